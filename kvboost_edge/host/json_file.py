"""Reader of JSON files whose errors name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvboost_edge.errors import ModelFormatError

__all__ = ["read_json_object"]

# Weight indexes of models with hundreds of experts are the largest files, with about 40 MB.
_MAX_BYTES = 64_000_000


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a model's JSON file.

    Raises ModelFormatError if the file is damaged or does not contain an object. The message names
    the file.
    """
    try:
        size = path.stat().st_size
        value = json.loads(path.read_text(encoding="utf-8")) if size <= _MAX_BYTES else None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFormatError(f"{path} is not readable JSON: {error}") from error
    if size > _MAX_BYTES:
        raise ModelFormatError(f"{path} has {size} bytes, over the limit of {_MAX_BYTES}")
    if not isinstance(value, dict):
        raise ModelFormatError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value
