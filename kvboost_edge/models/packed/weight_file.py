"""Packed weights, kept in one memory-mapped file per (model, format) in the cache directory.

If the file cannot be stored, the weights are packed into memory. The file has this layout:

    8 bytes magic | u32 version | u32 header length | JSON header | sections, each at a multiple of
    64 | digest

The header contains the fingerprint of the model, the format, and the name of every section. The
digest covers all bytes before it. It is the xxh3-128 of the xxh3-128 digests of every 8 MB.

A file is written under a temporary name and renamed when complete. It is checked against its digest
whenever its stamp (size, times, inode) differs from that of the last check. A file that fails a
check is written again.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import mmap
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from kvboost_edge.errors import CapacityError, ModelFormatError
from kvboost_edge.host.atomic_files import new_file, synced_meanwhile
from kvboost_edge.host.file_at import FileAt
from kvboost_edge.host.file_digest import digest_in_parts
from kvboost_edge.host.file_lock import hold_open
from kvboost_edge.host.file_memo import NO_CACHE, FileStamp, cache_directory, recall, remember
from kvboost_edge.host.memory import Region
from kvboost_edge.host.processor import default_num_threads
from kvboost_edge.kernels.linear.weights import PackedRows
from kvboost_edge.kernels.vectors import LANES
from kvboost_edge.models.locate import model_name
from kvboost_edge.models.packed.conversions import log_conversions
from kvboost_edge.models.packed.pack_plan import PackEntry
from kvboost_edge.models.packed.stream import EntryRows, pack_stream
from kvboost_edge.models.weights.weight_source import WeightSource

__all__ = [
    "MODEL_FACT",
    "Packable",
    "PackedWeights",
    "Progress",
    "free_bytes",
    "load_packed",
    "packed_path",
]

_LOG = logging.getLogger(__name__)
_MAGIC = b"KVBPACK\0"
# Version of the layout and of the quantization. Increase it when either changes.
PACKED_VERSION = 5
MODEL_FACT = "model"
"""Key for the model's name in the cached facts about a packed file."""
_ALIGN = 64
_DIGEST_BYTES = 16
_PART_BYTES = 8 << 20  # bytes that one thread digests at a time

Progress = Callable[[int, int], None]


class Packable(Protocol):
    """Interface of a model that can be packed, implemented by `Checkpoint`."""

    path: Path

    @property
    def config(self) -> Mapping[str, Any]: ...

    def open_source(self) -> WeightSource: ...

    def fingerprint(self, *, cache_dir: Path | None = None) -> str: ...

    def changed_files(self) -> list[str]:
        """Return the files that have changed since the fingerprint was computed."""
        ...


class PackedWeights:
    """Packed weights in a memory-mapped file or in memory.

    Arrays and addresses are valid until `close`.
    """

    def __init__(self, mapped: mmap.mmap, sections: dict[str, tuple[int, int]]) -> None:
        self._mapped = mapped
        self._data: npt.NDArray[np.uint8] | None = np.frombuffer(mapped, dtype=np.uint8)
        self._base = self._data.ctypes.data
        self._sections = sections
        self._borrowed: dict[str, int] = {}
        self.nbytes = len(mapped)

    @property
    def region(self) -> Region:
        """Memory region that contains all sections."""
        return Region(self._base, self.nbytes)

    def address(self, name: str) -> int:
        """Return the address of a section, a multiple of 64, or 0 if it does not exist."""
        found = self._sections.get(name)
        return self._borrowed.get(name, 0) if found is None else self._base + found[0]

    def borrow(self, entry: PackEntry, name: str, owner: PackedWeights) -> None:
        """Give `address` the sections of an entry of other weights, which must outlive these.

        Args:
            entry: the entry.
            name: its name in these weights.
            owner: the other weights.
        """
        for section, _ in entry.sections:
            self._borrowed[name + section.removeprefix(entry.name)] = owner.address(section)

    def array(self, name: str) -> npt.NDArray[np.uint8]:
        """Return the bytes of a section as a view."""
        if self._data is None:
            raise ModelFormatError("the packed weights are closed; load the model again")
        start, size = self._sections[name]
        return self._data[start : start + size]

    def close(self) -> None:
        """Unmap the file.

        If arrays are still in use, the file is unmapped when the last of them is freed.
        """
        self._data = None
        with contextlib.suppress(BufferError):
            self._mapped.close()


class _Layout(NamedTuple):
    """Layout of a packed file.

    Attributes:
        header: bytes before the first section.
        places: offset and size of each section in the file, by name.
        size: size of the file.
    """

    header: bytes
    places: dict[str, tuple[int, int]]
    size: int


class _Job(NamedTuple):
    """Packing job: the model, its plan, and how to pack it."""

    model: Packable
    plan: Sequence[PackEntry]
    weights: str
    layout: _Layout
    num_threads: int
    progress: Progress | None
    name: str


def load_packed(
    model: Packable,
    plan: Sequence[PackEntry],
    *,
    weights: str,
    cache_dir: Path | None = None,
    num_threads: int | None = None,
    progress: Progress | None = None,
) -> PackedWeights:
    """Return the packed weights of a model, from the cache or newly packed.

    Args:
        model: the model.
        plan: entries to pack, see `pack_plan`.
        weights: weight format.
        cache_dir: directory for packed files. With `NO_CACHE`, weights are packed into memory. The
            same happens, with a warning, if the directory is full or not writable.
        num_threads: threads for packing; by default, as many as the machine offers.
        progress: called with (bytes done, total bytes) while packing.

    Raises:
        ModelFormatError: the checkpoint does not fit the plan, contains weights that the format
            cannot represent, or changes during packing.
        CapacityError: the system refuses the memory.
    """
    fingerprint = model.fingerprint(
        cache_dir=cache_dir
    )  # packed weights with another one are refused
    layout = _layout(plan, fingerprint, weights)
    job = _Job(
        model,
        plan,
        weights,
        layout,
        num_threads or default_num_threads(),
        progress,
        model_name(model.path),
    )
    if cache_dir == NO_CACHE:
        return _pack_into_memory(job)
    path = packed_path(fingerprint, weights, cache_dir)
    found = _open_checked(path, layout, cache_dir, job.name)
    if found is not None:
        return found
    try:
        return _pack_into_file(job, path, cache_dir)
    except OSError as error:
        if sys.platform == "win32":
            # A file that another process packed meanwhile and has mapped cannot be replaced.
            found = _open_checked(path, layout, cache_dir, job.name)
            if found is not None:
                return found
        _LOG.warning(
            "packed weights (%.1f MB) cannot be stored in %s (%s); they stay in memory and are "
            "packed again at every start. %s",
            *(layout.size / 1e6, path.parent, error, _advice(error)),
        )
    return _pack_into_memory(job)


def _advice(error: OSError) -> str:
    if error.errno == errno.ENOMEM:
        return "Free memory, or raise the memory limit"
    elsewhere = "et KVBOOST_EDGE_CACHE to a directory on another disk"
    is_full = error.errno in (None, errno.ENOSPC, errno.EDQUOT)
    return f"Free disk space, or s{elsewhere}" if is_full else f"S{elsewhere}"


def packed_path(fingerprint: str, weights: str, cache_dir: Path | None = None) -> Path:
    """Return the path of a model's packed weights in a weight format."""
    directory = (cache_dir if cache_dir is not None else cache_directory()) / "packed"
    return directory / f"{fingerprint[:40]}-{weights}.kvpack"


def free_bytes(directory: Path) -> int:
    """Return the free disk space in bytes for a directory that need not exist; 0 if unknown."""
    for path in (directory, *directory.parents):
        if path.is_dir():
            try:
                return shutil.disk_usage(path).free
            except OSError:
                return 0
    return 0


def _pack_into_memory(job: _Job) -> PackedWeights:
    """Pack into anonymous private memory."""
    size = job.layout.size
    try:
        if sys.platform == "win32":
            memory = mmap.mmap(-1, size)
        else:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise CapacityError(
            f"the packed weights need {size / 1e6:.1f} MB of memory, which the system refused: "
            f"{error}"
        ) from error
    target = np.frombuffer(memory, dtype=np.uint8)

    def put(at: int, data: npt.NDArray[np.uint8]) -> None:
        target[at : at + len(data)] = data

    _pack(job, put, "memory")
    return PackedWeights(memory, job.layout.places)


def _pack_into_file(job: _Job, path: Path, cache_dir: Path | None) -> PackedWeights:
    """Write the packed weights to a temporary file, verify it and rename it to `path`.

    Raises:
        OSError: the directory is not writable, or the disk is full.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory; remove it")
    free = free_bytes(path.parent)
    if free < job.layout.size:
        raise OSError(f"only {free / 1e6:.1f} MB are free")
    with new_file(path) as file:
        _write(file, job, path)
        own = FileStamp.of_open(file, path)
    return _take(path, own, job, cache_dir)


def _take(path: Path, own: FileStamp, job: _Job, cache_dir: Path | None) -> PackedWeights:
    """Open the file just written, or an equal one that another process put in its place."""
    with open(path, "rb") as file:
        stamp = FileStamp.of_open(file, path)
        if (stamp.inode, stamp.modified_ns, stamp.size) == (own.inode, own.modified_ns, own.size):
            remember(stamp, _facts(job.name), cache_dir)
            return _map(file, job.layout.places)
    found = _open_checked(path, job.layout, cache_dir, job.name)
    if found is None:
        raise ModelFormatError(
            f"{path} was replaced by another process while it was opened; try again"
        )
    return found


def _layout(plan: Sequence[PackEntry], fingerprint: str, weights: str) -> _Layout:
    """Return the layout of a packed file.

    Its header depends only on the fingerprint, format and plan, so comparing it reveals an outdated
    file.
    """
    sections: dict[str, tuple[int, int]] = {}
    offset = 0
    for entry in plan:
        for name, size in entry.sections:
            sections[name] = (offset, size)
            offset += -(-size // _ALIGN) * _ALIGN
    shapes = {entry.name: [entry.kind, entry.rows, entry.inputs, entry.offset] for entry in plan}
    fields = {
        "fingerprint": fingerprint,
        "weights": weights,
        "entries": shapes,
        "sections": sections,
        "end": offset,
    }
    text = json.dumps(fields, sort_keys=True).encode()
    text += b" " * (-(len(text) + 16) % _ALIGN)
    header = _MAGIC + PACKED_VERSION.to_bytes(4, "little") + len(text).to_bytes(4, "little") + text
    places = {name: (len(header) + start, size) for name, (start, size) in sections.items()}
    return _Layout(header, places, len(header) + offset + _DIGEST_BYTES)


def _facts(name: str) -> dict[str, Any]:
    """Return the facts to cache about a valid file: the version that checked it, and the model's
    name.
    """
    return {"packed": PACKED_VERSION, **({MODEL_FACT: name} if name else {})}


def _open_checked(
    path: Path, layout: _Layout, cache_dir: Path | None, name: str = ""
) -> PackedWeights | None:
    """Return the weights in the file, or None if it is missing, outdated or damaged."""
    try:
        with open(path, "rb") as file:
            stamp = FileStamp.of_open(file, path)
            if stamp.size != layout.size or file.read(len(layout.header)) != layout.header:
                _LOG.warning(
                    "%s is damaged or was written by another version; the weights are packed again",
                    path,
                )
                return None
            known = recall(stamp, cache_dir)
            facts = _facts(name)
            if known.get("packed") != PACKED_VERSION and not _sound(file, stamp.size):
                _LOG.warning("%s is damaged (checksum); the weights are packed again", path)
                return None
            if {**known, **facts} != known:
                remember(stamp, facts, cache_dir)
            return _map(file, layout.places)
    except (FileNotFoundError, IsADirectoryError):
        return None
    except OSError as error:
        _LOG.warning("%s cannot be read (%s); the weights are packed again", path, error)
        return None


def _sound(file: IO[bytes], size: int) -> bool:
    try:
        digest = _digest(file, size)
    except OSError:
        return False
    file.seek(size - _DIGEST_BYTES)
    return file.read(_DIGEST_BYTES) == digest


def _digest(file: IO[bytes], size: int) -> bytes:
    stop = size - _DIGEST_BYTES
    threads = default_num_threads()
    found = digest_in_parts(
        file, stop, part_bytes=_PART_BYTES, num_threads=threads, algorithm=xxhash.xxh3_128
    )
    return bytes.fromhex(found)


def _map(file: IO[bytes], places: dict[str, tuple[int, int]]) -> PackedWeights:
    hold_open(file)  # keep the file open as long as it is mapped
    return PackedWeights(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), places)


def _write(file: IO[bytes], job: _Job, path: Path) -> None:
    """Write the header, the sections, and the digest of the data as read back.

    Gaps between sections become holes, which read as zeros.
    """
    size = job.layout.size
    target = FileAt(file)
    own = threading.local()

    def put(at: int, data: npt.NDArray[np.uint8]) -> None:
        back = getattr(own, "back", None)
        if back is None or len(back) < len(data):
            back = own.back = np.empty(len(data), dtype=np.uint8)
        target.write(data.data, at)
        count = target.read_into(back[: len(data)].data, at)
        if count != len(data) or not np.array_equal(back[:count], data):
            raise ModelFormatError(
                f"{path} does not read back as written; check the disk and the memory"
            )

    file.truncate(size)
    with synced_meanwhile(file):
        _pack(job, put, str(path))
        file.flush()
        digest = _digest(file, size)
    file.seek(size - _DIGEST_BYTES)
    file.write(digest)
    file.flush()


def _pack(job: _Job, put: Callable[[int, npt.NDArray[np.uint8]], None], target: str) -> None:
    """Pack all entries, and pass them and the header to `put` with their offsets.

    Entries are packed in pieces of a few megabytes, on several threads and in any order.
    """
    header, places, total = job.layout
    done = len(header)
    error = 0.0
    energy = 0.0
    start = time.monotonic()
    _LOG.info("packing %s as %s into %s, %.1f MB", job.model.path, job.weights, target, total / 1e6)

    def keep(piece: EntryRows, packed: PackedRows) -> None:
        first = piece.start // LANES
        tiles = -(-piece.entry.rows // LANES)
        sections = (data for data in (packed.codes, packed.scales, packed.minima) if len(data))
        for (name, size), data in zip(piece.entry.sections, sections, strict=True):
            put(places[name][0] + size // tiles * first, data)

    put(0, np.frombuffer(header, dtype=np.uint8))
    with job.model.open_source() as source:
        for _, packed in pack_stream(job.plan, source, job.num_threads, keep):
            done += len(packed.codes) + len(packed.scales) + len(packed.minima)
            error = error + packed.error
            energy = energy + packed.energy
            if job.progress is not None:
                job.progress(done, total)
        log_conversions(job.plan, source)
    for path in job.model.changed_files():
        raise ModelFormatError(
            f"{path} changed while its weights were being packed; load it again when it is complete"
        )
    if job.progress is not None:
        job.progress(total, total)
    rate = f"weight error {(error / energy) ** 0.5:.2%}" if energy else "otherwise kept as stored"
    seconds = time.monotonic() - start
    _LOG.info("packed %.1f MB as %s in %.1f s, %s", total / 1e6, job.weights, seconds, rate)
