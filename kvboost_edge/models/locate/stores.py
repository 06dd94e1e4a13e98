"""Models on this machine, in the stores of kvboost-edge, the hub, llama.cpp, LM Studio and Ollama.

Listing is fast even for thousands of models, because directories and a few small files are read,
but no model files.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.host.file_memo import cache_directory, home_directory
from kvboost_edge.models.locate.hub import gguf_models
from kvboost_edge.models.locate.managed import managed_models
from kvboost_edge.models.locate.ollama_store import OLLAMA, ollama_model, ollama_names

__all__ = ["StoredModel", "own_models", "real_model", "stored_models"]

_COMMIT = re.compile(r"[0-9a-f]{40}")
_REPOSITORY = "models--"
_MAX_DEPTH = 6  # maximum depth of folders searched in a store


class StoredModel(NamedTuple):
    """Model on this machine.

    Attributes:
        name: name that `locate_model` accepts.
        store: name of the store.
        path: directory or file; None if there is a `problem`.
        problem: reason why the model cannot be used; "" for none.
    """

    name: str
    store: str
    path: Path | None
    problem: str = ""


def own_models() -> Path:
    """Return the directory where kvboost-edge keeps the models that it downloads."""
    return cache_directory() / "models"


def real_model() -> Path:
    """Return the path of the model file that `make real-model` downloads."""
    return own_models() / "SmolLM2-135M-Instruct.Q4_1.gguf"


def stored_models() -> Iterator[StoredModel]:
    """Yield the models in each store. Models that several stores share are listed once.

    For a store that cannot be listed, an entry with the problem is yielded.
    """
    seen: set[Path] = set()
    for store, listed in _STORES.items():
        try:
            for model in listed():
                # `Path.resolve` fails at circular links in some versions of Python.
                real = None if model.path is None else Path(os.path.realpath(model.path))
                if real is None or real not in seen:
                    seen |= {real} if real is not None else set()
                    yield model._replace(store=store)
        except OSError as error:
            yield StoredModel(store, store, None, f"cannot be listed: {error}")


def _hub() -> Iterator[StoredModel]:
    """Yield the models in the hub cache.

    Each repository is represented by the snapshot of its main branch, or else by the newest one.
    """
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    for folder in sorted(cache.glob(f"{_REPOSITORY}*")):
        name = folder.name.removeprefix(_REPOSITORY).replace("--", "/")
        found = _snapshot(folder)
        if found is None:
            yield StoredModel(name, "", None, "no snapshot of it is in the cache")
            continue
        files = sorted(_files_below(found, ".gguf"))
        names = [path.relative_to(found).as_posix() for path in files]
        for parts in gguf_models(names).values():
            yield StoredModel(f"{name}:{parts[0]}", "", found / parts[0])
        if not names:
            yield StoredModel(name, "", found)


def _snapshot(folder: Path) -> Path | None:
    snapshots = folder / "snapshots"
    try:
        commit = (folder / "refs" / "main").read_text().strip()
    except (OSError, ValueError):
        commit = ""
    if _COMMIT.fullmatch(commit) and (snapshots / commit).is_dir():
        return snapshots / commit
    found = [path for path in snapshots.glob("*") if path.is_dir()]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def _in_folders(*folders: Path, without: Path | None = None) -> Iterator[StoredModel]:
    """Yield GGUF files, and directories with config.json and safetensors, in folders and
    subfolders.
    """
    for folder in folders:
        files = sorted(_files_below(folder, ".gguf", without))
        for parts in gguf_models(str(path) for path in files).values():
            yield StoredModel(parts[0], "", Path(parts[0]))
        for directory in sorted(
            {path.parent for path in _files_below(folder, ".safetensors", without)}
        ):
            if (directory / "config.json").is_file():
                yield StoredModel(str(directory), "", directory)


def _files_below(folder: Path, ending: str, without: Path | None = None) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        if Path(root) == without or len(Path(root).relative_to(folder).parts) >= _MAX_DEPTH:
            folders.clear()
        yield from (Path(root) / name for name in names if name.lower().endswith(ending))


def _own() -> Iterator[StoredModel]:
    store = managed_models()
    for model in store.models():
        if model.has_defaults or not model.folder:
            continue  # only a server can use it
        try:
            yield StoredModel(model.name, "", store.path_of(model))
        except ModelFormatError as error:
            yield StoredModel(model.name, "", None, str(error))
    yield from _in_folders(own_models(), without=store.root)


def _llama_cpp() -> Iterator[StoredModel]:
    named = os.environ.get("LLAMA_CACHE")
    caches = home_directory() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    return _in_folders(Path(named).expanduser() if named else caches / "llama.cpp")


def _lm_studio() -> Iterator[StoredModel]:
    home = home_directory()
    return _in_folders(home / ".lmstudio" / "models", home / ".cache" / "lm-studio" / "models")


def _ollama() -> Iterator[StoredModel]:
    for name in ollama_names():
        try:
            yield StoredModel(name, "", ollama_model(name.removeprefix(OLLAMA)))
        except ModelFormatError as error:
            yield StoredModel(name, "", None, str(error))


_STORES: dict[str, Callable[[], Iterator[StoredModel]]] = {
    "kvboost-edge": _own,
    "hub": _hub,
    "llama.cpp": _llama_cpp,
    "LM Studio": _lm_studio,
    "Ollama": _ollama,
}
