"""Nemotron-H as its configs say it: each layer is one thing, a mixer with a state, attention, an
MLP or experts.

Steps of time are limited by time_step_limit, as in its makers' code; files of llama.cpp have no
limits. transformers has time_step_min for the least instead, in passes of several tokens and not in
those of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.families.fields import MAX_LAYERS, integer_of, number_of
from kvboost_edge.models.families.layers import ATTENTION, NO_MIXER
from kvboost_edge.models.families.moe import ExpertNames, Experts, experts_of, flag_of
from kvboost_edge.models.families.ssd import SsdKeys, ssd_mixer, ssd_names, time_limit_of
from kvboost_edge.models.families.ssm import Hybrid

__all__ = ["kinds_of_layers", "nemotron_experts", "nemotron_layers", "with_nemotron_words"]

Config = Mapping[str, Any]

_STATE = "linear_attention"
_FULL = "full_attention"
_MLP = "mlp"
_EXPERTS = "moe"
_KINDS = {_STATE: "ssd", _FULL: ATTENTION, _MLP: NO_MIXER, _EXPERTS: NO_MIXER}
_OLDER = {"mamba": _STATE, "attention": _FULL}
_LETTERS = {"M": _STATE, "*": _FULL, "-": _MLP, "E": _EXPERTS}  # of hybrid_override_pattern
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


def kinds_of_layers(config: Mapping[str, Any]) -> tuple[str, Any]:
    """What says of each layer of Nemotron-H which kind it is, a list or a text of letters: its key
    and its value.
    """
    key = next(
        (key for key in _KINDS_OF_LAYERS if config.get(key) is not None), _KINDS_OF_LAYERS[-1]
    )
    return key, config.get(key)


def with_nemotron_words(config: Config) -> Config:
    """The config in Llama's words, with what it leaves out: the number of layers is that of their
    kinds, and attention has no rope.
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


def _types(config: Config) -> list[str]:
    """Kinds of layers, from a list or from a letter for each."""
    key, given = kinds_of_layers(config)
    if key == "hybrid_override_pattern":
        types = [_LETTERS.get(letter, letter) for letter in given] if isinstance(given, str) else []
    else:
        listed = given if isinstance(given, (list, tuple)) else []
        types = [_OLDER.get(one, one) if isinstance(one, str) else one for one in listed]
    if not 0 < len(types) <= MAX_LAYERS or any(one not in list(_KINDS) for one in types):
        raise ModelFormatError(
            f"{key}={given!r:.200} must say of each layer which of {sorted(_KINDS)} it is"
        )
    return types


def nemotron_layers(config: Config, layers: int) -> Hybrid:
    """By layer_types. Those that mix tokens have no MLP."""
    kinds = tuple(_KINDS[one] for one in config["layer_types"])
    if ATTENTION not in kinds:
        raise ModelFormatError(
            "no layer of the model attends; models of states alone are not known"
        )
    mixer = ssd_mixer(config, _KEYS, "gated_before", time_limit_of(config))
    names = ssd_names("mamba", mixer, conv_bias=flag_of(config, "use_conv_bias", True))
    return Hybrid(kinds, mixer if mixer.kind in kinds else None, names, alone=True)


def nemotron_experts(config: Config, layers: int) -> Experts | None:
    """The sigmoid of each logit, with a bias where experts are chosen; shares are divided by their
    sum and scaled. Beside them an expert that all tokens share. None where no layer has experts.
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
