"""Directory of pulled and created models.

    records/<hash of the name>.json    name, origin and defaults of one model
    files/<hash of the origin>/...     files of one revision, shared by all models made from it

No name from outside becomes a file name, except for paths in a repository, which are checked.
Symbolic links below the directory are refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from kvboost_edge.errors import ConfigError, ModelFormatError
from kvboost_edge.host.atomic_files import alone_in, new_file
from kvboost_edge.host.file_memo import cache_directory

__all__ = ["ManagedModel", "ModelStore", "managed_models"]

_LOG = logging.getLogger(__name__)
_MAX_MODELS = 1000
_MAX_RECORD_BYTES = 4_000_000
_ID = re.compile(r"[0-9a-f]{32}")
_PART = re.compile(r"[A-Za-z0-9_][\w.+ -]*", re.ASCII)
_MAX_DEPTH = 4
_MAX_NAMED = 20
_FORGOTTEN_SECONDS = 7 * 86_400.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ManagedModel:
    """A pulled or created model.

    Attributes:
        name: name that clients use.
        origin: name that the files were pulled under, or `served`.
        folder: id of the folder with its files; "" if they are those of a model of the command
            line.
        file: path of a GGUF file in the folder; "" for the folder itself.
        served: name of the model of the command line whose files are used; "" if `folder` is set.
        num_bytes: size of the files.
        created: time in seconds since the epoch.
        system: default system message.
        sampling: default sampling parameters by name.
        context: maximum number of tokens of a request; None for the model's context.
        template: chat template instead of the model's own; "" for none.
        license: text of the licence, if one was given.
    """

    name: str
    origin: str
    folder: str = ""
    file: str = ""
    served: str = ""
    num_bytes: int = 0
    created: float = 0.0
    system: str = ""
    sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    context: int | None = None
    template: str = ""
    license: str = ""

    @property
    def has_defaults(self) -> bool:
        """True if the model differs from its files, because it has defaults of its own."""
        return bool(self.system or self.sampling or self.context or self.template)


class ModelStore:
    """The models below a directory, which is created when the first model is stored."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def models(self) -> list[ManagedModel]:
        """Return all models, sorted by name. Damaged records are logged and left out."""
        try:
            paths = sorted(self._inside("records").glob("*.json"))
        except (OSError, ModelFormatError):
            return []
        found = []
        for path in paths:
            try:
                found.append(_read(path))
            except ModelFormatError as error:
                _LOG.warning("%s; the model is left out", error)
        return sorted(found, key=lambda model: model.name)

    def find(self, name: str) -> ManagedModel | None:
        """Return the model with this name, or None."""
        path = self._record(name)
        return _read(path) if os.path.lexists(path) else None

    def put(self, model: ManagedModel) -> None:
        """Store a model. Another one of the same name is replaced.

        Raises:
            ConfigError: the store is full, or the model's texts are too long.
            ModelFormatError: the directory cannot be written.
        """
        with self._writing():
            models = self.models()
            before = next((one for one in models if one.name == model.name), None)
            if before is None and len(models) >= _MAX_MODELS:
                raise ConfigError(
                    f"{len(models)} models are stored, which is the limit; delete some of them"
                )
            path = self._record(model.name)
            text = json.dumps(dataclasses.asdict(model)).encode("ascii")
            if len(text) > _MAX_RECORD_BYTES:
                raise ConfigError(
                    f"the record of {model.name!r} would have {len(text)} bytes, more than "
                    f"{_MAX_RECORD_BYTES}; shorten its system message, template or licence"
                )
            self.made("records")
            with new_file(path) as file:
                file.write(text)
            if before is not None:
                self._drop_unused(before.folder)
            self._drop_forgotten()

    def remove(self, name: str) -> None:
        """Remove a model, and its files unless another model uses them.

        Raises:
            ConfigError: no such model is stored.
        """
        model = self.find(name)
        if model is None:
            here = ", ".join(repr(one.name) for one in self.models()[:_MAX_NAMED]) or "no models"
            raise ConfigError(
                f"the model {name!r} was not pulled or created here; the store has {here}"
            )
        if model.folder:
            self.inside_files(model.folder)  # refuse links before anything is removed
        with self._writing():
            self._record(name).unlink(missing_ok=True)
            self._drop_unused(model.folder)

    def path_of(self, model: ManagedModel) -> Path | None:
        """Return the directory or GGUF file of a model; None if it is on the command line.

        Raises:
            ModelFormatError: the files are missing, or a part of the path is a symbolic link.
        """
        if not model.folder:
            return None
        path = self.inside_files(model.folder, model.file)
        if not path.exists():
            raise ModelFormatError(
                f"the files of {model.name!r} are missing from the model directory; pull "
                f"{model.origin} again"
            )
        return path

    def inside_files(self, folder: str, file: str = "") -> Path:
        """Return the path of a folder with files, or of a file in it.

        Raises:
            ModelFormatError: the path would be outside the folder, or contains a symbolic link.
        """
        if not _ID.fullmatch(folder):
            raise ModelFormatError(f"{folder[:80]!r} is not the id of a folder in the model store")
        parts = PurePosixPath(file).parts if file else ()
        if (
            len(parts) > _MAX_DEPTH
            or not all(_PART.fullmatch(part) for part in parts)
            or "/".join(parts) != file
        ):
            raise ModelFormatError(
                f"the repository contains a file {file[:200]!r}, whose name cannot be used here; "
                "use another repository"
            )
        return self._inside("files", folder, *parts)

    def made(self, *parts: str) -> Path:
        """Create a directory below the root, readable only by this user, and return its path."""
        path = self._inside(*parts)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path

    def _inside(self, *parts: str) -> Path:
        path = self.root
        for part in parts:
            path /= part
            try:
                is_link = stat.S_ISLNK(path.lstat().st_mode)
            except FileNotFoundError:
                is_link = False
            if is_link:
                raise ModelFormatError(
                    f"{path} is a symbolic link, which the model store refuses; remove it"
                )
        return path

    def _record(self, name: str) -> Path:
        digest = hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()
        return self._inside("records", f"{digest[:32]}.json")

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Lock the store against other processes."""
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            with alone_in(self.root):
                yield
        except OSError as error:
            raise ModelFormatError(
                f"the model directory {self.root} cannot be changed: {error.strerror}"
            ) from error

    def _drop_unused(self, folder: str) -> None:
        """Delete a folder with files that no model uses any more."""
        if not folder or folder in self._used_folders():
            return
        path = self.inside_files(folder)
        if path.is_dir():
            _remove_tree(path)

    def _used_folders(self) -> set[str]:
        """Return the folders that records name, including the records of newer versions."""
        used = set()
        for path in self._inside("records").glob("*.json"):
            with contextlib.suppress(OSError, ValueError, RecursionError):
                fields = _fields(path)
                used.add(str(fields.get("folder")) if isinstance(fields, dict) else "")
        return used

    def _drop_forgotten(self) -> None:
        """Delete old folders of pulls that were never finished."""
        used = self._used_folders()
        for path in self.made("files").iterdir():
            age = time.time() - path.lstat().st_mtime
            if _ID.fullmatch(path.name) and path.name not in used and age > _FORGOTTEN_SECONDS:
                _remove_tree(self.inside_files(path.name))


def managed_models() -> ModelStore:
    """Return the store of this user."""
    return ModelStore(cache_directory() / "models" / "pulled")


def _fields(path: Path) -> Any:
    """Return the contents of a record. Raises OSError, ValueError or RecursionError."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    with open(handle, "rb") as file:
        return json.loads(file.read(_MAX_RECORD_BYTES))


def _remove_tree(path: Path) -> None:
    """Delete a folder without following links. Raises OSError."""
    try:
        shutil.rmtree(path)
    except PermissionError as error:
        # On Windows, a process that has the model loaded keeps its files.
        _LOG.warning("%s cannot be deleted yet (%s); a later pull deletes it", path, error.strerror)


def _read(path: Path) -> ManagedModel:
    """Read a record. Raises ModelFormatError if it is damaged, or is a link."""
    try:
        fields = _fields(path)
        kinds = {field.name: field.type for field in dataclasses.fields(ManagedModel)}
        if not isinstance(fields, dict) or not {*fields} <= {*kinds}:
            raise ValueError("it has unknown fields")
        model = ManagedModel(**fields)
        texts = ("name", "origin", "folder", "file", "served", "system", "template", "license")
        if not all(isinstance(getattr(model, name), str) for name in texts):
            raise ValueError("a text is not a string")
        if not isinstance(model.sampling, dict):
            raise ValueError("sampling is not an object")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ModelFormatError(f"{path} is not a valid record of a model: {error}") from error
    return model
