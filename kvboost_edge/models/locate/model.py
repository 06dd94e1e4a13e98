"""Location of a model: bundled, local directory or file, Ollama's store, or the Hugging Face hub.

The network is used only for hub names, and never in offline mode.
"""

from __future__ import annotations

import re
from pathlib import Path

from kvboost_edge.errors import ConfigError, ModelFormatError
from kvboost_edge.models.locate.hub import HubName, gguf_file, gguf_models, snapshot
from kvboost_edge.models.locate.ollama import OLLAMA, ollama_model, ollama_names
from kvboost_edge.models.locate.suggestions import name_hint

__all__ = [
    "BUNDLED_MODEL",
    "READ_BYTES_PER_SECOND",
    "bundled_directory",
    "locate_model",
    "size_on_disk",
]

BUNDLED_MODEL = "kvboost-edge/demo"
READ_BYTES_PER_SECOND = 500e6
"""Estimated bytes per second for reading and hashing the files of a new model."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# A file of a repository: owner/name:Q4_K_M or owner/name:folder/file.gguf.
_HUB_FILE = re.compile(
    r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*):(?P<wanted>[A-Za-z0-9][\w.+ /-]*)"
)
_GGUF_MAGIC = b"GGUF"
_CONFIGS = ("config.json", "genai_config.json")
_MAX_NAMED = 20  # files in one message


def locate_model(
    path_or_id: str | Path,
    *,
    revision: str | None = None,
    token: str | None = None,
    local_files_only: bool = False,
) -> Path:
    """Return the directory with the model's files, or the GGUF file (any part of a split one).

    `path_or_id` is one of these:

    - 'kvboost-edge/demo': part of the package.
    - A directory. Without a config, its only GGUF model is used.
    - A GGUF file.
    - 'ollama:NAME:TAG': a model that Ollama has on this machine.
    - A hub id. For 'owner/name' only config, tokenizer and safetensors are fetched. For
      'owner/name:Q4_K_M' and 'owner/name:file.gguf' only that GGUF file is fetched, for
      'owner/name-GGUF' its only one.

    Raises:
        ConfigError: it is neither a string nor a path.
        ModelFormatError: the model does not exist or cannot be fetched.
    """
    if not isinstance(path_or_id, (str, Path)):
        raise ConfigError(
            f"the model {path_or_id!r} must be a string or a Path: a directory or a hub id"
        )
    name = str(path_or_id)
    if not name:
        raise ModelFormatError(
            "the model's name is empty; give a directory or a hub id such as 'owner/name'"
        )
    if name == BUNDLED_MODEL:
        return bundled_directory()
    path = Path(name).expanduser()
    if path.is_dir():
        return _directory(path.resolve())
    if path.is_file():
        return _file(path)
    if isinstance(path_or_id, str) and name.startswith(OLLAMA):
        return ollama_model(name.removeprefix(OLLAMA))
    file = _HUB_FILE.fullmatch(name)
    if isinstance(path_or_id, str) and file is not None and ".." not in name:
        return gguf_file(HubName(file["id"], revision, token, local_files_only), file["wanted"])
    if path.suffix.lower() in (".gguf", ".onnx"):
        raise ModelFormatError(f"there is no file {name}")
    if isinstance(path_or_id, Path) or not _HUB_ID.fullmatch(name) or ".." in name:
        problem = f"there is no model directory {name}, and it is not a hub id such as 'owner/name'"
        raise _with_hint(ModelFormatError(problem), path_or_id)
    model = HubName(name, revision, token, local_files_only)
    try:
        return gguf_file(model, None) if name.lower().endswith("-gguf") else snapshot(model)
    except ModelFormatError as error:
        raise _with_hint(error, path_or_id) from error.__cause__


def _with_hint(error: ModelFormatError, path_or_id: str | Path) -> ModelFormatError:
    """Return the error with a hint at what an unknown name may mean."""
    hint = "" if isinstance(path_or_id, Path) else name_hint(path_or_id, ollama_names())
    if not hint:
        return error
    return ModelFormatError(f"the model {path_or_id!r} was not found: {hint} ({error})")


def _directory(path: Path) -> Path:
    """Return a directory with a config, or the GGUF file that is the only model in it.

    Raises ModelFormatError, which names them, if there are several.
    """
    if any((path / name).is_file() for name in _CONFIGS):
        return path
    try:
        models = gguf_models(file.name for file in path.iterdir() if file.is_file())
    except OSError as error:
        raise ModelFormatError(f"{path} cannot be read: {error}") from error
    if len(models) > 1:
        names = [parts[0] for parts in models.values()]
        rest = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
        raise ModelFormatError(
            f"directory {path} contains {len(names)} GGUF models: "
            f"{', '.join(names[:_MAX_NAMED])}{rest}; give one of these files"
        )
    return next((path / parts[0] for parts in models.values()), path)


def _file(path: Path) -> Path:
    """Return a GGUF file, recognized by its name or its first bytes (for Ollama's blobs), or an
    ONNX file.

    Links are not followed, because the hub's cache holds links whose names matter.
    """
    try:
        with open(path, "rb") as file:
            is_gguf = file.read(len(_GGUF_MAGIC)) == _GGUF_MAGIC
    except OSError as error:
        raise ModelFormatError(f"{path} cannot be read: {error}") from error
    if is_gguf or path.suffix.lower() in (".gguf", ".onnx"):
        return path.absolute()
    raise ModelFormatError(
        f"{path} is a file; give the model directory with config.json and model.safetensors, or a "
        ".gguf or .onnx file"
    )


def bundled_directory() -> Path:
    """Return the directory of the bundled model."""
    directory = Path(__file__).resolve().parents[2] / "assets" / "demo"
    if not (directory / "config.json").is_file():
        raise ModelFormatError(
            f"the bundled model is missing from {directory}; reinstall the package"
        )
    return directory


def size_on_disk(path: Path) -> int:
    """Return the bytes of a model's directory or file; 0 if it does not exist."""
    files = [one for one in path.iterdir() if one.is_file()] if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.exists())
