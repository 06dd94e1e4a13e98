"""The reference backend: plain NumPy, slow, for tests and comparisons."""

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
from kvboost_edge.backends.batch_layout import check_layout, refuse_deltas
from kvboost_edge.backends.numpy_blocks import NumpyBlocks, unsupported_reason
from kvboost_edge.backends.quant_blocks import QuantKernels, QuantPass
from kvboost_edge.kernels.attention.paged import AttentionOptions, PagedBatch
from kvboost_edge.kernels.reference import attention as reference
from kvboost_edge.kernels.reference import quantized_kv as reference_coded
from kvboost_edge.kvcache.block_table import CopyOp

__all__ = ["ReferenceBackend", "make", "unsupported_reason"]

Floats = npt.NDArray[np.float32]


class ReferenceBackend(NumpyBlocks):
    """`Backend` of the reference kernels (kernels/reference/), which compute row by row.

    Sums are float64 if the pool is not quantized. Otherwise they follow the rounding steps of the
    compiled kernels.
    """

    name = "reference"
    quant_kernels = QuantKernels(
        reference.write_kv, reference.copy_blocks, reference_coded.quantize_blocks
    )

    @property
    def kernel_access(self) -> None:
        """None, because no compiled kernels run on this pool."""
        return None

    def describe(self) -> BackendInfo:
        """Return the description of a backend that has no own kernels or threads."""
        return BackendInfo(self.name, self.device, pool_regions=self._regions())

    def prepare(self, layout: BatchLayout) -> BatchLayout | QuantPass:
        """Check a layout and convert it; raise ConfigError that names a fault."""
        check_layout(layout, self.spec.block_size, self.num_blocks, *self._state_rows)
        refuse_deltas(layout, f"backend {self.name!r}")
        return layout if self._quant is None else self._quant.prepare(layout)

    def copy_blocks(self, ops: Sequence[CopyOp]) -> None:
        """Copy whole blocks of all layers in order."""
        self._begin_copy(ops)
        if self._quant is not None:
            self._quant.copy_blocks(ops)
        for pool in self._pools:
            reference.copy_blocks(pool, ops)

    def write_kv(
        self, layer: int, keys: Floats, values: Floats, batch: BatchLayout | QuantPass
    ) -> None:
        """Store KV, float32 [num_tokens, num_kv_heads, head_dim] each, at the batch's slots."""
        if isinstance(batch, QuantPass):
            self._coded.write_kv(layer, keys, values, batch)
        else:
            reference.write_kv(keys, values, self._pools[layer], batch.slot_mapping)

    def attention(
        self, layer: int, queries: Floats, batch: BatchLayout | QuantPass, params: AttentionParams
    ) -> tuple[Floats, Floats]:
        """Compute causal attention; return the float32 output, shaped like the queries, and lse."""
        layout = batch.layout if isinstance(batch, QuantPass) else batch
        paged = PagedBatch(
            layout.cu_seqlens_q, layout.seq_lens, layout.block_tables, layout.segments
        )
        options = AttentionOptions(*params)
        if isinstance(batch, QuantPass):
            coded = self._coded.layer(layer, batch)
            return reference_coded.paged_attention_coded(
                queries, coded.codes, coded.layout, paged, coded.own, options
            )
        return reference.paged_attention(queries, self._pools[layer], paged, options)


def make(
    spec: KVSpec,
    num_blocks: int,
    *,
    device: str,
    num_threads: int | None = None,
    num_open: int = DEFAULT_NUM_OPEN,
    num_state_slots: int = 0,
    num_draft_rows: int = 0,
) -> ReferenceBackend:
    """Allocate the backend; see `select.BackendModule`. It uses a single thread."""
    return ReferenceBackend(
        spec,
        num_blocks,
        num_open=num_open,
        num_state_slots=num_state_slots,
        num_draft_rows=num_draft_rows,
    )
