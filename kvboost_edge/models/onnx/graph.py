"""Queries on an ONNX graph, used to recognize a decoder.

They find constants, norms, matrices, and the node that computes a value. Nodes that match are
marked as seen. If any node is left unseen at the end, the model is refused.
"""

from __future__ import annotations

from typing import NamedTuple

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.onnx.file import OnnxModel, OnnxNode, OnnxTensor
from kvboost_edge.models.onnx.tensors import (
    FLOATS,
    OnnxMatrix,
    bit_matrix,
    float_matrix,
    read_whole,
)

__all__ = ["Graph", "Linear", "Norm", "Rows"]

_MAX_CASTS = 4
_NORMS = ("SimplifiedLayerNormalization", "RMSNormalization", "SkipSimplifiedLayerNormalization")
_SKIP = "SkipSimplifiedLayerNormalization"
_CASTS = (1, 10, 16)  # to float32, float16 and bfloat16


class Rows(NamedTuple):
    """Rows [start, stop) of a matrix in the file, or elements of a vector."""

    matrix: OnnxMatrix
    start: int
    stop: int


class Linear(NamedTuple):
    """Linear layer x W^T + bias. Only its outputs [start, stop) are used."""

    matrix: OnnxMatrix
    bias: OnnxMatrix | None
    source: str
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def weight(self) -> Rows:
        return Rows(self.matrix, self.start, self.stop)


class Norm(NamedTuple):
    """RMS norm.

    Attributes:
        source: value that is normalized, as a key for `Graph.summands`.
    """

    weight: OnnxMatrix
    eps: float
    source: str


class Graph:
    """Queries on the graph of one model.

    If a query finds an unexpected node, it raises ModelFormatError, which names the node.
    """

    def __init__(self, model: OnnxModel) -> None:
        self.model = model
        self._maker = {
            value: (node, i)
            for node in model.nodes
            for i, value in enumerate(node.outputs)
            if value
        }
        self.seen: set[int] = set()

    def error(self, problem: str) -> ModelFormatError:
        return ModelFormatError(f"{self.model.path}: {problem}")

    def maker(self, value: str) -> tuple[OnnxNode, int] | None:
        """Return the node that computes a value, and the index of the node's output.

        Casts between float types are skipped.
        """
        for _ in range(_MAX_CASTS):
            found = self._maker.get(value)
            if (
                found is None
                or found[0].op != "Cast"
                or found[0].attributes.get("to") not in _CASTS
            ):
                return found
            self.seen.add(found[0].index)
            value = found[0].inputs[0] if found[0].inputs else ""
        return None

    def expect(self, value: str, *ops: str) -> OnnxNode:
        """Return the node that computes a value, which must be of one of the types `ops`."""
        found = self.maker(value)
        if found is None:
            raise self.error(f"no node computes value {value!r}, expected {' or '.join(ops)}")
        node = found[0]
        if node.op not in ops:
            raise self.error(f"{node} is not supported here, expected {' or '.join(ops)}")
        self.seen.add(node.index)
        return node

    def input(self, node: OnnxNode, index: int) -> str:
        """Return the name of a required input."""
        if index >= len(node.inputs) or not node.inputs[index]:
            raise self.error(f"{node} lacks its input {index}")
        return node.inputs[index]

    def optional(self, node: OnnxNode, index: int) -> str:
        return node.inputs[index] if index < len(node.inputs) else ""

    def tensor(self, value: str) -> OnnxTensor | None:
        """Return a weight or the value of a Constant node, or None for a computed value."""
        found = self.model.tensors.get(value)
        if found is not None:
            return found
        made = self._maker.get(value)
        if made is None or made[0].op != "Constant":
            return None
        tensor = made[0].attributes.get("value")
        return tensor if isinstance(tensor, OnnxTensor) else None

    def weight(self, node: OnnxNode, index: int) -> OnnxTensor:
        """Return an input that must be a weight in the file."""
        name = self.input(node, index)
        found = self.tensor(name)
        if found is None:
            raise self.error(f"{node} takes computed input {name!r}, expected a weight")
        return found

    def scalar(self, value: str) -> float | None:
        """Return the number in a constant with one element, or None for other values."""
        tensor = self.tensor(value)
        if tensor is None or tensor.count != 1 or tensor.dtype not in FLOATS:
            return None
        return float(read_whole(tensor).reshape(-1)[0])

    def sizes(self, value: str) -> list[int]:
        """Return the integers in a constant, or [] for a computed value."""
        tensor = self.tensor(value)
        if tensor is None or tensor.dtype not in ("I64", "I32") or tensor.count > 16:
            return []
        return [int(size) for size in read_whole(tensor).reshape(-1)]

    def scaled(self, value: str) -> tuple[str, float]:
        """Split a value into an unscaled value and its constant factor, which is 1 if there is
        none.
        """
        found = self.maker(value)
        if found is None or found[0].op not in ("Mul", "Div") or len(found[0].inputs) != 2:
            return value, 1.0
        node = found[0]
        first, second = node.inputs
        factor = self.scalar(second)
        if factor is not None and node.op == "Div" and factor:
            factor = 1.0 / factor
            inner = first
        elif factor is not None:
            inner = first
        else:
            factor = self.scalar(first)
            inner = second
        if factor is None or (node.op == "Div" and inner == second):
            return value, 1.0
        self.seen.add(node.index)
        return inner, factor

    def linear(self, value: str) -> Linear:
        """Return the linear layer that computes a value, with the outputs that are used."""
        found = self.maker(value)
        if found is not None and found[0].op == "Split":
            node, index = found
            whole = self.linear(self.input(node, 0))
            start, stop = self._part(node, index, whole.size)
            return whole._replace(start=whole.start + start, stop=whole.start + stop)
        bias: OnnxTensor | None = None
        if found is not None and found[0].op == "Add":
            node = self.expect(value, "Add")
            left = self.input(node, 0)
            right = self.input(node, 1)
            bias = self.tensor(right)
            if bias is None:
                bias = self.weight(node, 0)
                left = right
            value = left
        node = self.expect(value, "MatMulNBits", "MatMul")
        matrix = self._bits(node) if node.op == "MatMulNBits" else self._floats(node)
        if len(node.inputs) > 5 and node.inputs[5]:
            if bias is not None:
                raise self.error(
                    f"{node} has a bias, but another bias is added to its output; only one is "
                    "supported"
                )
            bias = self.weight(node, 5)
        added = None if bias is None else float_matrix(str(node), bias, transposed=False)
        if added is not None and added.shape != matrix.shape[:1]:
            raise self.error(
                f"{node}: its bias {added.weight.name!r} has shape {added.shape}, not "
                f"{matrix.shape[:1]}"
            )
        return Linear(matrix, added, self.input(node, 0), 0, matrix.shape[0])

    def _bits(self, node: OnnxNode) -> OnnxMatrix:
        if node.domain != "com.microsoft":
            raise self.error(f"{node} has unknown operator domain {node.domain!r}")
        if self.optional(node, 4):
            raise self.error(f"{node} reorders its inputs (g_idx), which is not supported")
        size = tuple(self.integer(node, name, 0) for name in ("N", "K", "bits", "block_size"))
        zeros = self.weight(node, 3) if self.optional(node, 3) else None
        where = f"{self.model.path}: {node}"
        bits = size[2] or 4
        return bit_matrix(
            where,
            (size[0], size[1], bits, size[3]),
            self.weight(node, 1),
            self.weight(node, 2),
            zeros,
        )

    def _floats(self, node: OnnxNode) -> OnnxMatrix:
        weight = self.weight(node, 1)
        if len(weight.shape) != 2:
            raise self.error(
                f"{node}: tensor {weight.name!r} has shape {weight.shape}, expected two dimensions"
            )
        return float_matrix(f"{self.model.path}: {node}", weight, transposed=True)

    def integer(self, node: OnnxNode, name: str, default: int) -> int:
        value = node.attributes.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(f"{node}: attribute {name}={value!r:.40} must be an integer")
        return value

    def number(self, node: OnnxNode, name: str, default: float) -> float:
        value = node.attributes.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(f"{node}: attribute {name}={value!r:.40} must be a number")
        return float(value)

    def _part(self, node: OnnxNode, index: int, size: int) -> tuple[int, int]:
        """Return the range that output `index` of a Split has along the last axis."""
        self.seen.add(node.index)
        axis = self.integer(node, "axis", 0)
        given = (
            self.sizes(node.inputs[1]) if self.optional(node, 1) else node.attributes.get("split")
        )
        count = len(node.outputs)
        parts = given if isinstance(given, list) and given else [size // count] * count
        if axis not in (-1, 2) or len(parts) != count or sum(parts) != size or min(parts) < 0:
            raise self.error(
                f"{node} splits {size} outputs along axis {axis} into {parts}, which is not "
                "supported"
            )
        return sum(parts[:index]), sum(parts[: index + 1])

    def is_norm(self, value: str) -> bool:
        found = self.maker(value)
        return found is not None and found[0].op in _NORMS and found[1] == 0

    def norm(self, value: str) -> Norm:
        """Return the RMS norm that computes a value."""
        node = self.expect(value, *_NORMS)
        is_skip = node.op == _SKIP
        if is_skip and self.optional(node, 3):
            raise self.error(f"{node} has a bias, which is not supported")
        if not is_skip and self.integer(node, "axis", -1) not in (-1, 2):
            raise self.error(
                f"{node} has axis={node.attributes.get('axis')}, expected the last one"
            )
        weight = float_matrix(str(node), self.weight(node, 2 if is_skip else 1), transposed=False)
        source = _sum_of(node) if is_skip else self.stream(self.input(node, 0))
        return Norm(weight, self.number(node, "epsilon", 1e-5), source)

    def stream(self, value: str) -> str:
        """Return a unique key for a value of the residual stream, which may have several names."""
        found = self.maker(value)
        if found is not None and found[0].op == _SKIP and found[1] == 3:
            return _sum_of(found[0])
        return value if found is None else found[0].outputs[found[1]]

    def summands(self, key: str) -> tuple[str, str] | None:
        """Return the two summands of a sum in the residual stream, or None for other values."""
        if key.startswith("\0"):
            node = self.model.nodes[int(key[1:])]
            return self.input(node, 0), self.input(node, 1)
        found = self.maker(key)
        if (
            found is None
            or found[0].op != "Add"
            or any(self.tensor(name) is not None for name in found[0].inputs)
        ):
            return None
        self.seen.add(found[0].index)
        return self.input(found[0], 0), self.input(found[0], 1)

    def mark_ancestors(self, value: str, ops: tuple[str, ...], inputs: tuple[str, ...]) -> None:
        """Mark all nodes that contribute to a value as seen.

        Args:
            value: name of the value.
            ops: allowed types of these nodes.
            inputs: allowed inputs of the graph.
        """
        waiting = [value]
        known = set()
        while waiting:
            name = waiting.pop()
            if not name or name in known:
                continue
            known.add(name)
            found = self._maker.get(name)
            if found is None:
                if name not in inputs and name not in self.model.tensors:
                    raise self.error(
                        f"no node computes value {name!r}, and it is not one of the inputs {inputs}"
                    )
                continue
            node = found[0]
            if node.op not in ops:
                raise self.error(f"{node} is not supported in the computation of sequence lengths")
            self.seen.add(node.index)
            waiting += node.inputs

    def check_all_seen(self) -> None:
        """Raise ModelFormatError if a node has not been marked as seen."""
        for node in self.model.nodes:
            if node.index not in self.seen and node.op != "Constant":
                raise self.error(f"{node} is not part of a decoder that the native runner supports")


def _sum_of(node: OnnxNode) -> str:
    return f"\0{node.index}"
