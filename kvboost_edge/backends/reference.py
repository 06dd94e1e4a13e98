"""The backend that is only the specification: plain NumPy, slow, for tests and for doubts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvboost_edge.backends.base import AttentionParams, BatchLayout
from kvboost_edge.backends.numpy_blocks import NumpyBlocks, check_layout
from kvboost_edge.kernels import reference
from kvboost_edge.kernels.paged import AttentionOptions, PagedBatch
from kvboost_edge.kvcache.block_table import CopyOp

__all__ = ["ReferenceBackend"]

Floats = npt.NDArray[np.float32]


class ReferenceBackend(NumpyBlocks):
    """Implements `Backend` through kernels/reference.py: float64 sums, one query row at a time."""

    name = "reference"

    def prepare(self, layout: BatchLayout) -> BatchLayout:
        """Check the layout; ConfigError says what is wrong."""
        check_layout(layout, self.spec.block_size, self.num_blocks)
        return layout

    def copy_blocks(self, ops: Sequence[CopyOp]) -> None:
        """Copy whole blocks src -> dst over all layers, in order."""
        self._check_pairs(ops)
        for pool in self._pools:
            reference.copy_blocks(pool, ops)

    def write_kv(self, layer: int, keys: Floats, values: Floats, batch: BatchLayout) -> None:
        """Store keys and values, float32 [num_tokens, num_kv_heads, head_dim], at the slots of the batch."""
        reference.write_kv(keys, values, self._pools[layer], batch.slot_mapping)

    def attention(
        self, layer: int, queries: Floats, batch: BatchLayout, params: AttentionParams
    ) -> tuple[Floats, Floats]:
        """Causal attention: (out like queries, lse), float32."""
        paged = PagedBatch(batch.cu_seqlens_q, batch.seq_lens, batch.block_tables)
        return reference.paged_attention(queries, self._pools[layer], paged, AttentionOptions(*params))
