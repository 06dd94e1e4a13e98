"""NVFP4 checkpoints for tests, made from tiny float models whose linear layers are quantized."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from helpers.json_files import change_json
from helpers.models.tensor_files import tensors_of

SETTINGS: dict[str, dict[str, Any]] = {
    "modelopt": {"quant_algo": "NVFP4"},
    "compressed-tensors": {"format": "nvfp4-pack-quantized"},
}
_FLOAT4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_DTYPES = {"float32": "F32", "uint8": "U8"}

Parts = dict[str, tuple[str, np.ndarray]]
"""Tensors as (dtype in the file, values or bits)."""


def make_nvfp4(
    directory: Path, method: str, *, floats: str = "", **settings: Any
) -> dict[str, np.ndarray]:
    """Quantize the linear layers of a float model directory.

    Args:
        directory: directory of the model.
        method: quantization method, a key of `SETTINGS`.
        floats: prefix of the names of layers that stay floats.
        settings: additional keys of the quantization config.

    Returns:
        The values of the quantized matrices, float32 by name.
    """
    rng = np.random.default_rng(2)
    known = {}
    parts: Parts = {}
    for name, weights in sorted(tensors_of(directory).items()):
        module = name.removesuffix(".weight")
        if not module.endswith("_proj") or (floats and name.startswith(floats)):
            parts[name] = (_DTYPES[str(weights.dtype)], weights)
            continue
        rows, inputs = weights.shape
        codes = rng.integers(0, 16, (rows, inputs), dtype=np.uint8)
        scales = rng.integers(1, 127, (rows, inputs // 16), dtype=np.uint8)
        factor = np.float32(weights.std() / 400)
        packed = codes[:, ::2] | codes[:, 1::2] << np.uint8(4)
        exponents = (scales >> 3).astype(np.float64)
        mantissas = (scales & 7) / 8
        wide = np.where(exponents == 0, mantissas / 64, (1 + mantissas) * 2 ** (exponents - 7))
        if method == "modelopt":
            parts[name] = ("U8", packed)
            parts[f"{module}.weight_scale_2"] = ("F32", factor)
            parts[f"{module}.input_scale"] = ("F32", np.float32(3))
        else:
            factor = np.float32(1 / factor)
            parts[f"{module}.weight_packed"] = ("U8", packed)
            parts[f"{module}.weight_global_scale"] = ("F32", factor.reshape(1))
            parts[f"{module}.input_global_scale"] = ("F32", np.ones(1, np.float32))
            factor = np.float32(1 / factor)
        parts[f"{module}.weight_scale"] = ("F8_E4M3", scales)
        known[name] = _FLOAT4[codes] * wide.astype(np.float32).repeat(16, axis=1) * factor
    write_parts(directory, parts)
    quantization = {"quant_method": method, **SETTINGS[method], **settings}
    change_json(directory / "config.json", quantization_config=quantization)
    return known


def parts_of(directory: Path) -> Parts:
    """Return all tensors of a directory, those that are not F32 as bits."""
    raw = (directory / "model.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    found = {}
    for name, entry in json.loads(raw[8 : 8 + size]).items():
        start, stop = (8 + size + offset for offset in entry["data_offsets"])
        dtype = np.float32 if entry["dtype"] == "F32" else np.uint8
        values = np.frombuffer(raw[start:stop], dtype).reshape(entry["shape"])
        found[name] = (entry["dtype"], values)
    return found


def write_parts(directory: Path, parts: Parts) -> None:
    """Write all tensors of a directory."""
    header = {}
    data = b""
    for name, (dtype, values) in parts.items():
        start = len(data)
        data += np.ascontiguousarray(values).tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": list(np.shape(values)),
            "data_offsets": [start, len(data)],
        }
    text = json.dumps(header).encode()
    path = directory / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
