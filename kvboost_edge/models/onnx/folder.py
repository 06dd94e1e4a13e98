"""Directories with ONNX files, in the layout of onnxruntime-genai or of the hub.

The former have genai_config.json. The latter have config.json and files such as onnx/model_q4.onnx.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.host.json_file import read_json_object

__all__ = ["GENAI_CONFIG", "OnnxFolder", "find_onnx"]

GENAI_CONFIG = "genai_config.json"
# If several files have the same weights, the smallest one with little loss is used. Callers choose
# a different one by its path.
_PREFERRED = ("model_q4.onnx", "model_q4f16.onnx", "model.onnx", "model_fp16.onnx")
_MAX_NAMED = 10


class OnnxFolder(NamedTuple):
    """Location of an ONNX model and its configs.

    Attributes:
        root: directory of the configs and the tokenizer.
        model: the ONNX file.
        genai: contents of genai_config.json; None if the file does not exist.
    """

    root: Path
    model: Path
    genai: Mapping[str, Any] | None

    @property
    def has_config(self) -> bool:
        return (self.root / "config.json").is_file()


def find_onnx(path: Path) -> OnnxFolder | None:
    """Return the ONNX model at a path, or None for other formats.

    The path is a file, or a directory without other weights.

    Raises:
        ModelFormatError: the config is missing, or several ONNX files have unknown names.
    """
    if path.is_file():
        return _of_file(path)
    if (path / GENAI_CONFIG).is_file():
        return _of_genai(path)
    if not (path / "config.json").is_file() or any(path.glob("*.safetensors")):
        return None
    found = {
        file.name: file
        for folder in (path / "onnx", path)
        for file in sorted(folder.glob("*.onnx"))
    }
    for name in _PREFERRED:
        if name in found:
            return OnnxFolder(path, found[name], None)
    if len(found) > 1:
        names = ", ".join(sorted(found)[:_MAX_NAMED])
        raise ModelFormatError(
            f"{path} contains several ONNX files ({names}); give one of them as the model"
        )
    return OnnxFolder(path, next(iter(found.values())), None) if found else None


def _of_file(path: Path) -> OnnxFolder | None:
    if path.suffix.lower() != ".onnx":
        return None
    folders = [path.parent, path.parent.parent] if path.parent.name == "onnx" else [path.parent]
    for root in folders:
        if (root / GENAI_CONFIG).is_file():
            return OnnxFolder(root, path, read_json_object(root / GENAI_CONFIG))
        if (root / "config.json").is_file():
            return OnnxFolder(root, path, None)
    raise ModelFormatError(
        f"neither config.json nor {GENAI_CONFIG} is next to {path}; the model needs one of them"
    )


def _of_genai(path: Path) -> OnnxFolder:
    config = path / GENAI_CONFIG
    fields = read_json_object(config)
    model = fields.get("model")
    decoder = model.get("decoder") if isinstance(model, Mapping) else None
    name = decoder.get("filename") if isinstance(decoder, Mapping) else None
    if (
        not isinstance(name, str)
        or not name
        or name in (".", "..")
        or any(char in name for char in "/\\:\0")
    ):
        raise ModelFormatError(
            f"{config}: model.decoder.filename={name!r:.80} must be the name of a file in that "
            "folder; multi-file models are not supported"
        )
    if not (path / name).is_file():
        raise ModelFormatError(f"{path / name}, named in {config}, is missing")
    return OnnxFolder(path, path / name, fields)
