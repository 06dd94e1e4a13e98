"""JSON files of a model directory, read with errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvboost_edge.errors import ModelFormatError

__all__ = ["read_config_object", "read_json_object"]


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ModelFormatError names the file when it is damaged or holds something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFormatError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFormatError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def read_config_object(model_dir: Path) -> dict[str, Any]:
    """The object in config.json, known to name a `model_type`; nothing else is checked."""
    path = model_dir / "config.json"
    if not path.is_file():
        single = sorted(model_dir.glob("*.gguf"))
        hint = f"; give the file {single[0]} as the model" if len(single) == 1 else ""
        raise ModelFormatError(f"{path} is missing; {model_dir} is not a Hugging Face model directory{hint}")
    config = read_json_object(path)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise ModelFormatError(f"{path} lacks the key 'model_type'")
    return config
