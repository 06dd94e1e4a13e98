"""Protocol of a checkpoint's tensors, implemented for every form of weights.

Names are those of the family in transformers ("model.layers.0.self_attn.q_proj.weight"). A source
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
    """Rows of a quantized tensor, in groups of 32 inputs of one row; the last group may be short.

    Attributes:
        kind: "int8": weight = scale * (code - 128). "int4": scale * (code - 8). "int4-asym": scale
            * code - minimum. "q4k", "q5k", "q6k": blocks of 256 inputs in the layout of GGUF's
            Q4_K, Q5_K and Q6_K. "int4t": scale * table[code].
        codes: uint8 [rows, inputs]: 0..255 for int8, else 0..15. For blocks: their bytes, [rows,
            bytes of a row].
        scales: float16 [rows, groups]. For blocks: all float16 numbers in them.
        minima: float16 [rows, groups] for "int4-asym", else None.
        table: int8 [16] for "int4t", else None.
    """

    kind: str
    codes: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float16]
    minima: npt.NDArray[np.float16] | None = None
    table: npt.NDArray[np.int8] | None = None


class StoredRows(NamedTuple):
    """Location of a tensor's consecutive rows: row i begins at byte start + i * row_bytes of the
    file.

    Attributes:
        stamp: identity of the file that the source has open.
        type: storage type, as `WeightSource.type_of`.
    """

    path: Path
    stamp: FileStamp
    type: str
    start: int
    row_bytes: int


class WeightSource(Protocol):
    """Tensors of a checkpoint.

    Unknown names and tensors that cannot be read raise ModelFormatError. Sources are context
    managers. Results stay valid after the source is closed. Files are read, not mapped, so a
    truncated file raises that error too.
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
        """Return rows [start, stop) along the first axis as float32, also of quantized tensors."""
        ...

    def kind(self, name: str) -> str | None:
        """Return the packed format that represents the tensor as stored, see `QuantRows.kind`;
        None: float.
        """
        ...

    def type_of(self, name: str) -> str:
        """Return the checkpoint's name of the storage type, such as "Q4_K" or "BF16", for
        messages.
        """
        ...

    def quant_rows(self, name: str, start: int, stop: int) -> QuantRows:
        """Return rows of a tensor whose `kind` is not None."""
        ...

    def file_of(self, name: str) -> Path:
        """Return the file of a tensor, for messages."""
        ...

    def stored_rows(self, name: str) -> StoredRows:
        """Return the location of a tensor's rows in the file.

        Raises ModelFormatError unless they are stored as consecutive rows in this order.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class WeightSummary:
    """Content of the weight files.

    Attributes:
        nbytes: bytes of tensor data.
        dtypes: number of parameters in each dtype.
    """

    files: tuple[Path, ...]
    num_params: int
    nbytes: int
    dtypes: dict[str, int]


class WrappedSource:
    """Base of sources that read another source's tensors under other names, or in another order.

    It opens and closes the other source. A tensor has the kind and the file of the tensor that it
    is read from, see `_stored_as`. Subclasses implement the rest of `WeightSource`.
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
        """Return the source's name of the tensor that holds this one."""
        return name
