"""Tables with a row per token of which few rows are needed, such as Gemma 4's per-layer embeddings.

A table is not packed. It stays in the model's file, and rows are read when their tokens occur. The
file is read, not memory-mapped. Truncation therefore raises an error instead of killing the
process, and pages do not count as memory of this process.

A cached row of 5 KB takes 2.5 us (with a mapping 1.5 us, or 12 us on first touch). From disk, it
takes 75 us, or 14 us if all rows are announced first. Types without a kernel (IQ1, IQ2, IQ3, NVFP4
and ternary types) are converted by NumPy, which takes 35 to 100 us for a row of 8,960 weights.
"""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvboost_edge.errors import ModelFormatError, RequestError
from kvboost_edge.kernels.block_rows import DECODED, decode_rows
from kvboost_edge.models.weights.file_bytes import FileBytes
from kvboost_edge.models.weights.weight_source import StoredRows, WeightSource

__all__ = ["RowTable"]

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int64]

_AT_ONCE = 1 << 14  # weights that NumPy converts at once; more leave the L2 cache


class CheckpointFiles(Protocol):
    """Part of `Checkpoint` that a table needs."""

    def open_source(self) -> WeightSource: ...

    def fingerprint(self) -> str: ...

    def changed_files(self) -> list[str]: ...


class RowTable:
    """Rows of one tensor, which any number of threads can read on demand."""

    def __init__(self, file: FileBytes, stored: StoredRows, num_rows: int, width: int) -> None:
        self.num_rows = num_rows
        self.width = width
        self._file = file
        self._stored = stored

    @classmethod
    def open(cls, model: CheckpointFiles, tensor: str, rows: int, width: int) -> RowTable:
        """Open a tensor [rows, width].

        Args:
            model: the checkpoint.
            tensor: name of the tensor.
            rows: number of rows, one per token.
            width: number of weights in a row.

        Raises:
            ModelFormatError: the shape is wrong, single rows cannot be read, or a file changed
                since the fingerprint was computed.
        """
        model.fingerprint()  # computed on first use, then cached
        with model.open_source() as source:
            stored = source.stored_rows(tensor)
            shape = source.shape(tensor)
        if shape != (rows, width):
            raise ModelFormatError(
                f"{stored.path}: tensor {tensor!r} has shape {shape}, expected {(rows, width)}"
            )
        file = FileBytes(stored.path)
        changed = model.changed_files() or (
            [str(stored.path)] if file.stamp != stored.stamp else []
        )
        if changed:
            file.close()
            raise ModelFormatError(
                f"{changed[0]} changed since the model was opened; load it again when it is "
                "complete"
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
        """Return the rows of tokens as float32 [n, width].

        Args:
            token_ids: int64 [n].

        Raises:
            RequestError: an id is outside the table.
            ModelFormatError: see `read_into`.
        """
        out = np.empty((len(token_ids), self.width), dtype=np.float32)
        self.read_into(token_ids, out)
        return out

    def read_into(self, token_ids: Tokens, out: Floats) -> None:
        """Read the rows of tokens into `out`.

        Args:
            token_ids: int64 [n].
            out: float32 [n, width], contiguous.

        Raises:
            RequestError: an id is outside the table.
            ModelFormatError: the file was modified since it was opened. The contents of `out` are
                then undefined.
        """
        if not len(token_ids):
            return
        lowest = int(token_ids.min())
        highest = int(token_ids.max())
        if lowest < 0 or highest >= self.num_rows:
            wrong = lowest if lowest < 0 else highest
            raise RequestError(f"token {wrong} is outside the table's rows, 0..{self.num_rows - 1}")
        size = self._stored.row_bytes
        start = self._stored.start
        data = np.empty((len(token_ids), size), dtype=np.uint8)
        places = [start + size * token for token in token_ids.tolist()]
        if len(places) > 1:
            self._file.announce(places, size)
        for row, place in zip(data, places, strict=True):
            self._file.read_into(row, place)
        self._file.check_unchanged()
        _decode(self._stored, data, out)

    def close(self) -> None:
        self._file.close()


def _decode(stored: StoredRows, data: Bytes, out: Floats) -> None:
    if stored.type in DECODED:
        decode_rows(stored.type, data, out)
    elif stored.type == "F32":
        out[:] = data.view("<f4")
    elif stored.to_floats is not None:
        step = max(1, _AT_ONCE // out.shape[1])
        for start in range(0, len(data), step):
            out[start : start + step] = stored.to_floats(data[start : start + step])
    else:
        np.left_shift(data.view("<u2"), np.uint32(16), out=out.view(np.uint32), dtype=np.uint32)
