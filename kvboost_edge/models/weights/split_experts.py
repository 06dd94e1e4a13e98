"""Split of tensors that contain all experts of a layer into one tensor per expert.

Related tensors that some files store in another shape are reshaped.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from kvboost_edge.errors import ModelFormatError

__all__ = ["ExpertRows", "expert_number", "expert_rows"]


class ExpertRows(NamedTuple):
    """Matrix inside a larger tensor.

    Attributes:
        name: name of the matrix.
        first: index of its first element in the tensor.
        shape: shape of the matrix.
    """

    name: str
    first: int
    shape: tuple[int, ...]

    def bytes_in(self, start: int, stop: int, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the byte range of the matrix.

        Args:
            start: byte offset of the tensor.
            stop: byte offset of the end of the tensor.
            shape: shape of the tensor.
        """
        nbytes = stop - start
        elements = max(1, math.prod(shape))
        first = start + nbytes * self.first // elements
        return first, first + nbytes * math.prod(self.shape) // elements


# Names of tensors with all experts in transformers, and the matrices that each expert has in them.
# The number of an expert is inserted after the first group.
_GATE_UP = ("gate_proj", "up_proj")
_WHOLE = (
    (re.compile(r"(.*\.experts\.)gate_up_proj(?:\.weight)?"), _GATE_UP),
    (re.compile(r"(.*\.experts\.)(gate_proj|up_proj|down_proj|w1|w2|w3)(?:\.weight)?"), ()),
    (re.compile(r"(.*\.block_sparse_moe\.)input_linear\.weight"), _GATE_UP),
    (re.compile(r"(.*\.block_sparse_moe\.)output_linear\.weight"), ("down_proj",)),
)
_BIASES = re.compile(r"(.*\.experts\.)(gate_proj|up_proj|down_proj)\.bias")
_BIAS = ".e_score_correction_bias"
_SHARED_GATE = ".shared_expert_gate.weight"
# Vectors that GGUF files store as matrices, with one column or with one row per group.
_COLUMN = re.compile(r".*\.mamba\.(?:decay|D)")
_GROUPED = re.compile(r".*\.mamba\.norm\.weight")
_NUMBER = re.compile(r"\.experts\.(\d+)\.")


def expert_number(name: str) -> int | None:
    """Return the number of the expert that a tensor belongs to, or None."""
    found = _NUMBER.search(name)
    return None if found is None else int(found[1])


def expert_rows(name: str, shape: tuple[int, ...]) -> list[ExpertRows]:
    """Return the matrices or biases of single experts in a tensor, or [] for other tensors.

    The shape of the tensor is [experts, rows, columns] for matrices and [experts, rows] for biases.
    A vector that is stored as a matrix also has an entry, which gives its proper shape.

    Raises:
        ModelFormatError: the rows of an expert cannot be divided among its matrices.
    """
    if len(shape) == 2 and shape[0] == 1 and name.endswith(_BIAS):
        return [ExpertRows(name, 0, shape[1:])]
    if len(shape) == 1 and name.endswith(_SHARED_GATE):
        return [ExpertRows(name, 0, (1, *shape))]
    if len(shape) == 2 and (
        _GROUPED.fullmatch(name) or (shape[1] == 1 and _COLUMN.fullmatch(name))
    ):
        return [ExpertRows(name, 0, (math.prod(shape),))]
    biases = _BIASES.fullmatch(name) if len(shape) == 2 else None
    if biases is not None:
        rows = shape[1]
        return [
            ExpertRows(f"{biases[1]}{i}.{biases[2]}.bias", i * rows, (rows,))
            for i in range(shape[0])
        ]
    if len(shape) != 3:
        return []
    for pattern, inside in _WHOLE:
        match = pattern.fullmatch(name)
        if match is None:
            continue
        parts = inside or (match[2],)
        experts, rows, columns = shape
        if rows % len(parts):
            raise ModelFormatError(
                f"tensor {name!r} has {rows} rows per expert, which cannot be divided into "
                f"{len(parts)} matrices"
            )
        prefix = match[1] if match[1].endswith("experts.") else f"{match[1]}experts."
        each = rows // len(parts)
        return [
            ExpertRows(
                f"{prefix}{expert}.{part}.weight",
                (expert * rows + index * each) * columns,
                (each, columns),
            )
            for expert in range(experts)
            for index, part in enumerate(parts)
        ]
    return []
