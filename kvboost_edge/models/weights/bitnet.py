"""Weight source for BitNet b1.58 checkpoints, whose linear layers have ternary weights.

    BitLinear                code / weight_scale
    AutoBitLinear, offline   code * weight_scale
    AutoBitLinear, online    floats, which become code * mean(|weights|) when they are read

A code is -1, 0 or 1. Packed weights are uint8 [out / 4, in] with codes plus 1: bits 2i and 2i + 1
of row r are those of row r + i * out / 4. A matrix has one scale, which is rounded to float16 (an
error of at most 2^-11). Scales that are stored as bfloat16 and multiply are exact.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.kernels.linear.weight_formats import FORMATS
from kvboost_edge.models.config.quant_config import PackedLayout
from kvboost_edge.models.weights.safetensors_source import SafetensorsSource
from kvboost_edge.models.weights.weight_source import QuantRows, StoredRows, WrappedSource

__all__ = ["BitNetSource"]

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

_KIND = "int2-g256"
_SCALE = "_scale"
_LAYER = "model.layers."
_PER_BYTE = 4
_LEAST_MEAN = 1e-5  # lower limit of mean(|weights|), as in transformers
_CHUNK_FLOATS = 1 << 20


class BitNetSource(WrappedSource):
    """`WeightSource` that presents the weights of BitNet's linear layers as a quantized format."""

    def __init__(self, files: SafetensorsSource, layout: PackedLayout) -> None:
        """Initialize the source, which closes `files` on an error."""
        super().__init__(files)
        self._files = files
        self._layout = layout
        self._scales: dict[str, np.float32] = {}
        self._lock = threading.Lock()
        try:
            self._ternary = self._online() if layout.is_online else self._packed()
        except BaseException:
            files.__exit__(None, None, None)
            raise

    def names(self) -> set[str]:
        hidden = set() if self._layout.is_online else {name + _SCALE for name in self._ternary}
        return self._files.names() - hidden

    def shape(self, name: str) -> tuple[int, ...]:
        return self._ternary.get(name) or self._files.shape(name)

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> Floats:
        if name not in self._ternary:
            return self._files.rows(name, start, stop)
        codes = self._codes(name, start, self._ternary[name][0] if stop is None else stop)
        return (codes.astype(np.float32) - np.float32(1)) * self._scale_of(name)

    def kind(self, name: str) -> str | None:
        return _KIND if name in self._ternary else self._files.kind(name)

    def type_of(self, name: str) -> str:
        return "BitNet" if name in self._ternary else self._files.type_of(name)

    def quant_rows(self, name: str, start: int, stop: int) -> QuantRows:
        codes = self._codes(name, start, stop)
        scale = self._scale_of(name)
        limits = np.finfo(np.float16)
        if not limits.smallest_normal <= scale <= limits.max:
            raise self._error(
                name,
                f"has a scale of {scale:g}, which is outside the range of float16; use "
                "weights='bf16'",
            )
        count = -(-codes.shape[1] // FORMATS[_KIND].scale_inputs)
        return QuantRows(_KIND, codes, np.full((len(codes), count), scale, np.float16))

    def stored_rows(self, name: str) -> StoredRows:
        if name in self._ternary:
            raise self._error(name, "is packed; single rows cannot be read from it")
        return self._files.stored_rows(name)

    def _online(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the float matrices that become ternary."""
        names = [name for name in self._files.names() if name.startswith(_LAYER)]
        shapes = {name: self._files.shape(name) for name in names if name.endswith(".weight")}
        return {name: shape for name, shape in shapes.items() if len(shape) == 2}

    def _packed(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the packed matrices."""
        found: dict[str, tuple[int, ...]] = {}
        names = self._files.names()
        for scale in sorted(name for name in names if name.endswith(f".weight{_SCALE}")):
            name = scale.removesuffix(_SCALE)
            dtype = self._files.type_of(name)
            if dtype != "U8":
                raise self._error(
                    name,
                    f"has a scale, but is {dtype} instead of U8; only packed weights are supported",
                )
            rows, inputs = self._files.stored_shape(name, "U8", 2)
            found[name] = (_PER_BYTE * rows, inputs)
        if not found:
            raise ModelFormatError(
                "quantization_config: quant_method='bitnet' needs packed weights, but no tensor "
                "has a weight_scale; for float weights, set linear_class='autobitlinear' and "
                "quantization_mode='online'"
            )
        return found

    def _codes(self, name: str, start: int, stop: int) -> Bytes:
        """Return rows [start, stop) as codes from 0 to 2."""
        count, inputs = self._ternary[name]
        if not 0 <= start < stop <= count:
            raise self._error(name, f"has {count} rows; rows {start} to {stop} are out of range")
        if self._layout.is_online:
            inverse = np.float32(1) / self._scale_of(name)
            signs = np.rint(self._files.rows(name, start, stop) * inverse).clip(-1, 1)
            shifted: Bytes = (signs + np.float32(1)).astype(np.uint8)
            return shifted
        step = count // _PER_BYTE
        parts = []
        for part in range(start // step, -(-stop // step)):
            first = max(start - part * step, 0)
            rows = min(stop - part * step, step) - first
            stored = self._files.stored_span(name, "U8", 2, first * inputs, rows * inputs)
            parts.append(stored.reshape(rows, inputs) >> np.uint8(2 * part) & np.uint8(3))
        codes = np.concatenate(parts)
        if (codes == 3).any():
            raise self._error(name, "contains code 3; ternary weights have codes 0 to 2")
        return codes

    def _scale_of(self, name: str) -> np.float32:
        """Return the factor of the codes of a matrix."""
        with self._lock:
            if name not in self._scales:
                self._scales[name] = self._read_scale(name)
            return self._scales[name]

    def _read_scale(self, name: str) -> np.float32:
        if self._layout.is_online:
            return np.float32(max(self._mean(name), _LEAST_MEAN))
        shape = self._files.shape(name + _SCALE)
        if shape != (1,):
            raise self._error(name + _SCALE, f"has shape {shape}, expected (1,)")
        (stored,) = self._files.rows(name + _SCALE)
        if not 0 < stored < np.inf:
            raise self._error(name + _SCALE, f"is {stored:g}, expected a positive number")
        return np.float32(1) / stored if self._layout.divides else np.float32(stored)

    def _mean(self, name: str) -> float:
        """Return the mean of |weights|."""
        count, inputs = self._ternary[name]
        step = max(1, _CHUNK_FLOATS // inputs)
        starts = range(0, count, step)
        total = sum(
            float(np.abs(self._files.rows(name, at, min(count, at + step))).sum(dtype=np.float64))
            for at in starts
        )
        return total / (count * inputs)

    def _error(self, name: str, what: str) -> ModelFormatError:
        return ModelFormatError(f"{self._files.file_of(name)}: tensor {name!r} {what}")
