"""The model as Ollama's clients list it and look at it."""

from __future__ import annotations

import datetime
import hashlib
from typing import Any

from kvboost_edge.errors import RequestError
from kvboost_edge.server.errors import ApiError
from kvboost_edge.server.state import ServerState

__all__ = ["API_VERSION", "listed", "named", "running", "shown"]

Json = dict[str, Any]

API_VERSION = "0.12.0"
"""Ollama's API as it is spoken here; its clients ask for a lowest one."""

_LATEST = ":latest"
_FOREVER = "9999-12-31T23:59:59Z"


def named(state: ServerState, name: str | None) -> str:
    """Our name of the model that a client names, with a tag or without. ApiError 404 for one that is not served."""
    names = state.settings.model_names
    for known in (name, (name or "").removesuffix(_LATEST), f"{name}{_LATEST}"):
        if known in names:
            return str(known)
    message = f"model {(name or '')[:200]!r} not found; this server has {_tagged(state.model_name)!r}"
    raise ApiError(404, message, code="model_not_found", param="model")


def listed(state: ServerState) -> list[Json]:
    """The one model, by each of its names."""
    return [_entry(state, name) | {"modified_at": _created(state)} for name in state.settings.model_names]


def running(state: ServerState) -> list[Json]:
    """The same: it is loaded, and stays."""
    loaded = {"expires_at": _FOREVER, "size_vram": 0, "context_length": state.engine.runner_info.max_context}
    return [_entry(state, name) | loaded for name in state.settings.model_names]


def shown(state: ServerState) -> Json:
    """What there is to know of it."""
    info, tokenizer = state.engine.runner_info, state.engine.tokenizer
    kind = info.architecture
    return {
        "license": "",
        "modelfile": "",
        "parameters": "",
        "template": tokenizer.chat_template or "",
        "details": _details(state),
        "model_info": {
            "general.architecture": kind,
            f"{kind}.context_length": info.max_context,
            f"{kind}.embedding_length": info.hidden_size,
            f"{kind}.vocab_size": info.vocab_size,
        },
        "capabilities": _capabilities(state),
        "modified_at": _created(state),
    }


def _capabilities(state: ServerState) -> list[str]:
    tokenizer = state.engine.tokenizer
    if not tokenizer.chat_template:
        return ["completion"]
    try:
        format = tokenizer.turn_format
    except RequestError:
        return ["completion"]
    calls = not format.shows_tools or format.calls is not None
    return ["completion", *(["tools"] if calls else []), *(["thinking"] if format.reasoning else [])]


def _entry(state: ServerState, name: str) -> Json:
    info, tagged = state.engine.runner_info, _tagged(name)
    described = f"{state.model_name} {info.architecture} {info.dtype} {info.weight_bytes} {info.vocab_size}"
    digest = hashlib.sha256(described.encode()).hexdigest()
    return {"name": tagged, "model": tagged, "size": info.weight_bytes, "digest": digest, "details": _details(state)}


def _details(state: ServerState) -> Json:
    info = state.engine.runner_info
    return {
        "parent_model": "",
        "format": info.name,
        "family": info.architecture,
        "families": [info.architecture],
        "parameter_size": "",
        "quantization_level": info.dtype,
    }


def _tagged(name: str) -> str:
    return name if ":" in name else name + _LATEST


def _created(state: ServerState) -> str:
    return datetime.datetime.fromtimestamp(state.created, datetime.UTC).isoformat().replace("+00:00", "Z")
