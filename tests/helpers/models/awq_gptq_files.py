"""AWQ and GPTQ checkpoints for tests, packed from known codes by the formats' own definitions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Codes = dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]


def _words(codes: np.ndarray, order: tuple[int, ...] | range) -> np.ndarray:
    """Pack [n, 8 m] codes into int32 [n, m]: nibble i of a word is column order[i] of its eight."""
    eights = codes.reshape(codes.shape[0], -1, 8).astype(np.uint32)
    packed = np.zeros(eights.shape[:2], dtype=np.uint32)
    for index, column in enumerate(order):
        packed |= eights[:, :, column] << np.uint32(4 * index)
    return packed.view(np.int32)


def quantize_dir(
    directory: Path, method: str, *, group: int, symmetric: bool, seed: int = 0, **settings: Any
) -> Codes:
    """Replace the layers' matrices of a float model directory by random codes. Return by module
    (codes [out, in], scales [out, groups], zeros [out, groups]).
    """
    rng = np.random.default_rng(seed)
    tensors = load_file(directory / "model.safetensors")
    known: Codes = {}
    for name in sorted(tensors):
        if not name.endswith("_proj.weight"):
            continue
        module = name.removesuffix(".weight")
        outputs, inputs = tensors.pop(name).shape
        groups = -(-inputs // group)
        codes = rng.integers(0, 16, (outputs, inputs))
        zeros = (
            np.full((outputs, groups), 8) if symmetric else rng.integers(1, 16, (outputs, groups))
        )
        scales = (rng.uniform(0.5, 1.5, (outputs, groups)) / 5 / inputs**0.5).astype(np.float16)
        known[module] = codes, scales, zeros
        if method == "awq":
            tensors[f"{module}.qweight"] = _words(codes.T, AWQ_ORDER)
            tensors[f"{module}.qzeros"] = _words(zeros.T, AWQ_ORDER)
        else:
            stored = zeros - (settings.get("checkpoint_format") != "gptq_v2")
            tensors[f"{module}.qweight"] = np.ascontiguousarray(_words(codes, range(8)).T)
            tensors[f"{module}.qzeros"] = _words(stored.T, range(8))
            tensors[f"{module}.g_idx"] = (np.arange(inputs) // group).astype(np.int32)
            tensors[f"{module}.bias"] = np.zeros(outputs, dtype=np.float16)
        tensors[f"{module}.scales"] = np.ascontiguousarray(scales.T)
    save_file(tensors, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": method,
        "bits": 4,
        "group_size": group,
        **settings,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return known
