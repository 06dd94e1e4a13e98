"""Weight source for a directory with safetensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.weights.file_bytes import FileBytes
from kvboost_edge.models.weights.modalities import counted_parts, text_names
from kvboost_edge.models.weights.safetensors_check import TensorEntry, read_header, weight_files
from kvboost_edge.models.weights.split_experts import ExpertRows, expert_rows
from kvboost_edge.models.weights.weight_source import QuantRows, StoredRows, from_bfloat16

__all__ = ["SafetensorsSource"]

Floats = npt.NDArray[np.float32]
_Entries = dict[str, tuple[TensorEntry, FileBytes]]
_DTYPES: dict[str, npt.DTypeLike] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
_STORED: dict[str, npt.DTypeLike] = {
    "F16": np.float16,
    "I32": np.int32,
    "U8": np.uint8,
    "F8_E4M3": np.uint8,  # the bits
}


class SafetensorsSource:
    """`WeightSource` for the float tensors in a model directory.

    Headers are checked when the source is opened. For a composite model, it contains the tensors of
    the language model, under the names that they have in the language model alone. It may also
    contain only the tensors of an MTP head.

    Attributes:
        parts: number of tensors in each part other than the language model.
    """

    def __init__(
        self,
        model_dir: Path | str,
        *,
        select: Callable[[Iterable[str]], Mapping[str, str]] = text_names,
        split_experts: bool = True,
    ) -> None:
        """Open the files.

        Args:
            model_dir: directory of the model.
            select: function of all tensor names that returns the used ones, and the name that each
                of them has here. By default, they are those of the language model.
            split_experts: present the matrices of each expert as separate tensors, even if the
                files store them as one tensor.
        """
        self._stack = contextlib.ExitStack()
        self._entries: _Entries = {}
        try:
            for path in weight_files(Path(model_dir)):
                file = FileBytes(path)
                self._stack.callback(file.close)
                self._entries.update((entry.name, (entry, file)) for entry in read_header(path))
            self.parts = counted_parts(self._entries)
            self._entries = _selected(self._entries, select(self._entries))
            if split_experts:
                self._entries = _with_experts(self._entries)
            if (
                "embed_tokens.weight" in self._entries
            ):  # saved without its head, as embedding models are
                self._entries = {_with_prefix(name): found for name, found in self._entries.items()}
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> SafetensorsSource:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def names(self) -> set[str]:
        return set(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name)[0].shape

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> Floats:
        """Return rows [start, stop) of the first axis, copied and converted to float32."""
        entry, file = self._entry(name)
        width = int(np.prod(entry.shape[1:], dtype=np.int64))
        stop = entry.shape[0] if stop is None else stop
        stored = np.empty((stop - start) * width, dtype=_DTYPES[entry.dtype])
        file.read_into(stored, entry.start + start * width * stored.itemsize)
        if entry.dtype == "BF16":
            values = from_bfloat16(stored)
        else:
            values = stored.astype(np.float32, copy=False)
        return values.reshape(stop - start, *entry.shape[1:])

    def scalar(self, name: str) -> float:
        """Return the number in a float tensor of shape () or (1,)."""
        entry, file = self._entry(name)
        stored = np.empty(1, dtype=_DTYPES[entry.dtype])
        file.read_into(stored, entry.start)
        if entry.dtype == "BF16":
            stored = from_bfloat16(stored)
        return float(stored[0])

    def kind(self, name: str) -> str | None:
        """Return None, because the tensors are floats."""
        self._find(name)
        return None

    def type_of(self, name: str) -> str:
        return self._find(name)[0].dtype

    def quant_rows(self, name: str, start: int, stop: int) -> QuantRows:
        raise ModelFormatError(f"tensor {name!r} is not quantized")

    def stored_shape(self, name: str, dtype: str, num_dims: int) -> tuple[int, ...]:
        """Return the shape of a tensor after checking its type.

        Args:
            name: name of the tensor.
            dtype: required dtype, "I32", "F16", "U8" or "F8_E4M3".
            num_dims: required number of dimensions.

        Raises:
            ModelFormatError: the tensor has another dtype or number of dimensions.
        """
        entry, file = self._find(name)
        if entry.dtype != dtype or len(entry.shape) != num_dims:
            raise ModelFormatError(
                f"{file.path}: tensor {name!r} is {entry.dtype} {entry.shape}, expected {dtype}, "
                f"{num_dims} dimensions"
            )
        return entry.shape

    def stored(self, name: str, dtype: str, num_dims: int) -> npt.NDArray[Any]:
        """Return a whole tensor in its stored dtype, checked like `stored_shape`."""
        shape = self.stored_shape(name, dtype, num_dims)
        return self.stored_span(
            name, dtype, num_dims, 0, int(np.prod(shape, dtype=np.int64))
        ).reshape(shape)

    def stored_span(
        self, name: str, dtype: str, num_dims: int, first: int, count: int
    ) -> npt.NDArray[Any]:
        """Return `count` elements in the file's order, starting at index `first`.

        The tensor is checked like `stored_shape`.
        """
        self.stored_shape(name, dtype, num_dims)
        values = np.empty(count, dtype=_STORED[dtype])
        entry, file = self._find(name)
        file.read_into(values, entry.start + first * values.itemsize)
        return values

    def file_of(self, name: str) -> Path:
        return self._find(name)[1].path

    def stored_rows(self, name: str) -> StoredRows:
        entry, file = self._entry(name)
        if len(entry.shape) != 2 or not entry.shape[0]:
            raise ModelFormatError(
                f"{file.path}: tensor {name!r} has shape {entry.shape}; single rows cannot be "
                "read from it"
            )
        row_bytes = (entry.stop - entry.start) // entry.shape[0]
        return StoredRows(file.path, file.stamp, entry.dtype, entry.start, row_bytes)

    def _entry(self, name: str) -> tuple[TensorEntry, FileBytes]:
        found = self._find(name)
        if found[0].dtype not in _DTYPES:
            raise ModelFormatError(
                f"tensor {name!r} has dtype {found[0].dtype}; the native runner reads "
                f"{', '.join(_DTYPES)}"
            )
        return found

    def _find(self, name: str) -> tuple[TensorEntry, FileBytes]:
        found = self._entries.get(name)
        if found is None:
            raise ModelFormatError(f"the weight files lack tensor {name!r}")
        return found


def _selected(entries: _Entries, names: Mapping[str, str]) -> _Entries:
    """Return the tensors in `names` under their new names."""
    found: _Entries = {}
    for name, to in names.items():
        if to in found:
            raise ModelFormatError(f"{entries[name][1].path}: tensor {name!r} duplicates {to!r}")
        found[to] = entries[name]
    return found


def _with_experts(entries: _Entries) -> _Entries:
    """Split each tensor that contains all experts into tensors of the single experts."""
    found: _Entries = {}
    for name, (entry, file) in entries.items():
        pieces = expert_rows(name, entry.shape) or [ExpertRows(name, 0, entry.shape)]
        for piece in pieces:
            if piece.name in found or (piece.name != name and piece.name in entries):
                raise ModelFormatError(f"{file.path}: tensor {name!r} duplicates {piece.name!r}")
            start, stop = piece.bytes_in(entry.start, entry.stop, entry.shape)
            found[piece.name] = TensorEntry(piece.name, entry.dtype, piece.shape, start, stop), file
    return found


def _with_prefix(name: str) -> str:
    return name if name.startswith("lm_head.") else f"model.{name}"
