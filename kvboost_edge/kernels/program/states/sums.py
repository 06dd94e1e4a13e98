"""Loops over the rows of state tiles, with broadcast keys and sums in four chains.

A loop processes one tile, or two neighbouring tiles that share the loads of keys and queries. Two
tiles need 512-bit registers; on smaller registers, the chains of one tile already take them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvboost_edge.kernels.integers import has_512_bit_registers, int_constant
from kvboost_edge.kernels.jit import kernel
from kvboost_edge.kernels.lazy import cgutils
from kvboost_edge.kernels.vectors import F32, I64, LANES, V16, emit_load, emit_splat

__all__ = [
    "CHAINS",
    "LINE",
    "MOST_KEYS",
    "emit_number",
    "emit_quads",
    "emit_sums",
    "emit_total",
    "neighbours",
    "tiles_at_once",
]

LINE = 4 * LANES
"""Bytes per row of a tile, which has 16 value columns."""
CHAINS = 4
"""Number of chains in a sum over keys; key i is added to chain i mod 4."""
MOST_KEYS = 256
"""Maximum number of rows of a tile, or of two tiles processed together.

Their 16 KB stay in the L1 cache.
"""

_MOST = 2 if has_512_bit_registers() else 1

Value = Any
Builder = Any


@kernel
def tiles_at_once(dim: int) -> Any:
    """Return the number of tiles per unit; the last unit of a head may have fewer.

    `dim` is the number of rows per tile.
    """
    return _MOST if 2 * dim <= MOST_KEYS else 1


def neighbours(b: Builder, address: Value, step: Value, count: int) -> list[Value]:
    """Return `count` addresses that are `step` bytes apart."""
    return [b.add(address, b.mul(step, int_constant(tile))) for tile in range(count)]


def emit_sums(b: Builder) -> list[Value]:
    """Return stack slots for the chains of a sum, initialized to 0."""
    chains = [cgutils.alloca_once(b, V16) for _ in range(CHAINS)]
    for chain in chains:
        b.store(emit_splat(b, F32(0.0)), chain)
    return chains


def emit_total(b: Builder, chains: Sequence[Value]) -> Value:
    """Return the sum of the chains, added in pairs."""
    first, second, third, fourth = (b.load(chain) for chain in chains)
    return b.fadd(b.fadd(first, second), b.fadd(third, fourth))


def emit_number(b: Builder, address: Value, index: Value) -> Value:
    """Broadcast one float32 of an array to all lanes."""
    return emit_splat(b, emit_load(b, F32, b.add(address, b.mul(index, int_constant(4)))))


def emit_quads(b: Builder, dim: Value) -> Any:
    """Return a loop over keys that takes four keys per iteration."""
    return cgutils.for_range(b, b.lshr(dim, int_constant(2)), intp=I64)
