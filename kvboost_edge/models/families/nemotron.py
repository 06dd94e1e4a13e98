"""Nemotron-H: each layer is a Mamba2 mixer, attention, an MLP or a mixture of experts.

The time step is limited by time_step_limit, as in the original code. GGUF files give no limits.
transformers instead applies time_step_min as the lower bound, and only in passes of several tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.families.family import Family, ModelType
from kvboost_edge.models.families.fields import MAX_LAYERS, integer_of, number_of
from kvboost_edge.models.families.gguf_keys import Keys
from kvboost_edge.models.families.gguf_names import (
    EXPERT_KEYS,
    EXPERTS,
    MATRICES,
    SSM_SIZES,
    STATE_SPACE,
    GgufArchitecture,
)
from kvboost_edge.models.families.layers import ATTENTION, NO_MIXER
from kvboost_edge.models.families.moe import (
    SIGMOID,
    ExpertNames,
    Experts,
    experts_of,
    flag_of,
    gguf_experts,
)
from kvboost_edge.models.families.ssm import (
    FULL,
    LINEAR,
    Hybrid,
    SsdKeys,
    gguf_heads,
    ssd_mixer,
    ssd_names,
    time_limit_of,
)

__all__ = ["GGUF", "MODEL_TYPES"]

Config = Mapping[str, Any]

_MLP = "mlp"
_EXPERTS = "moe"
_KINDS = {LINEAR: "ssd", FULL: ATTENTION, _MLP: NO_MIXER, _EXPERTS: NO_MIXER}
_OLDER = {"mamba": LINEAR, "attention": FULL}
_LETTERS = {"M": LINEAR, "*": FULL, "-": _MLP, "E": _EXPERTS}  # letters of hybrid_override_pattern
_OLDER_KEYS = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_dt_limit": "time_step_limit",
}
_KINDS_OF_LAYERS = ("layers_block_type", "layer_types", "hybrid_override_pattern")
_KEYS = SsdKeys("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")
_USUAL = {
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "head_dim": 128,
    "intermediate_size": 21504,
    "mlp_hidden_act": "relu2",
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "layer_norm_epsilon": 1e-5,
}


def _complete(config: Config) -> Config:
    """Return the config with Llama's key names and defaults.

    The length of the list of layer types gives the number of layers. Attention does not use RoPE.
    """
    types = _types(config)
    given = {key: value for key, value in config.items() if value is not None}
    given.setdefault("head_dim", given.get("attention_head_dim", _USUAL["head_dim"]))
    given |= {key: given[older] for older, key in _OLDER_KEYS.items() if older in given}
    found = {**_USUAL, **given, "layer_types": types, "num_hidden_layers": len(types)}
    same = {"rms_norm_eps": "layer_norm_epsilon", "hidden_act": "mlp_hidden_act"}
    return {
        **found,
        **{to: found[key] for to, key in same.items()},
        "position_embedding_type": "nope",
    }


def _num_layers(config: Config) -> int | None:
    """Return the number of layers, which is the length of the list of layer types.

    Other keys for the number of layers are ignored.
    """
    _, kinds = _kinds_of_layers(config)
    return len(kinds) if kinds and isinstance(kinds, (list, str)) else None


def _kinds_of_layers(config: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the key that gives the layer types, and its value: a list, or a string of letters."""
    key = next(
        (key for key in _KINDS_OF_LAYERS if config.get(key) is not None), _KINDS_OF_LAYERS[-1]
    )
    return key, config.get(key)


def _types(config: Config) -> list[str]:
    """Return the type of each layer, from a list or a string of letters."""
    key, given = _kinds_of_layers(config)
    if key == "hybrid_override_pattern":
        types = [_LETTERS.get(letter, letter) for letter in given] if isinstance(given, str) else []
    else:
        listed = given if isinstance(given, (list, tuple)) else []
        types = [_OLDER.get(one, one) if isinstance(one, str) else one for one in listed]
    if not 0 < len(types) <= MAX_LAYERS or any(one not in list(_KINDS) for one in types):
        raise ModelFormatError(
            f"{key}={given!r:.200} must give one of {sorted(_KINDS)} for each layer"
        )
    return types


def _hybrid(config: Config, layers: int) -> Hybrid:
    """Return the Mamba2 layers according to layer_types.

    A layer has either a token mixer or an MLP, but not both."""
    kinds = tuple(_KINDS[one] for one in config["layer_types"])
    if ATTENTION not in kinds:
        raise ModelFormatError(
            "the model has no attention layers, and such models are not supported"
        )
    mixer = ssd_mixer(config, _KEYS, "gated_before", time_limit_of(config))
    names = ssd_names("mamba", mixer, conv_bias=flag_of(config, "use_conv_bias", True))
    return Hybrid(kinds, mixer if mixer.kind in kinds else None, names, alone=True)


def _experts(config: Config, layers: int) -> Experts | None:
    """Return the mixture of experts, which includes a shared expert, or None if no layer has
    experts.

    Routing weights are the sigmoids of the selected logits, divided by their sum and scaled. The
    router adds a bias when it selects experts.
    """
    sparse = [one == _EXPERTS for one in config["layer_types"]]
    if not any(sparse):
        return None
    names = ExpertNames(
        parts=("up_proj", "down_proj"),
        bias="mlp.gate.e_score_correction_bias",
        shared=("mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj"),
    )
    keys = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
    return experts_of(
        config,
        keys,
        (None, None, None),
        sparse,
        names=names,
        score="sigmoid",
        eps=1e-20,
        renorm="add" if flag_of(config, "norm_topk_prob", True) else "",
        scale=number_of(config, "routed_scaling_factor", 1e-6, 1e6),
        shared=integer_of(config, "moe_shared_expert_intermediate_size", 1),
    )


_OUTER = ("backbone.", "model.embeddings.", "model.norm_f.")
# Patterns that map tensor names to Llama's. The files use the word "mixer" for the content of every
# layer, including MLPs.
_LLAMAS_WORDS = (
    (re.compile(r"^(?:backbone|model)\.embeddings\."), "model.embed_tokens."),
    (re.compile(r"^(?:backbone|model)\.norm_f\."), "model.norm."),
    (re.compile(r"^backbone\."), "model."),
    (re.compile(r"^(model\.layers\.\d+)\.mixer\.(?=[qkvo]_proj\.)"), r"\1.self_attn."),
    (
        re.compile(
            r"^(model\.layers\.\d+)\.mixer\.(?=(?:up_proj|down_proj|gate|experts|shared_experts)\.)"
        ),
        r"\1.mlp.",
    ),
    (re.compile(r"^(model\.layers\.\d+)\.mixer\."), r"\1.mamba."),
)


def _in_llamas_words(name: str) -> str:
    if ".mixer." in name or name.startswith(_OUTER):
        for pattern, to in _LLAMAS_WORDS:
            name = pattern.sub(to, name)
    return name


MODEL_TYPES: Mapping[str, ModelType] = MappingProxyType(
    {
        "nemotron_h": ModelType(
            "Nemotron-H and Nemotron 3 Nano, layers of Mamba2, attention, MLPs or experts, "
            "without gates",
            Family(
                qkv_bias=False,
                gated=False,
                no_rope="typed",
                norm_names=("norm", "norm"),
                mlp=("mlp.up_proj", "mlp.down_proj"),
                kv_heads=8,
                num_layers=_num_layers,
                odd_heads=True,
                stored_name=_in_llamas_words,
                complete=_complete,
                hybrid=_hybrid,
                experts=_experts,
                unless=(
                    ("attention_bias", (None, False)),
                    ("use_bias", (None, False)),
                    ("mamba_proj_bias", (None, False)),
                    ("mamba_hidden_act", (None, "silu")),
                    ("moe_latent_size", (None,)),
                    ("n_group", (None, 1)),
                    ("n_shared_experts", (None, 1)),
                    ("sliding_window", (None,)),
                ),
            ),
            torch=False,
            gguf=True,
        ),
        "nemotron": ModelType("partial rotary", tested=False),
    }
)


def _gguf_config(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Return config entries read from a GGUF file.

    A layer with KV heads has attention, and a layer with an MLP width has an MLP or experts. A
    layer with neither has recurrent state.
    """
    tensors = keys.header.tensors
    (heads, dim) = gguf_heads(keys)
    found = {
        "layers_block_type": _gguf_kinds(keys),
        "layer_norm_epsilon": config["rms_norm_eps"],
        "mamba_num_heads": heads,
        "mamba_head_dim": dim,
        "n_groups": keys.size("ssm.group_count"),
        "ssm_state_size": keys.size("ssm.state_size"),
        "conv_kernel": keys.size("ssm.conv_kernel"),
        "use_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in tensors),
        "mlp_bias": any(name.endswith(".ffn_up.bias") for name in tensors),
    }
    return {**found, **_gguf_mixture(keys)} if "moe" in found["layers_block_type"] else found


def _gguf_kinds(keys: Keys) -> list[str]:
    found = []
    places = ("attention.head_count_kv", "feed_forward_length")
    for index, (count, width) in enumerate(
        zip(*(keys.sizes(place, 0) for place in places), strict=True)
    ):
        if count and width:
            raise keys.error(
                "feed_forward_length",
                width,
                f"is not supported in layer {index}, which has {count} KV heads",
            )
        has_router = f"blk.{index}.ffn_gate_inp.weight" in keys.header.tensors
        found.append(
            "full_attention"
            if count
            else "moe"
            if has_router
            else "mlp"
            if width
            else "linear_attention"
        )
    return found


def _gguf_mixture(keys: Keys) -> dict[str, Any]:
    """Return config entries for the mixture of experts, whose routing weights are sigmoids."""
    gating = keys.optional_size("expert_gating_func", 0)
    if gating not in (None, SIGMOID):
        raise keys.error("expert_gating_func", gating, f"must be {SIGMOID} (sigmoid)")
    return {
        **gguf_experts(keys, "n_routed_experts"),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": keys.size("expert_shared_feed_forward_length"),
        "n_shared_experts": keys.optional_size("expert_shared_count"),
        "norm_topk_prob": bool(keys.header.value(keys.name("expert_weights_norm"), bool)),
        "routed_scaling_factor": keys.number("expert_weights_scale") or 1.0,
        "n_group": keys.optional_size("expert_group_count", 0) or None,
        "moe_latent_size": keys.optional_size("moe_latent_size"),
    }


# Each layer has a single norm, whatever its type.
_LAYER = {**MATRICES, **STATE_SPACE, "attn_norm": "norm"}
_MOE_LAYER = {
    **EXPERTS,
    **{f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("up", "down")},
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
}
_GGUF_KEYS = SSM_SIZES | {"attention.layer_norm_epsilon"}
GGUF: Mapping[str, GgufArchitecture] = MappingProxyType(
    {
        "nemotron_h": GgufArchitecture(
            "nemotron_h",
            _LAYER,
            permuted=True,
            no_keys=True,
            alone=True,
            keys=_GGUF_KEYS,
            config=_gguf_config,
        ),
        "nemotron_h_moe": GgufArchitecture(
            "nemotron_h",
            {**_LAYER, **_MOE_LAYER},
            permuted=True,
            no_keys=True,
            alone=True,
            experts=True,
            keys=_GGUF_KEYS
            | EXPERT_KEYS
            | {
                "expert_shared_feed_forward_length",
                "expert_shared_count",
                "expert_weights_norm",
                "expert_weights_scale",
                "expert_group_count",
                "expert_group_used_count",
                "expert_gating_func",
                "moe_latent_size",
                "nextn_predict_layers",
            },
            config=_gguf_config,
        ),
    }
)
