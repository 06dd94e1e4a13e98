"""The plan of a draft model, MTP head or assistant: its checks, and its memory before anything is
loaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvboost_edge.config import EngineConfig
from kvboost_edge.engine.memory.selection import (
    Selection,
    bounded_context,
    find_model,
    model_traits,
    open_checkpoint,
    planned_info,
    select_path,
    usable_context,
)
from kvboost_edge.errors import ConfigError, DraftModelMismatch, KVBoostError, ModelFormatError
from kvboost_edge.models.assistant import AssistantFiles, HeadFile, packed_fingerprint
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.config.architectures import check_model_compatibility, is_bidirectional
from kvboost_edge.models.config.mtp_spec import MtpSpec, is_assistant
from kvboost_edge.models.config.spec import ModelSpec
from kvboost_edge.models.packed.pack_plan import STORED, plan_bytes
from kvboost_edge.runners.base import RunnerInfo
from kvboost_edge.runners.choice import plan_of
from kvboost_edge.runners.native.select_native import native_kv_spec

__all__ = [
    "DraftPlan",
    "check_draft_files",
    "draft_vocabulary_refusal",
    "mtp_refusal",
    "plan_draft",
    "select_with_draft",
    "short_vocabulary",
    "with_draft_model",
]

# Size of the short vocabulary. In texts in Latin script and in code, 1 to 8% of the tokens of a
# vocabulary of 152,000 have higher ids, because low ids are those of frequent tokens.
_SHORT_VOCABULARY = 65536


class DraftPlan(NamedTuple):
    """A draft model or assistant, or the model's own MTP head, that was checked but not loaded.

    Attributes:
        checkpoint: The draft model or assistant, or the model.
        config: Options for loading it, which are those of the engine with its own weight format.
        selected: The selected backend and runner.
        info: The planned runner's description.
        head: The checkpoint if its MTP head is used, or the assistant. None for a draft model.
    """

    checkpoint: Checkpoint
    config: EngineConfig
    selected: Selection
    info: RunnerInfo
    head: Checkpoint | AssistantFiles | None = None

    @property
    def is_mtp_head(self) -> bool:
        """True for an MTP head or assistant."""
        return self.head is not None

    @property
    def is_own_mtp_head(self) -> bool:
        """True for the MTP head in the model's own files, which the engine can do without."""
        return self.head is self.checkpoint

    @property
    def _mtp(self) -> MtpSpec | None:
        return None if self.head is None else self.head.mtp

    @property
    def spec(self) -> ModelSpec:
        """Spec of the draft model or head."""
        head = self._mtp
        return self.checkpoint.spec if head is None else head.model

    @property
    def bytes_read(self) -> int:
        """Size in bytes of the weights that a pass reads, including an LM head of the model.

        Rows of the LM head that a short vocabulary leaves out are not counted.
        """
        head = self._mtp
        is_shared = head is not None and "head" in head.shared
        weights = self.selected.runner.weights
        if self.head is None:
            entries = self.checkpoint.plan(weights)
        else:
            entries = self.head.plan(weights) if is_shared else self.head.mtp_plan(weights)
        plan = {one.name: one for one in entries}
        of_head = plan_bytes([plan["head"] if "head" in plan else plan["embed"]])
        computed = self.info.short_vocabulary or self.info.vocab_size
        unread = of_head - of_head * computed // self.info.vocab_size
        return self.info.weight_bytes + is_shared * of_head - unread

    def load_kernels(self) -> None:
        """Load the machine code that its passes need into this process."""
        # Imported here because attention kernels load Numba unless there is a kernel library.
        from kvboost_edge.runners.native.mtp_head import load_mtp_kernels
        from kvboost_edge.runners.native.runner import load_kernels

        weights = self.selected.runner.weights
        if self.head is not None:
            load_mtp_kernels(self.head, weights, self.config.kv_bits)
        else:
            load_kernels(self.checkpoint, weights, self.config.kv_bits)

    def packed_fingerprint(self) -> str:
        """Return the fingerprint that names the packed weights of the draft model or head."""
        own = self.checkpoint.fingerprint()
        return own if self.head is None else packed_fingerprint(own)

    def fingerprint(self) -> str:
        """Return the fingerprint of the draft model or head."""
        return "mtp " * self.is_mtp_head + self.checkpoint.fingerprint()


def plan_draft(target: Checkpoint, selected: Selection, config: EngineConfig) -> DraftPlan | None:
    """Plan the draft model of a model, or else its MTP head, or return None without either.

    A draft model on a hub is downloaded. Its vocabulary is not checked.

    Args:
        target: The model that the draft model drafts for.
        selected: Backend and runner of that model.
        config: Options of the engine.

    Raises:
        DraftModelMismatch: The model cannot have a draft model, or not this one.
        ConfigError: The draft model cannot be opened, or is not supported, or `draft_vocabulary`
            has no effect.
    """
    draft = (
        _plan_head(target, selected, config)
        if config.draft_model is None
        else _plan_draft_model(config.draft_model, target, selected, config)
    )
    if config.draft_vocabulary is not None and (reason := _unused_vocabulary(target, draft)):
        raise ConfigError(
            f"draft_vocabulary={config.draft_vocabulary} has no effect {reason}; leave "
            "draft_vocabulary out"
        )
    return draft


def select_with_draft(
    target: Checkpoint, config: EngineConfig
) -> tuple[Selection, DraftPlan | None]:
    """Select the path of a model, and plan its draft model or MTP head.

    A weight format that the engine chooses leaves room for the draft model. It need not leave room
    for the head in the model's own files, which the engine can do without.

    Raises:
        ConfigError: Options contradict each other or do not fit the model, or see `plan_draft`.
        ModelFormatError: The model's files are not supported.
        BackendUnavailable: A requested backend cannot run on this machine.
    """
    selected = select_path(target, config)
    draft = plan_draft(target, selected, config)
    if draft is None or draft.is_own_mtp_head:
        return selected, draft
    with_room = select_path(target, config, draft.info)
    if with_room.runner.weights != selected.runner.weights:
        draft = plan_draft(target, with_room, config)
    return with_room, draft


def draft_vocabulary_refusal(path_or_id: str | Path, config: EngineConfig) -> str:
    """Return why `draft_vocabulary` has no effect on a model with these other options, or ""."""
    checkpoint = open_checkpoint(find_model(path_or_id, config), config)
    _, draft = select_with_draft(checkpoint, config)
    reason = _unused_vocabulary(checkpoint, draft)
    return f"it has no effect {reason}" if reason else ""


def _unused_vocabulary(target: Checkpoint, draft: DraftPlan | None) -> str:
    """Return the case in which a short vocabulary has no effect, for an error, or ""."""
    if draft is None:
        return (
            f"without draft_model, because {target.path.name} has no multi-token prediction head "
            "that is used"
        )
    return "on an assistant, which chooses from all ids" if draft.info.borrows_kv else ""


def _plan_draft_model(
    draft_model: str | os.PathLike[str],
    target: Checkpoint,
    selected: Selection,
    config: EngineConfig,
) -> DraftPlan:
    """Plan a draft model, an assistant or an MTP head in a file of its own."""
    with _refused_by_name(draft_model):
        if refusal := _target_refusal(target, selected):
            raise DraftModelMismatch(f"{refusal}; leave draft_model out")
        own = _draft_options(config, selected.backend.name)
        checkpoint = open_checkpoint(find_model(os.fspath(draft_model), own), own)
        if checkpoint.is_mtp_file:
            return _plan_head_file(checkpoint, target, selected, config)
        if is_assistant(checkpoint.config):
            return _plan_assistant(checkpoint, target, selected, config)
        if refusal := _draft_refusal(checkpoint, config):
            raise ConfigError(refusal)
        chosen = select_path(checkpoint, own)
        info = planned_info(checkpoint, own, chosen, checkpoint.summary())
        info = dataclasses.replace(info, short_vocabulary=short_vocabulary(config, info.vocab_size))
    return DraftPlan(checkpoint, own, chosen, info)


def check_draft_files(config: EngineConfig) -> None:
    """Check that the config's draft model can be opened and is supported.

    Raises:
        ConfigError: It cannot be opened, or no model can have it as draft model.
    """
    assert config.draft_model is not None
    with _refused_by_name(config.draft_model):
        own = _draft_options(config, config.backend)
        checkpoint = open_checkpoint(find_model(os.fspath(config.draft_model), own), own)
        is_drafter = checkpoint.is_mtp_file or is_assistant(checkpoint.config)
        if not is_drafter and (refusal := _draft_refusal(checkpoint, config)):
            raise ConfigError(refusal)


@contextlib.contextmanager
def _refused_by_name(draft_model: str | os.PathLike[str]) -> Iterator[None]:
    """Turn errors into a ConfigError that names the draft model."""
    try:
        yield
    except KVBoostError as error:
        kind = DraftModelMismatch if isinstance(error, DraftModelMismatch) else ConfigError
        raise kind(f"draft_model={os.fspath(draft_model)!r} is refused: {error}") from error


def _draft_options(config: EngineConfig, backend: str) -> EngineConfig:
    """Return the options for loading a draft model."""
    return dataclasses.replace(
        config,
        runner="native",
        backend=backend,
        weights=config.draft_weights,
        dtype="auto",
        rope_range="short",
        max_state_bytes=None,
        revision=None,
        draft_model=None,
        draft_weights="int4",
        draft_vocabulary=None,
        mtp="off",
        arithmetic="exact",  # draft tokens are verified, so other bits would save little
        prefill="exact",
    )


def _plan_assistant(
    checkpoint: Checkpoint, target: Checkpoint, selected: Selection, config: EngineConfig
) -> DraftPlan:
    """Plan an assistant.

    Raises:
        ModelFormatError: The assistant is damaged.
        DraftModelMismatch: The assistant does not fit the model.
    """
    assistant = AssistantFiles(checkpoint, target, selected.runner.weights)
    weights = config.draft_weights
    if weights == STORED and not checkpoint.is_quantized:
        weights = "int8"
    runner = dataclasses.replace(selected.runner, weights=weights)
    info = _head_info(assistant, checkpoint, weights, config)
    own = dataclasses.replace(_headless(config), draft_model=None, draft_weights="int4")
    chosen = selected._replace(runner=runner)
    return DraftPlan(checkpoint, own, chosen, info, assistant)


def _plan_head_file(
    checkpoint: Checkpoint, target: Checkpoint, selected: Selection, config: EngineConfig
) -> DraftPlan:
    """Plan the MTP head in a file of its own.

    Raises:
        ModelFormatError: The head is damaged or not supported.
        DraftModelMismatch: The head does not fit the model.
    """
    head = HeadFile(checkpoint, target, selected.runner.weights)
    weights = config.draft_weights
    info = _head_info(head, checkpoint, weights, config)
    own = dataclasses.replace(_headless(config), draft_model=None, draft_weights="int4")
    chosen = selected._replace(runner=dataclasses.replace(selected.runner, weights=weights))
    return DraftPlan(checkpoint, own, chosen, info, head)


def _headless(config: EngineConfig) -> EngineConfig:
    """Return the options for loading a head, which has none itself."""
    return dataclasses.replace(config, draft_vocabulary=None, mtp="off")


def _head_info(
    head: Checkpoint | AssistantFiles, checkpoint: Checkpoint, weights: str, config: EngineConfig
) -> RunnerInfo:
    """Describe the runner of an MTP head or assistant in the files of a checkpoint."""
    assert head.mtp is not None
    spec = head.mtp.model
    return RunnerInfo(
        name="native",
        architecture=spec.model_type,
        dtype=weights,
        vocab_size=spec.vocab_size,
        max_context=bounded_context(usable_context(checkpoint.config), config),
        weight_bytes=plan_bytes(head.mtp_plan(weights)),
        kv_spec=native_kv_spec(spec, weights, config.block_size, config.kv_bits),
        joins_hidden_states=True,
        borrows_kv=spec.backbone_size > 0,
        # Gemma's tokenizers give high ids to punctuation, so a short vocabulary would not be used.
        short_vocabulary=0 if spec.backbone_size else short_vocabulary(config, spec.vocab_size),
    )


def _plan_head(target: Checkpoint, selected: Selection, config: EngineConfig) -> DraftPlan | None:
    """Plan the MTP head of a model, or return None if it is not used."""
    wanted = config.mtp == "auto" and config.speculation != "off"
    if not wanted or not _may_have_head(target, selected) or mtp_refusal(target, selected):
        return None
    if target.mtp is None:
        return None
    info = _head_info(target, target, selected.runner.weights, config)
    return DraftPlan(target, _headless(config), selected, info, target)


def short_vocabulary(config: EngineConfig, vocab_size: int) -> int:
    """Return the size of a drafter's short vocabulary, or 0 if it has none. See `RunnerInfo`."""
    size = config.draft_vocabulary
    size = _SHORT_VOCABULARY if size is None else size
    return size if size < vocab_size else 0


def _may_have_head(target: Checkpoint, selected: Selection) -> bool:
    """Return whether the files of a model that this runner runs contain tensors of a head."""
    return selected.runner.name == "native" and target.num_mtp_tensors > 0


def mtp_refusal(target: Checkpoint, selected: Selection) -> str:
    """Return why the MTP head in a model's files cannot be used, or ""."""
    if not _may_have_head(target, selected):
        return ""
    try:
        if target.mtp is not None:
            target.mtp_plan(selected.runner.weights)
    except ModelFormatError as error:
        return str(error)
    return ""


def with_draft_model(info: RunnerInfo, draft: RunnerInfo | None) -> RunnerInfo:
    """Return a model's description for memory planning, including its draft model.

    The weights are those of both models. A block takes space in both pools, because these have the
    same block ids.
    """
    if draft is None:
        return info
    return dataclasses.replace(
        info,
        weight_bytes=info.weight_bytes + draft.weight_bytes,
        kv_spec=info.kv_spec.with_pool(draft.kv_spec),
    )


def _target_refusal(target: Checkpoint, selected: Selection) -> str:
    """Return why a model cannot have a draft model, or ""."""
    if is_bidirectional(target.config):
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
    if is_bidirectional(checkpoint.config):
        return "it computes embeddings and generates no tokens; give a language model"
    if reason := plan_of("native").unsupported_reason(model_traits(checkpoint)):
        return f"{reason}; a draft model needs the native runner"
    if checkpoint.spec.mixer is not None:
        return (
            "some of its layers have a recurrent state, which rejected draft tokens would change; "
            "give a model in which all layers use attention"
        )
    return ""
