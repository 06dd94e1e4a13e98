"""The plan of a draft model: checks of the pair, and its memory before anything is loaded."""

from __future__ import annotations

import dataclasses
import os
from typing import NamedTuple

from kvboost_edge.config import EngineConfig
from kvboost_edge.engine.memory.selection import (
    Selection,
    find_model,
    model_traits,
    open_checkpoint,
    planned_info,
    select_path,
)
from kvboost_edge.errors import ConfigError, KVBoostError
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.config.architectures import attends_both_ways, check_model_compatibility
from kvboost_edge.runners.base import RunnerInfo
from kvboost_edge.runners.choice import plan_of

__all__ = ["DraftPlan", "plan_draft", "with_draft_model"]


class DraftPlan(NamedTuple):
    """A draft model that was checked but not loaded.

    Attributes:
        checkpoint: The draft model.
        config: Options for loading it, which are those of the engine with its own weight format and
            unquantized KV.
        selected: The selected backend and runner.
        info: The planned runner's description.
    """

    checkpoint: Checkpoint
    config: EngineConfig
    selected: Selection
    info: RunnerInfo


def plan_draft(target: Checkpoint, selected: Selection, config: EngineConfig) -> DraftPlan | None:
    """Plan the draft model of a model, or return None if the config names none.

    A draft model on a hub is downloaded. Its vocabulary is not checked.

    Args:
        target: The model that the draft model drafts for.
        selected: Backend and runner of that model.
        config: Options of the engine.

    Raises:
        ConfigError: One of the two models does not support draft models.
    """
    if config.draft_model is None:
        return None
    name = os.fspath(config.draft_model)
    if refusal := _target_refusal(target, selected):
        raise ConfigError(f"draft_model={name!r} is refused: {refusal}; leave draft_model out")
    own = dataclasses.replace(
        config,
        runner="native",
        backend=selected.backend.name,
        weights=config.draft_weights,
        # Rejected draft tokens rewrite blocks that are full, and quantized blocks cannot be
        # rewritten.
        kv_cache_bits=16,
        dtype="auto",
        rope_range="short",
        max_state_bytes=None,
        revision=None,
        draft_model=None,
        draft_weights="int4",
    )
    try:
        checkpoint = open_checkpoint(find_model(name, own), own)
        if refusal := _draft_refusal(checkpoint, config):
            raise ConfigError(refusal)
        chosen = select_path(checkpoint, own)
        info = planned_info(checkpoint, own, chosen, checkpoint.summary())
    except KVBoostError as error:
        raise ConfigError(f"draft_model={name!r} is refused: {error}") from error
    return DraftPlan(checkpoint, own, chosen, info)


def with_draft_model(info: RunnerInfo, draft: RunnerInfo | None) -> RunnerInfo:
    """Return a model's description for memory planning, including its draft model.

    The weights are those of both models. A block takes space in both pools, because these have the
    same block ids.
    """
    if draft is None:
        return info
    spec = dataclasses.replace(info.kv_spec, extra_bytes_per_block=draft.kv_spec.bytes_per_block)
    return dataclasses.replace(
        info, weight_bytes=info.weight_bytes + draft.weight_bytes, kv_spec=spec
    )


def _target_refusal(target: Checkpoint, selected: Selection) -> str:
    """Return why a model cannot have a draft model, or ""."""
    if attends_both_ways(target.config):
        return f"{target.path.name} computes embeddings and generates no tokens"
    if selected.runner.name != "native":
        return (
            f"{target.path.name} runs on the {selected.runner.name} runner "
            f"({selected.runner.reason}), and draft models need the native runner"
        )
    return ""


def _draft_refusal(checkpoint: Checkpoint, config: EngineConfig) -> str:
    """Return why a model cannot be a draft model, or ""."""
    if checkpoint.onnx_refusal is not None:
        return "it is an ONNX file; give a GGUF file or a directory with safetensors"
    check_model_compatibility(checkpoint.config, strict=config.strict)
    if attends_both_ways(checkpoint.config):
        return "it computes embeddings and generates no tokens; give a language model"
    if reason := plan_of("native").unsupported_reason(model_traits(checkpoint)):
        return f"{reason}; a draft model needs the native runner"
    if checkpoint.spec.mixer is not None:
        return (
            "some of its layers have a recurrent state, which rejected draft tokens would change; "
            "give a model in which all layers use attention"
        )
    return ""
