"""Display names of models, which reveal nothing else of a local path."""

from __future__ import annotations

import os
from pathlib import Path

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.locate.model import BUNDLED_MODEL, bundled_directory
from kvboost_edge.models.locate.ollama_store import OLLAMA, ollama_model, ollama_names

__all__ = ["model_name"]

_REPOSITORY = "models--"
_BLOB = "sha256-"


def model_name(path: Path) -> str:
    """Return the display name of a model.

    For bundled, hub (owner/name, owner/name:FILE) and Ollama models, `locate_model` accepts the
    name. For other models it is the last component of the path.
    """
    real = Path(os.path.abspath(path))
    if real == bundled_directory():
        return BUNDLED_MODEL
    repository = next((part for part in real.parts if part.startswith(_REPOSITORY)), None)
    if repository is not None:
        name = repository.removeprefix(_REPOSITORY).replace("--", "/")
        return f"{name}:{real.name}" if real.suffix.lower() == ".gguf" else name
    if real.name.startswith(_BLOB):
        return next(filter(lambda name: _is_at(name, real), ollama_names()), real.name[:19])
    return real.name


def _is_at(name: str, path: Path) -> bool:
    try:
        return ollama_model(name.removeprefix(OLLAMA)) == path
    except ModelFormatError:
        return False
