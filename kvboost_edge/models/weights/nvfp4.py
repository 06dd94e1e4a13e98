"""Weight source for NVFP4 checkpoints of ModelOpt and compressed-tensors that keeps their codes.

    ModelOpt             weight uint8, weight_scale, weight_scale_2     code * scale * scale_2
    compressed-tensors   weight_packed uint8, weight_scale, weight_global_scale
                                                                        code * scale / global_scale

A byte [out, in / 2] contains two 4-bit floats (E2M1), the first one in the low nibble. Scales are
8-bit floats (E4M3) [out, in / 16]. The factor of a tensor, or its reciprocal, is one float32.
Scales of activations and of a KV cache are not used.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.kernels.linear.weight_formats import E2M1
from kvboost_edge.models.config.quant_config import INSTEAD, PackedLayout
from kvboost_edge.models.weights.nvfp4_parts import (
    HALF_SCALES,
    SCALE,
    UNUSED_SCALES,
    bad_scales,
    weight_factor,
)
from kvboost_edge.models.weights.safetensors_source import SafetensorsSource
from kvboost_edge.models.weights.split_experts import expert_rows
from kvboost_edge.models.weights.weight_source import QuantRows, StoredRows, WrappedSource

__all__ = ["Nvfp4Source"]

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

_KIND = "nvfp4"
_PER_SCALE = 16
# Endings of scales of a tensor with all experts, and a shape that such a tensor may have.
_OF_FUSED = ("_weight_scale", SCALE)
_FUSED_SHAPE = (1, 2, 1)
_GROUP = 32  # the inputs of a matrix must be a multiple of this


class Nvfp4Source(WrappedSource):
    """`WeightSource` that presents the parts of a quantized matrix as "m.weight" [out, in]."""

    def __init__(
        self, files: SafetensorsSource, layout: PackedLayout, *, may_be_float: bool = False
    ) -> None:
        """Initialize the source, which closes `files` on an error.

        Args:
            files: source of the files.
            layout: layout of the codes.
            may_be_float: accept files without packed matrices, such as those of an MTP head, which
                usually stays a float.
        """
        super().__init__(files)
        self._files = files
        self._divides = layout.divides
        self._codes_in, self._factor_in = (
            (".weight_packed", ".weight_global_scale")
            if layout.divides
            else (".weight", ".weight_scale_2")
        )
        self._shapes: dict[str, tuple[int, int]] = {}
        self._factors: dict[str, np.float32] = {}
        self._lock = threading.Lock()
        try:
            names = files.names()
            modules = [name.removesuffix(SCALE) for name in names if name.endswith(SCALE)]
            self._refuse_fused(names)
            self._shapes = {f"{module}.weight": self._check(module) for module in sorted(modules)}
            if not modules and not may_be_float:
                directory = files.file_of(min(names)).parent
                raise ModelFormatError(
                    f"{directory}: quantization_config declares NVFP4 weights, but no tensor is "
                    f"named '*{SCALE}'; if the weights are floats, remove quantization_config"
                )
        except BaseException:
            files.__exit__(None, None, None)
            raise

    def names(self) -> set[str]:
        hidden = {
            _module(name) + part
            for name in self._shapes
            for part in (SCALE, self._codes_in, self._factor_in)
        }
        found = {name for name in self._files.names() if not name.endswith(UNUSED_SCALES)}
        return found - hidden | set(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes.get(name) or self._files.shape(name)

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> Floats:
        if name not in self._shapes:
            return self._files.rows(name, start, stop)
        found = self.quant_rows(name, start, self._shapes[name][0] if stop is None else stop)
        weights = np.take(np.array(E2M1, np.float32), found.codes)
        weights *= found.scales.astype(np.float32).repeat(_PER_SCALE, axis=1)
        return weights * np.float32(found.factor)

    def kind(self, name: str) -> str | None:
        return _KIND if name in self._shapes else self._files.kind(name)

    def type_of(self, name: str) -> str:
        return "NVFP4" if name in self._shapes else self._files.type_of(name)

    def file_of(self, name: str) -> Path:
        return self._files.file_of(_module(name) + self._codes_in if name in self._shapes else name)

    def quant_rows(self, name: str, start: int, stop: int) -> QuantRows:
        if name not in self._shapes:
            return self._files.quant_rows(name, start, stop)
        count, inputs = self._shapes[name]
        if not 0 <= start < stop <= count:
            raise self._error(name, f"has {count} rows; rows {start} to {stop} are out of range")
        module = _module(name)
        packed = self._span(module + self._codes_in, "U8", start, stop, inputs // 2)
        scales = self._span(module + SCALE, "F8_E4M3", start, stop, inputs // _PER_SCALE)
        if bad_scales(scales) is not None:
            raise self._error(
                module + SCALE,
                f"has negative or NaN scales in rows {start} to {stop - 1}; the weights are "
                "damaged",
            )
        codes = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=2)
        halves = np.take(HALF_SCALES, scales)
        factor = float(self._factor_of(module))
        return QuantRows(_KIND, codes.reshape(stop - start, inputs), halves, factor=factor)

    def stored_rows(self, name: str) -> StoredRows:
        if name in self._shapes:
            raise self._error(
                name,
                "is packed, so single rows cannot be read from it; use a checkpoint that stores it "
                "as floats",
            )
        return self._files.stored_rows(name)

    def _span(self, name: str, dtype: str, start: int, stop: int, width: int) -> Bytes:
        found: Bytes = self._files.stored_span(
            name, dtype, 2, start * width, (stop - start) * width
        )
        return found.reshape(stop - start, width)

    def _refuse_fused(self, names: Iterable[str]) -> None:
        """Refuse tensors that contain the scales of all experts of a layer."""
        for name in names:
            module = next((name.removesuffix(end) for end in _OF_FUSED if name.endswith(end)), "")
            if module and expert_rows(f"{module}.weight", _FUSED_SHAPE):
                raise self._error(
                    name,
                    "has the scales of all experts; NVFP4 experts must be stored one by one, with "
                    f"names such as 'experts.0.down_proj{SCALE}'; {INSTEAD}",
                )

    def _check(self, module: str) -> tuple[int, int]:
        """Check that the parts of a matrix match, and return its shape."""
        rows, pairs = self._files.stored_shape(module + self._codes_in, "U8", 2)
        inputs = 2 * pairs
        if inputs % _GROUP:
            raise self._error(
                module + self._codes_in,
                f"has {inputs} inputs; they must be a multiple of {_GROUP}; {INSTEAD}",
            )
        scales = self._files.stored_shape(module + SCALE, "F8_E4M3", 2)
        if scales != (rows, inputs // _PER_SCALE):
            raise self._error(
                module + SCALE, f"has shape {scales}, expected {(rows, inputs // _PER_SCALE)}"
            )
        if self._files.shape(module + self._factor_in) not in ((), (1,)):
            raise self._error(
                module + self._factor_in,
                f"has shape {self._files.shape(module + self._factor_in)}, expected one number",
            )
        return rows, inputs

    def _factor_of(self, module: str) -> np.float32:
        """Return the factor of the weights of a matrix."""
        with self._lock:
            if module not in self._factors:
                name = module + self._factor_in
                stored = self._files.scalar(name)
                factor = weight_factor(stored, divides=self._divides)
                if factor is None:
                    raise self._error(
                        name,
                        f"is {stored:g}, expected a positive number that keeps weights finite; the "
                        "weights are damaged",
                    )
                self._factors[module] = factor
            return self._factors[module]

    def _error(self, name: str, what: str) -> ModelFormatError:
        return ModelFormatError(f"{self.file_of(name)}: tensor {name!r} {what}")


def _module(name: str) -> str:
    return name.removesuffix(".weight")
