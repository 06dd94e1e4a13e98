"""What every form of weights is read as: the protocol of a checkpoint's tensors, read a piece at a
time.

Names are those of the family in transformers ("model.layers.0.self_attn.q_proj.weight"); a source
whose file has other names or another order of rows maps them. Reading is safe from several threads.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from kvboost_edge.host.file_memo import FileStamp

__all__ = ["QuantRows", "StoredRows", "WeightSource", "WeightSummary", "WrappedSource"]

Floats = npt.NDArray[np.float32]


class QuantRows(NamedTuple):
    """Rows of a tensor that is stored quantized, in groups of 32 inputs of one row; the last group
    may be short.

    Attributes:
        kind: "int8": weight = scale * (code - 128); "int4": scale * (code - 8); "int4-asym": scale
            * code - minimum "q4k", "q5k", "q6k": blocks of 256 inputs as GGUF files hold them,
            Q4_K, Q5_K and Q6_K "int4t": scale * table[code].
        codes: uint8 [rows, inputs]: 0..255 for int8, else 0..15; of blocks their bytes [rows, bytes
            of a row].
        scales (float16 [rows, groups];): minima: the same for "int4-asym", else None. Of blocks:
            all float16 numbers in them.
        table: int8 [16] for "int4t", else None.
    """

    kind: str
    codes: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float16]
    minima: npt.NDArray[np.float16] | None = None
    table: npt.NDArray[np.int8] | None = None


class StoredRows(NamedTuple):
    """Where the rows of a tensor lie in their file, one behind the other: row i begins at byte
    start + i * row_bytes.

    `stamp`: of the file the source has open.  `type`: as `WeightSource.type_of`
    """

    path: Path
    stamp: FileStamp
    type: str
    start: int
    row_bytes: int


class WeightSource(Protocol):
    """The tensors of a checkpoint. Unknown names and tensors that cannot be read raise
    ModelFormatError.

    Sources are context managers; nothing they returned depends on the source being open. Files are
    read, not mapped: one that is cut short meanwhile is such an error too.
    """

    def __enter__(self) -> WeightSource: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def names(self) -> set[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> Floats:
        """Rows [start, stop) along the first axis as float32, quantized tensors too."""
        ...

    def kind(self, name: str) -> str | None:
        """The packed format that holds the tensor as it is stored (as `QuantRows.kind`); None: it
        is float.
        """
        ...

    def type_of(self, name: str) -> str:
        """What the checkpoint calls the form it stores the tensor in, such as "Q4_K" or "BF16", for
        messages.
        """
        ...

    def quant_rows(self, name: str, start: int, stop: int) -> QuantRows:
        """Rows of a tensor whose `kind` is not None."""
        ...

    def file_of(self, name: str) -> Path:
        """The file a tensor is in, for messages."""
        ...

    def stored_rows(self, name: str) -> StoredRows:
        """Where its rows are, for who reads them alone. ModelFormatError where they are not stored
        as rows, one behind the other and in this order.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class WeightSummary:
    """What the weight files hold: `nbytes` of tensor data, `dtypes` with the number of parameters
    in each.
    """

    files: tuple[Path, ...]
    num_params: int
    nbytes: int
    dtypes: dict[str, int]


class WrappedSource:
    """What sources have in common that read another one's tensors under other names, or in another
    order.

    It opens and closes that one; a tensor has the kind and the file of the one it is read from, see
    `_stored_as`. The rest of `WeightSource` is for who inherits.
    """

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def __enter__(self) -> Self:
        self._source.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._source.__exit__(kind, error, trace)

    def kind(self, name: str) -> str | None:
        return self._source.kind(self._stored_as(name))

    def type_of(self, name: str) -> str:
        return self._source.type_of(self._stored_as(name))

    def file_of(self, name: str) -> Path:
        return self._source.file_of(self._stored_as(name))

    def _stored_as(self, name: str) -> str:
        """What the source calls the tensor that holds this one."""
        return name
