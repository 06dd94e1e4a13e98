"""Which runner, weight format and backend a model gets on this machine, and why: one place for the engine, `inspect`
and `doctor`."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from kvboost_edge.backends.select import BackendChoice, choose_backend
from kvboost_edge.config import EngineConfig
from kvboost_edge.engine.ledger import planned_pool_bytes
from kvboost_edge.host.memory import available_bytes
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.config.families import describe_model
from kvboost_edge.runners.choice import ModelTraits, RunnerChoice, choose_runner, choose_weights, native_kv_spec

__all__ = ["Selection", "select_path"]


class Selection(NamedTuple):
    """The path a model takes. `backend.reason` and `runner.reason` are sentences for people."""

    backend: BackendChoice
    runner: RunnerChoice


def select_path(checkpoint: Checkpoint, config: EngineConfig) -> Selection:
    """Decide; nothing is loaded, and torch is asked for its devices only where the torch runner is taken.

    Raises ConfigError, ModelFormatError or BackendUnavailable where what was asked for cannot be had.
    """
    model = ModelTraits(checkpoint.config, checkpoint.is_gguf, checkpoint.is_quantized)
    runner = choose_runner(config, model)
    if runner.name == "torch":
        return Selection(choose_backend(config.backend, config.device), runner)
    backend = choose_backend("cpu" if config.backend == "auto" else config.backend, config.device)
    if config.backend == "auto":
        reason = "compiled CPU kernels for the native runner; device='cuda' or 'mps' would take the torch runner"
        backend = dataclasses.replace(backend, reason=reason)
    spec = describe_model(model.config)
    kv_spec = native_kv_spec(spec, "", config.block_size, config.kv_bits)
    available = available_bytes()
    pool_bytes = planned_pool_bytes(config, kv_spec, spec.max_context, available)
    weights, why = choose_weights(config, model, pool_bytes, available)
    return Selection(backend, dataclasses.replace(runner, weights=weights, reason=f"{runner.reason}; weights: {why}"))
