"""Conversions that llama.cpp's converters apply to the tensors of several families: names, rows in
the order of its RoPE, and state spaces as in conversion/mamba.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gguf
import numpy as np
from gguf import MODEL_ARCH, GGUFWriter

Config = Mapping[str, Any]
Tensors = Mapping[str, np.ndarray]


def named(
    tensors: Tensors,
    arch: MODEL_ARCH,
    config: Config,
    parts: Callable[[str, np.ndarray], Tensors],
) -> Tensors:
    """Return tensors under GGUF's names.

    Args:
        parts: converts a tensor to float32 tensors under names of the package's table.
    """
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    found = {}
    for name, values in sorted(tensors.items()):
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        for new, part in parts(name, values.astype(np.float32)).items():
            target = names.get_name(new, try_suffixes=(".weight", ".bias"))
            assert target is not None, new
            found[target] = np.ascontiguousarray(part)
    return found


def permuted(name: str, weights: np.ndarray, config: Config) -> np.ndarray:
    """Reorder rows of queries and keys for llama.cpp's RoPE, with each pair (i, i + half) adjacent.
    Return other tensors unchanged.
    """
    sizes = {".q_proj.": "num_attention_heads", ".k_proj.": "num_key_value_heads"}
    heads = next((config[size] for part, size in sizes.items() if part in name), 0)
    if not heads:
        return weights
    shape = (heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return weights.reshape(shape).swapaxes(1, 2).reshape(weights.shape)


def mamba_values(name: str, values: np.ndarray, groups: int) -> np.ndarray:
    """Convert a state space's tensor to its form in files. Return other tensors unchanged."""
    if name.endswith("conv1d.weight"):
        return values.squeeze()
    if name.endswith("A_log"):
        return -np.exp(values.astype(np.float64)).astype(np.float32)[:, None]
    if name.endswith(("mamba.D", "mixer.D")):
        return values[:, None]
    return (
        values.reshape(groups, -1)
        if name.endswith(("mamba.norm.weight", "mixer.norm.weight"))
        else values
    )


def write_sizes(writer: GGUFWriter, config: Config, **sources: str) -> None:
    """Write keys of a file, given the name of the writer's method for each and the key of the
    config that holds its value.
    """
    for name, source in sources.items():
        getattr(writer, f"add_{name}")(config[source])
