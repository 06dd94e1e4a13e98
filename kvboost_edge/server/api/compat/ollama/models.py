"""Model entries of Ollama's listings."""

from __future__ import annotations

import datetime
import hashlib
import math
import time
from typing import Any

from kvboost_edge.server.api.compat.ollama.create import modelfile_fields, parameters_of
from kvboost_edge.server.api.compat.ollama.modelfile import modelfile_text, parameter_lines
from kvboost_edge.server.api_errors import ApiError
from kvboost_edge.server.models.registry import Models
from kvboost_edge.server.models.served import ServedModel, abilities_of
from kvboost_edge.server.models.server import ServerState

__all__ = ["API_VERSION", "list_models", "list_running", "resolve_name", "show_model"]

Json = dict[str, Any]

API_VERSION = "0.12.0"
"""Supported version of Ollama's API. Clients require a minimum version."""

_LATEST = ":latest"
_FOREVER = "9999-12-31T23:59:59Z"


def resolve_name(models: Models, name: str) -> str:
    """Resolve a model name of a client, which may have Ollama's tag ":latest" or lack it.

    Raises:
        ApiError: the model is not served (404).
    """
    for known in (name, name.removesuffix(_LATEST), f"{name}{_LATEST}"):
        if known in models.names:
            return known
    here = ", ".join(repr(_tagged(one.name)) for one in models.all)
    message = f"model {name[:200]!r} not found; this server has {here}"
    raise ApiError(404, message, code="model_not_found", param="model")


def list_models(server: ServerState) -> list[Json]:
    """List all models, loaded or not, under each of their names."""
    modified = {"modified_at": _created(server)}
    return [_entry(one, name) | modified for one in server.models.all for name in one.names]


def list_running(server: ServerState) -> list[Json]:
    """List the loaded models with the time at which each will be unloaded."""
    return [
        _entry(one, name)
        | {
            "expires_at": _expiry(server, one),
            "size_vram": 0,
            "context_length": one.known.max_context if one.known else 0,
        }
        for one in server.models.all
        if one.state is not None
        for name in one.names
    ]


def show_model(server: ServerState, served: ServedModel) -> Json:
    """Return the details of a model. A model that was never loaded has only a name.

    Takes a while, so run it in a worker thread.
    """
    known = served.known
    kind = known.architecture if known else ""
    figures = {
        "general.architecture": kind,
        **(
            {
                **({"general.parameter_count": known.num_params} if known.num_params else {}),
                f"{kind}.context_length": known.max_context,
                f"{kind}.embedding_length": known.hidden_size,
                f"{kind}.vocab_size": known.vocab_size,
            }
            if known
            else {}
        ),
    }
    record = served.record
    state = served.state  # read once, because the model may be unloaded at any time
    abilities = served.abilities if state is None else abilities_of(state.engine)
    return {
        "license": record.license if record else "",
        "modelfile": modelfile_text(_tagged(served.name), record.origin, modelfile_fields(record))
        if record
        else "",
        "parameters": parameter_lines(parameters_of(record)) if record else "",
        "template": known.chat_template if known else record.template if record else "",
        **({"system": record.system} if record and record.system else {}),
        "details": _details(served),
        "model_info": figures,
        "capabilities": list(abilities),
        "modified_at": _created(server),
    }


def _entry(served: ServedModel, name: str) -> Json:
    known = served.known
    record = served.record
    tagged = _tagged(name)
    text = served.name
    if known is not None:
        text += f" {known.architecture} {known.dtype} {known.weight_bytes} {known.vocab_size}"
    if record is not None:
        text += f" {record.created}"  # another model may get the name of one that was deleted
    digest = hashlib.sha256(text.encode()).hexdigest()
    size = known.weight_bytes if known else record.num_bytes if record else 0
    return {
        "name": tagged,
        "model": tagged,
        "size": size,
        "digest": digest,
        "details": _details(served),
    }


def _details(served: ServedModel) -> Json:
    known, record = served.known, served.record
    return {
        "parent_model": record.origin if record and record.origin != record.name else "",
        "format": known.runner if known else "",
        "family": known.architecture if known else "",
        "families": [known.architecture] if known else [],
        "parameter_size": _parameter_size(known.num_params) if known else "",
        "quantization_level": known.dtype if known else "",
    }


def _parameter_size(num_params: int) -> str:
    """Format a number of parameters as Ollama does, such as "8.0B" for 8,030,261,248."""
    for unit, size, digits in (("B", 10**9, 1), ("M", 10**6, 2), ("K", 10**3, 0)):
        if num_params >= size:
            number = num_params / size
            return f"{number:.{0 if number.is_integer() else digits}f}{unit}"
    return str(num_params or "")


def _expiry(server: ServerState, served: ServedModel) -> str:
    """Return the time at which the model will be unloaded; a model in use counts as idle now."""
    # With several API keys, the time is hidden: it would reveal when another key was last used.
    if served.source is None or served.keep_alive == math.inf or len(server.settings.all_keys) > 1:
        return _FOREVER
    since = time.monotonic() if served.in_use else served.idle_since
    left = since + served.keep_alive - time.monotonic()
    return _stamp(time.time() + max(0.0, left))


def _tagged(name: str) -> str:
    return name if ":" in name else name + _LATEST


def _created(server: ServerState) -> str:
    return _stamp(server.shared.created)


def _stamp(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat().replace("+00:00", "Z")
