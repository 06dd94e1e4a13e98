"""Packing of a plan as a stream: rows are read and packed in pieces of a few megabytes, on threads.

Quantized tensors keep their codes if the format of the entry represents them exactly. All others
are quantized from float32. ModelFormatError is raised for weights that a format cannot represent,
including NaN and infinity.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.kernels.block_rows import DECODED, decode_rows_entry
from kvboost_edge.kernels.entry import KernelEntry
from kvboost_edge.kernels.linear.grid_blocks import grid_blocks_entry
from kvboost_edge.kernels.linear.k_blocks import BLOCK_WEIGHTS, blocks_entry, pack_blocks
from kvboost_edge.kernels.linear.weight_formats import FORMATS
from kvboost_edge.kernels.linear.weights import (
    PackedRows,
    codes_entry,
    fit_entries,
    floats_entry,
    pack_codes,
    pack_rows,
)
from kvboost_edge.kernels.reference.linear import unpack_codes, unpack_scales
from kvboost_edge.kernels.vectors import LANES
from kvboost_edge.models.gguf.blocks import q3_k_as_q6_k
from kvboost_edge.models.packed.pack_plan import VECTOR, PackEntry, holds_exactly
from kvboost_edge.models.weights.weight_source import QuantRows, WeightSource

__all__ = ["EntryRows", "pack_stream", "packing_bytes", "packing_entries", "pieces_of", "read_rows"]

_PIECE_BYTES = 4 << 20  # float32 bytes of the rows that a thread packs at a time
_ALL_PIECES = (
    64 << 20
)  # float32 bytes of the pieces of all threads; with many threads, pieces are smaller
# Working memory per thread, in pieces: stored bytes, floats, codes and the packed result.
_WORKING_PIECES = 8
_PIECES_PER_THREAD = 2  # pieces in flight per thread, to avoid waiting for the writer

_NOTHING = np.empty(0, dtype=np.uint8)

Floats = npt.NDArray[np.float32]


def packing_entries(
    plan: Sequence[PackEntry], source: WeightSource, tables: Sequence[PackEntry] = ()
) -> list[KernelEntry]:
    """Return the kernel entries that packing a plan needs, slowest to compile first.

    Args:
        plan: entries to pack.
        source: the tensors.
        tables: tables whose rows are read one by one.
    """
    found = set()
    for entry in plan:
        if entry.kind == VECTOR:
            continue
        if FORMATS[entry.kind].block_bytes:
            has_grid = FORMATS[entry.kind].grid is not None
            found.add(grid_blocks_entry if has_grid else blocks_entry)
            continue
        kept = [holds_exactly(entry.kind, source.kind(tensor)) for tensor, _ in entry.parts]
        if any(kept):
            found.add(codes_entry)
        if not all(kept):
            found.add(fit_entries.get(entry.kind, floats_entry))
    if any(source.type_of(tensor) in DECODED for table in tables for tensor, _ in table.parts):
        found.add(decode_rows_entry)
    each = (
        *(blocks_entry, grid_blocks_entry, *fit_entries.values()),
        *(decode_rows_entry, codes_entry, floats_entry),
    )
    return [entry for entry in each if entry in found]


@dataclasses.dataclass(frozen=True, slots=True)
class EntryRows:
    """Rows [start, stop) of an entry, packed as one piece. Only the last piece may have a partial
    tile.
    """

    entry: PackEntry
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        return self.stop == self.entry.rows

    @property
    def parts(self) -> list[tuple[str, int, int]]:
        """Tensors that contain the rows, each with a row range."""
        found = []
        first = 0
        for tensor, rows in self.entry.parts:
            low = max(self.start, first)
            high = min(self.stop, first + rows)
            if low < high:
                found.append((tensor, low - first, high - first))
            first += rows
        return found


def pieces_of(plan: Sequence[PackEntry], num_threads: int = 1) -> Iterator[EntryRows]:
    """Yield the entries in order, split into pieces.

    Pieces end at tensor boundaries where these are also tile boundaries.
    """
    piece_bytes = _piece_bytes(num_threads)
    for entry in plan:
        if entry.kind == VECTOR:
            yield EntryRows(entry, 0, entry.rows)
            continue
        step = max(LANES, piece_bytes // (4 * entry.inputs) // LANES * LANES)
        ends = np.cumsum([rows for _, rows in entry.parts]).tolist()
        start = 0
        while start < entry.rows:
            stop = min(start + step, entry.rows)
            stop = min(
                [end for end in ends if start < end <= stop and end % LANES == 0], default=stop
            )
            yield EntryRows(entry, start, stop)
            start = stop


# Memory of the kernels and of data held between pieces. With one thread, whose pieces take 46 MB,
# the total was measured at 71 to 77 MB.
_BASE_BYTES = 32 << 20


def _piece_bytes(num_threads: int) -> int:
    return min(_PIECE_BYTES, _ALL_PIECES // num_threads)


def packing_bytes(num_threads: int) -> int:
    """Return the peak memory in bytes that packing takes, in addition to the packed weights.

    It does not depend on tensor sizes, because tensors are read a few megabytes at a time. Vectors
    are small and packed whole. Expert matrices that the file stores transposed (gpt-oss as floats)
    are not included. In addition to the one being read, two of them are held as float32.
    """
    waiting = _PIECES_PER_THREAD * num_threads + 1
    return _BASE_BYTES + (waiting + _WORKING_PIECES * num_threads) * _piece_bytes(num_threads)


def pack_stream(
    plan: Sequence[PackEntry],
    source: WeightSource,
    num_threads: int,
    put: Callable[[EntryRows, PackedRows], None] | None = None,
) -> Iterator[tuple[EntryRows, PackedRows]]:
    """Yield all pieces of a plan in order, with their packed bytes.

    Args:
        plan: entries to pack.
        source: the tensors.
        num_threads: number of packing threads.
        put: called with each piece before it is yielded, in any order, on the thread that packed
            it. If one thread did all the writing, it would take a third of the time on two cores.
    """

    def pack(piece: EntryRows) -> PackedRows:
        packed = _pack(piece, source)
        if put is not None:
            put(piece, packed)
        return packed

    waiting: collections.deque[tuple[EntryRows, Future[PackedRows]]] = collections.deque()
    pieces = pieces_of(plan, num_threads)
    with ThreadPoolExecutor(num_threads, thread_name_prefix="kvboost-pack") as pool:
        try:
            for piece in pieces:
                waiting.append((piece, pool.submit(pack, piece)))
                if len(waiting) > _PIECES_PER_THREAD * num_threads:
                    yield _next(waiting)
            while waiting:
                yield _next(waiting)
        finally:
            for _, future in waiting:
                future.cancel()


def _next(
    waiting: collections.deque[tuple[EntryRows, Future[PackedRows]]],
) -> tuple[EntryRows, PackedRows]:
    piece, future = waiting.popleft()
    return piece, future.result()


def read_rows(piece: EntryRows, source: WeightSource) -> Floats:
    """Return the rows of a piece as float32, with tensors stacked or concatenated.

    Raises:
        ModelFormatError: the entry's format cannot represent a weight.
    """
    rows = [_checked(source, *part, piece.entry.kind) for part in piece.parts]
    return _joined(rows)


def _joined(parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Stack arrays. A single array, the usual case, is not copied."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _pack(piece: EntryRows, source: WeightSource) -> PackedRows:
    entry = piece.entry
    if entry.kind == VECTOR:
        return _pack_vector(piece, source)
    form = FORMATS[entry.kind]
    if form.block_bytes:
        blocks = [_stored(source, *part, entry.kind).codes for part in piece.parts]
        return pack_blocks(_joined(blocks), entry.kind)
    if form.float8:
        stored = [_stored(source, *part, entry.kind) for part in piece.parts]
        return pack_codes(
            _joined([rows.codes for rows in stored]),
            _joined([rows.scales for rows in stored]),
            None,
            entry.kind,
            factors=_joined([np.full(len(rows.codes), rows.factor, np.float32) for rows in stored]),
        )
    if form.table:
        # The rows belong to one tensor, because in these entries tensors start at tile boundaries
        # and pieces end there.
        (part,) = piece.parts
        rows = _stored(source, *part, entry.kind)
        return pack_codes(rows.codes, rows.scales, None, entry.kind, rows.table)
    kept = [holds_exactly(entry.kind, source.kind(tensor)) for tensor, _, _ in piece.parts]
    if not any(kept):
        return pack_rows(read_rows(piece, source), entry.kind)
    parts = []
    error = 0.0
    energy = 0.0
    for (tensor, start, stop), keep in zip(piece.parts, kept, strict=True):
        if keep:
            parts.append(_stored(source, tensor, start, stop, entry.kind))
            continue
        packed = pack_rows(_checked(source, tensor, start, stop, entry.kind), entry.kind)
        error = error + packed.error
        energy = energy + packed.energy
        parts.append(_unpacked(packed, stop - start, entry.inputs, entry.kind))
    lowest = [part.minima for part in parts if part.minima is not None]
    packed = pack_codes(
        _joined([part.codes for part in parts]),
        _joined([part.scales for part in parts]),
        _joined(lowest) if lowest else None,
        entry.kind,
    )
    return packed._replace(error=error, energy=energy)


def _pack_vector(piece: EntryRows, source: WeightSource) -> PackedRows:
    entry = piece.entry
    padded = np.zeros(entry.sizes[0] // 4, dtype=np.float32)
    padded[: entry.rows] = read_rows(piece, source) + np.float32(entry.offset)
    return PackedRows(padded.view(np.uint8), _NOTHING, _NOTHING)


def _checked(source: WeightSource, tensor: str, start: int, stop: int, kind: str) -> Floats:
    rows = source.rows(tensor, start, stop)
    largest = FORMATS["f32" if kind == VECTOR else kind].largest
    # both are NaN if any weight is NaN
    low = float(rows.min())
    high = float(rows.max())
    if -largest <= low and high <= largest:
        return rows
    where = f"tensor {tensor!r} in {source.file_of(tensor)}"
    if not np.isfinite([low, high]).all():
        raise ModelFormatError(
            f"{where} holds NaN or infinity in rows {start} to {stop - 1}; the checkpoint is "
            "damaged"
        )
    top = high if high > largest else low
    raise ModelFormatError(
        f"{where} contains the weight {top:.6g}, beyond the range of weights={kind!r} (up to "
        f"{largest:.6g}); set weights='f32'"
    )


def _stored(source: WeightSource, tensor: str, start: int, stop: int, kind: str) -> QuantRows:
    """Return the stored codes of rows, in the format `kind`, which represents them exactly."""
    rows = source.quant_rows(tensor, start, stop)
    if rows.kind != kind:
        rows = _widened(rows, kind)
    if not all(np.isfinite(halves).all() for halves in rows[2:] if halves is not None):
        raise ModelFormatError(
            f"tensor {tensor!r} in {source.file_of(tensor)} has scales that are not finite in rows "
            f"{start} to {stop - 1}; the checkpoint is damaged"
        )
    return rows


def _widened(rows: QuantRows, kind: str) -> QuantRows:
    """Convert quantized rows to another format that represents them exactly."""
    stored = FORMATS[rows.kind]
    form = FORMATS[kind]
    rows = rows._replace(kind=kind)
    if stored.scale_groups > form.scale_groups:
        times = stored.scale_groups // form.scale_groups
        count = -(-rows.codes.shape[1] // form.scale_inputs)
        rows = rows._replace(scales=rows.scales.repeat(times, axis=1)[:, :count])
    if stored.name == "q3k":
        blocks = q3_k_as_q6_k(rows.codes.reshape(-1, stored.block_bytes))
        return rows._replace(codes=blocks.reshape(len(rows.codes), -1))
    if stored.block_bytes:
        return rows._replace(codes=_with_fifth_bits(rows.codes))
    if rows.table is not None:
        codes = rows.table.view(np.uint8)[rows.codes] + np.uint8(form.offset)
        return rows._replace(codes=codes, table=None)
    if form.table:
        return rows._replace(table=np.arange(stored.lowest, stored.highest + 1, dtype=np.int8))
    if form.minima:
        if stored.minima:
            return rows
        with np.errstate(over="ignore"):  # `_stored` checks for infinity
            return rows._replace(minima=rows.scales * np.float16(stored.offset))
    return rows._replace(codes=rows.codes + np.uint8(form.offset - stored.offset))


def _with_fifth_bits(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Convert Q4_K blocks to Q5_K blocks by inserting 32 zero bytes of fifth bits."""
    blocks = codes.reshape(-1, FORMATS["q4k"].block_bytes)
    none = np.zeros((len(blocks), BLOCK_WEIGHTS // 8), dtype=np.uint8)
    return np.concatenate([blocks[:, :16], none, blocks[:, 16:]], axis=1).reshape(len(codes), -1)


def _unpacked(packed: PackedRows, rows: int, inputs: int, kind: str) -> QuantRows:
    """Convert packed rows back to plain rows, which can then share a tile with other rows."""
    form = FORMATS[kind]
    signed = unpack_codes(packed.codes, rows, inputs, form.bits)[:rows, :inputs]
    codes = (signed.astype(np.int16) + (1 << form.bits - 1)).astype(np.uint8)
    scales, minima = (
        unpack_scales(halves.view(np.float16), rows, inputs)[:rows].astype(np.float16)
        for halves in (packed.scales, packed.minima if form.minima else packed.scales)
    )
    return QuantRows(kind, codes, scales, minima if form.minima else None)
