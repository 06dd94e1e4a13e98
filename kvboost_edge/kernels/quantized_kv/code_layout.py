"""Where the bytes of a quantized block lie: one run of codes and scales for each block and kv head.

Of a block of `block` tokens and `dim` channels (padded to 16); every section starts at a multiple
of 64 bytes:

    key codes      uint8 [dim / 4][block][4]   a quad is 4 channels; key = zero + step * code, code
                   in 0..top
    key zeros      float16 [dim]               the smallest key of a channel in this block
    key steps      uint8 [dim]                 of a channel: 5 bits of exponent, 3 of mantissa, see
                   STEP_BIAS
    value codes    int8 [block / 4][dim][4]    a quad is 4 tokens; 8 bits: value = scale * code,
                   code in -127..127
    value scales   float16 [block]             of a token
    value middles  float16 [block]             4 bits only: value = middle + scale * (code - 8),
                   code in 0..15

`top` is 255 or 15. With 4 bits two quads share a row of bytes: the low nibbles are quad 2j, the
high ones quad 2j + 1. Integers only; this module imports nothing.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["BIT_PAIRS", "STEP_BIAS", "CodeLayout", "code_layout"]

BIT_PAIRS = ((8, 8), (8, 4), (4, 8), (4, 4))
"""(bits of keys, bits of values) that a quantized pool can have."""
STEP_BIAS = 18
"""A key step's byte b stands for 2^(b // 8 - STEP_BIAS) * (1 + b % 8 / 8)."""
_LINE = 64


class CodeLayout(NamedTuple):
    """Sizes and byte offsets of the codes of one block and kv head; `dim`: channels, padded. Key
    codes start at 0.
    """

    block_size: int
    head_dim: int
    dim: int
    k_bits: int
    v_bits: int
    key_zeros: int
    key_steps: int
    values: int
    value_scales: int
    value_middles: int
    nbytes: int


def code_layout(block_size: int, head_dim: int, bits: tuple[int, int]) -> CodeLayout:
    """Where the codes of one block and kv head lie. `bits` is one of BIT_PAIRS, block_size a
    multiple of 16.
    """
    k_bits, v_bits = bits
    dim = _up(head_dim, 16)
    key_zeros = _up(dim * block_size * k_bits // 8, _LINE)
    key_steps = key_zeros + _up(2 * dim, _LINE)
    values = key_steps + _up(dim, _LINE)
    value_scales = values + _up(dim * block_size * v_bits // 8, _LINE)
    value_middles = value_scales + 2 * block_size
    nbytes = _up(value_middles + (2 * block_size if v_bits == 4 else 0), _LINE)
    sections = (key_zeros, key_steps, values, value_scales, value_middles)
    return CodeLayout(block_size, head_dim, dim, k_bits, v_bits, *sections, nbytes)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
