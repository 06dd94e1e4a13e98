"""The backend of compiled CPU kernels: NumPy arrays, and paged attention with Numba and SIMD."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvboost_edge.backends.base import (
    DEFAULT_NUM_OPEN,
    AttentionParams,
    BackendInfo,
    BatchLayout,
    KVSpec,
)
from kvboost_edge.backends.batch_layout import check_layout
from kvboost_edge.backends.kernel_access import KernelAccess
from kvboost_edge.backends.numpy_blocks import NumpyBlocks, unsupported_reason
from kvboost_edge.backends.quant_blocks import QuantKernels, QuantPass, read_only_pass
from kvboost_edge.errors import ConfigError
from kvboost_edge.host.processor import default_num_threads
from kvboost_edge.kernels.attention import storage
from kvboost_edge.kernels.attention.float_launch import AttentionWorkspace, paged_attention
from kvboost_edge.kernels.attention.paged import AttentionOptions, PagedBatch, WorkPlan, plan_work
from kvboost_edge.kernels.quantized_kv import code_write as coded_write
from kvboost_edge.kernels.quantized_kv.code_dot import coded_dot_form
from kvboost_edge.kernels.quantized_kv.code_launch import paged_attention_coded
from kvboost_edge.kvcache.block_table import CopyOp
from kvboost_edge.segments import repeated_segments

__all__ = [
    "THREADING_LAYER",
    "CPUBackend",
    "PreparedBatch",
    "attention_path",
    "make",
    "unsupported_reason",
]

THREADING_LAYER = "kernel-team"  # The kernels' threads are separate from Numba's and torch's.

Floats = npt.NDArray[np.float32]


class PreparedBatch:
    """A checked layout of one pass, with its attention schedules by head counts and window."""

    __slots__ = ("_num_threads", "_plans", "paged", "quantized", "slot_mapping")

    def __init__(self, layout: BatchLayout, num_threads: int) -> None:
        self.paged = PagedBatch(
            np.ascontiguousarray(layout.cu_seqlens_q, dtype=np.int32),
            np.ascontiguousarray(layout.seq_lens, dtype=np.int32),
            np.ascontiguousarray(layout.block_tables, dtype=np.int32),
            layout.segments,
            None if layout.sparse is None else np.ascontiguousarray(layout.sparse, dtype=np.int32),
        )
        self.slot_mapping = layout.slot_mapping
        self._num_threads = num_threads
        self.quantized: QuantPass | None = None
        self._plans: dict[tuple[int, int, int, int], WorkPlan] = {}

    def plan(self, heads_per_kv: int, num_kv_heads: int, window: int, ahead: int = 0) -> WorkPlan:
        """Return the attention schedule for layers with these head counts and this window."""
        key = (heads_per_kv, num_kv_heads, window, ahead)
        if key not in self._plans:
            self._plans[key] = plan_work(
                self.paged, heads_per_kv, num_kv_heads, window, self._num_threads, ahead
            )
        return self._plans[key]

    def narrowed(self, rows: npt.NDArray[np.int64]) -> PreparedBatch:
        """Return the pass restricted to some query rows, given in ascending order.

        Each run of consecutive rows becomes a sequence. Their KV is already written, and each row
        attends to the same keys as before.
        """
        paged = self.paged
        sequence = np.searchsorted(paged.cu_seqlens_q, rows, side="right") - 1
        starts = np.flatnonzero(
            (np.diff(rows, prepend=-2) != 1) | (np.diff(sequence, prepend=-1) != 0)
        )
        counts = np.diff(np.append(starts, len(rows)))
        source = sequence[starts]
        # number of rows from the first one to the end of its sequence
        rows_to_end = paged.cu_seqlens_q[source + 1] - rows[starts]
        layout = BatchLayout(
            np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            (paged.seq_lens[source] - rows_to_end + counts).astype(np.int32),
            paged.block_tables[source],
            self.slot_mapping[rows],
            repeated_segments(paged.segments, source),
        )
        if paged.sparse_ranges is not None:
            raise ConfigError(
                "a pass with sparse ranges cannot be restricted to some rows, because rows of one "
                "query block share a selection"
            )
        found = PreparedBatch(layout, self._num_threads)
        if self.quantized is not None:
            found.quantized = read_only_pass(self.quantized, layout, source)
        return found


class CPUBackend(NumpyBlocks):
    """`Backend` of compiled CPU kernels. Only one thread may call it at a time.

    The results of a row depend only on its own sequence and position, bit for bit. `close` ends the
    threads and releases the pool.

    Args:
        spec: Shapes and storage of all layers.
        num_blocks: Number of blocks in the pool.
        num_threads: Number of threads, including the calling one. None uses all cores of this
            process.
        num_open: Number of blocks of a quantized pool that may be partly written at a time.
        num_state_slots: Number of slots of recurrent state.
        num_draft_rows: Number of draft tokens whose inputs to recurrent state can be stored.
    """

    name = "cpu"
    quant_kernels = QuantKernels(storage.write_kv, storage.copy_blocks, coded_write.quantize_blocks)

    def __init__(
        self,
        spec: KVSpec,
        num_blocks: int,
        *,
        num_threads: int | None = None,
        num_open: int = DEFAULT_NUM_OPEN,
        num_state_slots: int = 0,
        num_draft_rows: int = 0,
    ) -> None:
        super().__init__(
            spec,
            num_blocks,
            num_open=num_open,
            num_state_slots=num_state_slots,
            num_draft_rows=num_draft_rows,
        )
        if num_threads is None:
            num_threads = default_num_threads()
        self._workspace = AttentionWorkspace(num_threads)

    @property
    def num_threads(self) -> int:
        """Number of threads that compute attention."""
        return self._workspace.num_threads

    @property
    def kernel_access(self) -> KernelAccess | None:
        """Storage and workspace for runners that call the kernels themselves."""
        plain = () if self.spec.is_quantized else tuple(self._pools)
        return KernelAccess(self._workspace, plain, self._quant)

    def describe(self) -> BackendInfo:
        """Return the description of the compiled kernels and their threads."""
        path = attention_path(is_quantized=self.spec.is_quantized)
        return BackendInfo(
            self.name, self.device, path, THREADING_LAYER, self.num_threads, self._regions()
        )

    def prepare(self, layout: BatchLayout) -> PreparedBatch:
        """Check a layout and convert it; raise ConfigError that names a fault."""
        check_layout(layout, self.spec.block_size, self.num_blocks, *self._state_rows)
        batch = PreparedBatch(layout, self.num_threads)
        if self._quant is not None:
            batch.quantized = self._quant.prepare(layout)
        return batch

    def copy_blocks(self, ops: Sequence[CopyOp]) -> None:
        """Copy whole blocks of all layers in order."""
        self._begin_copy(ops)
        if self._quant is not None:
            self._quant.copy_blocks(ops)
        for pool in self._pools:
            storage.copy_blocks(pool, ops)

    def write_kv(self, layer: int, keys: Floats, values: Floats, batch: PreparedBatch) -> None:
        """Store KV, float32 [num_tokens, num_kv_heads, head_dim] each, at the batch's slots."""
        if batch.quantized is not None:
            self._coded.write_kv(layer, keys, values, batch.quantized)
        else:
            storage.write_kv(keys, values, self._pools[layer], batch.slot_mapping)

    def attention(
        self, layer: int, queries: Floats, batch: PreparedBatch, params: AttentionParams
    ) -> tuple[Floats, Floats]:
        """Compute causal attention; return the float32 output, shaped like the queries, and lse."""
        num_tokens = int(batch.paged.cu_seqlens_q[-1])
        num_kv_heads = self.spec.layers[layer].num_kv_heads
        if len(queries) != num_tokens:
            raise ConfigError(
                f"{len(queries)} query rows were given for a batch of {num_tokens} tokens"
            )
        plan = batch.plan(queries.shape[1] // num_kv_heads, num_kv_heads, params.window)
        options = AttentionOptions(*params)
        if batch.quantized is not None:
            quantized = self._coded.layer(layer, batch.quantized)
            return paged_attention_coded(
                queries,
                quantized.codes,
                quantized.layout,
                batch.paged,
                quantized.own,
                options,
                self._workspace,
                plan,
            )
        return paged_attention(
            queries, self._pools[layer], batch.paged, options, self._workspace, plan
        )

    def close(self) -> None:
        """End the helper threads and release the pool."""
        try:
            self._workspace.close()
        finally:
            super().close()


def attention_path(*, is_quantized: bool) -> str:
    """Return the variant of the attention kernels: an integer dot product, or "float"."""
    return coded_dot_form() if is_quantized else "float"


def make(
    spec: KVSpec,
    num_blocks: int,
    *,
    device: str,
    num_threads: int | None = None,
    num_open: int = DEFAULT_NUM_OPEN,
    num_state_slots: int = 0,
    num_draft_rows: int = 0,
) -> CPUBackend:
    """Allocate the backend; see `select.BackendModule`."""
    return CPUBackend(
        spec,
        num_blocks,
        num_threads=num_threads,
        num_open=num_open,
        num_state_slots=num_state_slots,
        num_draft_rows=num_draft_rows,
    )
