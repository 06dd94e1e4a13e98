"""Values of ONNX tensors: float types as float32, and MatMulNBits matrices.

MatMulNBits (com.microsoft) has these inputs, with blocks = ceil(K / block_size):

    B            uint8 [N, blocks, block_size * bits / 8], low nibble first
    scales       float [N, blocks]
    zero points  uint8 [N, ceil(blocks * bits / 8)], packed like the codes, or one number per
                 block in the dtype of the scales; 2^(bits - 1) by default

The weights are weight[n, k] = scale * (code - zero).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.onnx.file import DTYPE_BITS, OnnxTensor
from kvboost_edge.models.weights.file_bytes import read_bytes
from kvboost_edge.models.weights.weight_source import from_bfloat16

__all__ = [
    "BLOCK_SIZES",
    "FLOATS",
    "OnnxMatrix",
    "as_float32",
    "bit_matrix",
    "float_matrix",
    "read_rows",
    "read_whole",
]

Floats = npt.NDArray[np.float32]
FLOATS = ("F32", "F16", "BF16")
BLOCK_SIZES = (16, 32, 64, 128, 256)
_STORED: dict[str, npt.DTypeLike] = {
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "F64": "<f8",
    "I64": "<i8",
    "I32": "<i4",
    "U8": "u1",
    "I8": "i1",
}
_SMALL = 1 << 16


@dataclasses.dataclass(frozen=True, slots=True)
class OnnxMatrix:
    """Matrix or vector in the file.

    Attributes:
        shape: shape as in torch, [outputs, inputs] or [size].
        bits: bits per code; 0 for float weights.
        block: number of weights that share a scale.
        scales: scales of quantized weights.
        zeros: zero points of quantized weights; None for the default.
        transposed: True for float weights that the file stores as [inputs, outputs].
    """

    weight: OnnxTensor
    shape: tuple[int, ...]
    bits: int = 0
    block: int = 0
    scales: OnnxTensor | None = None
    zeros: OnnxTensor | None = None
    transposed: bool = False

    @property
    def blocks(self) -> int:
        """Number of blocks in a row."""
        return -(-self.shape[1] // self.block)

    @property
    def has_float_zeros(self) -> bool:
        return self.zeros is not None and self.zeros.dtype in FLOATS

    @property
    def label(self) -> str:
        """Name of the storage format."""
        if not self.bits:
            return self.weight.dtype
        zeros = " with zero points" if self.zeros is not None else ""
        return f"{self.bits} bit in blocks of {self.block}{zeros}"


def bit_matrix(
    where: str,
    size: tuple[int, int, int, int],
    weight: OnnxTensor,
    scales: OnnxTensor,
    zeros: OnnxTensor | None,
) -> OnnxMatrix:
    """Return the matrix of a MatMulNBits or GatherBlockQuantized node.

    Args:
        where: prefix for error messages.
        size: number of outputs, number of inputs, bits, and block size.
        weight: codes.
        scales: scales.
        zeros: zero points; None for the default.

    Raises:
        ModelFormatError: the tensors do not match `size`, or the format is not supported.
    """
    outputs, inputs, bits, block = size
    if bits not in (4, 8):
        raise ModelFormatError(f"{where}: bits={bits} is not supported; supported: 4 and 8")
    if block not in BLOCK_SIZES:
        raise ModelFormatError(f"{where}: block_size={block} is not one of {BLOCK_SIZES}")
    if not (0 < outputs < 1 << 31 and 0 < inputs < 1 << 31):
        raise ModelFormatError(
            f"{where}: {outputs} outputs of {inputs} inputs are not a valid matrix"
        )
    found = OnnxMatrix(weight, (outputs, inputs), bits, block, scales, zeros)
    groups = found.blocks
    if (
        weight.dtype not in ("U8", "U4")
        or weight.stop - weight.start != outputs * groups * block * bits // 8
    ):
        raise ModelFormatError(
            f"{where}: tensor {weight.name!r} is {weight.dtype} {weight.shape}, which does not "
            f"hold {outputs} rows of {groups} blocks of {block} {bits}-bit codes"
        )
    if scales.dtype not in FLOATS or scales.count != outputs * groups:
        raise ModelFormatError(
            f"{where}: tensor {scales.name!r} is {scales.dtype} {scales.shape}, expected {outputs} "
            f"x {groups} floats"
        )
    if zeros is not None:
        packed = zeros.dtype in ("U8", "U4") and zeros.stop - zeros.start == outputs * -(
            -groups * bits // 8
        )
        if not packed and not (zeros.dtype in FLOATS and zeros.count == outputs * groups):
            raise ModelFormatError(
                f"{where}: tensor {zeros.name!r} is {zeros.dtype} {zeros.shape}, expected a zero "
                f"point for each of {outputs} x {groups} blocks"
            )
    return found


def float_matrix(where: str, weight: OnnxTensor, *, transposed: bool) -> OnnxMatrix:
    """Return a float tensor as a matrix or a vector."""
    if weight.dtype not in FLOATS or not 1 <= len(weight.shape) <= 2 or not weight.count:
        raise ModelFormatError(
            f"{where}: tensor {weight.name!r} is {weight.dtype} {weight.shape}, expected floats"
        )
    shape = tuple(reversed(weight.shape)) if transposed else weight.shape
    return OnnxMatrix(weight, shape, transposed=transposed)


def read_whole(tensor: OnnxTensor, limit: int = _SMALL) -> npt.NDArray[Any]:
    """Return a small tensor, with floats converted to float32.

    Raises:
        ModelFormatError: the tensor has more than `limit` elements or another type.
    """
    if tensor.values is not None:
        return np.array(tensor.values, dtype=np.int64).reshape(tensor.shape)
    if tensor.dtype not in _STORED or tensor.count > limit:
        raise ModelFormatError(
            f"{tensor.path}: tensor {tensor.name!r} is {tensor.dtype} {tensor.shape}, expected up "
            f"to {limit} numbers"
        )
    data = read_bytes(tensor.path, tensor.start, tensor.stop)
    return as_float32(tensor.dtype, data).reshape(tensor.shape)


def as_float32(dtype: str, data: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    """Convert bytes to numbers. Float types become float32, and integers keep their type."""
    stored = data.view(_STORED[dtype])
    if dtype == "BF16":
        return from_bfloat16(stored)
    return stored.astype(np.float32) if dtype in FLOATS else stored


def read_rows(tensor: OnnxTensor, start: int, stop: int) -> Floats:
    """Return rows [start, stop) of a two-dimensional float tensor."""
    width = tensor.shape[1] * DTYPE_BITS[tensor.dtype] // 8
    data = read_bytes(tensor.path, tensor.start + start * width, tensor.start + stop * width)
    return as_float32(tensor.dtype, data).reshape(stop - start, tensor.shape[1])
