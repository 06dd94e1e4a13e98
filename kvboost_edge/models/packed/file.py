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
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvboost_edge.errors import CapacityError, ModelFormatError
from kvboost_edge.host.cpu import default_num_threads
from kvboost_edge.host.file_memo import FileStamp, cache_directory, recall, remember
from kvboost_edge.host.unfinished import finish_file, open_unfinished
from kvboost_edge.kernels.linear.weights import PackedRows
from kvboost_edge.models.packed.conversions import log_conversions
from kvboost_edge.models.packed.plan import PackEntry
from kvboost_edge.models.packed.stream import pack_stream
from kvboost_edge.models.weights.source import WeightSource

__all__ = ["Packable", "PackedWeights", "Progress", "load_packed"]

_LOG = logging.getLogger(__name__)
_MAGIC = b"KVBPACK\0"
PACKED_VERSION = 2  # of the file's form and of the quantization: with either changed, older files are packed again
_ALIGN = 64
_DIGEST_BYTES = 32
_READ_BYTES = 1 << 20
_MAKE_ROOM = "make room, or point KVBOOST_EDGE_CACHE (TMPDIR where that cannot be written) to another disk"

Progress = Callable[[int, int], None]


class Packable(Protocol):
    """What packing asks of a model; `Checkpoint` answers."""

    path: Path

    @property
    def config(self) -> Mapping[str, Any]: ...

    def open_source(self) -> WeightSource: ...

    def fingerprint(self, *, cache_dir: Path | None = None) -> str: ...

    def changed_files(self) -> list[str]:
        """Files that are no longer those the fingerprint was taken of."""
        ...


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


class _Job(NamedTuple):
    """What is packed, and where to (for messages)."""

    model: Packable
    plan: Sequence[PackEntry]
    weights: str
    target: Path
    num_threads: int
    progress: Progress | None


def load_packed(
    model: Packable,
    plan: Sequence[PackEntry],
    *,
    weights: str,
    cache_dir: Path | None = None,
    num_threads: int | None = None,
    progress: Progress | None = None,
) -> PackedWeights:
    """The packed weights of a model, from the cache directory or packed now.

    progress: called with (bytes done, bytes in all) while packing. num_threads: of packing; None: the machine's.
    Raises ModelFormatError where the checkpoint does not fit the plan, holds weights that the format cannot hold or
    changes meanwhile, CapacityError where the disk is full. Where the cache directory cannot be written the weights are
    packed into a temporary file.
    """
    fingerprint = model.fingerprint(cache_dir=cache_dir)  # what is packed is what it was taken of, or refused
    directory = (cache_dir if cache_dir is not None else cache_directory()) / "packed"
    path = directory / f"{fingerprint[:40]}-{weights}.kvpack"
    header = _header(plan, fingerprint, weights)
    found = _open_checked(path, header, cache_dir)
    if found is not None:
        return found
    job = _Job(model, plan, weights, path, num_threads or default_num_threads(), progress)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a directory; remove it")
        _check_room(directory, _size(header))
        file = open_unfinished(directory)
    except OSError as error:
        _LOG.warning("packed weights cannot be kept in %s (%s); they are packed again at every start", directory, error)
        job = job._replace(target=Path(tempfile.gettempdir()))
        _check_room(job.target, _size(header))
        with _clear_disk_errors(job.target, _size(header)), tempfile.TemporaryFile() as scratch:
            _write(scratch, header, job)
            return _map(scratch, header)
    try:
        with _clear_disk_errors(directory, _size(header)), file:
            _write(file, header, job)
            own = FileStamp.of_open(file, path)
            finish_file(file, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(file.name)
        raise
    return _take(path, own, header, cache_dir)


def _take(path: Path, own: FileStamp, header: bytes, cache_dir: Path | None) -> PackedWeights:
    """The file just written, or what another process that packed the same has put in its place since."""
    with open(path, "rb") as file:
        stamp = FileStamp.of_open(file, path)
        if (stamp.inode, stamp.modified_ns, stamp.size) == (own.inode, own.modified_ns, own.size):
            remember(stamp, {"packed": PACKED_VERSION}, cache_dir)
            return _map(file, header)
    found = _open_checked(path, header, cache_dir)
    if found is None:
        raise ModelFormatError(f"{path} was replaced by another process while it was opened; start again")
    return found


def _check_room(directory: Path, needed: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise CapacityError(
            f"the packed weights take {needed / 1e6:.1f} MB and {directory} has {free / 1e6:.1f} MB left; {_MAKE_ROOM}"
        )


@contextlib.contextmanager
def _clear_disk_errors(directory: Path, needed: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CapacityError(
            f"the packed weights ({needed / 1e6:.1f} MB) cannot be written to {directory}: {error}; {_MAKE_ROOM}"
        ) from error


def _header(plan: Sequence[PackEntry], fingerprint: str, weights: str) -> bytes:
    """The bytes before the first section: they depend on the plan alone, so an old file is known by comparing them."""
    sections: dict[str, tuple[int, int]] = {}
    offset = 0
    for entry in plan:
        for name, size in entry.sections:
            sections[name] = (offset, size)
            offset += -(-size // _ALIGN) * _ALIGN
    shapes = {entry.name: [entry.kind, entry.rows, entry.inputs, entry.offset] for entry in plan}
    fields = {"fingerprint": fingerprint, "weights": weights, "entries": shapes, "sections": sections, "end": offset}
    text = json.dumps(fields, sort_keys=True).encode()
    text += b" " * (-(len(text) + 16) % _ALIGN)
    return _MAGIC + PACKED_VERSION.to_bytes(4, "little") + len(text).to_bytes(4, "little") + text


def _fields(header: bytes) -> dict[str, Any]:
    fields = json.loads(header[16:])
    return dict(fields)


def _size(header: bytes) -> int:
    return len(header) + int(_fields(header)["end"]) + _DIGEST_BYTES


def _open_checked(path: Path, header: bytes, cache_dir: Path | None) -> PackedWeights | None:
    """The file if it is there, of this header, and sound."""
    try:
        with open(path, "rb") as file:
            stamp = FileStamp.of_open(file, path)
            if stamp.size != _size(header) or file.read(len(header)) != header:
                _LOG.warning("%s is of another version or damaged; the weights are packed again", path)
                return None
            if recall(stamp, cache_dir).get("packed") != PACKED_VERSION:
                if not _sound(file, stamp.size):
                    _LOG.warning("%s is damaged (checksum); the weights are packed again", path)
                    return None
                remember(stamp, {"packed": PACKED_VERSION}, cache_dir)
            return _map(file, header)
    except (FileNotFoundError, IsADirectoryError):
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


def _write(file: IO[bytes], header: bytes, job: _Job) -> None:
    """Header, sections and digest, then read back. The codes of an entry are written as they come, its scales and
    minima wait for its last piece."""
    digest = hashlib.sha256()
    total, done = _size(header), 0

    def put(data: memoryview | bytes) -> None:
        nonlocal done
        file.write(data)
        digest.update(data)
        done += len(data)
        if job.progress is not None:
            job.progress(done, total)

    def pad(size: int) -> None:
        put(bytes(-size % _ALIGN))

    error, energy, start = 0.0, 0.0, time.monotonic()
    _LOG.info("packing %s as %s into %s, %.1f MB", job.model.path, job.weights, job.target, total / 1e6)
    put(header)
    with job.model.open_source() as source:
        waiting: list[PackedRows] = []
        for piece, packed in pack_stream(job.plan, source, job.num_threads):
            put(packed.codes.data)
            waiting.append(packed._replace(codes=packed.codes[:0]))
            error, energy = error + packed.error, energy + packed.energy
            if piece.is_last:
                pad(piece.entry.sizes[0])
                for section, size in enumerate(piece.entry.sizes[1:]):
                    for halves in waiting:
                        put((halves.minima if section else halves.scales).data)
                    pad(size)
                waiting.clear()
        log_conversions(job.plan, source)
    file.write(digest.digest())
    file.flush()
    if done + _DIGEST_BYTES != total:
        raise ModelFormatError(f"packed {done + _DIGEST_BYTES} bytes, {total} were planned: the checkpoint changed")
    if not _sound(file, total):
        raise ModelFormatError(f"{job.target} does not read back as it was written: the disk or the memory is faulty")
    _check_unchanged(job)
    seconds = time.monotonic() - start
    rate = f"weight error {(error / energy) ** 0.5:.2%}" if energy else "otherwise kept as stored"
    _LOG.info("packed %.1f MB as %s in %.1f s, %s", total / 1e6, job.weights, seconds, rate)


def _check_unchanged(job: _Job) -> None:
    """The weights that were packed are those of the fingerprint."""
    for path in job.model.changed_files():
        raise ModelFormatError(f"{path} changed while its weights were packed; load it when it is complete")
