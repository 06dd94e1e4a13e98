"""Cached files on disk: KV blocks, packed weights, tokenizers and named sessions."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from stat import S_ISREG
from typing import Any

from kvboost_edge.host.file_memo import FileStamp, cache_directory, recall
from kvboost_edge.models.packed.weight_file import MODEL_FACT
from kvboost_edge.tiers.disk.session_records import SessionRecord, delete_record, find_records
from kvboost_edge.tiers.disk.survey import FoundSpace, delete_space, find_spaces
from kvboost_edge.tiers.disk.system_calls import Files

__all__ = [
    "BLOCKS",
    "SESSION",
    "TOKENIZER",
    "WEIGHTS",
    "CacheEntry",
    "delete_entry",
    "find_entries",
    "packed_directory",
    "printable",
]

BLOCKS = "blocks"
WEIGHTS = "weights"
TOKENIZER = "tokenizer"
SESSION = "session"
_ENDINGS = {".kvpack": WEIGHTS, ".kvtok": TOKENIZER}
_DAY_S = 86_400.0
_DESCRIBED = ("model", "kv_format", "block_size", "numerics")
_SHORT = 16  # number of fingerprint digits shown for a space


@dataclasses.dataclass(frozen=True, slots=True)
class CacheEntry:
    """A cache entry: the blocks of a space, a file of packed weights, a tokenizer, or a session.

    Attributes:
        kind: BLOCKS, WEIGHTS, TOKENIZER or SESSION.
        model: Name of the model; "" if unknown.
        name: Fingerprint and format, or the name of the session.
        path: File or directory of the entry.
        nbytes: Size on disk in bytes.
        changed: Time of the last use, in seconds since 1970.
        in_use: True if a process has the entry open.
        space: Space of a BLOCKS entry.
        record: Record of a SESSION entry.
    """

    kind: str
    model: str
    name: str
    path: Path
    nbytes: int
    changed: float
    in_use: bool
    space: FoundSpace | None = None
    record: SessionRecord | None = None

    @property
    def days(self) -> float:
        """Number of days since the last use."""
        return max(0.0, (time.time() - self.changed) / _DAY_S)

    @property
    def has_expired(self) -> bool:
        """True for a session that has ended."""
        expires = None if self.record is None else self.record.expires
        return expires is not None and expires <= time.time()

    def matches(self, word: str) -> bool:
        """Return whether the name of the model or the entry contains `word`."""
        return word.lower() in f"{self.model} {self.name}".lower()

    def row(self) -> dict[str, Any]:
        """Return the entry's fields for JSON output."""
        described = self.space.description if self.space is not None else {}
        fields = {"kind": self.kind, "model": self.model, "name": self.name, "path": str(self.path)}
        figures = {"bytes": self.nbytes, "days": round(self.days, 2), "in_use": self.in_use}
        return {**fields, **figures, "description": described}


def packed_directory() -> Path:
    """Return the directory of packed weights and tokenizers."""
    return cache_directory() / "packed"


def printable(text: str) -> str:
    """Replace unprintable characters with "?"."""
    # Names in a damaged or forged file may contain terminal escape sequences.
    return "".join(character if character.isprintable() else "?" for character in text)


def find_entries(root: Path, files: Files) -> list[CacheEntry]:
    """Return all entries: blocks, packed files, sessions, each oldest first. Raises OSError."""
    spaces = find_spaces(root, files)
    packed = sorted(_packed(files), key=lambda one: one.changed)
    # Another file of the same model may contain its name.
    names = {_fingerprint(one.name): one.model for one in packed if one.model}
    for space in spaces:
        described = {key: space.description.get(key) for key in ("model", "name")}
        if all(isinstance(value, str) and value for value in described.values()):
            names[_fingerprint(str(described["model"]))] = printable(str(described["name"]))
    sessions = [_session(record) for record in find_records(root)]
    rows = [_blocks(space) for space in spaces] + packed + sessions
    return [
        dataclasses.replace(one, model=one.model or names.get(_fingerprint(one.name), ""))
        for one in rows
    ]


def delete_entry(one: CacheEntry, files: Files) -> bool:
    """Delete an entry. Returns False if a process has it open. Raises OSError."""
    if one.space is not None:
        return delete_space(one.space, files)
    if one.record is not None:
        delete_record(one.record, files)  # a process reads it whole, and keeps no file open
        return True
    return files.unlink_unheld(one.path)


def _fingerprint(name: str) -> str:
    """Return the beginning of an entry's name, which is the same for all entries of a model."""
    return name[:_SHORT]


def _blocks(space: FoundSpace) -> CacheEntry:
    name = printable(
        " ".join(str(space.description[key]) for key in _DESCRIBED if key in space.description)
    )
    name = name or space.path.name[:12]
    model = space.description.get("name")
    shown = printable(model) if isinstance(model, str) else ""
    return CacheEntry(
        BLOCKS, shown, name, space.path, space.nbytes, space.changed, space.in_use, space
    )


def _session(record: SessionRecord) -> CacheEntry:
    name = printable(record.name) or record.path.stem[:_SHORT]
    model = printable(record.model)
    return CacheEntry(
        SESSION, model, name, record.path, record.nbytes, record.changed, False, record=record
    )


def _packed(files: Files) -> Iterator[CacheEntry]:
    directory = packed_directory()
    for path in directory.iterdir() if directory.is_dir() else ():
        kind = _ENDINGS.get(path.suffix)
        if kind is None:
            continue
        stat = path.lstat()
        if S_ISREG(stat.st_mode):
            model = recall(FileStamp.of(path)).get(MODEL_FACT)
            shown = printable(model) if isinstance(model, str) else ""
            used = max(stat.st_mtime, stat.st_atime)
            yield CacheEntry(
                kind, shown, path.stem, path, stat.st_size, used, _is_open(path, files)
            )


def _is_open(path: Path, files: Files) -> bool:
    try:
        return files.is_held(path)
    except OSError:
        return False
