"""What is said of the models: /v1/models, and their part of /v1/stats."""

from __future__ import annotations

import time
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from kvboost_edge.server.models.registry import Models
from kvboost_edge.server.models.served import ServedModel
from kvboost_edge.server.state import Shared

__all__ = ["Model", "ModelList", "ModelsMemory", "listed", "memory_of"]

Phase = Literal["not_loaded", "loading", "loaded", "unloading"]


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ModelMeta(_Answer):
    architecture: str
    dtype: str
    runner: str
    vocab_size: int
    weight_bytes: int


class Model(_Answer):
    """One name of a model, `root` the one that answers tell. Of one that was never loaded
    max_model_len and meta are null. failure: why its last loading failed.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int | None
    meta: ModelMeta | None
    state: Phase
    failure: str | None


class ModelList(_Answer):
    object: Literal["list"]
    data: list[Model]


class ModelFigures(_Answer):
    """bytes: what its weights, pool and states take; in_use: requests that hold it or wait for it;
    unloads_in_seconds: null while no time is set; waits_for: what its loading waits for, else "".
    """

    id: str
    state: Phase
    bytes: int
    in_use: int
    unloads_in_seconds: float | None
    waits_for: str


class ModelsMemory(_Answer):
    """Of all models together; waiting: requests for one that is not loaded yet."""

    max_bytes: int
    taken_bytes: int
    waiting: int
    data: list[ModelFigures]


def listed(served: ServedModel, shared: Shared, name: str) -> dict[str, Any]:
    """A model by one of its names, as `Model`."""
    known = served.known
    return {
        "id": name,
        "object": "model",
        "created": shared.created,
        "owned_by": "kvboost-edge",
        "root": served.name,
        "parent": None,
        "max_model_len": None if known is None else known.max_context,
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


def memory_of(models: Models) -> dict[str, Any]:
    """As `ModelsMemory`."""
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
