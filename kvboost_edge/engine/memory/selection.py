"""Selection of runner, weight format and backend, with reasons and planned memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvboost_edge.backends.base import KVSpec, LayerKVSpec
from kvboost_edge.backends.select import BackendChoice, choose_backend
from kvboost_edge.config import EngineConfig
from kvboost_edge.engine.memory.pool_size import planned_pool_bytes
from kvboost_edge.errors import ConfigError
from kvboost_edge.host.file_memo import NO_CACHE
from kvboost_edge.host.memory import available_bytes
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.config.architectures import is_bidirectional, pinned_context
from kvboost_edge.models.config.json_readers import context_length, stored_dtype, text_config
from kvboost_edge.models.families.fields import size_of
from kvboost_edge.models.locate import locate_model
from kvboost_edge.models.weights.weight_source import WeightSummary
from kvboost_edge.runners.base import ModelTraits, RunnerInfo
from kvboost_edge.runners.choice import RunnerChoice, choose_runner, plan_of
from kvboost_edge.runners.native.select_native import native_kv_spec
from kvboost_edge.runners.onnx.select_onnx import onnx_kv_spec
from kvboost_edge.runners.torch.select_torch import compute_dtype, torch_kv_spec

__all__ = [
    "Selection",
    "available_on",
    "bounded_context",
    "find_model",
    "loaded_bytes",
    "model_traits",
    "open_checkpoint",
    "planned_info",
    "planned_kv_spec",
    "refused_approximations",
    "select_path",
    "usable_context",
]

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_ANY = 1 << 60  # bytes; more than any machine has
_SHAPE = ("num_hidden_layers", "num_attention_heads", "hidden_size")


class Selection(NamedTuple):
    """The selected backend and runner. Each has a `reason` to show to users."""

    backend: BackendChoice
    runner: RunnerChoice


def find_model(path_or_id: str | Path, config: EngineConfig) -> Path:
    """Return the local path of a model, see `locate_model`. A hub model is downloaded first."""
    return locate_model(
        path_or_id,
        revision=config.revision,
        token=config.token,
        local_files_only=config.local_files_only,
    )


def open_checkpoint(path: Path, config: EngineConfig) -> Checkpoint:
    """Open a model's files with the cache directory and the RoPE factors that the config sets."""
    cache_dir = None if config.pack_cache else NO_CACHE
    return Checkpoint.open(path, cache_dir=cache_dir, rope_range=config.rope_range)


def select_path(
    checkpoint: Checkpoint, config: EngineConfig, draft: RunnerInfo | None = None
) -> Selection:
    """Select backend, runner and weight format without loading anything.

    Args:
        checkpoint: The model.
        config: Options of the engine.
        draft: Description of the planned runner of a draft model, whose weights and blocks take
            memory as well.

    Raises:
        ConfigError: Options contradict each other or do not fit the model.
        ModelFormatError: The model's files are not supported.
        BackendUnavailable: A requested backend cannot run on this machine.
    """
    model = model_traits(checkpoint)
    runner = choose_runner(config, model)
    plan = plan_of(runner.name)
    is_auto = config.backend == "auto"
    backend = choose_backend(plan.AUTO_BACKEND if is_auto else config.backend, config.device)
    if is_auto and plan.AUTO_BACKEND_REASON:
        backend = dataclasses.replace(backend, reason=plan.AUTO_BACKEND_REASON)
    available = min(available_bytes(), config.max_memory or _ANY)
    # max_memory acts here as the memory of the machine, so ignore it in the pool plan.
    unbound = dataclasses.replace(config, max_memory=None)

    if draft is not None:
        available = max(0, available - draft.weight_bytes)

    def plan_pool(kv_spec: KVSpec, max_context: int) -> int:
        if draft is not None:
            kv_spec = kv_spec.with_pool(draft.kv_spec)
        longest = bounded_context(max_context, config)
        return planned_pool_bytes(unbound, kv_spec, longest, available)

    weights, why = plan.choose_weights(config, model, plan_pool, available)
    if weights:
        runner = dataclasses.replace(
            runner, weights=weights, reason=f"{runner.reason}; weights: {why}"
        )
    return Selection(backend, runner)


def model_traits(checkpoint: Checkpoint) -> ModelTraits:
    """Return what the choice of a runner depends on."""
    return ModelTraits(
        checkpoint.config,
        checkpoint.is_gguf,
        checkpoint.is_quantized,
        checkpoint.native_refusal,
        checkpoint.onnx_refusal,
        len(checkpoint.past_layout().layers) if checkpoint.onnx_refusal == "" else 0,
        lambda: checkpoint.spec,
        checkpoint.packed_bytes,
    )


def planned_info(
    checkpoint: Checkpoint, config: EngineConfig, selected: Selection, summary: WeightSummary
) -> RunnerInfo:
    """Describe the planned runner for memory planning, without loading anything."""
    device = selected.backend.device
    runner = selected.runner
    stores_kv = not is_bidirectional(checkpoint.config)
    spec = KVSpec((), config.block_size, "float32")
    if stores_kv:
        spec = planned_kv_spec(checkpoint, config, runner.name, runner.weights, device)
    return RunnerInfo(
        name=runner.name,
        architecture=str(text_config(checkpoint.config).get("model_type")),
        dtype=runner.weights or config.dtype,
        vocab_size=size_of(text_config(checkpoint.config), "vocab_size") or 0,
        max_context=bounded_context(usable_context(checkpoint.config), config),
        weight_bytes=loaded_bytes(checkpoint, summary, runner, config.dtype, device),
        kv_spec=spec,
        copies_kv=runner.name == "onnx",
        stores_kv=stores_kv,
    )


def planned_kv_spec(
    checkpoint: Checkpoint, config: EngineConfig, runner: str, weights: str, device: str
) -> KVSpec:
    """Return the KV layout that a runner would use with a given weight format."""
    fields = checkpoint.config
    if runner == "onnx":
        return onnx_kv_spec(checkpoint.past_layout(), config.block_size)
    if runner == "native":
        return native_kv_spec(checkpoint.spec, weights, config.block_size, config.kv_bits)
    inner = text_config(fields)
    layers, heads, hidden = (size_of(inner, name) or 0 for name in _SHAPE)
    kv_heads = size_of(inner, "num_key_value_heads") or heads
    head_dim = size_of(inner, "head_dim") or (hidden // heads if heads else 0)
    return torch_kv_spec(
        (LayerKVSpec(kv_heads, head_dim),) * layers,
        config.block_size,
        compute_dtype(config.dtype, stored_dtype(fields) or "float32", device),
        config.kv_bits,
    )


def refused_approximations(path_or_id: str | Path, config: EngineConfig) -> dict[str, str]:
    """Return why a model cannot have the config's approximate options, by the options' names.

    Raises:
        KVBoostError: the model cannot be loaded without these options either.
    """
    given = {name: getattr(config, name) for name in ("arithmetic", "prefill")}
    given = {name: value for name, value in given.items() if value != "exact"}
    if not given:
        return {}
    exact = dataclasses.replace(config, arithmetic="exact", prefill="exact")
    checkpoint = open_checkpoint(find_model(path_or_id, config), config)
    select_path(checkpoint, exact)
    refused = {}
    for name, value in given.items():
        try:
            select_path(checkpoint, dataclasses.replace(exact, **{name: value}))
        except ConfigError as error:
            refused[name] = str(error)
    return refused


def bounded_context(max_context: int, config: EngineConfig) -> int:
    """Return the maximum sequence length that the engine accepts, in tokens."""
    return min(max_context, config.max_model_len or max_context)


def usable_context(fields: Mapping[str, Any]) -> int:
    """Return the maximum sequence length that the model supports, in tokens."""
    length = context_length(fields)
    pinned = pinned_context(fields)
    return length if pinned is None else min(length, pinned.length)


def loaded_bytes(
    checkpoint: Checkpoint, summary: WeightSummary, selected: RunnerChoice, dtype: str, device: str
) -> int:
    """Return the size in bytes of the loaded weights, packed or in the device's compute dtype."""
    if selected.weights:
        return checkpoint.packed_bytes(selected.weights)
    if selected.name == "onnx":
        return summary.nbytes
    per_param = _DTYPE_BYTES.get(compute_dtype(dtype, stored_dtype(checkpoint.config), device))
    return summary.nbytes if per_param is None else summary.num_params * per_param


def available_on(device: str) -> int:
    """Return the memory available on a device, in bytes.

    Apple GPUs share the machine's memory and have their own limit on it.
    """
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info(torch.device(device))[0])
    if device.startswith("mps"):
        from kvboost_edge.backends.torch import apple

        return apple.available_bytes()
    return available_bytes()
