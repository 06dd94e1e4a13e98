"""Mamba2's state-space recurrence (SSD; Dao and Gu, 2024), token by token.

Each head has a state S, float32 [key_dim, value_dim]:

    S = decay * S + k (time * v)^T;  out = S^T q + skip * v

In the paper's notation, keys are B, queries C, values x, time dt, and skip D.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvboost_edge.kernels.integers import int_constant
from kvboost_edge.kernels.jit import intrinsic
from kvboost_edge.kernels.lazy import types
from kvboost_edge.kernels.program.states.sums import (
    CHAINS,
    LINE,
    emit_number,
    emit_quads,
    emit_sums,
    emit_total,
    neighbours,
)
from kvboost_edge.kernels.vectors import V16, emit_fma, emit_load, emit_store

__all__ = ["advance", "advance_two"]

Value = Any
Builder = Any


def _emit_advance(b: Builder, arguments: Sequence[Value], count: int) -> None:
    """Emit `advance` for `count` consecutive tiles."""
    tile, dim, query, key, values, apart, gates, skip = arguments
    time, decay = (emit_number(b, gates, int_constant(index)) for index in range(2))
    tiles = neighbours(b, tile, b.mul(dim, int_constant(LINE)), count)
    columns = neighbours(b, values, apart, count)
    given = [emit_load(b, V16, place) for place in columns]
    taken = [b.fmul(one, time) for one in given]
    sums = [emit_sums(b) for _ in tiles]
    with emit_quads(b, dim) as loop:
        first = b.mul(loop.index, int_constant(CHAINS))
        for chain in range(CHAINS):
            i = b.add(first, int_constant(chain))
            at = b.mul(i, int_constant(LINE))
            of_key = emit_number(b, key, i)
            of_query = emit_number(b, query, i)
            places = [b.add(tile, at) for tile in tiles]
            rows = [emit_load(b, V16, place) for place in places]
            rows = [
                emit_fma(b, of_key, one, b.fmul(row, decay))
                for one, row in zip(taken, rows, strict=True)
            ]
            for place, row, outs in zip(places, rows, sums, strict=True):
                b.store(emit_fma(b, of_query, row, b.load(outs[chain])), outs[chain])
                emit_store(b, row, place)
    own = emit_number(b, skip, int_constant(0))
    for place, one, outs in zip(columns, given, sums, strict=True):
        emit_store(b, emit_fma(b, own, one, emit_total(b, outs)), place)


@intrinsic
def advance(
    typing: Any,
    tile: Any,
    dim: Any,
    query: Any,
    key: Any,
    values: Any,
    apart: Any,
    gates: Any,
    skip: Any,
) -> Any:
    """Process one token: tile = decay * tile + key (time * values).

    The values are replaced by the query's result from the new tile plus skip * values.

    Args:
        tile: address of float32 [dim, 16].
        dim: channels per key.
        query: address of float32 [dim].
        key: address of float32 [dim].
        values: address of float32 [16], updated.
        apart: bytes from one tile's values to the next tile's.
        gates: address of float32 (time, decay).
        skip: address of a float32.
    """

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        _emit_advance(b, arguments, 1)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), codegen


@intrinsic
def advance_two(
    typing: Any,
    tile: Any,
    dim: Any,
    query: Any,
    key: Any,
    values: Any,
    apart: Any,
    gates: Any,
    skip: Any,
) -> Any:
    """Process one token in two consecutive tiles; see `advance` for the arguments."""

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        _emit_advance(b, arguments, 2)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), codegen
