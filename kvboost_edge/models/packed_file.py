"""Packed weights on disk: one file per (model, format) in the cache directory, mapped into memory.

    8 bytes magic | u32 version | u32 header length | JSON header | sections, each at a multiple of 64 | SHA-256

The header names the model's fingerprint, the format, and every section; the digest at the end covers all bytes before
it. A file is written under another name and renamed when complete. It is checked against its digest whenever its
stamp (size, times, inode) is not that of the last check; a file that fails any check is written again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.file_memo import FileStamp, cache_directory, recall, remember
from kvboost_edge.models.quantize import PackEntry, pack_entry
from kvboost_edge.models.weight_source import SafetensorsSource

__all__ = ["PackedWeights", "load_packed"]

_LOG = logging.getLogger(__name__)
_MAGIC = b"KVBPACK\0"
_VERSION = 1
_ALIGN = 64
_DIGEST_BYTES = 32
_READ_BYTES = 1 << 20

Progress = Callable[[int, int], None]


class PackedWeights:
    """A mapped packed file. Arrays and addresses are valid until `close`."""

    def __init__(self, mapped: mmap.mmap, sections: dict[str, tuple[int, int]]) -> None:
        self._mapped = mapped
        self._data: npt.NDArray[np.uint8] | None = np.frombuffer(mapped, dtype=np.uint8)
        self._base = self._data.ctypes.data
        self._sections = sections
        self.nbytes = len(mapped)

    def address(self, name: str) -> int:
        """Address of a section, a multiple of 64; 0 if there is none."""
        found = self._sections.get(name)
        return 0 if found is None else self._base + found[0]

    def array(self, name: str) -> npt.NDArray[np.uint8]:
        """Bytes of a section (a view of the file)."""
        if self._data is None:
            raise ModelFormatError("the packed weights are closed")
        start, size = self._sections[name]
        return self._data[start : start + size]

    def close(self) -> None:
        """Unmap the file, unless arrays of it are still in use; then it is unmapped with the last of them."""
        self._data = None
        with contextlib.suppress(BufferError):
            self._mapped.close()


def load_packed(
    model_dir: Path | str,
    plan: Sequence[PackEntry],
    *,
    fingerprint: str,
    weights: str,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> PackedWeights:
    """The packed weights of a model, from the cache directory or packed now.

    progress: called with (bytes done, bytes in all) while packing. Raises ModelFormatError where the checkpoint does
    not fit the plan. Where the cache directory cannot be written the weights are packed into a temporary file.
    """
    directory = (cache_dir if cache_dir is not None else cache_directory()) / "packed"
    path = directory / f"{fingerprint[:40]}-{weights}.kvpack"
    header = _header(plan, fingerprint, weights)
    found = _open_checked(path, header, cache_dir)
    if found is not None:
        return found
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        file: IO[bytes] = tempfile.NamedTemporaryFile(dir=directory, prefix=".new-", delete=False)  # noqa: SIM115
    except OSError as error:
        _LOG.warning("packed weights cannot be kept in %s (%s); they are packed again at every start", directory, error)
        with tempfile.TemporaryFile() as scratch:
            _write(scratch, header, plan, model_dir, progress)
            return _map(scratch, header)
    try:
        with file:
            _write(file, header, plan, model_dir, progress)
            file.flush()
            os.fsync(file.fileno())
        os.replace(file.name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(file.name)
        raise
    remember(FileStamp.of(path), {"packed": _VERSION}, cache_dir)
    with open(path, "rb") as written:
        return _map(written, header)


def _header(plan: Sequence[PackEntry], fingerprint: str, weights: str) -> bytes:
    """The bytes before the first section: they depend on the plan alone, so an old file is known by comparing them."""
    sections: dict[str, tuple[int, int]] = {}
    offset = 0
    for entry in plan:
        for name, size in zip((entry.name, f"{entry.name}.scales"), entry.sizes, strict=True):
            if size:
                sections[name] = (offset, size)
                offset += -(-size // _ALIGN) * _ALIGN
    shapes = {entry.name: [entry.kind, entry.rows, entry.inputs, entry.offset] for entry in plan}
    fields = {"fingerprint": fingerprint, "weights": weights, "entries": shapes, "sections": sections, "end": offset}
    text = json.dumps(fields, sort_keys=True).encode()
    text += b" " * (-(len(text) + 16) % _ALIGN)
    return _MAGIC + _VERSION.to_bytes(4, "little") + len(text).to_bytes(4, "little") + text


def _fields(header: bytes) -> dict[str, Any]:
    fields = json.loads(header[16:])
    return dict(fields)


def _size(header: bytes) -> int:
    return len(header) + int(_fields(header)["end"]) + _DIGEST_BYTES


def _open_checked(path: Path, header: bytes, cache_dir: Path | None) -> PackedWeights | None:
    """The file if it is there, of this header, and sound."""
    try:
        with open(path, "rb") as file:
            stamp = FileStamp.of(path)
            if stamp.size != _size(header) or file.read(len(header)) != header:
                _LOG.warning("%s is of another version or damaged; the weights are packed again", path)
                return None
            if recall(stamp, cache_dir).get("packed") != _VERSION:
                if not _sound(file, stamp.size):
                    _LOG.warning("%s is damaged (checksum); the weights are packed again", path)
                    return None
                remember(stamp, {"packed": _VERSION}, cache_dir)
            return _map(file, header)
    except FileNotFoundError:
        return None
    except OSError as error:
        _LOG.warning("%s cannot be read (%s); the weights are packed again", path, error)
        return None


def _sound(file: IO[bytes], size: int) -> bool:
    digest = hashlib.sha256()
    file.seek(0)
    left = size - _DIGEST_BYTES
    while left:
        piece = file.read(min(left, _READ_BYTES))
        if not piece:
            return False
        digest.update(piece)
        left -= len(piece)
    return file.read(_DIGEST_BYTES) == digest.digest()


def _map(file: IO[bytes], header: bytes) -> PackedWeights:
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    sections = _fields(header)["sections"]
    return PackedWeights(mapped, {name: (len(header) + start, size) for name, (start, size) in sections.items()})


def _write(
    file: IO[bytes], header: bytes, plan: Sequence[PackEntry], model_dir: Path | str, progress: Progress | None
) -> None:
    """Header, sections and digest. The codes of an entry are written as they come, its scales wait."""
    digest = hashlib.sha256()
    total, done = _size(header), 0

    def put(data: memoryview) -> None:
        nonlocal done
        file.write(data)
        digest.update(data)
        done += len(data)
        if progress is not None:
            progress(done, total)

    def pad(size: int) -> None:
        if -size % _ALIGN:
            put(memoryview(bytes(-size % _ALIGN)))

    put(memoryview(header))
    with SafetensorsSource(model_dir) as source:
        for entry in plan:
            scales = []
            for stream, piece in pack_entry(entry, source):
                if stream == 0:
                    put(piece.data)
                else:
                    scales.append(piece)
            pad(entry.sizes[0])
            for piece in scales:
                put(piece.data)
            pad(entry.sizes[1])
    file.write(digest.digest())
    file.flush()
    if done + _DIGEST_BYTES != total:
        raise ModelFormatError(f"packed {done + _DIGEST_BYTES} bytes, {total} were planned: the checkpoint changed")
