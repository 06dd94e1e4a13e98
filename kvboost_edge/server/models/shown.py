"""Descriptions of models for /v1/models and /v1/stats."""

from __future__ import annotations

import time
from typing import cast

from kvboost_edge.config import GenerationMode
from kvboost_edge.server.models.registry import Models
from kvboost_edge.server.models.served import ServedModel
from kvboost_edge.server.response_types import Model, ModelsMemory, SamplingValues
from kvboost_edge.server.state import Shared

__all__ = ["listed", "memory_of"]


def listed(served: ServedModel, shared: Shared, name: str) -> Model:
    """Return the description of a model under one of its names."""
    known = served.known
    return {
        "id": name,
        "object": "model",
        "created": shared.created,
        "owned_by": "kvboost-edge",
        "root": served.name,
        "parent": None,
        "max_model_len": None if known is None else known.max_context,
        "sampling": None if known is None else cast(SamplingValues, known.sampling.as_dict()),
        "mode": None if known is None else known.mode.value,
        "approximate": None if known is None else known.mode is GenerationMode.CHUNK_KV_REUSE,
        "meta": None
        if known is None
        else {
            "architecture": known.architecture,
            "dtype": known.dtype,
            "runner": known.runner,
            "vocab_size": known.vocab_size,
            "weight_bytes": known.weight_bytes,
        },
        "state": served.phase,
        "failure": None if served.refusal is None else served.refusal.message,
    }


def memory_of(models: Models) -> ModelsMemory:
    """Return the memory of each model and the total."""
    now = time.monotonic()
    return {
        "max_bytes": models.loader.budget,
        "taken_bytes": models.loader.taken,
        "waiting": models.num_waiting,
        "data": [
            {
                "id": one.name,
                "state": one.phase,
                "bytes": one.num_bytes,
                "in_use": one.in_use,
                "unloads_in_seconds": None
                if one.unloads_at is None
                else round(max(0.0, one.unloads_at - now), 3),
                "waits_for": one.waits_for,
            }
            for one in models.all
        ],
    }
