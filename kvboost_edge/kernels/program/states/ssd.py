"""A state space with a scalar decay (Mamba2), token by token: a state of each head, [key_dim, value_dim].

    S = decay * S + k (time * v)^T;  out = S^T q + skip * v

Keys and queries are what its papers call B and C, values x, and the skip D.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numba.core import types

from kvboost_edge.kernels.integers import int_constant
from kvboost_edge.kernels.jit import intrinsic
from kvboost_edge.kernels.program.states.sums import CHAINS, LINE, emit_number, emit_quads, emit_sums, emit_total
from kvboost_edge.kernels.vectors import V16, emit_fma, emit_load, emit_store

__all__ = ["advance"]

Value = Any
Builder = Any


@intrinsic
def advance(typing: Any, tile: Any, dim: Any, query: Any, key: Any, values: Any, gates: Any, skip: Any) -> Any:
    """One token: the tile becomes decay * tile + key (time * values), and the values what the query finds in it and
    skip times themselves.

    gates  address of (time, decay);  skip: of a float32
    """

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        tile, dim, query, key, values, gates, skip = arguments
        time, decay = (emit_number(b, gates, int_constant(index)) for index in range(2))
        given = emit_load(b, V16, values)
        taken = b.fmul(given, time)
        outs = emit_sums(b)
        with emit_quads(b, dim) as loop:
            first = b.mul(loop.index, int_constant(CHAINS))
            for index, out in enumerate(outs):
                i = b.add(first, int_constant(index))
                place = b.add(tile, b.mul(i, int_constant(LINE)))
                row = emit_fma(b, emit_number(b, key, i), taken, b.fmul(emit_load(b, V16, place), decay))
                b.store(emit_fma(b, emit_number(b, query, i), row, b.load(out)), out)
                emit_store(b, row, place)
        own = emit_number(b, skip, int_constant(0))
        emit_store(b, emit_fma(b, own, given, emit_total(b, outs)), values)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), codegen
