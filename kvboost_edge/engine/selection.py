"""Which runner, weight format and backend a model gets on this machine, and why: one place for the engine, `inspect`
and `doctor`."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from kvboost_edge.backends.base import KVSpec
from kvboost_edge.backends.select import BackendChoice, choose_backend
from kvboost_edge.config import EngineConfig
from kvboost_edge.engine.ledger import planned_pool_bytes
from kvboost_edge.host.memory import available_bytes
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.runners.base import ModelTraits
from kvboost_edge.runners.choice import RunnerChoice, choose_runner, plan_of

__all__ = ["Selection", "select_path"]


class Selection(NamedTuple):
    """The path a model takes. `backend.reason` and `runner.reason` are sentences for people."""

    backend: BackendChoice
    runner: RunnerChoice


def select_path(checkpoint: Checkpoint, config: EngineConfig) -> Selection:
    """Decide; nothing is loaded, and torch is asked for its devices only where the torch runner is taken.

    Raises ConfigError, ModelFormatError or BackendUnavailable where what was asked for cannot be had.
    """
    model = ModelTraits(
        checkpoint.config,
        checkpoint.is_gguf,
        checkpoint.is_quantized,
        checkpoint.native_refusal,
        checkpoint.onnx_refusal,
    )
    runner = choose_runner(config, model)
    plan = plan_of(runner.name)
    is_auto = config.backend == "auto"
    backend = choose_backend(plan.AUTO_BACKEND if is_auto else config.backend, config.device)
    if is_auto and plan.AUTO_BACKEND_REASON:
        backend = dataclasses.replace(backend, reason=plan.AUTO_BACKEND_REASON)
    available = available_bytes()

    def plan_pool(kv_spec: KVSpec, max_context: int) -> int:
        return planned_pool_bytes(config, kv_spec, max_context, available)

    weights, why = plan.choose_weights(config, model, plan_pool, available)
    if weights:
        runner = dataclasses.replace(runner, weights=weights, reason=f"{runner.reason}; weights: {why}")
    return Selection(backend, runner)
