"""Ragged batches laid out in scattered blocks, and dense attention in float64 as their oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvboost_edge.backends.base import BatchLayout
from kvboost_edge.kernels.attention.paged import KVPool, aligned_empty

NUMPY_DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
DTYPES = tuple(NUMPY_DTYPES)


def round_to(values: np.ndarray, dtype: str) -> np.ndarray:
    """Round float32 values to the nearest ones of `dtype`, ties to even, and return them as
    float32. NaN stays NaN.
    """
    if dtype != "bfloat16":
        with np.errstate(over="ignore", invalid="ignore"):
            return values.astype(dtype).astype(np.float32)
    # Value of the last of 8 significant bits. Subnormal numbers are 2^-133 apart.
    with np.errstate(over="ignore", invalid="ignore"):
        wide = values.astype(np.float64)
        _, exponents = np.frexp(wide)
        place = np.ldexp(1.0, np.maximum(exponents, -125) - 8)
        return np.where(np.isfinite(wide), np.rint(wide / place) * place, wide).astype(np.float32)


def round_with_torch(values: np.ndarray, dtype: str) -> np.ndarray:
    """Do the same as `round_to` with torch."""
    import torch

    return torch.from_numpy(values).to(getattr(torch, dtype)).float().numpy()


def attend_densely(
    queries: np.ndarray, keys: np.ndarray, values: np.ndarray, params: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Attend within one sequence: queries [n, heads, dim] at the last n positions of keys and
    values [tokens, kv_heads, dim].
    """
    repeats = queries.shape[1] // keys.shape[1]
    wide_keys, wide_values = (
        np.repeat(x.astype(np.float64), repeats, axis=1) for x in (keys, values)
    )
    scores = np.einsum("qhd,khd->hqk", queries.astype(np.float64), wide_keys) * params.softmax_scale
    if params.softcap:
        scores = params.softcap * np.tanh(scores / params.softcap)
    query_at = np.arange(len(keys) - len(queries), len(keys))[:, None]
    key_at = np.arange(len(keys))
    ahead = getattr(params, "ahead", 0)  # absent in a backend's params
    seen = (key_at <= query_at + ahead) & (key_at > query_at - (params.window or len(keys)))
    weights = np.where(seen, np.exp(np.where(seen, scores, 0.0)), 0.0)
    total = weights.sum(-1)
    if params.sinks is not None:
        total += np.exp(params.sinks.astype(np.float64))[:, None]
    return np.einsum("hqk,khd->qhd", weights / total[:, :, None], wide_values), np.log(total).T


@dataclasses.dataclass(frozen=True)
class Case:
    """Sequences of random tokens.

    Attributes:
        lengths: (new tokens, all tokens) of each sequence.
        queries, keys, values: rows of all tokens, by sequence.
    """

    lengths: tuple[tuple[int, int], ...]
    block_size: int
    tables: np.ndarray
    queries: list[np.ndarray]
    keys: list[np.ndarray]
    values: list[np.ndarray]

    @property
    def whole(self) -> BatchLayout:
        """Return a layout in which all tokens are new."""
        return self.layout(
            [(sequence, 0, total) for sequence, (_, total) in enumerate(self.lengths)]
        )

    @property
    def spans(self) -> list[tuple[int, int, int]]:
        """Return the new tokens: (sequence, first position, position after the last)."""
        return [
            (sequence, total - new, total) for sequence, (new, total) in enumerate(self.lengths)
        ]

    def layout(self, spans: Sequence[tuple[int, int, int]]) -> BatchLayout:
        """Return a batch of tokens [start, stop) of some of the sequences. The rest of a sequence
        does not exist yet.
        """
        slots = [
            slots_of(self.tables[seq], np.arange(start, stop), self.block_size)
            for seq, start, stop in spans
        ]
        starts = np.cumsum([0] + [stop - start for _, start, stop in spans]).astype(np.int32)
        ends = np.array([stop for _, _, stop in spans], np.int32)
        return BatchLayout(
            starts, ends, self.tables[[seq for seq, _, _ in spans]], np.concatenate(slots)
        )

    def rows(self, arrays: list[np.ndarray], spans: Sequence[tuple[int, int, int]]) -> np.ndarray:
        """Select a batch's rows from the queries, keys or values of all tokens."""
        return np.concatenate([arrays[seq][start:stop] for seq, start, stop in spans])

    def expected(
        self, spans: Sequence[tuple[int, int, int]], params: Any, dtype: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Compute dense attention over KV as stored in `dtype`: (out, lse) in float64."""
        keys, values = (
            [round_to(array, dtype) for array in arrays] for arrays in (self.keys, self.values)
        )
        results = [
            attend_densely(
                self.queries[seq][start:stop], keys[seq][:stop], values[seq][:stop], params
            )
            for seq, start, stop in spans
        ]
        return np.concatenate([out for out, _ in results]), np.concatenate(
            [lse for _, lse in results]
        )


def poisoned_pool(blocks: int, heads: int, dim: int, size: int, dtype: str) -> KVPool:
    """Return a KV pool that is all NaN."""
    kind = NUMPY_DTYPES[dtype]
    pool = KVPool(
        aligned_empty((blocks, heads, dim, size), kind),
        aligned_empty((blocks, heads, size, dim), kind),
    )
    for array in pool:
        array.view(np.uint8)[...] = 0xFF
    return pool


def slots_of(table: np.ndarray, positions: np.ndarray, block_size: int) -> np.ndarray:
    return table[positions // block_size].astype(np.int64) * block_size + positions % block_size


def make_case(
    rng: np.random.Generator,
    lengths: Sequence[tuple[int, int]],
    *,
    kv_heads: int,
    per_group: int,
    dim: int,
    block_size: int,
) -> Case:
    """Make a case. Blocks are drawn at random, so neighbors in a sequence are not neighbors in the
    pool. Tables end with -1.
    """
    free = rng.permutation(num_blocks_for(lengths, block_size)).tolist()
    needed = [-(-total // block_size) for _, total in lengths]
    tables = np.full((len(lengths), max(needed) + 1), -1, np.int32)
    for table, count in zip(tables, needed, strict=True):
        table[:count] = [free.pop() for _ in range(count)]
    totals = [total for _, total in lengths]
    shape = (kv_heads, dim)
    queries = [
        random_rows(rng, total, kv_heads * per_group, dim) * np.float32(2.0) for total in totals
    ]
    keys, values = ([random_rows(rng, total, *shape) for total in totals] for _ in range(2))
    return Case(tuple(lengths), block_size, tables, queries, keys, values)


def random_rows(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32)


def num_blocks_for(lengths: Sequence[tuple[int, int]], block_size: int) -> int:
    """Count the blocks that the sequences need, plus three that no sequence owns."""
    return sum(-(-total // block_size) for _, total in lengths) + 3


def assert_close(
    got: tuple[np.ndarray, np.ndarray], expected: tuple[np.ndarray, np.ndarray]
) -> None:
    """Assert that out and lse are within 1e-5."""
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got[1], expected[1], rtol=1e-5, atol=1e-5)
