"""Check of ONNX tensors before loading: they fit the config, and no number is NaN or infinite."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.host.file_memo import recall, remember
from kvboost_edge.host.processor import default_num_threads
from kvboost_edge.models.onnx.file import OnnxModel, OnnxTensor
from kvboost_edge.models.onnx.native import OnnxDecoder
from kvboost_edge.models.onnx.tensors import FLOATS, OnnxMatrix
from kvboost_edge.models.weights.finite_check import first_non_finite
from kvboost_edge.models.weights.shapes import check_shapes
from kvboost_edge.models.weights.weight_source import WeightSummary

__all__ = ["check_onnx", "onnx_types"]


def check_onnx(
    model: OnnxModel,
    decoder: OnnxDecoder | None,
    config: Mapping[str, Any],
    *,
    cache_dir: Path | None = None,
) -> WeightSummary:
    """Check the tensors of a model against its config, as `check_weights` does for a directory.

    All floats and scales of a recognized decoder must be finite. The result of this check is
    cached. Other graphs are not checked, because they may contain infinite constants such as masks.
    Instead, the runner checks their results.
    """
    files = tuple(part.path for part in model.files)
    if decoder is None:
        dtypes: dict[str, int] = {}
        for tensor in model.tensors.values():
            dtypes[tensor.dtype] = dtypes.get(tensor.dtype, 0) + tensor.count
        nbytes = sum(tensor.stop - tensor.start for tensor in model.tensors.values())
        return WeightSummary(files, sum(dtypes.values()), nbytes, dtypes)
    with decoder.open_source() as source:
        shapes = {name: (source.file_of(name), source.shape(name)) for name in source.names()}
    check_shapes(shapes, config, model.path, model.path.name)
    matrices = {
        rows.matrix.weight.name: rows.matrix for parts in decoder.tensors.values() for rows in parts
    }
    if any(recall(part.stamp, cache_dir).get("finite") is not True for part in model.files):
        _check_finite(matrices.values())
        for part in model.files:
            remember(part.stamp, {"finite": True}, cache_dir)
    dtypes = {}
    for matrix in matrices.values():
        count = matrix.shape[0] * (matrix.shape[1] if len(matrix.shape) > 1 else 1)
        dtypes[matrix.label] = dtypes.get(matrix.label, 0) + count
    nbytes = sum(
        tensor.stop - tensor.start for matrix in matrices.values() for tensor in _tensors(matrix)
    )
    return WeightSummary(files, sum(dtypes.values()), nbytes, dtypes)


def onnx_types(model: OnnxModel) -> set[str]:
    """Return the storage types of the weights, such as "4 bit" or "F16"."""
    bits = {node.attributes.get("bits", 4) for node in model.nodes if node.op == "MatMulNBits"}
    return {f"{count} bit" for count in bits} or {
        t.dtype for t in model.tensors.values() if len(t.shape) > 1
    }


def _tensors(matrix: OnnxMatrix) -> Iterable[OnnxTensor]:
    return [tensor for tensor in (matrix.weight, matrix.scales, matrix.zeros) if tensor is not None]


def _check_finite(matrices: Iterable[OnnxMatrix]) -> None:
    tensors = [
        tensor for matrix in matrices for tensor in _tensors(matrix) if tensor.dtype in FLOATS
    ]
    try:
        with ThreadPoolExecutor(default_num_threads()) as pool:
            places = pool.map(lambda t: first_non_finite(t.path, t.dtype, t.start, t.stop), tensors)
            for tensor, where in zip(tensors, places, strict=True):
                if where is not None:
                    raise ModelFormatError(
                        f"{tensor.path}: tensor {tensor.name!r} ({tensor.dtype}) holds NaN or "
                        f"infinity, first at element {where} of {tensor.count}; the file is damaged"
                    )
    except OSError as error:
        raise ModelFormatError(f"the weights cannot be read: {error}") from error
