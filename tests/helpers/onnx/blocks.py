"""Weight storage of the tests' ONNX files: codes of 4 and 8 bits in blocks, as MatMulNBits reads
them.
"""

from __future__ import annotations

import dataclasses

import numpy as np

Array = np.ndarray


@dataclasses.dataclass(frozen=True)
class Form:
    """Options of an ONNX file.

    Attributes:
        bits: 4, 8, or 0 for floats.
        zeros: "" for no zero points, "codes" to pack them like the codes, or "floats".
    """

    bits: int = 4
    block: int = 32
    zeros: str = ""
    halves: bool = False  # scales and float weights in float16
    packed: bool = True  # queries, keys and values in one matrix
    quantized_embedding: bool = (
        False  # looked up in the head's blocks, as in files where both are tied
    )
    bias_inside: bool = False  # the bias as an input of MatMulNBits
    outer_rope: bool = False  # RotaryEmbedding before attention
    concat: bool = False
    half_past: bool = False  # past and present in float16
    external: bool = True
    genai: bool = True  # genai_config.json, no config.json; else config.json and onnx/model_q4.onnx


def quantize(weights: Array, form: Form) -> tuple[Array, Array, Array | None]:
    """Quantize to codes uint8 [rows, blocks, block], scales [rows, blocks], and zero points of the
    same shape or None.
    """
    rows, inputs = weights.shape
    blocks = -(-inputs // form.block)
    padded = np.zeros((rows, blocks * form.block), dtype=np.float32)
    padded[:, :inputs] = weights
    grouped = padded.reshape(rows, blocks, form.block)
    top = (1 << form.bits) - 1
    middle = 1 << (form.bits - 1)
    kind = np.float16 if form.halves else np.float32
    if not form.zeros:
        largest = np.take_along_axis(grouped, np.abs(grouped).argmax(axis=2)[..., None], axis=2)[
            ..., 0
        ]
        scales = (largest / -middle).astype(kind)
        zeros = np.full(scales.shape, middle, dtype=np.float32)
    else:
        low = np.minimum(grouped.min(axis=2), 0)
        high = np.maximum(grouped.max(axis=2), 0)
        scales = ((high - low) / top).astype(kind)
        zeros = np.rint(-low / np.where(scales == 0, 1, scales).astype(np.float32)).astype(
            np.float32
        )
    wide = np.where(scales == 0, 1, scales).astype(np.float32)[..., None]
    codes = np.clip(np.rint(grouped / wide) + zeros[..., None], 0, top).astype(np.uint8)
    return codes, scales, zeros if form.zeros else None


def dequantize(codes: Array, scales: Array, zeros: Array | None, bits: int, inputs: int) -> Array:
    middle = np.float32(1 << (bits - 1)) if zeros is None else zeros[..., None]
    found = scales.astype(np.float32)[..., None] * (codes.astype(np.float32) - middle)
    return found.reshape(len(codes), -1)[:, :inputs]


def packed_codes(codes: Array, bits: int) -> Array:
    """Pack two codes of 4 bits per byte along the last axis, low nibble first."""
    if bits == 8:
        return codes.astype(np.uint8)
    if codes.shape[-1] % 2:
        codes = np.concatenate([codes, np.zeros((*codes.shape[:-1], 1), codes.dtype)], axis=-1)
    codes = codes.astype(np.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4
