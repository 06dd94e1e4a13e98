"""Byte layout of a quantized block, one run of codes and scales per block and KV head.

A block has `block` tokens and `dim` channels (padded to a multiple of 16). Sections start at
multiples of 64 bytes, in this order:

    section        type and shape              content
    key codes      uint8 [dim / 4][block][4]   key = zero + step * code, code in 0..top
    key zeros      float16 [dim]               smallest key of the channel in this block
    key steps      uint8 [dim]                 step of the channel: 5 bits exponent, 3 bits mantissa
    value codes    int8 [block / 4][dim][4]    8 bits: value = scale * code, code in -127..127
    value scales   float16 [block]             scale of the token
    value middles  float16 [block]             4 bits: value = middle + scale * (code - 8), 0..15

The last axis is a quad: 4 channels of a key or 4 tokens of a value. These are the 4 bytes of one
lane that `vpdpbusd` and `sdot` multiply and add. `top` is 255 for 8 bits and 15 for 4 bits. With 4
bits, two quads share bytes: quad 2j is in the low nibbles, quad 2j + 1 in the high nibbles. Keys
are quantized per channel and values per token, as in KIVI (Liu et al., 2024).

Importing this module does not import the compiler.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["BIT_PAIRS", "STEP_BIAS", "CodeLayout", "code_layout"]

BIT_PAIRS = ((8, 8), (8, 4), (4, 8), (4, 4))
"""Supported pairs (bits per key, bits per value) of a quantized pool."""
STEP_BIAS = 18
"""A key step's byte b encodes 2^(b // 8 - STEP_BIAS) * (1 + b % 8 / 8)."""
_LINE = 64


class CodeLayout(NamedTuple):
    """Sizes and byte offsets of the codes of one block and KV head; key codes start at byte 0.

    Attributes:
        block_size: tokens per block.
        head_dim: channels per head.
        dim: head_dim rounded up to a multiple of 16.
        k_bits: bits per key, 8 or 4.
        v_bits: bits per value, 8 or 4.
        key_zeros: byte offset of the key zeros.
        key_steps: byte offset of the key steps.
        values: byte offset of the value codes.
        value_scales: byte offset of the value scales.
        value_middles: byte offset of the value middles, which exist with 4 bits only.
        nbytes: total size in bytes, a multiple of 64.
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
    """Return the layout of one block and KV head.

    Args:
        block_size: tokens per block, a multiple of 16.
        head_dim: channels per head.
        bits: (bits per key, bits per value), one of BIT_PAIRS.
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
