"""Weight source for gpt-oss directories, in which one tensor contains all experts of a layer.

    gate_up_proj  [experts, inputs, 2 * width]        floats, one column per row of the matrix
    down_proj     [experts, width, outputs]           floats, one column per row of the matrix
    ..._blocks    uint8 [experts, rows, groups, 16]   MXFP4 codes, instead of floats
    ..._scales    uint8 [experts, rows, groups]       MXFP4 exponents
    ..._bias      [experts, rows]

Even rows of gate_up belong to gate, and odd rows to up. A byte of blocks contains two neighbouring
codes, the low nibble first. The source presents the matrices and biases of each expert as separate
tensors.
"""

from __future__ import annotations

import functools
import re
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.weights import mxfp4
from kvboost_edge.models.weights.safetensors_source import SafetensorsSource
from kvboost_edge.models.weights.weight_source import QuantRows, StoredRows

__all__ = ["ColumnExperts"]

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
_WHOLE = re.compile(r"(.*\.experts\.)(gate_up_proj|down_proj)(_bias|_blocks|_scales|)")
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_GROUP = 32
_BLOCK_BYTES = 16
_KEPT = 2  # number of experts whose floats are cached while they are packed


class _Rows(NamedTuple):
    """Rows of one expert in a tensor that contains all experts.

    Attributes:
        whole: name of the tensor, without "_blocks" or "_bias".
        form: "" for transposed floats, "_blocks", or "_bias".
        expert: number of the expert.
        first: index of the expert's first row that is used.
        step: distance between the rows that are used.
        rows: number of rows of the matrix, or elements of the bias.
        inputs: number of inputs of the matrix.
    """

    whole: str
    form: str
    expert: int
    first: int
    step: int
    rows: int
    inputs: int


class ColumnExperts:
    """`WeightSource` for a gpt-oss directory.

    The constructor raises ModelFormatError if blocks, scales and biases do not fit together.
    """

    def __init__(self, model_dir: Path | str) -> None:
        self._files = SafetensorsSource(model_dir, split_experts=False)
        # The files store rows as columns, so an expert is read whole and cached while its rows are
        # used.
        self._expert = functools.lru_cache(maxsize=_KEPT)(self._read_expert)
        # Serialize reads. Otherwise every packing thread would read and hold the same expert.
        self._reading = threading.Lock()
        self._lost = mxfp4.LostWeights()
        self._rows: dict[str, _Rows] = {}
        try:
            self._wholes = {name for name in self._files.names() if _WHOLE.fullmatch(name)}
            for name in sorted(self._wholes):
                self._add(name)
            twice = self._files.names() & set(self._rows)
            if twice:
                raise self._error(min(twice), "also appears in a tensor of all experts")
        except BaseException:
            self._files.__exit__(None, None, None)
            raise

    def _add(self, name: str) -> None:
        """Register the matrices or biases of all experts in a tensor."""
        found = _WHOLE.fullmatch(name)
        assert found is not None
        prefix, base, form = found.groups()
        whole = name.removesuffix(form) if form else name
        parts = _PARTS[base]
        if form == "_scales":
            if f"{whole}_blocks" not in self._wholes:
                raise self._error(name, f"has no matching '{whole}_blocks'")
            return
        experts, rows, inputs = self._sizes(whole, form)
        if rows % len(parts):
            raise self._error(
                name,
                f"has {rows} rows per expert, which cannot be divided into {len(parts)} matrices",
            )
        ending = "bias" if form == "_bias" else "weight"
        for expert in range(experts):
            for first, part in enumerate(parts):
                to = f"{prefix}{expert}.{part}.{ending}"
                if to in self._rows:
                    raise self._error(name, f"contains {to!r}, which appears twice")
                self._rows[to] = _Rows(
                    whole, form, expert, first, len(parts), rows // len(parts), inputs
                )

    def _sizes(self, whole: str, form: str) -> tuple[int, int, int]:
        """Return the number of experts, the rows per expert, and the inputs of a row (0 for
        biases).
        """
        name = whole + form
        shape = (
            self._files.shape(name)
            if form != "_blocks"
            else self._files.stored_shape(name, "U8", 4)
        )
        if form == "_blocks":
            experts, rows, groups, nbytes = shape
            if nbytes != _BLOCK_BYTES:
                raise self._error(
                    name, f"contains blocks of {nbytes} bytes, expected {_BLOCK_BYTES}"
                )
            scales = self._files.stored_shape(f"{whole}_scales", "U8", 3)
            if scales != (experts, rows, groups):
                raise self._error(
                    f"{whole}_scales", f"has shape {scales}, expected {(experts, rows, groups)}"
                )
            return experts, rows, groups * _GROUP
        if len(shape) != (2 if form else 3):
            raise self._error(name, f"has shape {shape}, expected {2 if form else 3} dimensions")
        return shape[0], shape[-1], 0 if form else shape[1]

    def __enter__(self) -> ColumnExperts:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # The cache refers to this object and vice versa, so the floats would otherwise not be
        # freed.
        self._expert.cache_clear()
        self._files.__exit__(kind, error, trace)

    def names(self) -> set[str]:
        return (self._files.names() - self._wholes) | set(self._rows)

    def shape(self, name: str) -> tuple[int, ...]:
        piece = self._rows.get(name)
        if piece is None:
            return self._files.shape(name)
        return (piece.rows,) if piece.form == "_bias" else (piece.rows, piece.inputs)

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> Floats:
        piece = self._rows.get(name)
        if piece is None:
            return self._files.rows(name, start, stop)
        stop = piece.rows if stop is None else stop
        if piece.form == "_blocks":
            codes, exponents, _ = self._blocks(piece, start, stop)
            with np.errstate(over="ignore"):  # infinity is rejected during packing
                scales = mxfp4.float_scales(exponents)
                return np.repeat(scales, _GROUP, axis=1) * mxfp4.TABLE[codes].astype(np.float32)
        picked = slice(
            piece.first + piece.step * start, piece.first + piece.step * (stop - 1) + 1, piece.step
        )
        if piece.form == "_bias":
            biases: Floats = self._files.rows(
                f"{piece.whole}_bias", piece.expert, piece.expert + 1
            )[0]
            return biases[picked]
        with self._reading:
            floats = self._expert(piece.whole, piece.expert)
        return np.ascontiguousarray(floats[:, picked].T)

    def _read_expert(self, whole: str, expert: int) -> Floats:
        """Return the floats of an expert, float32 [inputs, rows]."""
        found: Floats = self._files.rows(whole, expert, expert + 1)[0]
        return found

    def kind(self, name: str) -> str | None:
        piece = self._rows.get(name)
        if piece is None:
            return self._files.kind(name)
        return "int4t" if piece.form == "_blocks" else None

    def type_of(self, name: str) -> str:
        piece = self._rows.get(name)
        if piece is None:
            return self._files.type_of(name)
        return "MXFP4" if piece.form == "_blocks" else self._files.type_of(piece.whole + piece.form)

    def quant_rows(self, name: str, start: int, stop: int) -> QuantRows:
        piece = self._rows.get(name)
        if piece is None or piece.form != "_blocks":
            return self._files.quant_rows(name, start, stop)
        codes, exponents, packed = self._blocks(piece, start, stop)
        scales = mxfp4.half_scales(exponents, packed)
        if not np.isfinite(scales).all():
            raise self._error(
                f"{piece.whole}_scales",
                f"has scales above 65504, the limit of 'int4t', for rows {start} to {stop - 1} of "
                f"{name!r}; set weights='f32' or 'bf16'",
            )
        lost = mxfp4.count_lost(exponents, packed)
        self._lost.note(self._files.file_of(f"{piece.whole}_blocks"), piece.whole, lost)
        return QuantRows("int4t", codes, scales, None, mxfp4.TABLE)

    def file_of(self, name: str) -> Path:
        piece = self._rows.get(name)
        return self._files.file_of(name if piece is None else piece.whole + piece.form)

    def stored_rows(self, name: str) -> StoredRows:
        piece = self._rows.get(name)
        if piece is not None:
            raise self._error(
                piece.whole + piece.form,
                "contains all experts; single rows cannot be read from it",
            )
        return self._files.stored_rows(name)

    def _blocks(self, piece: _Rows, start: int, stop: int) -> tuple[Bytes, Bytes, Bytes]:
        """Read rows [start, stop) of an expert in MXFP4.

        Returns:
            Codes [rows, inputs], exponents [rows, groups] and the stored bytes [rows, groups, 16].
        """
        if not 0 <= start < stop <= piece.rows:
            raise self._error(
                f"{piece.whole}_blocks",
                f"has {piece.rows} rows per expert; rows {start} to {stop} are out of range",
            )
        groups = piece.inputs // _GROUP
        each = piece.rows * piece.step
        first = piece.expert * each + piece.first + piece.step * start
        rows = piece.step * (stop - start - 1) + 1
        packed = self._span(f"{piece.whole}_blocks", 4, first, rows, groups * _BLOCK_BYTES)
        packed = packed.reshape(rows, groups, _BLOCK_BYTES)[:: piece.step]
        exponents = self._span(f"{piece.whole}_scales", 3, first, rows, groups)[:: piece.step]
        codes = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1).reshape(
            stop - start, -1
        )
        return codes, np.ascontiguousarray(exponents), packed

    def _span(self, name: str, num_dims: int, first: int, rows: int, width: int) -> Bytes:
        """Return rows of a uint8 tensor, where all axes but those of a row are joined."""
        found: npt.NDArray[Any] = self._files.stored_span(
            name, "U8", num_dims, first * width, rows * width
        )
        return found.reshape(rows, width)

    def _error(self, name: str, what: str) -> ModelFormatError:
        return ModelFormatError(f"{self._files.file_of(name)}: tensor {name!r} {what}")
