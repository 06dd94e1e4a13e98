"""What a model is called for people, told by where it lies: nothing else of this machine's paths is
in a name.
"""

from __future__ import annotations

import os
from pathlib import Path

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.locate.model import BUNDLED_MODEL, bundled_directory
from kvboost_edge.models.locate.ollama import OLLAMA, ollama_model, ollama_names

__all__ = ["model_name"]

_REPOSITORY = "models--"
_BLOB = "sha256-"


def model_name(path: Path) -> str:
    """As `locate_model` takes it for the bundled model, the hub's (owner/name, owner/name:FILE) and
    Ollama's; else the last part of the path.
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
