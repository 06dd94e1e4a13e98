"""Hybrids as configs of the families say them: which layers attend, which keep a state, and what
mixes tokens there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.families.fields import integer_of, number_of, size_of
from kvboost_edge.models.families.mixers import Mixer, MixerNames

__all__ = [
    "OUTPUT_GATE",
    "TILED_HEADS",
    "Hybrid",
    "adjusted_width",
    "conv_layers",
    "delta_layers",
    "hybrid_of",
    "kinds_of_layers",
    "with_lfm2_defaults",
    "with_shared_width",
]

Config = Mapping[str, Any]

TILED_HEADS = "kvboost-edge: tiled_heads"
"""The key of a config whose value heads stand in the order of GGUF files (`Mixer.tiled_heads`); no
file has it.
"""

OUTPUT_GATE = "self_attn.output_gate"
"""What the rows of queries that are gates of what attention returns are called, once they are told
apart.
"""

_ATTENTION = "attention"
_FULL = "full_attention"
# What the kernels of states take. The native runner checks the same, but only after the weights
# were packed. length of a convolution; dim of a head
_MOST_TAPS = 16
_MOST_DIM = 1 << 11
_LANES = 16  # value channels that a kernel takes at once
_GROUP = 32  # inputs of a matrix that a kernel takes at once


class Hybrid(NamedTuple):
    """kinds: of each layer, see `mixed_shapes`; mixer: of those that keep a state, None where there
    is no such one; alone: layers that mix tokens have no MLP.
    """

    kinds: tuple[str, ...]
    mixer: Mixer | None
    names: MixerNames
    alone: bool = False


_CONV = MixerNames(("conv.in_proj",), "conv.out_proj", "conv.conv.weight")
_DELTA = MixerNames(
    ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
    "linear_attn.out_proj",
    "linear_attn.conv1d.weight",
    ("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
    "linear_attn.decay",
    "linear_attn.dt_bias",
    "linear_attn.norm.weight",
)


def conv_layers(config: Config, layers: int) -> Hybrid:
    """LFM2: short convolutions, by layer_types, or all layers that full_attn_idxs does not name."""
    kinds = kinds_of_layers(config, layers, "conv", "conv", _by_indices(config, layers))
    given = {"conv_L_cache": 3, **config}
    length = integer_of(given, "conv_L_cache", 2)
    hidden = integer_of(config, "hidden_size", 1)
    _check_most("conv_L_cache", length, _MOST_TAPS)
    if "conv" in kinds and hidden % _GROUP:
        raise ModelFormatError(
            f"hidden_size={hidden} is no multiple of {_GROUP}, which the kernels of states need"
        )
    return hybrid_of(kinds, Mixer("conv", length - 1, hidden), _CONV)


def delta_layers(config: Config, layers: int) -> Hybrid:
    """Qwen3.5: a gated delta rule, by layer_types, or all layers but every
    full_attention_interval-th.
    """
    kinds = kinds_of_layers(
        config, layers, "linear_attention", "delta", _by_interval(config, layers)
    )
    usual = {
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }
    given = {**usual, **{key: value for key, value in config.items() if value is not None}}
    key_heads, value_heads, key_dim, value_dim = (
        integer_of(given, key, 1) for key in list(usual)[:4]
    )
    length = integer_of(given, "linear_conv_kernel_dim", 2)
    if value_heads % key_heads:
        raise ModelFormatError(
            f"linear_num_value_heads={value_heads} is not a multiple of "
            f"linear_num_key_heads={key_heads}"
        )
    _check_most("linear_conv_kernel_dim", length, _MOST_TAPS)
    for name, dim in (("linear_key_head_dim", key_dim), ("linear_value_head_dim", value_dim)):
        _check_most(name, dim, _MOST_DIM)
        if dim % _LANES:
            raise ModelFormatError(
                f"{name}={dim} is no multiple of {_LANES}, which the kernels of states need"
            )
    if value_heads * value_dim % _GROUP:
        raise ModelFormatError(
            f"linear_num_value_heads={value_heads} x linear_value_head_dim={value_dim} are "
            f"{value_heads * value_dim} values, no multiple of {_GROUP}, which the kernels of "
            "states need"
        )
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    tiled = bool(config.get(TILED_HEADS))
    mixer = Mixer("delta", length - 1, channels, key_heads, value_heads, key_dim, value_dim, tiled)
    return hybrid_of(kinds, mixer, _DELTA)


def _check_most(name: str, value: int, most: int) -> None:
    if value > most:
        raise ModelFormatError(
            f"{name}={value} is above {most}, the most that kernels of states take"
        )


def hybrid_of(kinds: tuple[str, ...], mixer: Mixer, names: MixerNames) -> Hybrid:
    """A model of these layers, of which some must attend."""
    if _ATTENTION not in kinds:
        raise ModelFormatError(
            "no layer of the model attends; models of states alone are not known"
        )
    return Hybrid(kinds, mixer if mixer.kind in kinds else None, names)


def kinds_of_layers(
    config: Config, layers: int, name: str, kind: str, rule: Sequence[str] | None
) -> tuple[str, ...]:
    """Kinds of layers by layer_types, whose states are called `name` there, or by an older rule;
    both must agree.
    """
    types = config.get("layer_types")
    known = {_FULL: _ATTENTION, name: kind}
    if types is None:
        types = rule if rule is not None else [_FULL] * layers
    if (
        not isinstance(types, (list, tuple))
        or len(types) != layers
        or any(one not in list(known) for one in types)
    ):
        raise ModelFormatError(f"layer_types={types!r:.200} must be {layers} of {sorted(known)}")
    if rule is not None and list(types) != list(rule):
        at = next(
            index
            for index, (one, other) in enumerate(zip(types, rule, strict=True))
            if one != other
        )
        raise ModelFormatError(
            f"layer_types says {types[at]!r} of layer {at}, and {_rule_of(config)} says "
            f"{rule[at]!r}; they contradict each other"
        )
    return tuple(known[one] for one in types)


def _rule_of(config: Config) -> str:
    key = next(
        key for key in ("full_attn_idxs", "full_attention_interval") if config.get(key) is not None
    )
    return f"{key}={config[key]!r:.60}"


def _by_indices(config: Config, layers: int) -> list[str] | None:
    indices = config.get("full_attn_idxs")
    if indices is None:
        return None
    if not isinstance(indices, (list, tuple)) or any(
        isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < layers for i in indices
    ):
        raise ModelFormatError(
            f"full_attn_idxs={indices!r:.200} must be numbers of layers below {layers}"
        )
    return [_FULL if index in indices else "conv" for index in range(layers)]


def _by_interval(config: Config, layers: int) -> list[str] | None:
    if config.get("full_attention_interval") is None and config.get("layer_types") is not None:
        return None
    given = {
        "full_attention_interval": 4,
        **{key: value for key, value in config.items() if value is not None},
    }
    step = integer_of(given, "full_attention_interval", 1)
    return ["linear_attention" if (index + 1) % step else _FULL for index in range(layers)]


def with_lfm2_defaults(config: Config) -> Config:
    """The config in Llama's words: norm_eps, tie_embedding and block_ff_dim are called otherwise
    there, and the width of the MLP is what follows from it unless block_auto_adjust_ff_dim is
    false.
    """
    found = dict(config)
    for old, name in (
        ("norm_eps", "rms_norm_eps"),
        ("tie_embedding", "tie_word_embeddings"),
        ("block_ff_dim", "intermediate_size"),
    ):
        if config.get(old) is not None:
            found[name] = config[old]
    if config.get("model_type") == "lfm2":
        found["intermediate_size"] = adjusted_width(found)
    return found


def with_shared_width(config: Config) -> Config:
    """A config of Qwen3.5's mixture with the width of the shared expert, which is that of its only
    MLPs.
    """
    return {"shared_expert_intermediate_size": 512, **config}


def adjusted_width(config: Config) -> int:
    """Width of an LFM2's MLP: two thirds of the config's, times a factor, up to the next multiple;
    or as it is.
    """
    usual = {
        "intermediate_size": 12288,
        "block_multiple_of": 256,
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
    }
    given = {**usual, **config}
    width = size_of(given, "intermediate_size") or 0
    adjusts = given["block_auto_adjust_ff_dim"]
    if not isinstance(adjusts, bool):
        raise ModelFormatError(
            f"config: block_auto_adjust_ff_dim={adjusts!r} must be true or false"
        )
    if not adjusts:
        return width
    width = int(2 * width / 3)
    if given["block_ffn_dim_multiplier"] is not None:
        width = int(number_of(given, "block_ffn_dim_multiplier", 1e-3, 1e3) * width)
        multiple = integer_of(given, "block_multiple_of", 1)
        width = multiple * ((width + multiple - 1) // multiple)
    if width < 1:
        raise ModelFormatError(
            f"intermediate_size={given['intermediate_size']} leaves an MLP of no width"
        )
    return width
