"""What llama.cpp's converters do to the tensors of several families: names, rows in the order of
its rope, and state spaces as conversion/mamba.py has them.
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
    """Tensors under GGUF's names. parts: what a tensor becomes, float32, by names that the
    package's table has.
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
    """Rows of queries and keys in the order of llama.cpp's rope: pairs (i, i + half) one after the
    other. Other tensors as they are.
    """
    sizes = {".q_proj.": "num_attention_heads", ".k_proj.": "num_key_value_heads"}
    heads = next((config[size] for part, size in sizes.items() if part in name), 0)
    if not heads:
        return weights
    shape = (heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return weights.reshape(shape).swapaxes(1, 2).reshape(weights.shape)


def mamba_values(name: str, values: np.ndarray, groups: int) -> np.ndarray:
    """A state space's tensor as files have it; others as they are."""
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
    """Keys of a file by the names of the writer's methods, each with the key of the config that it
    takes.
    """
    for name, source in sources.items():
        getattr(writer, f"add_{name}")(config[source])
