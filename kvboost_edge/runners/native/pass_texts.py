"""KV of bidirectional models, kept only while a layer's attention runs.

It is not stored in a backend's pool and never reused. Each text is complete within one pass. Its
blocks are numbered consecutively here, independent of the engine's block tables.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvboost_edge.backends.base import AttentionParams, BatchLayout, KVSpec, LayerKVSpec
from kvboost_edge.backends.cpu import PreparedBatch
from kvboost_edge.backends.kernel_access import KernelAccess
from kvboost_edge.errors import ConfigError
from kvboost_edge.kernels.attention.float_launch import paged_attention
from kvboost_edge.kernels.attention.paged import AttentionOptions, KVPool, aligned_empty
from kvboost_edge.kernels.linear.weight_formats import GROUP
from kvboost_edge.kernels.reference import attention as reference
from kvboost_edge.models.config.spec import ModelSpec
from kvboost_edge.runners.native.whole_pass import WholePass

__all__ = ["PassTexts"]

Floats = npt.NDArray[np.float32]

_BLOCK = 16  # tokens per block


class PassTexts:
    """A float32 KV pool that all layers overwrite, which grows to the largest pass.

    Attributes:
        whole: attention as operations of one kernel call. It is None without `access`, or if heads
            x head_dim is not a multiple of 32. `write_kv` and `attention` then run layer by layer.
    """

    def __init__(self, spec: ModelSpec, access: KernelAccess | None) -> None:
        self._spec = spec
        self._access = access
        self._grow(1)

    def prepare(self, layout: BatchLayout) -> PreparedBatch:
        """Return the backend's batch for a pass. Only the lengths in the layout are used.

        Raises:
            ConfigError: a sequence is not complete in the pass.
        """
        lengths = np.diff(layout.cu_seqlens_q)
        if not np.array_equal(lengths, layout.seq_lens) or layout.segments is not None:
            raise ConfigError(
                "a bidirectional model needs whole sequences, but the pass contains "
                f"{lengths.tolist()} tokens of sequences with {layout.seq_lens.tolist()} tokens"
            )
        counts = -(-lengths // _BLOCK)
        first = np.cumsum(counts) - counts
        total = int(counts.sum())
        if total > len(self._pool.keys):
            self._grow(total)
        tables = first[:, None] + np.arange(counts.max())
        slots = np.repeat(first * _BLOCK - layout.cu_seqlens_q[:-1], lengths) + np.arange(
            layout.cu_seqlens_q[-1]
        )
        own = BatchLayout(
            layout.cu_seqlens_q, layout.seq_lens, tables.astype(np.int32), slots.astype(np.int64)
        )
        return PreparedBatch(own, 1 if self._access is None else self._access.workspace.num_threads)

    def write_kv(self, layer: int, keys: Floats, values: Floats, batch: PreparedBatch) -> None:
        """Store a layer's keys and values, overwriting those of the previous layer."""
        reference.write_kv(keys, values, self._pool, batch.slot_mapping)

    def attention(
        self, layer: int, queries: Floats, batch: PreparedBatch, params: AttentionParams
    ) -> tuple[Floats, Floats]:
        """Compute bidirectional attention.

        Returns:
            The output, shaped like the queries, and the log-sum-exp.
        """
        options = AttentionOptions(*params, ahead=self._spec.layers[layer].ahead)
        if self._access is None:
            return reference.paged_attention(queries, self._pool, batch.paged, options)
        return paged_attention(queries, self._pool, batch.paged, options, self._access.workspace)

    def _grow(self, num_blocks: int) -> None:
        """Allocate a pool of `num_blocks` blocks and, for the CPU backend, its `WholePass`."""
        spec = self._spec
        shape = LayerKVSpec(spec.num_kv_heads, spec.head_dim)
        sizes = (num_blocks, shape.num_kv_heads)
        pool = KVPool(
            aligned_empty((*sizes, shape.head_dim, _BLOCK), np.float32),
            aligned_empty((*sizes, _BLOCK, shape.head_dim), np.float32),
        )
        whole = None
        if self._access is not None and spec.num_heads * spec.head_dim % GROUP == 0:
            layers = len(spec.layers)
            access = KernelAccess(self._access.workspace, [pool] * layers, None)
            options = [
                AttentionOptions(spec.softmax_scale, one.window, spec.softcap, None, one.ahead)
                for one in spec.layers
            ]
            whole = WholePass(
                access, KVSpec((shape,) * layers, _BLOCK, "float32"), options, range(layers)
            )
        # Assigned together, so that a MemoryError above changes neither.
        self._pool = pool
        self.whole = whole
