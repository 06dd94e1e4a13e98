"""One tile of weights against a block of 1, 2, 4 or 8 tokens, the kernel chosen at run time by kind and number."""

from __future__ import annotations

from kvboost_edge.kernels.jit import kernel
from kvboost_edge.kernels.linear_tiles import GROUP, KIND_INT4, KIND_INT8, TOKENS, float_tile, int_tile
from kvboost_edge.kernels.vectors import KIND_BF16, KIND_F32

__all__ = ["float_block", "int_block", "tokens_at_once"]

_INT8_1, _INT8_2, _INT8_4, _INT8_8 = [int_tile[KIND_INT8, tokens] for tokens in TOKENS]
_INT4_1, _INT4_2, _INT4_4, _INT4_8 = [int_tile[KIND_INT4, tokens] for tokens in TOKENS]
_F32_1, _F32_2, _F32_4, _F32_8 = [float_tile[KIND_F32, tokens] for tokens in TOKENS]
_BF16_1, _BF16_2, _BF16_4, _BF16_8 = [float_tile[KIND_BF16, tokens] for tokens in TOKENS]


@kernel
def int_block(
    kind: int, n: int, w: int, s: int, groups: int, x: int, xs: int, sums: int, y: int, step: int, bias: int, f: float,
    add: int,
) -> None:  # fmt: skip
    """One tile against n = 1, 2, 4 or 8 tokens; names as in `int_tile`."""
    xstep, sstep = groups * GROUP, groups * 4
    if kind == KIND_INT8:
        if n == 8:
            _INT8_8(w, s, groups, x, xstep, xs, sums, sstep, y, step, bias, f, add)
        elif n == 4:
            _INT8_4(w, s, groups, x, xstep, xs, sums, sstep, y, step, bias, f, add)
        elif n == 2:
            _INT8_2(w, s, groups, x, xstep, xs, sums, sstep, y, step, bias, f, add)
        else:
            _INT8_1(w, s, groups, x, xstep, xs, sums, sstep, y, step, bias, f, add)
    elif n == 8:
        _INT4_8(w, s, groups, x, xstep, xs, sums, sstep, y, step, bias, f, add)
    elif n == 4:
        _INT4_4(w, s, groups, x, xstep, xs, sums, sstep, y, step, bias, f, add)
    elif n == 2:
        _INT4_2(w, s, groups, x, xstep, xs, sums, sstep, y, step, bias, f, add)
    else:
        _INT4_1(w, s, groups, x, xstep, xs, sums, sstep, y, step, bias, f, add)


@kernel
def float_block(
    kind: int, n: int, w: int, inputs: int, x: int, xstep: int, y: int, step: int, bias: int, f: float, add: int
) -> None:
    """One tile of float weights against n tokens; names as in `float_tile`."""
    if kind == KIND_F32:
        if n == 8:
            _F32_8(w, inputs, x, xstep, y, step, bias, f, add)
        elif n == 4:
            _F32_4(w, inputs, x, xstep, y, step, bias, f, add)
        elif n == 2:
            _F32_2(w, inputs, x, xstep, y, step, bias, f, add)
        else:
            _F32_1(w, inputs, x, xstep, y, step, bias, f, add)
    elif n == 8:
        _BF16_8(w, inputs, x, xstep, y, step, bias, f, add)
    elif n == 4:
        _BF16_4(w, inputs, x, xstep, y, step, bias, f, add)
    elif n == 2:
        _BF16_2(w, inputs, x, xstep, y, step, bias, f, add)
    else:
        _BF16_1(w, inputs, x, xstep, y, step, bias, f, add)


@kernel
def tokens_at_once(left: int) -> int:
    """Size of the next block of `left` tokens."""
    if left >= 8:
        return 8
    if left >= 4:
        return 4
    return 2 if left >= 2 else 1
