"""Tiny Gemma 4 assistants with random weights, for tiny models that they draft for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import numpy as np
import torch
from gguf import GGUFWriter
from transformers import AutoConfig, PreTrainedModel
from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
from transformers.models.gemma4_assistant import Gemma4AssistantForCausalLM
from transformers.models.gemma4_unified_assistant import Gemma4UnifiedAssistantForCausalLM

from helpers.gguf.gemma4 import rope_freqs, write_gemma4_sizes
from helpers.gguf.writer import add_matrix, write_sizes_of
from helpers.json_files import read_json
from helpers.models.built import copy_of
from helpers.models.tensor_files import tensors_of
from helpers.models.tiny_checkpoints import COMMON_FIELDS, save_tokenizer
from helpers.models.tiny_models import FAMILIES, save_tiny_model, sharpen

TARGETS = ("gemma4", "gemma4-wide")
"""Models with shared KV, and with keys as values in full layers."""

_LIKE_TARGET = (
    "model_type",
    "head_dim",
    "global_head_dim",
    "num_key_value_heads",
    "num_global_key_value_heads",
    "attention_k_eq_v",
    "sliding_window",
    "rope_parameters",
    "vocab_size",
    "max_position_embeddings",
)
_OWN = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_attention_heads": 8,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "num_kv_shared_layers": 3,
    "tie_word_embeddings": True,
}


@contextlib.contextmanager
def lends_kv() -> Iterator[None]:
    """Let transformers 5.23 build assistants, and models without shared KV that return their KV.

    It refuses the former, and its models without shared KV return none.
    """
    stored = Gemma4TextConfig.kv_sharing_modes
    assert isinstance(stored, property)
    assert stored.fget is not None

    def modes(config: Gemma4TextConfig) -> Any:
        kinds = list(config.layer_types or ())
        if config.num_kv_shared_layers == len(kinds):
            return ["reuse"] * len(kinds)
        if config.num_kv_shared_layers:
            return stored.fget(config)
        lasts = {len(kinds) - 1 - kinds[::-1].index(kind) for kind in kinds}
        return ["store" if index in lasts else None for index in range(len(kinds))]

    with mock.patch.object(Gemma4TextConfig, "kv_sharing_modes", property(modes)):
        yield


def build_assistant(name: str, *, seed: int = 4, **overrides: Any) -> PreTrainedModel:
    """An assistant for `build_tiny_model(name)`. overrides: fields of its text config."""
    target = {**COMMON_FIELDS, **FAMILIES[name], **overrides.pop("target", {})}
    is_unified = target["model_type"] == "gemma4_unified_text"
    fields = {key: target[key] for key in _LIKE_TARGET if key in target} | _OWN
    kind = "gemma4_unified_assistant" if is_unified else "gemma4_assistant"
    outer = {
        name: overrides.pop(name)
        for name in ("use_ordered_embeddings", "num_centroids", "centroid_intermediate_top_k")
        if name in overrides
    }
    config = AutoConfig.for_model(
        kind,
        text_config={**fields, **overrides},
        backbone_hidden_size=target["hidden_size"],
        **outer,
    )
    made = Gemma4UnifiedAssistantForCausalLM if is_unified else Gemma4AssistantForCausalLM
    torch.manual_seed(seed)
    with lends_kv():
        model = made(config)
    with torch.no_grad():
        sharpen(model, torch.Generator().manual_seed(seed))
        if model.masked_embedding is not None:  # the token ids, cluster by cluster
            ordering = model.masked_embedding.token_ordering
            ordering.copy_(torch.randperm(len(ordering)))
    return model.eval()


def save_assistant(name: str, directory: Path, *, seed: int = 4, **overrides: Any) -> Path:
    """Write the directory of an assistant for `build_tiny_model(name)`, and return its path."""

    def save(folder: Path) -> None:
        model = build_assistant(name, seed=seed, **overrides)
        model.save_pretrained(folder)
        save_tokenizer(folder)

    return copy_of(directory, save, "build_assistant", name, seed, overrides)


def save_pair(name: str, folder: Path, **fields: Any) -> tuple[Path, Path]:
    """Write a model and its assistant, and return their paths. fields: of both configs."""
    path = save_tiny_model(name, folder / "model", **fields)
    return path, save_assistant(name, folder / "assistant", **fields)


def config_of(path: Path) -> dict[str, Any]:
    """The config of a directory."""
    found: dict[str, Any] = read_json(path / "config.json")
    return found


def write_gguf_assistant(model_dir: Path, path: Path, kind: str = "F32", **keys: Any) -> Path:
    """Write an assistant as GGUF, as llama.cpp's `Gemma4AssistantModel` does.

    Args:
        kind: type of the matrices.
        keys: other metadata of the architecture.
    """
    outer = config_of(model_dir)
    config = outer["text_config"]
    layers = config["num_hidden_layers"]
    writer = GGUFWriter(path, "gemma4-assistant")
    write_sizes_of(writer, config)
    write_gemma4_sizes(writer, config)
    writer.add_uint32("gemma4-assistant.embedding_length_out", outer["backbone_hidden_size"])
    writer.add_uint32("gemma4-assistant.nextn_predict_layers", layers)
    for key, value in keys.items():
        writer.kv_data[0].pop(f"gemma4-assistant.{key}", None)
        writer.add_uint32(f"gemma4-assistant.{key}", value)
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(config["vocab_size"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, layers)
    writer.add_tensor("rope_freqs.weight", rope_freqs(config))
    for name, values in tensors_of(model_dir).items():
        if name.startswith("masked_embedding."):  # its converter leaves them out
            continue
        target = f"nextn.{name}"
        if name.startswith("model."):
            name += ".weight" if name.endswith("layer_scalar") else ""
            found = names.get_name(name, try_suffixes=(".weight",))
            assert found is not None, name
            target = found
        is_matrix = values.ndim > 1
        add_matrix(writer, target, values.astype(np.float32), kind if is_matrix else "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
