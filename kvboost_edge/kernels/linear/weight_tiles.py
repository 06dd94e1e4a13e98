"""Microkernels of the linear layers as intrinsics, by weight format and number of tokens.

Integer weights use int_tiles.py. For many tokens, AVX2 and formats with a grid use unpacked.py.
Float weights are implemented here, with one fma chain per output in input order. In both cases an
output depends only on its row and token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvboost_edge.kernels.integers import dot_form, int_constant
from kvboost_edge.kernels.jit import intrinsic
from kvboost_edge.kernels.lazy import cgutils, types
from kvboost_edge.kernels.linear.int_tiles import (
    AHEAD,
    IntTiles,
    Target,
    Tile,
    emit_place,
    emit_target,
    emit_zeros,
    splat_f32_at,
)
from kvboost_edge.kernels.linear.panel import (
    FINE_TOKENS,
    PAIR_FINE_TOKENS,
    PAIR_TOKENS,
    SMALL_TOKENS,
    TILES_AT_ONCE,
    UNPACKED,
)
from kvboost_edge.kernels.linear.unpacked import UnpackedTiles
from kvboost_edge.kernels.linear.weight_formats import FORMAT_OF, INT_KINDS
from kvboost_edge.kernels.vectors import (
    I64,
    KIND_BF16,
    KIND_F32,
    LANES,
    emit_fma,
    emit_load_as_f32,
    emit_prefetch,
)

__all__ = [
    "FLOAT_TOKENS",
    "IntTiles",
    "Target",
    "Tile",
    "fields_of",
    "float_tile",
    "int_tile",
]

FLOAT_TOKENS = (1, 2, 4, 8)

Value = Any
Builder = Any


def _emit_float_tile(
    b: Builder, kind: int, tokens: int, tile: Tile, inputs: Value, step: Value, target: Target
) -> None:
    """Emit a product of 16 rows with `tokens` tokens: one fma chain per output, in input order.

    Args:
        b: the builder.
        kind: dtype of the weights.
        tokens: 1 to 8.
        tile: weights [groups, 16] of `kind`; a group is one input.
        inputs: address of float32 rows.
        step: bytes from one row of inputs to the next.
        target: destination of the outputs.
    """
    size = 4 if kind == KIND_F32 else 2
    sums = emit_zeros(b, tokens)
    with cgutils.for_range(b, tile.groups, intp=I64) as loop:
        place = emit_place(b, tile.weights, loop.index, size * LANES)
        emit_prefetch(b, b.add(place, int_constant(AHEAD)))
        row = emit_load_as_f32(b, kind, place)
        at = emit_place(b, inputs, loop.index, 4)
        for token in range(tokens):
            value = splat_f32_at(b, b.add(at, b.mul(step, int_constant(token))))
            b.store(emit_fma(b, row, value, b.load(sums[token])), sums[token])
    emit_target(b, [sums], target)


def fields_of(b: Builder, kind: Any, value: Value) -> Any:
    return kind(*cgutils.unpack_tuple(b, value))


def _int_tile(kind: int, tiles: int, tokens: int, fine: bool) -> Any:
    emitter = IntTiles(kind, tiles, tokens, fine)
    is_pair = (tiles, tokens) == (TILES_AT_ONCE, PAIR_FINE_TOKENS if fine else PAIR_TOKENS)
    if (tokens, fine) in UNPACKED or (is_pair and FORMAT_OF[kind].grid is not None):
        emitter = UnpackedTiles(kind, tokens, fine, dot_form(), tiles)

    @intrinsic
    def tile(typing: Any, tile: Any, panel: Any, target: Any) -> Any:
        """Multiply weight tiles by a panel.

        Args:
            tile: `Tile`.
            panel: address of the tokens' panel; see panel.py.
            target: `Target`.
        """

        def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
            emitter.emit(
                b,
                fields_of(b, Tile, arguments[0]),
                arguments[1],
                fields_of(b, Target, arguments[2]),
            )
            return context.get_dummy_value()

        return types.void(tile, types.int64, target), codegen

    return tile


def _float_tile(kind: int, tokens: int) -> Any:
    @intrinsic
    def tile(typing: Any, tile: Any, inputs: Any, step: Any, target: Any) -> Any:
        """Multiply a tile of float weights by rows of float32.

        Args:
            tile: `Tile` of floats [inputs, 16].
            inputs: address of float32 [tokens, inputs].
            step: bytes from one token to the next.
            target: `Target`.
        """

        def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
            where = fields_of(b, Tile, arguments[0])
            target = fields_of(b, Target, arguments[3])
            _emit_float_tile(b, kind, tokens, where, arguments[1], arguments[2], target)
            return context.get_dummy_value()

        return types.void(tile, types.int64, types.int64, target), codegen

    return tile


_SHAPES = {(1, tokens, False) for tokens in SMALL_TOKENS} | {
    (1, tokens, True) for tokens in FINE_TOKENS
}
_SHAPES |= {(TILES_AT_ONCE, PAIR_TOKENS, False), (TILES_AT_ONCE, PAIR_FINE_TOKENS, True)}
int_tile = {
    (kind, *shape): _int_tile(kind, *shape) for kind in INT_KINDS for shape in sorted(_SHAPES)
}
"""(format number, tiles, tokens, fine) -> microkernel."""
float_tile = {
    (kind, tokens): _float_tile(kind, tokens)
    for kind in (KIND_F32, KIND_BF16)
    for tokens in FLOAT_TOKENS
}
