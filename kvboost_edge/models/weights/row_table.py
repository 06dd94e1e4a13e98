"""A table with a row for each token, such as Gemma 4's embeddings of the layers: far larger than
what is read of it.

The table is not packed, and the engine owns none of it: a row is read from the model's file when
its token comes. Reads go through the file, not through a mapping: a file that is cut short
meanwhile is an error then instead of the end of the process, and its pages never count as this
process's memory. Measured on rows of 5 KB: 2.5 us a row that the system keeps, where a mapping
takes 1.5 us, or 12 us at the first touch; from a disk 75 us one by one, 14 us when all are asked
for before the first is read.
"""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvboost_edge.errors import ModelFormatError, RequestError
from kvboost_edge.kernels.block_rows import DECODED, decode_rows
from kvboost_edge.models.weights.file_bytes import FileBytes
from kvboost_edge.models.weights.source import StoredRows, WeightSource

__all__ = ["ROW_TYPES", "RowTable"]

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int64]

ROW_TYPES = ("F32", "BF16", *DECODED)
"""The forms a table may be stored in: those of safetensors and GGUF that are decoded row by row."""


class CheckpointFiles(Protocol):
    """What it asks of a model; `Checkpoint` answers."""

    def open_source(self) -> WeightSource: ...

    def fingerprint(self) -> str: ...

    def changed_files(self) -> list[str]: ...


class RowTable:
    """The rows of one tensor, read when they are asked for, from any number of threads at once."""

    def __init__(self, file: FileBytes, stored: StoredRows, num_rows: int, width: int) -> None:
        self.num_rows = num_rows
        self.width = width
        self._file = file
        self._stored = stored

    @classmethod
    def open(cls, model: CheckpointFiles, tensor: str, rows: int, width: int) -> RowTable:
        """The tensor, which must have that many rows of that many weights, of a form in
        `ROW_TYPES`.

        ModelFormatError names what is otherwise, and a file that is no longer the one the model's
        fingerprint was taken of.
        """
        model.fingerprint()  # known already, but where nobody asked for it yet
        with model.open_source() as source:
            stored = source.stored_rows(tensor)
            shape = source.shape(tensor)
        if shape != (rows, width):
            raise ModelFormatError(
                f"{stored.path}: tensor {tensor!r} has shape {shape}, expected {(rows, width)}"
            )
        if stored.type not in ROW_TYPES:
            raise ModelFormatError(
                f"{stored.path}: tensor {tensor!r} has the type {stored.type}; rows are read alone "
                f"of {', '.join(ROW_TYPES)}"
            )
        file = FileBytes(stored.path)
        changed = model.changed_files() or (
            [str(stored.path)] if file.stamp != stored.stamp else []
        )
        if changed:
            file.close()
            raise ModelFormatError(
                f"{changed[0]} changed since the model was opened; load it when it is complete"
            )
        return cls(file, stored, rows, width)

    def __enter__(self) -> RowTable:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def rows(self, token_ids: Tokens) -> Floats:
        """float32 [n, width] of int64 [n]. RequestError for an id that has no row, else as
        `read_into`.
        """
        out = np.empty((len(token_ids), self.width), dtype=np.float32)
        self.read_into(token_ids, out)
        return out

    def read_into(self, token_ids: Tokens, out: Floats) -> None:
        """Fill out, float32 [n, width] and contiguous. ModelFormatError where the file was written
        to or cut short since it was opened; out holds nothing of use then.
        """
        if not len(token_ids):
            return
        lowest = int(token_ids.min())
        highest = int(token_ids.max())
        if lowest < 0 or highest >= self.num_rows:
            wrong = lowest if lowest < 0 else highest
            raise RequestError(f"token {wrong} has no row in a table of {self.num_rows}")
        size = self._stored.row_bytes
        start = self._stored.start
        data = np.empty((len(token_ids), size), dtype=np.uint8)
        places = [start + size * token for token in token_ids.tolist()]
        if len(places) > 1:
            self._file.announce(places, size)
        for row, place in zip(data, places, strict=True):
            self._file.read_into(row, place)
        self._file.check_unchanged()
        _decode(self._stored.type, data, out)

    def close(self) -> None:
        self._file.close()


def _decode(kind: str, data: Bytes, out: Floats) -> None:
    if kind in DECODED:
        decode_rows(kind, data, out)
    elif kind == "F32":
        out[:] = data.view("<f4")
    else:
        np.left_shift(data.view("<u2"), np.uint32(16), out=out.view(np.uint32), dtype=np.uint32)
