"""Dense projections that an embedding model applies after pooling, in sentence-transformers'
folders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.host.json_file import read_json_object
from kvboost_edge.models.config.json_readers import text_config
from kvboost_edge.models.families.fields import size_of
from kvboost_edge.models.weights.safetensors_source import SafetensorsSource

__all__ = ["Matrices", "check_dense", "read_dense"]

Floats = npt.NDArray[np.float32]
Matrices = tuple[Floats, ...]
"""Matrices, each float32 [outputs, inputs]."""

_NAME = "linear.weight"
_IDENTITY = "Identity"


def read_dense(folders: Sequence[Path], config: Mapping[str, Any]) -> Matrices:
    """Return the matrices in these folders, in order.

    Raises:
        ModelFormatError: a projection has a bias or an activation, or its inputs do not match the
            outputs of the previous one; the message names the folder.
    """
    found = tuple(_read(folder) for folder in folders)
    check_dense(found, config, [str(folder) for folder in folders])
    return found


def check_dense(matrices: Matrices, config: Mapping[str, Any], names: Sequence[str]) -> None:
    """Check that the inputs of each matrix match the outputs of the previous one.

    The first matrix takes the hidden size as inputs.

    Args:
        matrices: matrices in order.
        config: object in config.json.
        names: name of each matrix, for messages.

    Raises:
        ModelFormatError: a matrix does not match, or contains NaN or infinity; the message names
            it.
    """
    inputs = size_of(text_config(config), "hidden_size")
    for matrix, name in zip(matrices, names, strict=True):
        if matrix.ndim != 2 or matrix.shape[1] != inputs:
            raise ModelFormatError(
                f"{name}: a matrix of shape {matrix.shape} does not fit {inputs} inputs"
            )
        if not np.isfinite(matrix).all():
            raise ModelFormatError(f"{name} holds NaN or infinity; the file is damaged")
        inputs = matrix.shape[0]


def _read(folder: Path) -> Floats:
    path = folder / "config.json"
    settings = read_json_object(path)
    activation = str(
        settings.get("activation_function", "torch.nn.modules.activation.Tanh")
    ).rpartition(".")[2]
    if activation != _IDENTITY:
        raise ModelFormatError(
            f"{path}: activation_function {activation!r} is not supported; only {_IDENTITY!r} is"
        )
    if settings.get("bias", True):
        raise ModelFormatError(f"{path}: a Dense layer with a bias is not supported")
    with SafetensorsSource(folder) as source:
        if source.names() != {_NAME}:
            raise ModelFormatError(
                f"{folder} holds the tensors {sorted(source.names())}, expected only {_NAME!r}"
            )
        return source.rows(_NAME)
