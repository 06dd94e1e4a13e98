"""A pass as one call of a kernel: writing keys and values and attention become operations of the program.

Python between the layers of a decode step would cost a tenth of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvboost_edge.backends.base import AttentionParams, Backend, KVSpec
from kvboost_edge.backends.cpu import PreparedBatch
from kvboost_edge.backends.kernel_access import CodedBlocks, KernelAccess
from kvboost_edge.kernels.attention.call import AttentionCall
from kvboost_edge.kernels.attention.launch import make_call
from kvboost_edge.kernels.attention.paged import AttentionOptions, KVPool, PagedBatch, aligned_empty
from kvboost_edge.kernels.attention.storage import from_storage
from kvboost_edge.kernels.coded.attend import coded_scratch_floats
from kvboost_edge.kernels.program import attend as la
from kvboost_edge.kernels.reference.coded import decode_block

__all__ = ["PassMemory", "WholePass"]

Floats = npt.NDArray[np.float32]


class PassMemory(NamedTuple):
    """What the operations of one pass write to and read from.

    counters  int64: those of the program, then the attention rows, then the counters of the attention calls
    rows      address of the attention rows
    attended  float32 [num_tokens, num_heads * head_dim], where attention writes
    lse       float32 [num_tokens, num_heads], and there
    held      calls and arrays that the rows point to
    """

    counters: npt.NDArray[np.int64]
    rows: int
    attended: Floats
    lse: Floats
    held: list[Any]


class _Storage(NamedTuple):
    """Where the rows of a pass find keys and values.

    pool     what attention reads as floats
    batch    the pass, with the block tables of layer 0 in that pool
    columns  index of a row -> its number, or one for each layer
    held     arrays that the columns point to
    """

    pool: KVPool
    batch: PagedBatch
    columns: dict[int, Any]
    held: list[Any]


class WholePass:
    """The attention operations of all layers on one backend."""

    def __init__(
        self, access: KernelAccess, spec: KVSpec, params: Sequence[AttentionParams | AttentionOptions]
    ) -> None:
        self._space, self._pools, self._coded = access
        self._shape, self._num_layers, self._block_size = spec.layers[0], len(spec.layers), spec.block_size
        self._fixed: dict[int, Any] = {}
        if self._coded is None:
            self._fixed[la.R_KEYS] = [pool.keys.ctypes.data for pool in self._pools]
            self._fixed[la.R_VALUES] = [pool.values.ctypes.data for pool in self._pools]
        else:
            pools, layout = self._coded.codes
            self._stage = aligned_empty((self._space.num_threads, layout.dim * layout.block_size), np.float32)
            self._fixed[la.R_CODES] = [pool.ctypes.data for pool in pools]
            self._fixed[la.R_STAGE] = self._stage.ctypes.data
            self._fixed |= {la.R_LAYOUT + index: number for index, number in enumerate(layout)}
        self._kinds: dict[AttentionOptions, list[int]] = {}
        for layer, one in enumerate(params):
            self._kinds.setdefault(AttentionOptions(*one), []).append(layer)

    @classmethod
    def of(cls, backend: Backend, params: Sequence[AttentionParams]) -> WholePass | None:
        """None where the backend has other kernels, or a pool that differs from layer to layer."""
        access = backend.kernel_access
        if access is None or len(set(backend.spec.layers)) != 1:
            return None
        return cls(access, backend.spec, params)

    @property
    def is_quantized(self) -> bool:
        """Whether the pool is."""
        return self._coded is not None

    def stored_keys(self, layer: int, slots: npt.NDArray[np.int64]) -> Floats:
        """What the pool holds as keys of a layer at slots of full blocks, float32 [num_slots, num_kv_heads,
        head_dim]."""
        if self._coded is None:
            blocks, offsets = np.divmod(slots, self._block_size)
            return from_storage(self._pools[layer].keys[blocks, :, :, offsets])
        return self._decoded(self._coded, layer, slots, 0)

    def stored_values(self, layer: int, slots: npt.NDArray[np.int64]) -> Floats:
        """The same of values."""
        if self._coded is None:
            blocks, offsets = np.divmod(slots, self._block_size)
            return from_storage(self._pools[layer].values[blocks, :, offsets])
        return self._decoded(self._coded, layer, slots, 1)

    def _decoded(self, coded: CodedBlocks, layer: int, slots: npt.NDArray[np.int64], which: int) -> Floats:
        """Keys (0) or values (1)."""
        blocks, offsets = np.divmod(slots, self._block_size)
        (pools, layout), heads = coded.codes, range(self._shape.num_kv_heads)
        found = np.empty((len(slots), self._shape.num_kv_heads, self._shape.head_dim), dtype=np.float32)
        for block in np.unique(blocks).tolist():
            tokens = np.stack([decode_block(pools[layer][block, head], layout)[which] for head in heads], axis=1)
            found[blocks == block] = tokens[offsets[blocks == block]]
        return found

    def prepare(
        self, queries: Floats, prepared: PreparedBatch, num_counters: int, turning: Mapping[int, Any]
    ) -> PassMemory:
        """Memory for a pass whose program needs `num_counters` counters; queries float32 [tokens, heads, head_dim].

        turning: see `Buffers.turning`; empty where no part of the batch has a delta
        """
        num_layers, num_kv_heads = self._num_layers, self._shape.num_kv_heads
        storage = self._plain(prepared) if self._coded is None else self._open(self._coded, prepared)
        more = None if self._coded is None else coded_scratch_floats
        calls: list[AttentionCall] = []
        for options in self._kinds:
            plan = prepared.plan(queries.shape[1] // num_kv_heads, num_kv_heads, options.window, options.ahead)
            call = make_call(queries, storage.pool, storage.batch, options, self._space, plan, more)
            calls.append(call._replace(out=calls[0].out, lse=calls[0].lse) if calls else call)
        each = -(-max(call.counters.size for call in calls) // 8) * 8
        memory = np.zeros(num_counters + num_layers * (la.ROW_NUMBERS + each), dtype=np.int64)
        rows = memory[num_counters : num_counters + num_layers * la.ROW_NUMBERS].reshape(num_layers, la.ROW_NUMBERS)
        for call, layers in zip(calls, self._kinds.values(), strict=True):
            rows[layers] = la.row_of(call)
        for index, numbers in (self._fixed | storage.columns | dict(turning)).items():
            rows[:, index] = numbers
        first = rows.ctypes.data + 8 * num_layers * la.ROW_NUMBERS
        rows[:, la.R_COUNTERS] = first + 8 * each * np.arange(num_layers)
        held = [*calls, *storage.held]
        return PassMemory(memory, rows.ctypes.data, calls[0].out.reshape(len(queries), -1), calls[0].lse, held)

    def _plain(self, prepared: PreparedBatch) -> _Storage:
        slots = np.ascontiguousarray(prepared.slot_mapping, dtype=np.int64)
        return _Storage(self._pools[0], prepared.paged, {la.R_SLOTS: slots.ctypes.data}, [slots])

    def _open(self, coded: CodedBlocks, prepared: PreparedBatch) -> _Storage:
        """Attention reads the open blocks as floats, and what is written goes there."""
        assert prepared.coded is not None
        own, places = coded.all_layers(prepared.coded)
        tables = np.ascontiguousarray(prepared.paged.block_tables, dtype=np.int32)
        first = np.ascontiguousarray(own.first, dtype=np.int32)
        layers = np.arange(self._num_layers)
        columns = {
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
        for index, array in of_layer.items():
            columns[index] = array.ctypes.data + array.strides[0] * layers
        batch = prepared.paged._replace(block_tables=own.tables)
        return _Storage(own.pool, batch, columns, [tables, first, places])
