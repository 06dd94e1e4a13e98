"""What the loops over a tile's rows have in common: numbers of keys as vectors, and sums in four chains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numba.core import cgutils

from kvboost_edge.kernels.integers import int_constant
from kvboost_edge.kernels.vectors import F32, I64, LANES, V16, emit_load, emit_splat

__all__ = ["CHAINS", "LINE", "emit_number", "emit_quads", "emit_sums", "emit_total"]

LINE = 4 * LANES
"""Bytes of a row of a tile: 16 value columns."""
CHAINS = 4
"""Of a sum over keys: key i goes to chain i mod 4."""

Value = Any
Builder = Any


def emit_sums(b: Builder) -> list[Value]:
    """Places of the chains of a sum, which are zeros."""
    chains = [cgutils.alloca_once(b, V16) for _ in range(CHAINS)]
    for chain in chains:
        b.store(emit_splat(b, F32(0.0)), chain)
    return chains


def emit_total(b: Builder, chains: Sequence[Value]) -> Value:
    """What they add up to."""
    first, second, third, fourth = (b.load(chain) for chain in chains)
    return b.fadd(b.fadd(first, second), b.fadd(third, fourth))


def emit_number(b: Builder, address: Value, index: Value) -> Value:
    """A float32 of an array, in all lanes."""
    return emit_splat(b, emit_load(b, F32, b.add(address, b.mul(index, int_constant(4)))))


def emit_quads(b: Builder, dim: Value) -> Any:
    """A loop over keys, four at a time."""
    return cgutils.for_range(b, b.lshr(dim, int_constant(2)), intp=I64)
