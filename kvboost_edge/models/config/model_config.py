"""Minimal reader for the config of a model directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.host.json_file import read_json_object

__all__ = ["read_config_object"]


_MODELOPT_FILE = "hf_quant_config.json"


def read_config_object(model_dir: Path) -> dict[str, Any]:
    """Return the object in config.json. Only `model_type` is checked.

    Earlier exports of ModelOpt have their quantization config in a file of its own, from which it
    is added.
    """
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
    if not config.get("quantization_config"):
        settings = _modelopt_settings(model_dir / _MODELOPT_FILE)
        if settings:
            config["quantization_config"] = settings
    return config


def _modelopt_settings(path: Path) -> dict[str, Any]:
    """Return the quantization config in ModelOpt's file; it is empty if weights are floats."""
    settings = read_json_object(path).get("quantization") if path.is_file() else None
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise ModelFormatError(
            f"{path}: quantization must be an object, got {type(settings).__name__}"
        )
    # Without an algorithm, only the KV cache is quantized.
    return {**settings, "quant_method": "modelopt"} if settings.get("quant_algo") else {}
