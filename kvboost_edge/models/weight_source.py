"""Tensors of a checkpoint, read a piece at a time: safetensors files by mmap, pages given back after each tensor."""

from __future__ import annotations

import contextlib
import mmap
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np
import numpy.typing as npt

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.safetensors_check import TensorEntry, read_header, weight_files

__all__ = ["SafetensorsSource"]

Floats = npt.NDArray[np.float32]
_DTYPES: dict[str, npt.DTypeLike] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


class SafetensorsSource:
    """The float tensors of a model directory, as float32. A context manager; headers are checked on opening."""

    def __init__(self, model_dir: Path | str) -> None:
        self._stack = contextlib.ExitStack()
        self._entries: dict[str, tuple[TensorEntry, mmap.mmap]] = {}
        try:
            for path in weight_files(Path(model_dir)):
                entries = read_header(path)
                mapped = _map(self._stack, path)
                self._entries.update((entry.name, (entry, mapped)) for entry in entries)
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
        entry, mapped = self._entry(name)
        width = int(np.prod(entry.shape[1:], dtype=np.int64))
        stop = entry.shape[0] if stop is None else stop
        dtype = np.dtype(_DTYPES[entry.dtype])
        stored = np.frombuffer(mapped, dtype, (stop - start) * width, entry.start + start * width * dtype.itemsize)
        if entry.dtype == "BF16":
            values = (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
        else:
            values = stored.astype(np.float32)
        return values.reshape(stop - start, *entry.shape[1:])

    def release(self, name: str) -> None:
        """Give the pages of a tensor back to the system; they are read again if asked for."""
        entry, mapped = self._entry(name)
        if hasattr(mmap, "MADV_DONTNEED"):
            start = entry.start // mmap.PAGESIZE * mmap.PAGESIZE
            mapped.madvise(mmap.MADV_DONTNEED, start, entry.stop - start)

    def _entry(self, name: str) -> tuple[TensorEntry, mmap.mmap]:
        found = self._entries.get(name)
        if found is None:
            raise ModelFormatError(f"the weight files lack tensor {name!r}")
        if found[0].dtype not in _DTYPES:
            raise ModelFormatError(
                f"tensor {name!r} has dtype {found[0].dtype}; the native runner reads {', '.join(_DTYPES)}"
            )
        return found


def _map(stack: contextlib.ExitStack, path: Path) -> mmap.mmap:
    try:
        file: IO[bytes] = stack.enter_context(open(path, "rb"))  # noqa: SIM115 - the stack closes it
        return stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        raise ModelFormatError(f"{path} cannot be read: {error}") from error
