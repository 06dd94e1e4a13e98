"""Lookup of a model: bundled, local directory or file, Ollama's store, or the Hugging Face hub.

The network is used only for hub names, and never in offline mode.
"""

from __future__ import annotations

import re
from pathlib import Path

from kvboost_edge.errors import ConfigError, ModelFormatError
from kvboost_edge.models.locate.hub import HubName, gguf_file, gguf_models, snapshot
from kvboost_edge.models.locate.managed import managed_models
from kvboost_edge.models.locate.ollama_store import OLLAMA, ollama_model, ollama_names
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
"""Estimated speed, in bytes per second, at which the files of a new model are read and hashed."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# A file in a hub repository: owner/name:Q4_K_M or owner/name:folder/file.gguf.
_HUB_FILE = re.compile(
    r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*):(?P<wanted>[A-Za-z0-9][\w.+ /-]*)"
)
_GGUF_MAGIC = b"GGUF"
_CONFIGS = ("config.json", "genai_config.json")
_MAX_NAMED = 20  # maximum number of files named in an error


def locate_model(
    path_or_id: str | Path,
    *,
    revision: str | None = None,
    token: str | None = None,
    local_files_only: bool = False,
) -> Path:
    """Return the directory or GGUF file of a model. Missing files are downloaded.

    For a split GGUF model, the result may be any of its files.

    `path_or_id` is one of these:

    - 'kvboost-edge/demo', the bundled model.
    - A directory. If it has no config, it must contain a single GGUF model.
    - A GGUF file.
    - The name of a model that was pulled with `kvboost-edge pull`.
    - 'ollama:NAME:TAG', a model in Ollama's store on this machine.
    - 'owner/name', a model on the hub. Its config, tokenizer and safetensors are downloaded. If the
      name ends in '-GGUF', its only GGUF file is downloaded instead.
    - 'owner/name:Q4_K_M' or 'owner/name:file.gguf', a single GGUF file on the hub.

    Args:
        path_or_id: name of the model.
        revision: branch, tag or commit on the hub.
        token: access token for the hub.
        local_files_only: forbid downloads.

    Raises:
        ConfigError: the name is neither a string nor a path.
        ModelFormatError: the model does not exist or cannot be downloaded.
    """
    if not isinstance(path_or_id, (str, Path)):
        raise ConfigError(
            f"the model must be a string or a Path with a directory or a hub id, not {path_or_id!r}"
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
    pulled = _pulled(name) if isinstance(path_or_id, str) and revision is None else None
    if pulled is not None:
        return pulled
    if isinstance(path_or_id, str) and name.startswith(OLLAMA):
        return ollama_model(name.removeprefix(OLLAMA))
    file = _HUB_FILE.fullmatch(name)
    if isinstance(path_or_id, str) and file is not None and ".." not in name:
        return gguf_file(HubName(file["id"], revision, token, local_files_only), file["wanted"])
    if path.suffix.lower() in (".gguf", ".onnx"):
        raise ModelFormatError(f"the file {name} does not exist; check the path")
    if isinstance(path_or_id, Path) or not _HUB_ID.fullmatch(name) or ".." in name:
        problem = f"there is no model directory {name}, and it is not a hub id such as 'owner/name'"
        raise _with_hint(ModelFormatError(problem), path_or_id)
    model = HubName(name, revision, token, local_files_only)
    try:
        return gguf_file(model, None) if name.lower().endswith("-gguf") else snapshot(model)
    except ModelFormatError as error:
        raise _with_hint(error, path_or_id) from error.__cause__


def _pulled(name: str) -> Path | None:
    """Return the path of a pulled model, or None if no pulled model has this name.

    Raises:
        ModelFormatError: the model was created with defaults, which only a server applies.
    """
    store = managed_models()
    model = store.find(name.removesuffix(":latest"))
    if model is None or not (model.has_defaults or model.served):
        return None if model is None else store.path_of(model)
    raise ModelFormatError(
        f"{name!r} was created from {model.origin} with defaults of its own, which only a server "
        f"applies; run `kvboost-edge serve` and name {name!r} in requests, or give {model.origin}"
    )


def _with_hint(error: ModelFormatError, path_or_id: str | Path) -> ModelFormatError:
    """Return the error, with a suggestion if the name resembles that of a known model."""
    hint = "" if isinstance(path_or_id, Path) else name_hint(path_or_id, ollama_names())
    if not hint:
        return error
    return ModelFormatError(f"the model {path_or_id!r} was not found: {hint} ({error})")


def _directory(path: Path) -> Path:
    """Return a directory with a config, or the only GGUF model in a directory.

    Raises:
        ModelFormatError: the directory contains several GGUF models; the message names them.
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
    """Return the absolute path of a GGUF or ONNX file.

    GGUF files are recognized by their name or, as for Ollama's blobs, by their first bytes. Links
    are not resolved, because the names of links in the hub cache matter.
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
    """Return the size in bytes of a model's directory or file; 0 if it does not exist."""
    files = [one for one in path.iterdir() if one.is_file()] if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.exists())
