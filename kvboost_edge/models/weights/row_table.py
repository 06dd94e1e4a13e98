"""Table with a row for each token, such as Gemma 4's per-layer embeddings.

The table is far larger than the part that is read. So it is not packed, and the engine does not
hold it: a row is read from the model's file when its token arrives. Reads go through the file, not
a mapping. A file that is truncated meanwhile is then an error instead of the end of the process,
and its pages never count as this process's memory. Measured on rows of 5 KB: 2.5 us for a cached
row (1.5 us through a mapping, 12 us at the first touch); from a disk 75 us one by one, or 14 us if
all are requested before the first is read.
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
    """Interface of the model, implemented by `Checkpoint`."""

    def open_source(self) -> WeightSource: ...

    def fingerprint(self) -> str: ...

    def changed_files(self) -> list[str]: ...


class RowTable:
    """Rows of one tensor, read on demand from any number of threads at once."""

    def __init__(self, file: FileBytes, stored: StoredRows, num_rows: int, width: int) -> None:
        self.num_rows = num_rows
        self.width = width
        self._file = file
        self._stored = stored

    @classmethod
    def open(cls, model: CheckpointFiles, tensor: str, rows: int, width: int) -> RowTable:
        """Open the tensor, which must have this many rows and weights per row, and a type in
        `ROW_TYPES`.

        Raises ModelFormatError for another shape or type, or a file that changed since the model's
        fingerprint was taken.
        """
        model.fingerprint()  # usually known already
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
        """Return the rows of int64 [n] as float32 [n, width].

        Raises RequestError for an id without a row, and the errors of `read_into`.
        """
        out = np.empty((len(token_ids), self.width), dtype=np.float32)
        self.read_into(token_ids, out)
        return out

    def read_into(self, token_ids: Tokens, out: Floats) -> None:
        """Fill `out`, float32 [n, width] and contiguous.

        Raises ModelFormatError if the file was written or truncated since it was opened; the
        content of `out` is then undefined.
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
