"""Minimal reader for the config of a model directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.host.json_file import read_json_object

__all__ = ["read_config_object"]


def read_config_object(model_dir: Path) -> dict[str, Any]:
    """Return the object in config.json. Only `model_type` is checked."""
    path = model_dir / "config.json"
    if not path.is_file():
        single = sorted(model_dir.glob("*.gguf"))
        hint = f"; give the file {single[0]} as the model" if len(single) == 1 else ""
        raise ModelFormatError(
            f"{path} is missing; {model_dir} is not a Hugging Face model directory{hint}"
        )
    config = read_json_object(path)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise ModelFormatError(f"{path} lacks the key 'model_type'")
    return config
