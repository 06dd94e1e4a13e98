"""Weight source for the tensors of a recognized ONNX decoder, under transformers' names.

A MatMulNBits matrix becomes one of these packed formats. Float32 scales are rounded to float16,
with an error of at most 2^-11 of a weight:

    4 bits, blocks of at least 32    int4: the same codes, a scale for each group of 32
      with zero points               int4-asym: minimum = scale * zero point, rounded to float16
    8 bits, blocks of at least 32    int8: the same codes
      with zero points               int8, requantized: scale = max|w| / 127 of each group of 32
    blocks of 16                     int8, requantized
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.onnx.decoder import Decoder
from kvboost_edge.models.onnx.file import OnnxModel, OnnxTensor
from kvboost_edge.models.onnx.graph import Rows
from kvboost_edge.models.onnx.tensors import OnnxMatrix, as_float32
from kvboost_edge.models.weights.file_bytes import open_stamped
from kvboost_edge.models.weights.weight_source import QuantRows, StoredRows

__all__ = ["OnnxSource", "tensors_of"]

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
GROUP = 32
# Number of transposed matrices to cache, the maximum that is packed at once. They are read whole.
_KEPT = 4
_FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


def tensors_of(decoder: Decoder, *, fused: bool) -> dict[str, tuple[Rows, ...]]:
    """Return the rows that make up each tensor, by transformers' name.

    Args:
        decoder: the recognized decoder.
        fused: True if the family has one matrix for QKV, and one for gate and up.
    """
    found: dict[str, tuple[Rows, ...]] = {"model.embed_tokens.weight": (_whole(decoder.embedding),)}
    for index, layer in enumerate(decoder.layers):
        own: dict[str, tuple[Rows, ...]] = {
            f"{name}.weight": (rows,) for name, rows in layer.weights.items()
        }
        own |= {name: (rows,) for name, rows in layer.vectors.items()}
        for name, parts in _FUSED.items() if fused else ():
            for ending in (".weight", ".bias"):
                rows = [own.pop(part + ending) for part in parts if part + ending in own]
                if len(rows) == len(parts):
                    own[name + ending] = tuple(part for one in rows for part in one)
                elif rows:
                    raise ModelFormatError(
                        f"layer {index}: either all or none of {', '.join(parts)} must have a bias"
                    )
        found |= {f"model.layers.{index}.{name}": rows for name, rows in own.items()}
    found["model.norm.weight"] = (_whole(decoder.norm.weight),)
    if decoder.head is not None:
        found["lm_head.weight"] = (_whole(decoder.head),)
    return found


def _whole(matrix: OnnxMatrix) -> Rows:
    return Rows(matrix, 0, matrix.shape[0])


class OnnxSource:
    """`WeightSource` for an ONNX model, whose files must not have changed since the graph was read.

    Attributes:
        zeros: sizes of zero vectors that the file omits, by name.
        norm_offset: difference between the file's norm weights and transformers' (Gemma's norms
            multiply by 1 + weight).
    """

    def __init__(
        self,
        model: OnnxModel,
        tensors: Mapping[str, tuple[Rows, ...]],
        *,
        zeros: Mapping[str, int],
        norm_offset: float = 0.0,
    ) -> None:
        self._path = model.path
        self._zeros = zeros
        self._tensors = tensors
        self._norm_offset = np.float32(norm_offset)
        self._transposed = functools.lru_cache(maxsize=_KEPT)(self._read_transposed)
        self._has_middle_zeros = functools.cache(self._find_middle_zeros)
        self._files = {file.path: file for file in open_stamped(model.files, "graph")}

    def __enter__(self) -> OnnxSource:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def _close(self) -> None:
        for file in self._files.values():
            file.close()

    def names(self) -> set[str]:
        return {*self._tensors, *self._zeros}

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._zeros:
            return (self._zeros[name],)
        parts = self._parts(name)
        return (sum(part.stop - part.start for part in parts), *parts[0].matrix.shape[1:])

    def type_of(self, name: str) -> str:
        """Return the storage type of a tensor, such as "4 bit in blocks of 64"."""
        if name in self._zeros:
            return "zeros"
        return " and ".join(sorted({part.matrix.label for part in self._parts(name)}))

    def file_of(self, name: str) -> Path:
        return self._path if name in self._zeros else self._parts(name)[0].matrix.weight.path

    def stored_rows(self, name: str) -> StoredRows:
        raise ModelFormatError(
            f"{self.file_of(name)}: tensor {name!r} is in an ONNX file; single rows cannot be "
            "read from such files"
        )

    def kind(self, name: str) -> str | None:
        if name in self._zeros:
            return None
        kinds = {self._kind(part.matrix) for part in self._parts(name)}
        if len(kinds) == 1:
            return kinds.pop()
        return "int8" if kinds == {"int4", "int8"} else None

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> Floats:
        """Return rows [start, stop) as float32.

        Quantized weights are converted by scale * (code - zero point).
        """
        if name in self._zeros:
            return np.zeros((self._zeros[name] if stop is None else stop) - start, dtype=np.float32)
        size = self.shape(name)[0]
        found = [
            self._floats(part.matrix, *ends)
            for part, ends in self._cut(name, start, size if stop is None else stop)
        ]
        values = found[0] if len(found) == 1 else np.concatenate(found)
        return (
            values - self._norm_offset
            if self._norm_offset and name.endswith("norm.weight")
            else values
        )

    def quant_rows(self, name: str, start: int, stop: int) -> QuantRows:
        kind = self.kind(name)
        if kind is None:
            raise ModelFormatError(f"tensor {name!r} is not stored in a single quantized format")
        parts = [
            self._quantized(part.matrix, kind, *ends) for part, ends in self._cut(name, start, stop)
        ]
        if len(parts) == 1:
            return parts[0]
        lowest = [part.minima for part in parts if part.minima is not None]
        return QuantRows(
            kind,
            np.concatenate([part.codes for part in parts]),
            np.concatenate([part.scales for part in parts]),
            np.concatenate(lowest) if lowest else None,
        )

    def _parts(self, name: str) -> tuple[Rows, ...]:
        found = self._tensors.get(name)
        if found is None:
            raise ModelFormatError(f"{self._path} lacks tensor {name!r}")
        return found

    def _cut(self, name: str, start: int, stop: int) -> list[tuple[Rows, tuple[int, int]]]:
        """Return the parts that contain rows [start, stop), each with its row range."""
        size = self.shape(name)[0]
        if not 0 <= start < stop <= size:
            raise ModelFormatError(
                f"{self._path}: tensor {name!r} has {size} rows; rows {start} to {stop} are out "
                "of range"
            )
        found = []
        first = 0
        for part in self._parts(name):
            low = max(start, first)
            high = min(stop, first + part.stop - part.start)
            if low < high:
                found.append((part, (part.start + low - first, part.start + high - first)))
            first += part.stop - part.start
        return found

    def _kind(self, matrix: OnnxMatrix) -> str | None:
        if not matrix.bits:
            return None
        if matrix.bits == 8 or matrix.block < GROUP:
            return "int8"
        return "int4" if self._has_middle_zeros(matrix) else "int4-asym"

    def _floats(self, matrix: OnnxMatrix, start: int, stop: int) -> Floats:
        if not matrix.bits:
            if matrix.transposed:
                return np.ascontiguousarray(self._transposed(matrix.weight)[:, start:stop].T)
            return self._numbers(matrix.weight, start, stop, matrix.shape[0]).reshape(
                stop - start, *matrix.shape[1:]
            )
        codes, scales, zeros = self._read(matrix, start, stop)
        inputs = matrix.shape[1]
        wide = np.repeat(scales, matrix.block, axis=1)[:, :inputs]
        return wide * (
            codes.astype(np.float32) - np.repeat(zeros, matrix.block, axis=1)[:, :inputs]
        )

    def _quantized(self, matrix: OnnxMatrix, kind: str, start: int, stop: int) -> QuantRows:
        own = self._kind(matrix)
        if own == "int8" and (matrix.block < GROUP or not self._has_middle_zeros(matrix)):
            return _requantized(self._floats(matrix, start, stop))
        codes, scales, zeros = self._read(matrix, start, stop)
        groups = -(-matrix.shape[1] // GROUP)
        times = matrix.block // GROUP
        if own == "int4" and kind == "int8":
            codes = codes + np.uint8(128 - 8)
        halves = np.repeat(_as_half(scales), times, axis=1)[:, :groups]
        if kind != "int4-asym":
            return QuantRows(kind, codes, halves)
        minima = _as_half(
            _as_half(scales).astype(np.float32) * zeros
        )  # use the rounded scale, so that a code at the zero point stays nearly 0
        return QuantRows(kind, codes, halves, np.repeat(minima, times, axis=1)[:, :groups])

    def _read(self, matrix: OnnxMatrix, start: int, stop: int) -> tuple[Bytes, Floats, Floats]:
        """Read rows [start, stop) of a matrix.

        Returns:
            Codes [rows, inputs], scales [rows, blocks] and zero points [rows, blocks].
        """
        outputs, inputs = matrix.shape
        assert matrix.scales is not None
        packed = self._bytes(matrix.weight, start, stop, outputs)
        codes = _nibbles(packed) if matrix.bits == 4 else packed
        scales = self._numbers(matrix.scales, start, stop, outputs).reshape(
            stop - start, matrix.blocks
        )
        zeros = np.full(scales.shape, 1 << (matrix.bits - 1), dtype=np.float32)
        if matrix.zeros is not None and matrix.has_float_zeros:
            zeros = self._numbers(matrix.zeros, start, stop, outputs).reshape(scales.shape)
        elif matrix.zeros is not None:
            points = self._bytes(matrix.zeros, start, stop, outputs)
            zeros = (_nibbles(points) if matrix.bits == 4 else points)[:, : matrix.blocks].astype(
                np.float32
            )
        return np.ascontiguousarray(codes[:, :inputs]), scales, zeros

    def _find_middle_zeros(self, matrix: OnnxMatrix) -> bool:
        """Return whether every zero point has the default value, the middle of the code range."""
        if matrix.zeros is None:
            return True
        middle = float(1 << (matrix.bits - 1))
        rows = matrix.shape[0]
        if matrix.has_float_zeros:
            return bool((self._numbers(matrix.zeros, 0, rows, rows) == middle).all())
        points = self._bytes(matrix.zeros, 0, rows, rows)
        return bool(
            ((_nibbles(points) if matrix.bits == 4 else points)[:, : matrix.blocks] == middle).all()
        )

    def _read_transposed(self, tensor: OnnxTensor) -> Floats:
        return self._numbers(tensor, 0, tensor.shape[0], tensor.shape[0]).reshape(tensor.shape)

    def _numbers(self, tensor: OnnxTensor, start: int, stop: int, rows: int) -> Floats:
        found: Floats = as_float32(tensor.dtype, self._bytes(tensor, start, stop, rows).reshape(-1))
        return found

    def _bytes(self, tensor: OnnxTensor, start: int, stop: int, rows: int) -> Bytes:
        """Return the bytes of rows [start, stop) of a tensor, uint8 [rows, bytes of a row].

        Args:
            tensor: location of the tensor.
            start: first row.
            stop: end of the rows.
            rows: number of rows in the whole tensor.
        """
        width = (tensor.stop - tensor.start) // rows
        data = np.empty((stop - start, width), dtype=np.uint8)
        self._files[tensor.path].read_into(data, tensor.start + start * width)
        return data


def _nibbles(packed: Bytes) -> Bytes:
    """Unpack nibbles, low ones first: [rows, n] -> [rows, 2 n]."""
    codes = np.empty((*packed.shape, 2), dtype=np.uint8)
    np.bitwise_and(packed, 15, out=codes[:, :, 0])
    np.right_shift(packed, 4, out=codes[:, :, 1])
    return codes.reshape(len(packed), -1)


def _as_half(values: Floats) -> npt.NDArray[np.float16]:
    with np.errstate(over="ignore"):  # infinity is rejected during packing
        return values.astype(np.float16)


def _requantized(weights: Floats) -> QuantRows:
    rows, inputs = weights.shape
    groups = -(-inputs // GROUP)
    grouped = np.zeros((rows, groups * GROUP), dtype=np.float32)
    grouped[:, :inputs] = weights
    grouped = grouped.reshape(rows, groups, GROUP)
    scales = _as_half(np.abs(grouped).max(axis=2) / np.float32(127.0))
    wide = scales.astype(np.float32)
    inverse = np.divide(np.float32(1.0), wide, out=np.zeros_like(wide), where=wide != 0)
    codes = (np.clip(np.rint(grouped * inverse[:, :, None]), -127, 127) + 128).astype(np.uint8)
    return QuantRows("int8", codes.reshape(rows, -1)[:, :inputs].copy(), scales)
