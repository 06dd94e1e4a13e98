"""BitNet checkpoints for tests, made from tiny float models whose linear layers become ternary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from helpers.json_files import change_json
from helpers.models.tensor_files import change_tensors, tensors_of

# Storage layout of the weights -> settings of the quantization config.
LAYOUTS: dict[str, dict[str, Any]] = {
    "bitlinear": {},
    "autobitlinear": {"linear_class": "autobitlinear", "quantization_mode": "offline"},
    "online": {"linear_class": "autobitlinear", "quantization_mode": "online"},
}


def packed_rows(signs: np.ndarray) -> np.ndarray:
    """Pack -1, 0 and 1 [out, in] as uint8 [out / 4, in]. Row r holds rows r + i * out / 4, from the
    lowest bits on.
    """
    quarters = (signs + 1).astype(np.uint8).reshape(4, -1, signs.shape[1])
    packed = np.zeros_like(quarters[0])
    for index, quarter in enumerate(quarters):
        packed |= quarter << np.uint8(2 * index)
    return packed


def make_bitnet(
    directory: Path, layout: str = "bitlinear", **settings: Any
) -> dict[str, np.ndarray]:
    """Rewrite the linear layers of a float model directory in a layout.

    Returns the values of the ternary matrices, float32 by name.
    """
    tensors = tensors_of(directory)
    known = {}
    changed: dict[str, np.ndarray | None] = {}
    for name in sorted(tensors):
        if not name.endswith("_proj.weight"):
            continue
        weights = tensors[name]
        mean = np.float32(np.abs(weights).mean(dtype=np.float64))
        signs = np.rint(weights * (np.float32(1) / mean)).clip(-1, 1)
        if layout == "online":
            known[name] = signs * mean
            continue
        # Multiplication by a float16 scale is exact. The reciprocal of a float16 is not a float16.
        scale = np.float16(1 / mean if layout == "bitlinear" else mean).astype(np.float32)
        known[name] = signs * (np.float32(1) / scale if layout == "bitlinear" else scale)
        changed |= {name: packed_rows(signs), f"{name}_scale": scale.reshape(1)}
    change_tensors(directory, changed)
    quantization = {"quant_method": "bitnet", **LAYOUTS[layout], **settings}
    change_json(directory / "config.json", quantization_config=quantization)
    return known
