"""Tiny models with a multi-token prediction head, in both file formats.

The head is transformers' `MtpModel`, with random weights under the names that real files use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from helpers.gguf.experts import merged_experts
from helpers.gguf.hybrids import hybrid_tensors, is_hybrid
from helpers.gguf.writer import ARCHS, gguf_tensors, write_gguf
from helpers.json_files import read_json
from helpers.models.tensor_files import change_tensors, tensors_of
from helpers.models.tiny_models import build_tiny_model, save_tiny_model, sharpen

# Key and value heads have one size, so that GGUF can hold the models.
HEADS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"linear_key_head_dim": 32},
    "qwen3_5_moe_text": {"linear_key_head_dim": 32},
    "glm4_moe": {"num_nextn_predict_layers": 1},
}
_QWEN = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "post_norm": "norm",
}
_NEXTN = {
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "fc": "eh_proj",
    "norm": "shared_head_norm",
    "embed_tokens": "embed_tokens",
}


def build_head(name: str, **overrides: Any) -> tuple[PreTrainedModel, MtpModel]:
    """Build a model and its head, which shares the model's embedding and LM head."""
    model = build_tiny_model(name, **{**HEADS[name], **overrides})
    model.config.num_mtp_layers = 1
    model.config.mtp_layer_types = ["full_attention"]
    head = MtpModel(model, 1).eval()
    with torch.no_grad():
        sharpen(head.layers[0], torch.Generator().manual_seed(9))
    return model, head


def save_with_head(
    name: str, directory: Path, *, own: Mapping[str, np.ndarray] | None = None, **overrides: Any
) -> Path:
    """Write a directory with the model that `build_head` makes.

    Args:
        own: additional tensors of the head.
    """
    save_tiny_model(name, directory, **{**HEADS[name], **overrides})
    _, head = build_head(name, **overrides)
    found = {}
    for inner, tensor in head.layers[0].state_dict().items():
        found |= _stored(name, _layers(directory), inner, tensor.numpy())
    change_tensors(directory, {**found, **(own or {})})
    return directory


def _layers(directory: Path) -> int:
    count: int = read_json(directory / "config.json")["num_hidden_layers"]
    return count


def _stored(name: str, layers: int, inner: str, values: np.ndarray) -> dict[str, np.ndarray]:
    if name.startswith("qwen3_5"):
        first, _, rest = inner.partition(".")
        place = f"layers.0.{rest}" if first == "mtp_block" else f"{_QWEN[first]}.{rest}"
        return {f"mtp.{place}": values}
    place = inner.replace("post_norm", "shared_head.norm").removeprefix("mtp_block.")
    name = f"model.layers.{layers}.{place}"
    if name.endswith("experts.gate_up_proj"):
        halves = zip(("gate_proj", "up_proj"), np.split(values, 2, axis=1), strict=True)
    elif name.endswith("experts.down_proj"):
        halves = zip(("down_proj",), [values], strict=True)
    else:
        return {name: values}
    base = name.rpartition(".")[0]
    return {
        f"{base}.{index}.{part}.weight": matrix
        for part, matrices in halves
        for index, matrix in enumerate(matrices)
    }


def write_gguf_with_head(
    model_dir: Path, path: Path, *, num_heads: int = 1, **options: Any
) -> Path:
    """Write a model and its head as one GGUF file, with the options of `write_gguf`.

    Args:
        num_heads: number of layers of the head according to the keys.
    """
    config = read_json(model_dir / "config.json")
    layers = config["num_hidden_layers"]
    keys = {"block_count": layers + num_heads, "nextn_predict_layers": num_heads}
    if is_hybrid(config):
        recurrent = [kind != "full_attention" for kind in config["layer_types"]]
        keys["attention.recurrent_layers"] = [*recurrent, *[False] * num_heads]
    more = {**gguf_head(model_dir), **options.pop("more", {})}
    return write_gguf(model_dir, path, keys=keys, more=more, **options)


ENDS = ("token_embd.weight", "output_norm.weight", "output.weight")


def write_head_file(
    model_dir: Path, path: Path, missing: Sequence[str] = ENDS, **options: Any
) -> Path:
    """Write the head of a model as a GGUF file of its own, without some other tensors."""
    of_head = gguf_head(model_dir)
    layers = [name for name in gguf_tensors(model_dir) if name.startswith("blk.")]
    left_out = dict.fromkeys([*missing, *(name for name in layers if name not in of_head)])
    return write_gguf_with_head(
        model_dir, path, more={**left_out, **options.pop("more", {})}, **options
    )


def gguf_head(model_dir: Path) -> dict[str, np.ndarray]:
    """Return the tensors of the head under GGUF's names."""
    config = read_json(model_dir / "config.json")
    layers = config["num_hidden_layers"]
    block = f"model.layers.{layers}."
    stored = {
        name: values
        for name, values in tensors_of(model_dir).items()
        if name.startswith(("mtp.", block))
    }
    if not is_hybrid(config):
        names = gguf.get_tensor_name_map(ARCHS[config["model_type"]], layers + 1)
        found = {}
        for name, values in merged_experts(stored).items():
            target = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert target is not None, name
            found[target] = values
        return found
    outer = {}
    inside = {}
    for name, values in stored.items():
        part = name.removeprefix("mtp.").removesuffix(".weight")
        if part in _NEXTN:
            # Its converter adds 1 to norms, as in the layers.
            offset = np.float32(1 if part.endswith(("norm", "norm_embedding", "hidden")) else 0)
            outer[f"blk.{layers}.nextn.{_NEXTN[part]}.weight"] = values + offset
        else:
            inside[name.replace("mtp.layers.0.", block)] = values
    return {**outer, **hybrid_tensors(inside, {**config, "num_hidden_layers": layers + 1})}
