"""Protocol of weight sources, which read the tensors of a checkpoint in pieces.

Tensor names are those of the family in transformers, such as
"model.layers.0.self_attn.q_proj.weight". If files have other names or another order of rows, their
source converts them. Reads are thread-safe.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from kvboost_edge.host.file_memo import FileStamp

__all__ = [
    "QuantRows",
    "StoredRows",
    "WeightSource",
    "WeightSummary",
    "WrappedSource",
    "from_bfloat16",
]

Floats = npt.NDArray[np.float32]


def from_bfloat16(bits: npt.NDArray[np.uint16]) -> Floats:
    """Convert the bits of bfloat16 numbers exactly to float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


class QuantRows(NamedTuple):
    """Rows of a quantized tensor, with one scale for each group of 32 inputs.

    In the formats whose names end with -g64, -g128 or -g256, that many inputs share a scale. The
    last group of a row may be shorter. These are the formats, by `kind`:

        "int8"                 weight = scale * (code - 128)
        "int4"                 weight = scale * (code - 8)
        "int4-asym"            weight = scale * code - minimum
        "int5"                 weight = scale * (code - 16)
        "int5-asym"            weight = scale * code - minimum
        "int4t"                weight = scale * table[code]
        "nvfp4"                weight = factor * scale * E2M1[code], a scale for 16 inputs
        "int2-g64", "int2-g256", "int1-g128"    weight = scale * (code - 1)
        "q2k" to "q6k"         blocks of 256 inputs in the layout of GGUF's Q2_K to Q6_K
        "iq1s" to "iq3s"       blocks of 256 inputs in the layout of GGUF's IQ1_S to IQ3_S

    Attributes:
        kind: packed format.
        codes: uint8 [rows, inputs], from 0 to 255 for int8, to 31 for int5, to 15 for int4 and
            nvfp4, and to 3 for int2; 0 or 2 for int1. For block formats, the bytes of the blocks,
            uint8 [rows, bytes of a row].
        scales: float16 [rows, scales]. For block formats, all float16 numbers in the blocks.
        minima: float16 [rows, groups] for "int4-asym" and "int5-asym", else None.
        table: int8 [16] for "int4t", else None.
        factor: factor of all weights, for "nvfp4".
    """

    kind: str
    codes: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float16]
    minima: npt.NDArray[np.float16] | None = None
    table: npt.NDArray[np.int8] | None = None
    factor: float = 1.0


class StoredRows(NamedTuple):
    """Location of the rows of a tensor in a file.

    Rows are contiguous: row i begins at byte start + i * row_bytes.

    Attributes:
        path: path of the file.
        stamp: stamp of the file when the source opened it.
        type: stored type, see `WeightSource.type_of`.
        start: byte offset of the first row.
        row_bytes: size of a row in bytes.
        to_floats: conversion of rows, uint8 [n, row_bytes], to float32 [n, weights]; None for
            floats.
    """

    path: Path
    stamp: FileStamp
    type: str
    start: int
    row_bytes: int
    to_floats: Callable[[npt.NDArray[np.uint8]], Floats] | None = None


class WeightSource(Protocol):
    """Tensors of a checkpoint.

    A source is a context manager, and its results stay valid after it is closed. Files are read,
    not memory-mapped. Unknown names, unreadable tensors and truncated files raise ModelFormatError.
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
        """Return rows [start, stop) of the first axis as float32, dequantized if necessary."""
        ...

    def kind(self, name: str) -> str | None:
        """Return the packed format that keeps the stored codes (see `QuantRows`), or None for
        floats.
        """
        ...

    def type_of(self, name: str) -> str:
        """Return the checkpoint's name for the stored type, such as "Q4_K" or "BF16"."""
        ...

    def quant_rows(self, name: str, start: int, stop: int) -> QuantRows:
        """Return rows [start, stop) of a tensor whose `kind` is not None."""
        ...

    def file_of(self, name: str) -> Path:
        """Return the file that contains a tensor, for messages."""
        ...

    def stored_rows(self, name: str) -> StoredRows:
        """Return the location of a tensor's rows, with which single rows can be read.

        Raises:
            ModelFormatError: the rows are not stored contiguously and in order.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class WeightSummary:
    """Summary of the weight files.

    Attributes:
        files: paths of the files.
        num_params: number of parameters.
        nbytes: bytes of tensor data, including scales.
        dtypes: number of parameters of each stored type.
    """

    files: tuple[Path, ...]
    num_params: int
    nbytes: int
    dtypes: dict[str, int]


class WrappedSource:
    """Base class of sources that read another source and change its names or its order of rows.

    The other source is opened and closed together with this one. Format and file of a tensor are
    those of the tensor that `_stored_as` returns. Subclasses implement the remaining methods of
    `WeightSource`.
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
        """Return the name of the source's tensor that contains this tensor."""
        return name
