"""Passes as one kernel call, with KV writes and attention as operations of the program.

Returning to Python between layers would cost a tenth of a decode step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvboost_edge.backends.base import AttentionParams, Backend, KVSpec, LayerKVSpec
from kvboost_edge.backends.cpu import PreparedBatch
from kvboost_edge.backends.kernel_access import KernelAccess, QuantizedStorage
from kvboost_edge.kernels.attention.call import AttentionCall
from kvboost_edge.kernels.attention.float_launch import make_call
from kvboost_edge.kernels.attention.paged import (
    AttentionOptions,
    KVPool,
    PagedBatch,
    WorkPlan,
    aligned_empty,
)
from kvboost_edge.kernels.attention.storage import from_storage
from kvboost_edge.kernels.program import attention_calls as la
from kvboost_edge.kernels.quantized_kv.code_attend import coded_scratch_floats
from kvboost_edge.kernels.reference.quantized_kv import decode_block

__all__ = ["PassMemory", "WholePass"]

Floats = npt.NDArray[np.float32]
Longs = npt.NDArray[np.int64]


class PassMemory(NamedTuple):
    """Memory of one pass.

    Attributes:
        counters: int64, counters of the program, then attention rows, then counters of attention
            calls.
        rows: address that layer 0's attention row has, or would have if the range begins later.
        attended: float32, attention output of a layer, [num_tokens, num_heads * head_dim].
        lse: float32 [num_tokens, num_heads], log-sum-exp of the last attention.
        held: calls and arrays whose addresses the rows contain.
    """

    counters: npt.NDArray[np.int64]
    rows: int
    attended: Floats
    lse: Floats
    held: list[Any]


_Which = Longs | slice
_NONE = np.empty(0, dtype=np.int64)
# Fields of a call that differ in each pass, and are therefore 0 in `_AlikeRows`.
_OF_A_PASS: dict[str, Any] = {
    **dict.fromkeys(("out", "lse", "counters", "cu_seqlens_q", "seq_lens", "block_tables"), _NONE),
    **dict.fromkeys(("keys", "values", "max_blocks"), 0),
}


class _Storage(NamedTuple):
    """Location of the KV of layers with one shape, for a pass.

    Attributes:
        pool: KV that attention reads as floats.
        batch: the pass, with block tables of the first layer of this shape in that pool.
        columns: values that all layers share, by index in an attention row.
        layered: values of each layer, by index in an attention row.
        held: arrays whose addresses the columns contain.
    """

    pool: KVPool
    batch: PagedBatch
    columns: dict[int, int]
    layered: dict[int, Longs]
    held: list[Any]


class _AlikeRows(NamedTuple):
    """Cached attention rows of a range of layers, for passes with the same work plan.

    Consecutive decode steps often share a plan. Values that change with each pass are 0.

    Attributes:
        key: key of the cache. See `WholePass._alike_rows`.
        rows: int64 [num_layers, ROW_NUMBERS]. Counters are offsets from those of the first layer.
        each: number of counters per layer.
        held: objects that the key and the rows refer to.
    """

    key: tuple[int, ...]
    rows: Longs
    each: int
    held: tuple[Any, ...]


class _Members(NamedTuple):
    """Layers of a range that share a KV shape.

    Attributes:
        shape: KV shape of each layer.
        first: index of the first such layer in the range.
        layers: indices of the layers in the range.
        places: int64, indices of the layers among the pool's layers of this shape.
        kinds: indices of the layers in the range, by attention options.
    """

    shape: LayerKVSpec
    first: int
    layers: _Which
    places: Longs
    kinds: dict[AttentionOptions, _Which]


class WholePass:
    """Attention operations of all layers on one backend.

    Args:
        access: kernels and pools of the backend.
        spec: the KV spec.
        params: attention constants of each layer.
        kv: index of the pool layer that each layer reads, or -1 if the layer does not attend.
    """

    def __init__(
        self,
        access: KernelAccess,
        spec: KVSpec,
        params: Sequence[AttentionParams | AttentionOptions],
        kv: Sequence[int],
    ) -> None:
        self._space, self._pools, self._coded = access
        self._spec = spec
        self._kv = list(kv)
        # Sinks are excluded, because arrays are not hashable.
        self._params = [AttentionOptions(*one)._replace(sinks=None) for one in params]
        fixed: dict[int, Any] = {}
        # Rows of layers that do not attend are never read, so any index is valid.
        kv = [max(index, 0) for index in kv]
        if self._coded is None:
            fixed[la.R_KEYS] = np.array([self._pools[index].keys.ctypes.data for index in kv])
            fixed[la.R_VALUES] = np.array([self._pools[index].values.ctypes.data for index in kv])
        else:
            pools, layouts = self._coded.codes
            largest = max(layout.dim for layout in layouts) * spec.block_size
            self._stage = aligned_empty((self._space.num_threads, largest), np.float32)
            fixed[la.R_CODES] = np.array([pools[index].ctypes.data for index in kv])
            fixed[la.R_STAGE] = np.full(len(kv), self._stage.ctypes.data)
            for index, numbers in enumerate(np.array([layouts[index] for index in kv]).T):
                fixed[la.R_LAYOUT + index] = numbers
        # kept alive because the rows contain their addresses
        self._sinks = [one.sinks for one in params]
        fixed[la.R_SINKS] = np.array(
            [0 if sinks is None else sinks.ctypes.data for sinks in self._sinks]
        )
        self._fixed = np.zeros((len(kv), la.ROW_NUMBERS), dtype=np.int64)
        self._fixed[:, list(fixed)] = np.stack(list(fixed.values()), axis=1)
        self._ranges: dict[range, list[_Members]] = {}
        self._kept: dict[range, _AlikeRows] = {}

    @classmethod
    def of(
        cls, backend: Backend, params: Sequence[AttentionParams], kv: Sequence[int]
    ) -> WholePass | None:
        """Return the operations for a backend, or None if a program cannot call its kernels."""
        access = backend.kernel_access
        return None if access is None else cls(access, backend.spec, params, kv)

    @property
    def is_quantized(self) -> bool:
        """Whether the pool is quantized."""
        return self._coded is not None

    def stored_keys(self, layer: int, slots: Longs) -> Floats:
        """Return a layer's keys at slots of full blocks, float32 [slots, kv_heads, head_dim]."""
        if self._coded is None:
            blocks, offsets = np.divmod(slots, self._spec.block_size)
            return from_storage(self._pools[self._kv[layer]].keys[blocks, :, :, offsets])
        return self._decoded(self._coded, layer, slots, 0)

    def stored_values(self, layer: int, slots: Longs) -> Floats:
        """Return a layer's values at slots of full blocks, float32 [slots, kv_heads, head_dim]."""
        if self._coded is None:
            blocks, offsets = np.divmod(slots, self._spec.block_size)
            return from_storage(self._pools[self._kv[layer]].values[blocks, :, offsets])
        return self._decoded(self._coded, layer, slots, 1)

    def _decoded(self, coded: QuantizedStorage, layer: int, slots: Longs, which: int) -> Floats:
        """Return dequantized keys (`which` is 0) or values (`which` is 1)."""
        blocks, offsets = np.divmod(slots, self._spec.block_size)
        pools, layouts = coded.codes
        pool = pools[self._kv[layer]]
        layout = layouts[self._kv[layer]]
        found = np.empty((len(slots), pool.shape[1], layout.head_dim), dtype=np.float32)
        for block in np.unique(blocks).tolist():
            heads = [
                decode_block(pool[block, head], layout)[which] for head in range(pool.shape[1])
            ]
            found[blocks == block] = np.stack(heads, axis=1)[offsets[blocks == block]]
        return found

    def prepare(
        self,
        query: Floats,
        num_heads: int,
        prepared: PreparedBatch,
        num_counters: int,
        turning: Mapping[int, Any],
        layers: range,
        attended_floats: int,
    ) -> PassMemory:
        """Allocate memory for attention in a range of layers.

        Args:
            query: float32 [num_tokens, num_heads, head_dim], query buffer of all layers.
            num_heads: number of query heads.
            prepared: the backend's batch.
            num_counters: number of counters of the program.
            turning: result of `ProgramBuffers.turning`, or empty if no segment has a delta.
            layers: range of layers.
            attended_floats: maximum number of floats per token in the attention output.
        """
        num_layers = len(layers)
        num_tokens = len(prepared.slot_mapping)
        storages = [
            (members, self._storage(members, layers, prepared)) for members in self._members(layers)
        ]
        alike = self._alike_rows(query, num_heads, prepared, storages, layers)
        out = np.empty(num_tokens * attended_floats, dtype=np.float32)
        lse = np.empty((num_tokens, num_heads), dtype=np.float32)
        memory = np.zeros(num_counters + num_layers * (la.ROW_NUMBERS + alike.each), dtype=np.int64)
        first = memory.ctypes.data + 8 * num_counters
        rows = memory[num_counters : num_counters + alike.rows.size].reshape(alike.rows.shape)
        of_pass = {
            la.R_COUNTERS: first + 8 * rows.size,
            la.R_OUT: out.ctypes.data,
            la.R_LSE: lse.ctypes.data,
            la.R_CU_SEQLENS: prepared.paged.cu_seqlens_q.ctypes.data,
            la.R_SEQ_LENS: prepared.paged.seq_lens.ctypes.data,
        }
        ranges = prepared.paged.sparse_ranges
        if ranges is not None:
            of_pass[la.R_SPARSE] = ranges.ctypes.data
        rows[:] = alike.rows
        for members, storage in storages:
            columns = of_pass | storage.columns
            row = np.zeros(la.ROW_NUMBERS, dtype=np.int64)
            row[list(columns)] = list(columns.values())
            # Rows of layers that do not attend are never read.
            rows[members.layers if len(storages) > 1 else slice(None)] += row
            for index, numbers in storage.layered.items():
                rows[members.layers, index] = numbers
        for index, numbers in turning.items():
            rows[:, index] = (
                numbers[layers.start : layers.stop] if isinstance(numbers, list) else numbers
            )
        held = [alike, ranges, *(storage.held for _, storage in storages)]
        return PassMemory(memory, first - 8 * la.ROW_NUMBERS * layers.start, out, lse, held)

    def _alike_rows(
        self,
        query: Floats,
        num_heads: int,
        prepared: PreparedBatch,
        storages: Sequence[tuple[_Members, _Storage]],
        layers: range,
    ) -> _AlikeRows:
        """Return the rows of a range of layers, cached for passes with the same work plans."""
        num_tokens = len(prepared.slot_mapping)
        plans = [
            prepared.plan(
                num_heads // of.shape.num_kv_heads,
                of.shape.num_kv_heads,
                options.window,
                options.ahead,
            )
            for of, _ in storages
            for options in of.kinds
        ]
        key = (num_tokens, query.ctypes.data, *(id(plan.items) for plan in plans))
        found = self._kept.get(layers)
        if found is None or found.key != key:
            calls = self._calls(query, num_heads, num_tokens, storages, plans)
            found = self._kept[layers] = self._rows_of(key, calls, storages, layers)
        return found

    def _calls(
        self,
        query: Floats,
        num_heads: int,
        num_tokens: int,
        storages: Sequence[tuple[_Members, _Storage]],
        plans: Sequence[WorkPlan],
    ) -> list[AttentionCall]:
        """Return one attention call per kind of layer, in the order of the plans."""
        more = None if self._coded is None else coded_scratch_floats
        calls = []
        kinds = ((of, storage, options) for of, storage in storages for options in of.kinds)
        for (of, storage, options), plan in zip(kinds, plans, strict=True):
            dim = of.shape.head_dim
            queries = query[: num_tokens * num_heads * dim].reshape(num_tokens, num_heads, dim)
            calls.append(
                make_call(queries, storage.pool, storage.batch, options, self._space, plan, more)
            )
        return calls

    def _rows_of(
        self,
        key: tuple[int, ...],
        calls: Sequence[AttentionCall],
        storages: Sequence[tuple[_Members, _Storage]],
        layers: range,
    ) -> _AlikeRows:
        """Build the rows of a range of layers from one attention call per kind of layer."""
        each = -(-max(call.counters.size for call in calls) // 8) * 8
        rows = self._fixed[layers.start : layers.stop].copy()
        rows[:, la.R_COUNTERS] = 8 * each * np.arange(len(layers))
        held = tuple(call._replace(**_OF_A_PASS) for call in calls)
        whose = (those for of, _ in storages for those in of.kinds.values())
        for call, those in zip(held, whose, strict=True):
            rows[those] += la.row_of(call)
        return _AlikeRows(key, rows, each, held)

    def _members(self, layers: range) -> list[_Members]:
        """Return the layers of a range, grouped by KV shape. The result is cached."""
        found = self._ranges.get(layers)
        if found is None:
            by_shape: dict[LayerKVSpec, dict[AttentionOptions, list[int]]] = {}
            for layer in (one for one in layers if self._kv[one] >= 0):
                kinds = by_shape.setdefault(self._spec.layers[self._kv[layer]], {})
                kinds.setdefault(self._params[layer], []).append(layer - layers.start)
            found = self._ranges[layers] = [
                self._one_shape(shape, kinds, layers) for shape, kinds in by_shape.items()
            ]
        return found

    def _one_shape(
        self, shape: LayerKVSpec, kinds: dict[AttentionOptions, list[int]], layers: range
    ) -> _Members:
        """Return the layers of a range that share a KV shape."""
        own = sorted(layer for members in kinds.values() for layer in members)
        places = [self._spec.layers[: self._kv[layers.start + layer]].count(shape) for layer in own]
        of_kinds = {params: _which(members, len(layers)) for params, members in kinds.items()}
        return _Members(
            shape, own[0], _which(own, len(layers)), np.array(places, dtype=np.int64), of_kinds
        )

    def _storage(self, members: _Members, layers: range, prepared: PreparedBatch) -> _Storage:
        """Return the pool that layers of the same shape read, and the values for their rows."""
        if self._coded is not None:
            return self._open(self._coded, members, prepared)
        slots = np.ascontiguousarray(prepared.slot_mapping, dtype=np.int64)
        paged = prepared.paged
        pool = self._pools[self._kv[layers.start + members.first]]
        columns = {
            la.R_BLOCK_TABLES: paged.block_tables.ctypes.data,
            la.R_TABLE_WIDTH: paged.block_tables.shape[1],
            la.R_SLOTS: slots.ctypes.data,
        }
        return _Storage(pool, paged, columns, {}, [slots, paged])

    def _open(
        self, coded: QuantizedStorage, members: _Members, prepared: PreparedBatch
    ) -> _Storage:
        """Return the storage for a quantized pool, where open blocks have float16 copies."""
        assert prepared.quantized is not None
        own, places = coded.same_shape(members.shape, prepared.quantized)
        tables = np.ascontiguousarray(prepared.paged.block_tables, dtype=np.int32)
        first = np.ascontiguousarray(own.first, dtype=np.int32)
        batch = prepared.paged._replace(block_tables=own.tables)
        columns = {
            la.R_TABLE_WIDTH: own.tables.shape[1],
            la.R_KEYS: own.pool.keys.ctypes.data,
            la.R_VALUES: own.pool.values.ctypes.data,
            la.R_CODED_TABLES: tables.ctypes.data,
            la.R_MAX_BLOCKS: tables.shape[1],
            la.R_FIRST: first.ctypes.data,
            la.R_NUM_CONTINUED: places.continued.shape[1],
            la.R_NUM_CLOSED: places.closed.shape[1],
        }
        of_layer: dict[int, npt.NDArray[Any]] = {
            la.R_SLOTS: places.slots,
            la.R_BLOCK_TABLES: places.tables,
            la.R_CONTINUED: places.continued,
            la.R_CLOSED: places.closed,
        }
        layered = {
            index: array.ctypes.data + array.strides[0] * members.places
            for index, array in of_layer.items()
        }
        return _Storage(own.pool, batch, columns, layered, [tables, first, places, own, batch])


def _which(layers: Sequence[int], count: int) -> _Which:
    """Return an index for these rows. All rows are indexed by a slice, which is faster."""
    return slice(None) if len(layers) == count else np.array(layers, dtype=np.int64)
