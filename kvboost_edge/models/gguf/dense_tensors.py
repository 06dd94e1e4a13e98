"""Dense projections that an embedding model in a GGUF file applies after pooling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.gguf.blocks import dequantize
from kvboost_edge.models.gguf.file import GgufHeader
from kvboost_edge.models.gguf.source import architecture_of
from kvboost_edge.models.weights.dense_folders import Matrices, check_dense
from kvboost_edge.models.weights.file_bytes import read_bytes

__all__ = ["gguf_dense"]

Floats = npt.NDArray[np.float32]


def gguf_dense(header: GgufHeader, config: Mapping[str, Any]) -> Matrices:
    """Return the matrices of the dense projections; () for architectures without them.

    Raises:
        ModelFormatError: the file lacks the matrices. Many files do, and their embeddings would be
            wrong.
    """
    names = architecture_of(header).dense
    missing = [name for name in names if name not in header.tensors]
    if missing:
        raise ModelFormatError(
            f"{header.path} lacks the tensors {', '.join(missing)} of the Dense layers after "
            "pooling; convert the original model with convert_hf_to_gguf.py "
            "--sentence-transformers-dense-modules, or use its safetensors files"
        )
    found = tuple(_read(header, name) for name in names)
    check_dense(found, config, [f"{header.path}: tensor {name!r}" for name in names])
    return found


def _read(header: GgufHeader, name: str) -> Floats:
    tensor = header.tensors[name]
    data = read_bytes(header.path_of(tensor), tensor.start, tensor.stop)
    return np.asarray(
        dequantize(tensor.type, data.reshape(tensor.shape[0], -1)), np.float32
    ).reshape(tensor.shape)
