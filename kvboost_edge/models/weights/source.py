"""Where weights come from: the protocol of a checkpoint's tensors, read a piece at a time, and its safetensors form.

Names are those of the family in transformers ("model.layers.0.self_attn.q_proj.weight"); a source whose file has other
names or another order of rows maps them. Reading is safe from several threads.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.config.json_file import read_config_object
from kvboost_edge.models.weights.file_bytes import FileBytes
from kvboost_edge.models.weights.safetensors_check import TensorEntry, read_header, weight_files

__all__ = ["QuantRows", "SafetensorsSource", "WeightSource", "open_source"]

Floats = npt.NDArray[np.float32]
_DTYPES: dict[str, npt.DTypeLike] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
_STORED: dict[str, npt.DTypeLike] = {"F16": np.float16, "I32": np.int32}


class QuantRows(NamedTuple):
    """Rows of a tensor that is stored quantized, in groups of 32 inputs of one row; the last group may be short.

    kind    "int8": weight = scale * (code - 128); "int4": scale * (code - 8); "int4m": scale * code - minimum
    codes   uint8 [rows, inputs]: 0..255 for int8, else 0..15
    scales  float16 [rows, groups];  minima: the same for "int4m", else None
    """

    kind: str
    codes: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float16]
    minima: npt.NDArray[np.float16] | None = None


class WeightSource(Protocol):
    """The tensors of a checkpoint. Unknown names and tensors that cannot be read raise ModelFormatError.

    Sources are context managers; nothing they returned depends on the source being open. Files are read, not mapped:
    one that is cut short meanwhile is such an error too.
    """

    def __enter__(self) -> WeightSource: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def names(self) -> set[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> Floats:
        """Rows [start, stop) along the first axis as float32, quantized tensors too."""
        ...

    def kind(self, name: str) -> str | None:
        """The packed format that holds the tensor as it is stored ("int8", "int4", "int4m"); None: it is float."""
        ...

    def type_of(self, name: str) -> str:
        """What the checkpoint calls the form it stores the tensor in, such as "Q4_K" or "BF16", for messages."""
        ...

    def quant_rows(self, name: str, start: int, stop: int) -> QuantRows:
        """Rows of a tensor whose `kind` is not None."""
        ...

    def file_of(self, name: str) -> Path:
        """The file a tensor is in, for messages."""
        ...


def open_source(model_path: Path | str) -> WeightSource:
    """The source for a model: a GGUF file, or a directory of safetensors (float, AWQ or GPTQ)."""
    path = Path(model_path)
    if path.is_file():
        from kvboost_edge.models.gguf.source import GgufSource

        return GgufSource(path)
    config = read_config_object(path)
    if config.get("quantization_config"):
        from kvboost_edge.models.weights.awq_gptq import PackedQuantSource

        return PackedQuantSource(path, config)
    return SafetensorsSource(path)


class SafetensorsSource:
    """The float tensors of a model directory, as float32. A context manager; headers are checked on opening."""

    def __init__(self, model_dir: Path | str) -> None:
        self._stack = contextlib.ExitStack()
        self._entries: dict[str, tuple[TensorEntry, FileBytes]] = {}
        try:
            for path in weight_files(Path(model_dir)):
                file = FileBytes(path)
                self._stack.callback(file.close)
                self._entries.update((entry.name, (entry, file)) for entry in read_header(path))
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> SafetensorsSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def names(self) -> set[str]:
        return set(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name)[0].shape

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> Floats:
        """Rows [start, stop) along the first axis, converted to float32 (a copy)."""
        entry, file = self._entry(name)
        width = int(np.prod(entry.shape[1:], dtype=np.int64))
        stop = entry.shape[0] if stop is None else stop
        stored = np.empty((stop - start) * width, dtype=_DTYPES[entry.dtype])
        file.read_into(stored, entry.start + start * width * stored.itemsize)
        if entry.dtype == "BF16":
            values = (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
        else:
            values = stored.astype(np.float32, copy=False)
        return values.reshape(stop - start, *entry.shape[1:])

    def kind(self, name: str) -> str | None:
        """None: safetensors hold floats."""
        self._find(name)
        return None

    def type_of(self, name: str) -> str:
        return self._find(name)[0].dtype

    def quant_rows(self, name: str, start: int, stop: int) -> QuantRows:
        raise ModelFormatError(f"tensor {name!r} is not stored quantized")

    def stored_shape(self, name: str, dtype: str, num_dims: int) -> tuple[int, ...]:
        """Shape of a tensor. ModelFormatError unless it is of that dtype ("I32" or "F16") and number of dimensions."""
        entry, file = self._find(name)
        if entry.dtype != dtype or len(entry.shape) != num_dims:
            raise ModelFormatError(
                f"{file.path}: tensor {name!r} is {entry.dtype} {entry.shape}, expected {dtype}, {num_dims} dimensions"
            )
        return entry.shape

    def stored(self, name: str, dtype: str, num_dims: int) -> npt.NDArray[Any]:
        """A whole tensor as it is in the file, checked as `stored_shape` does."""
        values = np.empty(self.stored_shape(name, dtype, num_dims), dtype=_STORED[dtype])
        entry, file = self._find(name)
        file.read_into(values, entry.start)
        return values

    def file_of(self, name: str) -> Path:
        return self._find(name)[1].path

    def _entry(self, name: str) -> tuple[TensorEntry, FileBytes]:
        found = self._find(name)
        if found[0].dtype not in _DTYPES:
            raise ModelFormatError(
                f"tensor {name!r} has dtype {found[0].dtype}; the native runner reads {', '.join(_DTYPES)}"
            )
        return found

    def _find(self, name: str) -> tuple[TensorEntry, FileBytes]:
        found = self._entries.get(name)
        if found is None:
            raise ModelFormatError(f"the weight files lack tensor {name!r}")
        return found
