"""Descriptions of models for /v1/models and /v1/stats."""

from __future__ import annotations

import time
from typing import cast

from kvboost_edge.config import GenerationMode
from kvboost_edge.server.api_errors import ApiError
from kvboost_edge.server.models.registry import Models
from kvboost_edge.server.models.served import ServedModel
from kvboost_edge.server.models.server import ServerState
from kvboost_edge.server.response_types import (
    AllowedChanges,
    Model,
    ModelList,
    ModelsMemory,
    SamplingValues,
)

__all__ = ["memory_of", "model_entry", "model_list"]


def model_list(server: ServerState, tenant: str | None) -> ModelList:
    """Return all models under each of their names, and what a tenant may do with them."""
    models = server.models
    return {
        "object": "list",
        "data": [
            model_entry(one, server, name, tenant) for one in models.all for name in one.names
        ],
        "changes": _changes_allowed(server, tenant),
        "memory": memory_of(models) if server.settings.is_admin(tenant) else None,
    }


def _changes_allowed(server: ServerState, tenant: str | None) -> AllowedChanges:
    reason = None
    try:
        server.allowed_changes()
    except ApiError as error:
        reason = error.message
    else:
        if not server.settings.is_admin(tenant):
            reason = "changing the models of all API keys needs an admin key (--admin-api-key)"
    return {"allowed": reason is None, "reason": reason}


def model_entry(served: ServedModel, server: ServerState, name: str, tenant: str | None) -> Model:
    """Return the description of a model under one of its names."""
    known, record = served.known, served.record
    return {
        "id": name,
        "object": "model",
        "created": server.shared.created,
        "owned_by": "kvboost-edge",
        "root": served.name,
        "parent": None,
        "max_model_len": None if known is None else known.max_context,
        "sampling": None if known is None else cast(SamplingValues, known.sampling.as_dict()),
        "mode": None if known is None else known.mode.value,
        "approximate": None
        if known is None
        else known.mode is GenerationMode.CHUNK_KV_REUSE or bool(known.approximations),
        "approximations": None if known is None else list(known.approximations),
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
        "managed": record is not None,
        "file_bytes": None if record is None else record.num_bytes or None,
        "unloadable": server.models.may_set_keep_alive(served, tenant),
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
