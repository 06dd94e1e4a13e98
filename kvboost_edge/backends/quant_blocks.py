"""Storage of a quantized pool: codes of full blocks, and float16 buffers of open blocks.

`write_kv` of a layer copies the earlier content of blocks that become full into temporary buffers,
writes the new tokens in float16, and quantizes the full blocks. Attention then reads a query's own
block from its buffer, and all earlier blocks from their codes. Results therefore do not depend on
where a pass begins or ends.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvboost_edge.backends.base import BatchLayout, KVSpec, LayerKVSpec
from kvboost_edge.backends.kernel_access import Places
from kvboost_edge.backends.open_blocks import OpenBlocks, PassPlan
from kvboost_edge.errors import ConfigError
from kvboost_edge.kernels.attention.paged import KVPool, OwnBlocks, aligned_empty
from kvboost_edge.kernels.quantized_kv.code_layout import CodeLayout, code_layout

__all__ = ["CodedLayer", "QuantBlocks", "QuantKernels", "QuantPass", "read_only_pass"]

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Longs = npt.NDArray[np.int64]

# Temporary buffers for which there is room from the start. They take no memory before their use.
# More of them need a larger array, and for a moment a copy of all open blocks.
_TEMPORARY = 64


class QuantKernels(NamedTuple):
    """The three functions that move KV, compiled or from the reference."""

    write_kv: Callable[[Floats, Floats, KVPool, npt.NDArray[np.int64]], None]
    copy_blocks: Callable[[KVPool, Sequence[tuple[int, int]]], None]
    quantize_blocks: Callable[[KVPool, Longs, Bytes, Longs, CodeLayout], None]


class QuantPass(NamedTuple):
    """A prepared pass over a quantized pool."""

    layout: BatchLayout
    plan: PassPlan
    places: dict[LayerKVSpec, Places]


class CodedLayer(NamedTuple):
    """Layer storage that attention reads. `codes` is uint8 [num_blocks, num_kv_heads, bytes]."""

    codes: Bytes
    layout: CodeLayout
    own: OwnBlocks


def read_only_pass(batch: QuantPass, layout: BatchLayout, source: Longs) -> QuantPass:
    """Return a pass without writes for the sequences `source` of a pass whose KV is written."""
    places = {}
    for shape, one in batch.places.items():
        nothing = np.empty((len(one.tables), 0, 2), dtype=np.int64)
        tables = np.ascontiguousarray(one.tables[:, source])
        places[shape] = Places(
            np.empty((len(one.tables), 0), dtype=np.int64), tables, nothing, nothing
        )
    return QuantPass(layout, batch.plan._replace(first=batch.plan.first[source]), places)


class _Arena:
    """Float16 buffers for layers of the same shape: `num_open` each, and shared temporary ones."""

    def __init__(self, spec: KVSpec, shape: LayerKVSpec, num_layers: int, num_open: int) -> None:
        self.shape = shape
        self.block_size = spec.block_size
        self.num_open = num_open
        self.num_layers = num_layers
        self.num_kept = num_layers * num_open
        self._num_clean = 0  # buffers that were set to 0
        self.pool = self._make(self.num_kept + _TEMPORARY)
        self._clean(self.num_kept)
        first = np.arange(num_layers)[:, None] * num_open
        self._first_slots = first * self.block_size
        self._first_buffers = first[:, :, None].astype(np.int32)
        self._no_pairs = np.empty((num_layers, 0, 2), dtype=np.int64)

    def _make(self, num_buffers: int) -> KVPool:
        heads = self.shape.num_kv_heads
        dim = self.shape.head_dim
        keys = aligned_empty((num_buffers, heads, dim, self.block_size), np.float16)
        values = aligned_empty((num_buffers, heads, self.block_size, dim), np.float16)
        return KVPool(keys, values)

    def _clean(self, num_buffers: int) -> None:
        """Set the first buffers to 0 that were not set before."""
        for array in self.pool:
            array[self._num_clean : num_buffers] = 0
        self._num_clean = max(self._num_clean, num_buffers)

    def grow(self, num_temporary: int) -> None:
        """Make room for `num_temporary` temporary buffers. The other buffers keep their content."""
        wanted = self.num_kept + num_temporary
        if wanted > len(self.pool.keys):
            larger = self._make(wanted)
            for old, new in zip(self.pool, larger, strict=True):
                new[: self._num_clean] = old[: self._num_clean]
            self.pool = larger
        self._clean(wanted)

    def place(self, ordinal: Any, buffers: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Map a pass's buffers to arena indices for the layer `ordinal`."""
        kept = ordinal * self.num_open
        temporary = self.num_kept - self.num_open
        placed: npt.NDArray[Any] = buffers + np.where(
            buffers < self.num_open, kept, temporary
        ).astype(buffers.dtype)
        return placed

    def places(self, plan: PassPlan) -> Places:
        """Map a plan's buffers to arena indices for each layer of this shape."""
        if not plan.closed:
            # Most decode steps need no temporary buffers.
            slots = self._first_slots + plan.slots
            return Places(slots, self._first_buffers + plan.tables, self._no_pairs, self._no_pairs)
        layers = np.arange(self.num_layers)[:, None]
        buffers, offsets = np.divmod(plan.slots, self.block_size)
        slots = self.place(layers, buffers) * self.block_size + offsets
        tables = self.place(layers[:, :, None].astype(np.int32), plan.tables)
        continued = self.place(
            layers[:, :, None], np.array(plan.continued, dtype=np.int64).reshape(-1, 2)
        )
        closed = np.empty((self.num_layers, len(plan.closed), 2), dtype=np.int64)
        closed[:] = np.array(plan.closed, dtype=np.int64)
        closed[:, :, 0] = self.place(layers, closed[0, :, 0])
        return Places(slots, tables, continued, closed)


class QuantBlocks:
    """Codes and open buffers of all layers. MemoryError is passed on to the caller."""

    def __init__(self, spec: KVSpec, num_blocks: int, num_open: int, kernels: QuantKernels) -> None:
        if num_open < 1:
            raise ConfigError(f"num_open={num_open} must be at least 1")
        self._kernels = kernels
        self._open = OpenBlocks(num_open, spec.block_size)
        self._size = spec.block_size
        self._layouts = [
            code_layout(spec.block_size, layer.head_dim, spec.bits) for layer in spec.layers
        ]
        self._pools: list[Bytes] = []
        for layer, codes in zip(spec.layers, self._layouts, strict=True):
            self._pools.append(
                aligned_empty((num_blocks, layer.num_kv_heads, codes.nbytes), np.uint8)
            )
        self._ordinals = [
            spec.layers[:index].count(layer) for index, layer in enumerate(spec.layers)
        ]
        self._arenas = {
            shape: _Arena(spec, shape, spec.layers.count(shape), num_open)
            for shape in dict.fromkeys(spec.layers)
        }
        self._layers = spec.layers

    @property
    def num_bytes(self) -> int:
        """Total bytes of the `arrays`."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def arrays(self) -> list[npt.NDArray[Any]]:
        """Codes and open buffers. Temporary buffers are workspace and not included."""
        kept = [array[: arena.num_kept] for arena in self._arenas.values() for array in arena.pool]
        return [*self._pools, *kept]

    def prepare(self, layout: BatchLayout) -> QuantPass:
        """Plan the writes of a checked layout, opening and closing its blocks."""
        plan = self._open.plan(layout) if layout.stores else self._open.view(layout)
        for arena in self._arenas.values():
            arena.grow(plan.num_temporary)
        return QuantPass(
            layout, plan, {shape: arena.places(plan) for shape, arena in self._arenas.items()}
        )

    def release(self, block_ids: Sequence[int]) -> None:
        self._open.release(block_ids)

    def check_full(self, block_ids: Sequence[int]) -> None:
        """Raise ConfigError if any of the blocks is open."""
        self._open.check_full(block_ids)

    def copy_blocks(self, ops: Sequence[tuple[int, int]]) -> None:
        """Copy blocks in order. Open blocks are copied from buffer to buffer."""
        for src, dst in ops:
            buffers = self._open.copied(src, dst)
            if buffers is None:
                for pool in self._pools:
                    pool[dst] = pool[src]
                continue
            for layer, ordinal in zip(self._layers, self._ordinals, strict=True):
                arena = self._arenas[layer]
                pair = tuple(int(place) for place in arena.place(ordinal, np.array(buffers)))
                self._kernels.copy_blocks(arena.pool, [(pair[0], pair[1])])

    def write_kv(self, layer: int, keys: Floats, values: Floats, batch: QuantPass) -> None:
        """Store new tokens and quantize the blocks that are now full."""
        shape = self._layers[layer]
        ordinal = self._ordinals[layer]
        arena = self._arenas[shape]
        places = batch.places[shape]
        if places.continued.size:
            self._kernels.copy_blocks(arena.pool, places.continued[ordinal].tolist())
        self._kernels.write_kv(keys, values, arena.pool, places.slots[ordinal])
        if places.closed.size:
            sources, targets = places.closed[ordinal].T
            self._kernels.quantize_blocks(
                arena.pool, sources, self._pools[layer], targets, self._layouts[layer]
            )

    def layer(self, layer: int, batch: QuantPass) -> CodedLayer:
        """Return the storage that attention of a layer reads."""
        shape = self._layers[layer]
        ordinal = self._ordinals[layer]
        own = OwnBlocks(
            self._arenas[shape].pool, batch.places[shape].tables[ordinal], batch.plan.first
        )
        return CodedLayer(self._pools[layer], self._layouts[layer], own)

    def same_shape(self, shape: LayerKVSpec, batch: QuantPass) -> tuple[OwnBlocks, Places]:
        """Return the buffers of a pass in layers of the same shape, see `QuantizedStorage`."""
        places = batch.places[shape]
        return OwnBlocks(self._arenas[shape].pool, places.tables[0], batch.plan.first), places

    @property
    def codes(self) -> tuple[list[Bytes], list[CodeLayout]]:
        """Codes of each layer, uint8 [num_blocks, num_kv_heads, bytes], and the layout of each."""
        return self._pools, self._layouts

    def poison(self, block_ids: Sequence[int]) -> None:
        """Fill blocks with 0xFF bytes, which are NaN in float16."""
        ids = list(block_ids)
        for pool in self._pools:
            pool[ids] = 0xFF
        for arena, place in self._buffers(ids):
            for array in arena.pool:
                array[place] = np.nan

    def checksum(self, block_id: int) -> int:
        """Return the CRC-32 of a block over all layers. For an open block, its buffer counts."""
        crc = 0
        buffers = self._buffers([block_id])
        for arena, place in buffers:
            for array in arena.pool:
                crc = zlib.crc32(array[place].reshape(-1).view(np.uint8), crc)
        if not buffers:
            for pool in self._pools:
                crc = zlib.crc32(pool[block_id].reshape(-1), crc)
        return crc

    def _buffers(self, block_ids: Sequence[int]) -> list[tuple[_Arena, int]]:
        """Return (arena, index) of each layer's buffer for those blocks that are open."""
        held = [buffer for buffer in map(self._open.buffer, block_ids) if buffer is not None]
        return [
            (self._arenas[layer], int(self._arenas[layer].place(ordinal, np.array(buffer))))
            for buffer in held
            for layer, ordinal in zip(self._layers, self._ordinals, strict=True)
        ]
