"""Weight source for 4-bit AWQ and GPTQ checkpoints that keeps their codes.

    weight[out, in] = scale[group, out] * (code - zero[group, out])

Each int32 word contains 8 nibbles, lowest first:

    AWQ ("gemm")  qweight int32 [in, out / 8], qzeros int32 [groups, out / 8]; the nibbles of a
                  word are columns 0 2 4 6 1 3 5 7
    GPTQ          qweight int32 [in / 8, out], nibbles along the inputs in order; qzeros int32
                  [groups, out / 8] in order, stored minus 1 ("gptq") or unchanged ("gptq_v2")
    both          scales float16 [groups, out]

A tensor becomes int4 if its zero points are all 8, which is exact. Otherwise it becomes int4-asym
with minimum = scale * zero, rounded to float16. The rounding error is at most scale * zero / 2048,
and equal for all weights of a group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.config.quant_config import GROUP, packed_layout
from kvboost_edge.models.weights.modalities import text_names
from kvboost_edge.models.weights.safetensors_source import SafetensorsSource
from kvboost_edge.models.weights.weight_source import QuantRows, StoredRows

__all__ = ["PackedQuantSource"]

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_PARTS = (".qweight", ".qzeros", ".scales", ".g_idx")
# Number of cached qweight and scales tensors: two for each of the up to four packed at once.
_KEPT = 8
_MIDDLE = 8  # zero point of a symmetric tensor


class PackedQuantSource:
    """`WeightSource` that presents "m.qweight" and related tensors as "m.weight" [out, in]."""

    def __init__(
        self,
        model_dir: Path | str,
        config: Mapping[str, Any],
        *,
        select: Callable[[Iterable[str]], Mapping[str, str]] = text_names,
    ) -> None:
        """Open the files. `select` is that of `SafetensorsSource`."""
        self._layout = packed_layout(config)
        self._files = SafetensorsSource(model_dir, select=select)
        # The files store rows as columns, so a tensor is read whole and cached while its rows are
        # used.
        self._whole = functools.lru_cache(maxsize=_KEPT)(self._files.stored)
        try:
            names = self._files.names()
            self._packed = {
                name.removesuffix(".qweight") for name in names if name.endswith(".qweight")
            }
            self._zeros: dict[str, Bytes] = {}
            self._shapes = {module: self._check(module) for module in sorted(self._packed)}
        except BaseException:
            self._files.__exit__(None, None, None)
            raise

    def __enter__(self) -> PackedQuantSource:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files.__exit__(kind, error, trace)

    def names(self) -> set[str]:
        """Return the tensor names.

        Biases that are all zero are left out, because some writers add them to layers without a
        bias.
        """
        found = {f"{module}.weight" for module in self._packed}
        for name in self._files.names():
            module, _, last = name.rpartition(".")
            if module in self._packed and (
                f".{last}" in _PARTS or (last == "bias" and not self._files.rows(name).any())
            ):
                continue
            found.add(name)
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        module = self._module(name)
        return self._files.shape(name) if module is None else self._shapes[module]

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> Floats:
        """Return rows [start, stop) as float32.

        Quantized rows are scale * (code - zero), without the rounding of int4-asym minima.
        """
        module = self._module(name)
        if module is None:
            return self._files.rows(name, start, stop)
        stop = self._shapes[module][0] if stop is None else stop
        codes, scales, zeros = self._read(module, start, stop)
        size = self._layout.group_size
        wide = np.repeat(scales.astype(np.float32), size, axis=1)[:, : codes.shape[1]]
        return wide * (
            codes.astype(np.float32) - np.repeat(zeros, size, axis=1)[:, : codes.shape[1]]
        )

    def kind(self, name: str) -> str | None:
        module = self._module(name)
        if module is None:
            return self._files.kind(name)
        return "int4" if (self._zeros_of(module) == _MIDDLE).all() else "int4-asym"

    def type_of(self, name: str) -> str:
        return (
            self._files.type_of(name) if self._module(name) is None else self._layout.method.upper()
        )

    def quant_rows(self, name: str, start: int, stop: int) -> QuantRows:
        module = self._module(name)
        if module is None:
            return self._files.quant_rows(name, start, stop)
        codes, scales, zeros = self._read(module, start, stop)
        times = self._layout.group_size // GROUP
        groups = codes.shape[1] // GROUP
        spread = np.repeat(scales, times, axis=1)[:, :groups]
        if self.kind(name) == "int4":
            return QuantRows("int4", codes, spread)
        minima = (scales.astype(np.float32) * zeros.astype(np.float32)).astype(np.float16)
        if not np.isfinite(minima).all():
            raise ModelFormatError(
                f"{self.file_of(name)}: tensor '{module}.scales' times the zero points exceeds the "
                "range of float16"
            )
        return QuantRows("int4-asym", codes, spread, np.repeat(minima, times, axis=1)[:, :groups])

    def file_of(self, name: str) -> Path:
        module = self._module(name)
        return self._files.file_of(name if module is None else f"{module}.qweight")

    def stored_rows(self, name: str) -> StoredRows:
        module = self._module(name)
        if module is not None:
            raise self._error(
                module, "qweight", "stores rows as columns; single rows cannot be read from it"
            )
        return self._files.stored_rows(name)

    def _module(self, name: str) -> str | None:
        module = name.removesuffix(".weight")
        return module if module != name and module in self._packed else None

    def _check(self, module: str) -> tuple[int, int]:
        """Check that the parts of a quantized tensor match, and return its shape [out, in]."""
        first, last = self._files.stored_shape(f"{module}.qweight", "I32", 2)
        awq = self._layout.method == "awq"
        inputs, outputs = (first, 8 * last) if awq else (8 * first, last)
        groups = -(-inputs // self._layout.group_size)
        if inputs % GROUP or outputs % 8:
            raise self._error(
                module,
                "qweight",
                f"has {inputs} inputs and {outputs} outputs; they must be multiples of 32 and 8",
            )
        for part, dtype, shape in (
            ("qzeros", "I32", (groups, outputs // 8)),
            ("scales", "F16", (groups, outputs)),
        ):
            found = self._files.stored_shape(f"{module}.{part}", dtype, 2)
            if found != shape:
                raise self._error(module, part, f"has shape {found}, expected {shape}")
        if not awq and f"{module}.g_idx" in self._files.names():
            order = self._files.stored(f"{module}.g_idx", "I32", 1)
            if not np.array_equal(order, np.arange(inputs) // self._layout.group_size):
                raise self._error(
                    module, "g_idx", "is not in order: act-order (desc_act) is not supported"
                )
        return outputs, inputs

    def _read(
        self, module: str, start: int, stop: int
    ) -> tuple[Bytes, npt.NDArray[np.float16], Bytes]:
        """Read rows [start, stop) of a quantized tensor.

        Returns:
            Codes [rows, in], scales [rows, groups] and zero points [rows, groups].
        """
        outputs = self._shapes[module][0]
        if not 0 <= start < stop <= outputs:
            raise self._error(
                module, "qweight", f"has {outputs} rows; rows {start} to {stop} are out of range"
            )
        qweight = self._whole(f"{module}.qweight", "I32", 2)
        scales = self._whole(f"{module}.scales", "F16", 2)[:, start:stop].T
        if self._layout.method == "awq":
            words = qweight[:, start // 8 : -(-stop // 8)]
            codes = _nibbles(words, _AWQ_ORDER)[:, start % 8 : start % 8 + stop - start].T
        else:
            nibbles = np.stack([_nibble(qweight[:, start:stop], i) for i in range(8)], axis=1)
            codes = nibbles.reshape(-1, stop - start).T
        return (
            np.array(codes, order="C"),
            np.array(scales, order="C"),
            self._zeros_of(module)[start:stop],
        )

    def _zeros_of(self, module: str) -> Bytes:
        """Return the zero points, uint8 [out, groups].

        They are cached because they are small and decide the format of the tensor.
        """
        known = self._zeros.get(module)
        if known is None:
            words = self._files.stored(f"{module}.qzeros", "I32", 2)
            zeros = _nibbles(words, _AWQ_ORDER if self._layout.method == "awq" else range(8)).T
            if self._layout.zero_offset and (zeros == 15).any():
                raise self._error(
                    module,
                    "qzeros",
                    "holds 15, which is ambiguous in this format (16 or 0)",
                )
            known = self._zeros[module] = np.ascontiguousarray(
                zeros + np.uint8(self._layout.zero_offset)
            )
        return known

    def _error(self, module: str, part: str, what: str) -> ModelFormatError:
        name = f"{module}.{part}"
        return ModelFormatError(f"{self._files.file_of(name)}: tensor {name!r} {what}")


def _nibble(words: npt.NDArray[np.int32], index: int) -> Bytes:
    return ((words >> np.int32(4 * index)) & np.int32(15)).astype(np.uint8)


def _nibbles(words: npt.NDArray[np.int32], order: tuple[int, ...] | range) -> Bytes:
    """Unpack nibbles: int32 [n, words] -> uint8 [n, 8 * words].

    Nibble i of a word, lowest first, becomes column order[i] of the word's eight columns.
    """
    codes = np.empty((*words.shape, 8), dtype=np.uint8)
    for index, column in enumerate(order):
        codes[:, :, column] = _nibble(words, index)
    return codes.reshape(len(words), -1)
