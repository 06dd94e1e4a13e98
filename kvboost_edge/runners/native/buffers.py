"""Activation buffers of a pass. They grow to the size of the largest pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvboost_edge.kernels.attention.paged import QueryRotation, aligned_empty
from kvboost_edge.kernels.attention.rope import RopeTable
from kvboost_edge.kernels.linear.panel import LARGEST_CELL
from kvboost_edge.kernels.linear.weight_formats import GROUP
from kvboost_edge.kernels.linear.wide import wide_panel_bytes
from kvboost_edge.kernels.program import attention_calls as la
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.kernels.program.table import BufferRows
from kvboost_edge.kernels.reference.rope import turn_keys
from kvboost_edge.models.config.spec import ModelSpec
from kvboost_edge.runners.native.buffer_sizes import MixtureSizes, Sizes

__all__ = ["ProgramBuffers", "largest_bytes"]

# rows of logits that are kept allocated: enough for decode steps, not for whole prompts
_KEPT_ROWS = 64
_MORE_POSITIONS = 1024  # extra positions, so that the table does not grow with every token
_SLACK = 4 * GROUP  # floats that a vector load may read past the last row


class ProgramBuffers:
    """Activation buffers of a model by their number in the program, and its RoPE tables.

    Args:
        spec: the model.
        float_experts: whether the experts' weights are floats.
        is_wide: whether passes may compute in wide arithmetic.
    """

    def __init__(
        self, spec: ModelSpec, *, float_experts: bool = False, is_wide: bool = False
    ) -> None:
        self._is_wide = is_wide
        self.sizes = Sizes.of(spec, floats=float_experts)
        self._spec = spec
        self._capacity = 0
        self._arrays: dict[int, npt.NDArray[Any]] = {}
        self._logits = aligned_empty((0, self.sizes.logits), np.float32)
        self._query_factors = np.empty(0, dtype=np.float32)
        self._tables = [
            RopeTable(np.array(rope.frequencies, dtype=np.float32), rope.factor)
            for rope in spec.ropes
        ]
        self._num_positions = 0
        self._addresses = np.zeros(lt.B_TABLES + 2 * len(self._tables) + 1, dtype=np.int64)

    def addresses(self, num_tokens: int, num_positions: int) -> npt.NDArray[np.int64]:
        """Return the buffer addresses for a pass, int64 [num_buffers].

        The caller adds the addresses of tokens, positions, attention output and logits.

        Args:
            num_tokens: number of tokens in the pass.
            num_positions: highest position + 1.
        """
        if num_tokens > self._capacity:
            self._grow(num_tokens)
        if num_positions > self._num_positions:
            self._cover(num_positions)
        return self._addresses.copy()

    def turning(self) -> dict[int, Any]:
        """Return the columns of attention rows that segments with a delta need.

        They contain the address of the queries before RoPE and each layer's RoPE tables. A value is
        one number for all layers or a list by layer. It is valid until the next call of
        `addresses`.
        """
        tables = [
            None if layer.rope < 0 else self._tables[layer.rope] for layer in self._spec.layers
        ]
        return {
            la.R_UNROTATED: self._arrays[lt.B_PROJECTED].ctypes.data,
            la.R_UNROTATED_STEP: self.sizes.projected,
            la.R_COS: [0 if table is None else table.cos.ctypes.data for table in tables],
            la.R_SIN: [0 if table is None else table.sin.ctypes.data for table in tables],
            la.R_HALF: [0 if table is None else table.cos.shape[1] for table in tables],
        }

    def turned(
        self, layer: int, keys: npt.NDArray[np.float32], deltas: npt.NDArray[np.int64]
    ) -> npt.NDArray[Any]:
        """Rotate a layer's keys [tokens, num_kv_heads, head_dim] by `deltas` positions.

        Must be called after `addresses` of the pass whose queries attend to the keys.
        """
        rope = self._spec.layers[layer].rope
        if rope < 0:
            return keys
        turning = QueryRotation(keys, self._tables[rope].cos, self._tables[rope].sin)
        return turn_keys(keys.transpose(1, 0, 2).astype(np.float64), deltas, turning).transpose(
            1, 0, 2
        )

    def rows(self, number: int, num_tokens: int, heads: int, dim: int) -> npt.NDArray[np.float32]:
        """Return the first rows of a query, key or value buffer, float32 [tokens, heads, dim]."""
        return self._arrays[number][: num_tokens * heads * dim].reshape(num_tokens, heads, dim)

    @property
    def query(self) -> npt.NDArray[np.float32]:
        """Buffer of the queries, as a flat array. See `rows`."""
        return self._arrays[lt.B_QUERY]

    def hidden(self, num_tokens: int) -> npt.NDArray[np.float32]:
        """Return the first rows of the hidden state, float32 [num_tokens, padded hidden size]."""
        row = self.sizes.hidden
        return self._arrays[lt.B_HIDDEN][: num_tokens * row].reshape(num_tokens, row)

    def normed(self, num_tokens: int) -> npt.NDArray[np.float32]:
        """Return the first rows of a norm's output, float32 [num_tokens, hidden size]."""
        row = self.sizes.hidden
        return self._arrays[lt.B_NORMED][: num_tokens * row].reshape(num_tokens, row)[
            :, : self._spec.hidden_size
        ]

    def joined(self, num_tokens: int) -> npt.NDArray[np.float32]:
        """Return the rows for the states that an MTP head joins, float32 [num_tokens, size]."""
        size = self._spec.backbone_size
        if not size:
            return self.normed(num_tokens)
        return self.projected(num_tokens)[:, size : 2 * size]

    def states(self, num_tokens: int) -> npt.NDArray[np.float32]:
        """Return the first rows of the hidden states of a pass, float32 [num_tokens, size]."""
        size = self._spec.backbone_size
        return self.projected(num_tokens)[:, :size] if size else self.normed(num_tokens)

    def per_layer(self, num_tokens: int) -> npt.NDArray[np.float32]:
        """Return the first rows of the per-layer inputs, float32 [num_tokens, padded size]."""
        row = self.sizes.per_layer
        return self._arrays[lt.B_PER_LAYER][: num_tokens * row].reshape(num_tokens, row)

    def projected(self, num_tokens: int) -> npt.NDArray[np.float32]:
        """Return the first rows of the QKV projection, float32 [num_tokens, padded size]."""
        row = self.sizes.projected
        return self._arrays[lt.B_PROJECTED][: num_tokens * row].reshape(num_tokens, row)

    def copied(
        self, rows: BufferRows, num_tokens: int, which: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float32]:
        """Copy some rows of a buffer to a flat float32 array, sized as a buffer for these rows.

        Args:
            rows: number and row size of the buffer.
            num_tokens: number of rows in the pass.
            which: int64, rows to copy.
        """
        number = rows.buffer
        step = rows.step
        source = self._arrays[number][: num_tokens * step].reshape(num_tokens, step)
        each = -(-(len(self._arrays[number]) - _SLACK) // self._capacity)
        copy: npt.NDArray[np.float32] = aligned_empty((len(which) * each + _SLACK,), np.float32)
        source.take(which, axis=0, out=copy[: len(which) * step].reshape(len(which), step))
        return copy

    def logits(self, num_rows: int) -> npt.NDArray[np.float32]:
        """Return an uninitialized array for logits, float32 [num_rows, padded vocabulary].

        Up to 64 rows reuse the same memory in each call.
        """
        if num_rows > _KEPT_ROWS:
            return aligned_empty((num_rows, self.sizes.logits), np.float32)
        if num_rows > len(self._logits):
            self._logits = aligned_empty((num_rows, self.sizes.logits), np.float32)
        return self._logits[:num_rows]

    def _cover(self, num_positions: int) -> None:
        """Extend RoPE tables and query factors to at least `num_positions` positions."""
        # Updated table by table, so that all addresses are valid even after a MemoryError.
        for index, table in enumerate(self._tables):
            table.cover(num_positions)
            self._addresses[lt.B_TABLES + 2 * index] = table.cos.ctypes.data
            self._addresses[lt.B_TABLES + 2 * index + 1] = table.sin.ctypes.data
        held = [len(table.cos) for table in self._tables]
        if self._spec.query_scale is not None:
            self._query_factors = self._spec.query_scale.factors(num_positions + _MORE_POSITIONS)
            self._addresses[-1] = self._query_factors.ctypes.data
            held.append(len(self._query_factors))
        self._num_positions = min(held, default=num_positions)

    def _grow(self, num_tokens: int) -> None:
        """Replace all buffers by larger ones. On MemoryError they remain unchanged."""
        arrays = self._of_size(num_tokens)
        for number, array in arrays.items():
            self._addresses[number] = array.ctypes.data
        self._arrays = arrays
        self._capacity = num_tokens

    def _of_size(self, num_tokens: int) -> dict[int, npt.NDArray[Any]]:
        """Allocate buffers for passes of up to `num_tokens` tokens."""
        sizes = self.sizes
        floats = {
            lt.B_HIDDEN: sizes.hidden,
            lt.B_NORMED: sizes.normed,
            lt.B_PROJECTED: sizes.projected,
            lt.B_QUERY: sizes.query,
            lt.B_KEY: sizes.key,
            lt.B_VALUE: sizes.value,
            lt.B_MIXED: sizes.mixed,
            lt.B_PER_LAYER: sizes.per_layer,
        }
        arrays: dict[int, npt.NDArray[Any]] = {
            number: aligned_empty((num_tokens * row + _SLACK,), np.float32)
            for number, row in floats.items()
        }
        panel = num_tokens * sizes.groups * LARGEST_CELL
        if self._is_wide:
            panel = max(panel, wide_panel_bytes(num_tokens, sizes.groups * GROUP, fine=True))
        for number in (lt.B_PANEL, lt.B_INNER):
            arrays[number] = aligned_empty((panel,), np.int8)
        return arrays if sizes.mixture is None else arrays | _of_mixture(sizes.mixture, num_tokens)


def largest_bytes(spec: ModelSpec, num_tokens: int, num_positions: int) -> int:
    """Return the size of all buffers in bytes for passes of up to `num_tokens` tokens."""
    buffers = ProgramBuffers(spec, float_experts=True, is_wide=True)
    arrays = buffers._of_size(num_tokens).values()  # never written, so it takes no physical memory
    logits = 4 * _KEPT_ROWS * buffers.sizes.logits
    each = sum(2 * len(rope.frequencies) for rope in spec.ropes) + (spec.query_scale is not None)
    # Growing a table copies it, so old and new exist at the same time.
    tables = 2 * 4 * each * (num_positions + _MORE_POSITIONS)
    return sum(array.nbytes for array in arrays) + logits + tables


def _of_mixture(sizes: MixtureSizes, num_tokens: int) -> dict[int, npt.NDArray[Any]]:
    """Allocate the buffers of layers with experts."""
    places = num_tokens * sizes.experts_per_token
    return {
        lt.B_ROUTED: aligned_empty((num_tokens * sizes.routed,), np.float32),
        lt.B_CHOSEN: aligned_empty((places,), np.int64),
        lt.B_SHARES: aligned_empty((places,), np.float32),
        lt.B_DISPATCH: aligned_empty((sizes.numbers + places,), np.int64),
        lt.B_SPREAD: aligned_empty((places * sizes.routed_row_bytes + 4 * _SLACK,), np.int8),
        lt.B_EXPERTS_INNER: aligned_empty((places * sizes.inner_row_bytes + 4 * _SLACK,), np.int8),
        lt.B_BESIDE: aligned_empty((num_tokens * sizes.parallel_mlp,), np.float32),
    }
