"""GGUF files for tests, written with the `gguf` package from a tiny model directory, as llama.cpp's
converters do.

Tensor names are taken from the package's tables, which makes them an oracle for ours.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, quants
from safetensors.numpy import load_file

from helpers.gguf.experts import merged_experts, write_expert_sizes
from helpers.gguf.gemma4 import gemma4_scale, rope_freqs, write_gemma4_sizes
from helpers.gguf.granite import write_granite_factors
from helpers.gguf.hybrids import (
    HYBRID_FAMILIES,
    arch_of,
    hybrid_tensors,
    is_hybrid,
    write_hybrid_sizes,
)
from helpers.gguf.layers import Config, Tensors, permuted, write_sizes
from helpers.gguf.types import TYPES, put_half
from helpers.models.gpt_oss_files import ROPE as GPT_OSS_ROPE
from helpers.models.hybrid_models import HYBRID_NESTED
from helpers.models.tiny_checkpoints import save_tiny_checkpoint
from helpers.models.tiny_models import NESTED, save_nested_model, save_tiny_model

ARCHS = {
    "llama": MODEL_ARCH.LLAMA,
    "mistral": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
    "gemma": MODEL_ARCH.GEMMA,
    "gemma2": MODEL_ARCH.GEMMA2,
    "gemma3_text": MODEL_ARCH.GEMMA3,
    "gemma4_text": MODEL_ARCH.GEMMA4,
    "phi3": MODEL_ARCH.PHI3,
    "olmo2": MODEL_ARCH.OLMO2,
    "granite": MODEL_ARCH.GRANITE,
    "smollm3": MODEL_ARCH.SMOLLM3,
    "olmo3": MODEL_ARCH.OLMO2,
    "exaone4": MODEL_ARCH.EXAONE4,
    "ernie4_5": MODEL_ARCH.ERNIE4_5,
    "glm4": MODEL_ARCH.GLM4,
    "qwen3_vl": MODEL_ARCH.QWEN3VL,
    "ministral3": MODEL_ARCH.MISTRAL3,
    "mistral3": MODEL_ARCH.MISTRAL3,
    "hunyuan_v1_dense": MODEL_ARCH.HUNYUAN_DENSE,
    "qwen2_moe": MODEL_ARCH.QWEN2MOE,
    "qwen3_moe": MODEL_ARCH.QWEN3MOE,
    "olmoe": MODEL_ARCH.OLMOE,
    "mixtral": MODEL_ARCH.LLAMA,
    "granitemoe": MODEL_ARCH.GRANITE_MOE,
    "ernie4_5_moe": MODEL_ARCH.ERNIE4_5_MOE,
    "glm4_moe": MODEL_ARCH.GLM4_MOE,
    "gpt_oss": MODEL_ARCH.GPT_OSS,
    "granitemoehybrid": MODEL_ARCH.GRANITE,
    "minicpm": MODEL_ARCH.MINICPM,
    "bitnet": MODEL_ARCH.BITNET,
}
# A property that GGUF cannot express must have the value that llama.cpp assumes.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-llama3rope": {},
    "llama-yarn": {},
    "llama-linear": {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}
    },
    "llama-biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "qwen3_vl": {},
    "qwen3_moe": {"mlp_only_layers": []},
    "qwen2_moe": {"decoder_sparse_step": 1},
    "olmoe": {"num_key_value_heads": 4},
    "mixtral": {},
    "granitemoe": {},
    "ernie4_5_moe": {"intermediate_size": 256},
    "glm4_moe": {},
    # llama.cpp rounds YaRN's bounds to whole numbers. With this base they are the first and the
    # last channel either way.
    "gpt_oss": {"rope_parameters": {**GPT_OSS_ROPE, "rope_theta": 4.0}},
    "ministral3": {},
    "mistral3": {"sliding_window": None},
    "mistral3-ministral3": {},
    "hunyuan_v1_dense": {},
    "granitemoehybrid": {},
    "granitemoehybrid-nope": {},
    "minicpm": {},
    "gemma": {"tie_word_embeddings": True},
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3": {"query_pre_attn_scalar": 32},
    "gemma4": {},
    "gemma4-wide": {},
    "gemma4-moe": {},
    "phi3": {},
    "phi3-full": {"sliding_window": None},
    "olmo2": {},
    "olmo3": {},
    "exaone4": {},
    "exaone4-full": {"sliding_window": None, "layer_types": ["full_attention"] * 3},
    "ernie4_5": {},
    "glm4": {},
    "granite": {},
    # Written as llama.cpp's converter does, and computed as llama.cpp does.
    "bitnet": {
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 1.0},
    },
    "smollm3": {"no_rope_layers": None},
}
WINDOWED = ("gpt_oss", "gemma2", "gemma3_text", "phi3", "olmo3", "exaone4")
PATTERNED = ("gemma3_text", "olmo3", "exaone4")
PERMUTED = (
    "llama",
    "mistral",
    "granite",
    "smollm3",
    "ministral3",
    "mistral3",
    "granitemoehybrid",
    "minicpm",
    "mixtral",
    "granitemoe",
)
# Rows are multiples of the block size in every format.
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64}
PLUS_ONE = ("gemma", "gemma2", "gemma3_text")  # norms that multiply by 1 + weight
# Matrices that are always F32.
IN_FLOATS = ("conv.weight", "conv1d.weight", "ssm_norm.weight", "ssm_a", "ssm_d")
# Names in a config of transformers -> names in the package's table.
OTHER_NAMES = {
    "shared_mlp.output_linear": "mlp.down_proj",
    "self_attn.attn_sub_norm": "self_attn.inner_attn_ln",
    "mlp.ffn_sub_norm": "mlp.ffn_layernorm",
}
OTHER_PARTS = ("model.visual.", "vision_tower.", "multi_modal_projector.")
TOKEN_TYPES = gguf.TokenType
# Types that the package cannot quantize to: offsets of their float16 numbers, and the largest
# weight they can represent.
K_SCALES = {
    "Q4_K": ((0, 2), 63 * 15),
    "Q5_K": ((0, 2), 63 * 31),
    "Q6_K": ((208,), 127 * 32),
    "Q2_K": ((80, 82), 15 * 3),
    "Q3_K": ((108,), 32 * 4),
    "IQ1_S": ((0,), 15 / 8 * 9),
    "IQ1_M": (((49, 51, 53, 55),), 15 / 8 * 9),
    "IQ2_XXS": ((0,), 31 / 8 * 43),
    "IQ2_XS": ((0,), 31 / 8 * 43),
    "IQ2_S": ((0,), 31 / 8 * 43),
    "IQ3_XXS": ((0,), 31 / 4 * 62),
    "IQ3_S": ((0,), 31 * 15),
    "IQ4_NL": ((0,), 127),
    "IQ4_XS": ((0,), 32 * 127),
    "TQ1_0": ((52,), 2),
    "TQ2_0": ((64,), 2),
    "Q1_0": ((0,), 2),
    "Q2_0": ((0,), 2),
    "Q2_0_g128": ((0,), 2),
    "NVFP4": ((), 12),
}


def save_model(name: str, directory: Path) -> Path:
    """Save a tiny model of FAMILIES as its makers' directory."""
    if name == "minicpm":  # transformers has no class for it
        directory.mkdir()
        return save_tiny_checkpoint(name, directory, **FAMILIES[name])
    nested = name in HYBRID_NESTED or (name in NESTED and not name.startswith("gemma"))
    return (save_nested_model if nested else save_tiny_model)(
        name, directory, **{**FAMILIES, **HYBRID_FAMILIES}[name]
    )


def _config(model_dir: Path) -> dict[str, Any]:
    """Return the config as the converters' `load_hparams` does: text_config takes precedence over
    the fields around it.
    """
    config = json.loads((model_dir / "config.json").read_text())
    return {**config, **config.get("text_config", {}), "model_type": config["model_type"]}


def gguf_tensors(model_dir: Path) -> Tensors:
    """Return a tiny model's float32 tensors under GGUF names, with rows in GGUF order and GGUF
    norms.
    """
    config = _config(model_dir)
    model_type = config["model_type"]
    if is_hybrid(config):
        tensors = merged_experts(load_file(model_dir / "model.safetensors"))
        own = {name.replace("language_model.", ""): values for name, values in tensors.items()}
        return hybrid_tensors(
            {n: v for n, v in own.items() if not n.startswith((*OTHER_PARTS, "mtp."))}, config
        )
    names = gguf.get_tensor_name_map(ARCHS[model_type], config["num_hidden_layers"])
    found = {}
    for name, tensor in sorted(merged_experts(load_file(model_dir / "model.safetensors")).items()):
        values = tensor.astype(np.float32)
        name = name.replace("language_model.", "")
        if name.startswith((*OTHER_PARTS, f"model.layers.{config['num_hidden_layers']}.")):
            continue
        if model_type in PERMUTED:
            values = permuted(name, values, config)
        if model_type in PLUS_ONE and name.endswith("norm.weight"):
            values = values + np.float32(1)
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        if model_type == "gemma4_text" and (scale := gemma4_scale(name)) is not None:
            found[scale] = values
            continue
        name += (
            ".weight"
            if name.endswith("layer_scalar") or re.search(r"\.experts\.[a-z_]+$", name)
            else ""
        )
        if "shared_mlp.input_linear" in name:
            layer = name.split(".")[2]
            found[f"blk.{layer}.ffn_gate.weight"], found[f"blk.{layer}.ffn_up.weight"] = np.split(
                values, 2
            )
            continue
        for ours, theirs in OTHER_NAMES.items():
            name = name.replace(ours, theirs)
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        found[target] = np.ascontiguousarray(values)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type") == "llama3":
        found["rope_freqs.weight"] = _llama3_factors(
            rope, config["hidden_size"] // config["num_attention_heads"]
        )
    if model_type == "gemma4_text":
        found["rope_freqs.weight"] = rope_freqs(config)
    if rope.get("rope_type") == "longrope":
        for which in ("long", "short"):
            found[f"rope_factors_{which}.weight"] = np.array(
                rope[f"{which}_factor"], dtype=np.float32
            )
    return found


def _llama3_factors(rope: Config, dim: int) -> np.ndarray:
    low = rope["low_freq_factor"]
    high = rope["high_freq_factor"]
    old = rope["original_max_position_embeddings"]
    factor = rope["factor"]
    found = []
    for wavelength in 2 * np.pi * rope["rope_theta"] ** (np.arange(0, dim, 2) / dim):
        smooth = np.clip((old / wavelength - low) / (high - low), 0, 1)
        found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, dtype=np.float32)


def _random_blocks(values: np.ndarray, kind: str) -> np.ndarray:
    """Return random blocks of a type with about the magnitude of `values`: uint8 [rows, bytes]."""
    _, weights, nbytes = TYPES[kind]
    rng = np.random.default_rng(values.size)
    blocks = rng.integers(0, 256, (values.size // weights, nbytes), dtype=np.uint8)
    halves, largest = K_SCALES[kind]
    for at in halves:
        put_half(blocks, at, 2 * values.std() / largest)
    if kind == "NVFP4":
        scale = quants.NVFP4.fp32_to_ue4m3(np.array([4 * values.std() / largest], np.float32))
        blocks[:, :4] = np.clip(scale + blocks[:, :4] % np.uint8(8), 1, 126)
    return blocks.reshape(*values.shape[:-1], -1)


def q4_k_m(name: str) -> str:
    """Return a tensor's type in the mixture that llama.cpp calls Q4_K_M."""
    return "Q6_K" if name in ("token_embd.weight", "output.weight") or "attn_v" in name else "Q4_K"


def iq4_xs(name: str) -> str:
    """Return a tensor's type in IQ4_XS, for a model whose query heads share keys. llama.cpp uses
    more bits for values and the first layers' down projections.
    """
    if name in ("token_embd.weight", "output.weight"):
        return "Q6_K"
    return "Q5_K" if "attn_v" in name or name.startswith("blk.0.ffn_down") else "IQ4_XS"


def write_gguf(
    model_dir: Path,
    path: Path,
    *,
    kind: str | Callable[[str], str] = "F32",
    tokenizer: bool | Mapping[str, Any] | None = True,
    keys: Mapping[str, Any] | None = None,
    general: Mapping[str, float | str] | None = None,
    more: Mapping[str, np.ndarray | None] | None = None,
    split: int = 0,
    dense: bool = True,
) -> Path:
    """Write the model as GGUF.

    Args:
        kind: type of the matrices, or a function of the GGUF name. Vectors are F32. Weights of
            K types are random.
        tokenizer: True for the model's own, or keys of another one. None writes a file that
            declares none, as llama.cpp requires.
        keys: other metadata of the architecture, {"attention.scale": 0.5}. None omits a key.
        general: numbers and texts by complete key, {"general.sampling.temp": 0.5}.
        more: additional F32 tensors. None omits a tensor.
        split: number of tensors per file. Split files are written next to `path`, which is not
            written itself, and the first one is returned.
        dense: include the matrices after the pooling of a model with bidirectional attention.
    """
    config = _config(model_dir)
    bidirectional = bool(config.get("use_bidirectional_attention"))
    known = arch_of(config) if is_hybrid(config) else ARCHS[config["model_type"]]
    arch = MODEL_ARCH.GEMMA_EMBEDDING if bidirectional else known
    writer = GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch], split_max_tensors=split)
    (write_hybrid_sizes if is_hybrid(config) else write_sizes_of)(writer, config)
    for key, value in (keys or {}).items():
        writer.kv_data[0].pop(f"{writer.arch}.{key}", None)
        kinds = {
            float: writer.add_float32,
            bool: writer.add_bool,
            list: writer.add_array,
            type(None): lambda *_: None,
        }
        kinds.get(type(value), writer.add_uint32)(f"{writer.arch}.{key}", value)
    for key, value in (general or {}).items():
        kinds = {float: writer.add_float32, str: writer.add_string}
        kinds.get(type(value), writer.add_int32)(key, value)
    if isinstance(tokenizer, Mapping):
        add_keys(writer, tokenizer)
    elif tokenizer:
        _write_tokenizer(writer, model_dir, config["vocab_size"], ends=bidirectional)
    elif tokenizer is None:
        writer.add_tokenizer_model("none")
        writer.add_vocab_size(config["vocab_size"])
    tensors = {**gguf_tensors(model_dir), **(more or {})}
    for number in (2, 3) if bidirectional and dense else ():
        values = load_file(model_dir / f"{number}_Dense/model.safetensors")["linear.weight"]
        tensors[f"dense_{number}.weight"] = values
        writer.add_dense_features_dims(f"dense_{number}", values.shape[1], values.shape[0])
    for name, values in tensors.items():
        if values is None:
            continue
        chosen = kind if isinstance(kind, str) else kind(name)
        chosen = "F32" if values.ndim == 1 or name.endswith(".bias") else chosen
        in_floats = "ffn_gate_inp" in name or name.endswith(IN_FLOATS)
        if in_floats or (values.ndim > 1 and values.shape[-1] % TYPES[chosen][1]):
            chosen = "F32"
        add_matrix(writer, name, values, chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if not split else min(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))


def add_matrix(writer: GGUFWriter, name: str, values: np.ndarray, kind: str) -> None:
    """Add a tensor of a type. Weights of types in K_SCALES are random."""
    if kind not in K_SCALES:
        number = GGMLQuantizationType[kind]
        writer.add_tensor(name, quants.quantize(values, number), raw_dtype=number)
        return
    writer.add_tensor(name, _random_blocks(values, kind), raw_dtype=GGMLQuantizationType.I8)
    info = writer.tensors[-1][name]
    info.shape = values.shape
    info.dtype = TYPES[kind][0]


def save_gguf(
    name: str, directory: Path, fields: Mapping[str, Any] | None = None, **options: Any
) -> Path:
    """Save a tiny model with these config fields as the file m.gguf, and its makers' directory next
    to it.
    """
    return write_gguf(
        save_tiny_model(name, directory / "model", **(fields or {})),
        directory / "m.gguf",
        **options,
    )


def add_keys(writer: GGUFWriter, metadata: Config) -> None:
    """Add the keys of a tokenizer, with arrays given as lists or NumPy arrays."""
    kinds = {bool: writer.add_bool, str: writer.add_string, list: writer.add_array}
    for key, value in metadata.items():
        if key != "general.architecture":
            plain = value.tolist() if isinstance(value, np.ndarray) else value
            kinds.get(type(plain), writer.add_uint32)(key, plain)


def write_sizes_of(writer: GGUFWriter, config: Config) -> None:
    """Write the keys that llama.cpp's converter writes for a model with this config."""
    model_type = config["model_type"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    write_sizes(
        writer,
        config,
        context_length="max_position_embeddings",
        embedding_length="hidden_size",
        block_count="num_hidden_layers",
        feed_forward_length="intermediate_size",
        head_count="num_attention_heads",
        layer_norm_rms_eps="rms_norm_eps",
    )
    kv_heads = config["num_key_value_heads"]
    writer.add_head_count_kv(
        [kv_heads] * config["num_hidden_layers"] if model_type == "granitemoehybrid" else kv_heads
    )
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = {"rope_type": "default", "rope_theta": config.get("rope_theta", 10000.0), **rope}
    if "full_attention" in rope:
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    if model_type == "hunyuan_v1_dense" and rope["rope_type"] == "dynamic":
        base = rope["rope_theta"] * rope["alpha"] ** (head_dim / (head_dim - 2))
        writer.add_rope_freq_base(base)
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        writer.add_rope_scaling_factor(1)
        writer.add_rope_scaling_orig_ctx_len(config["max_position_embeddings"])
    else:
        writer.add_rope_freq_base(rope["rope_theta"])
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        writer.add_rope_dimension_count(int(head_dim * rope["partial_rotary_factor"]))
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        own = {
            "rope_scaling_factor": "factor",
            "rope_scaling_orig_ctx_len": "original_max_position_embeddings",
        }
        betas = {
            f"rope_scaling_yarn_{key}": key for key in ("beta_fast", "beta_slow") if key in rope
        }
        write_sizes(writer, rope, **own, **betas)
    if "llama_4_scaling_beta" in rope:
        writer.add_rope_dimension_count(head_dim)
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if (
        rope["rope_type"] == "longrope" and model_type == "minicpm"
    ):  # its converter writes neither length nor factor
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
    elif rope["rope_type"] == "longrope":
        old = (
            config.get("original_max_position_embeddings")
            or rope["original_max_position_embeddings"]
        )
        scale = config["max_position_embeddings"] / old
        writer.add_rope_scaling_orig_ctx_len(old)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(old)))
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if model_type in WINDOWED and config["sliding_window"] is not None:
        writer.add_sliding_window(config["sliding_window"])
    if model_type in PATTERNED and config["sliding_window"] is not None:
        writer.add_sliding_window_pattern([t == "sliding_attention" for t in config["layer_types"]])
    if "mrope_section" in rope:
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    if model_type == "qwen3_vl":
        writer.add_num_deepstack_layers(len(config["vision_config"]["deepstack_visual_indexes"]))
    if model_type == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if model_type == "gemma4_text":
        write_gemma4_sizes(writer, config)
    write_expert_sizes(writer, config)
    _write_factors(writer, config)


def _write_factors(writer: GGUFWriter, config: Config) -> None:
    """Write the multipliers of MiniCPM and Granite."""
    model_type = config["model_type"]
    if model_type == "minicpm":
        writer.add_embedding_scale(config["scale_emb"])
        writer.add_residual_scale(config["scale_depth"] / config["num_hidden_layers"] ** 0.5)
        writer.add_logit_scale(config["hidden_size"] / config["dim_model_base"])
    if model_type in ("granite", "granitemoe", "granitemoehybrid"):
        write_granite_factors(writer, config)


def _write_tokenizer(
    writer: GGUFWriter, model_dir: Path, vocab_size: int, *, ends: bool = False
) -> None:
    """Write the tokenizer as the converters' `_set_vocab_gpt2` does: tokens by id, and ids without
    a token as unused.
    """
    state = json.loads((model_dir / "tokenizer.json").read_text(encoding="utf-8"))
    settings = json.loads((model_dir / "tokenizer_config.json").read_text(encoding="utf-8"))
    tokens = [f"[PAD{i}]" for i in range(vocab_size)]
    types = [TOKEN_TYPES.UNUSED] * vocab_size
    for token, index in state["model"]["vocab"].items():
        tokens[index] = token
        types[index] = TOKEN_TYPES.NORMAL
    for token in state["added_tokens"]:
        tokens[token["id"]] = token["content"]
        types[token["id"]] = TOKEN_TYPES.CONTROL if token["special"] else TOKEN_TYPES.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    merges = [" ".join(m) if isinstance(m, list) else m for m in state["model"]["merges"]]
    if merges:
        writer.add_token_merges(merges)
    ids = {token: index for index, token in enumerate(tokens)}
    writer.add_bos_token_id(ids[settings["bos_token"]])
    writer.add_eos_token_id(ids[settings["eos_token"]])
    writer.add_pad_token_id(ids[settings["pad_token"]])
    writer.add_add_bos_token(True)
    if ends:
        writer.add_add_eos_token(True)
    writer.add_chat_template(settings["chat_template"])
