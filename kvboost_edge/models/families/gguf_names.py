"""What the tensors of a GGUF file are called in transformers, by architecture, and how their rows
were reordered.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType

__all__ = [
    "ARCHITECTURES",
    "OTHER_PARTS",
    "GgufArchitecture",
    "counted_parts",
    "hf_name",
    "is_ahead",
    "is_other_part",
]

_PRE_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_BOTH_NORMS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    **_POST_NORMS,
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MATRICES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FUSED = {
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
_GLM4_MLP = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
_GLM4_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_self_attn_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}
_GEMMA4 = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "layer_output_scale": "layer_scalar",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_up_exps": "experts.gate_up_proj",
    "ffn_gate_exps": "experts.gate_proj",
    "ffn_up_exps": "experts.up_proj",
    "ffn_down_exps": "experts.down_proj",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}
_LFM2 = {
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
_LFM2_MOE = {
    "ffn_gate_inp": "feed_forward.gate",
    "ffn_gate_exps": "feed_forward.experts.w1",
    "ffn_up_exps": "feed_forward.experts.w3",
    "ffn_down_exps": "feed_forward.experts.w2",
    "exp_probs_b": "feed_forward.expert_bias",
}
_DELTA = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.decay",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_STATE_SPACE = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_dt": "mamba.dt_bias",
    "ssm_a": "mamba.decay",
    "ssm_d": "mamba.D",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_IN_BLOCK = {  # of Granite's; Mixtral's have the names of its first code
    **{name: to.replace("mlp.", "block_sparse_moe.") for name, to in _EXPERTS.items()},
    "ffn_gate_inp": "block_sparse_moe.router.layer",
}
# Of Granite 4: its only MLPs, or what its experts share.
_ONE_MLP = {
    "gate": "shared_mlp.gate_proj",
    "up": "shared_mlp.up_proj",
    "down": "shared_mlp.output_linear",
}
_SHARED_MLP = {
    f"ffn_{part}{ending}": to for ending in ("", "_shexp") for part, to in _ONE_MLP.items()
}
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.w1",
    "ffn_up_exps": "block_sparse_moe.experts.w3",
    "ffn_down_exps": "block_sparse_moe.experts.w2",
}
_SHARED = {f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")}
_SHARED["ffn_gate_inp_shexp"] = "mlp.shared_expert_gate"
_ERNIE_MOE = {
    **_EXPERTS,
    **{f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
    "exp_probs_b": "mlp.moe_statics.e_score_correction_bias",
}
_FALCON = {
    **{name: to.replace("mlp.", "feed_forward.") for name, to in _MATRICES.items()},
    **_STATE_SPACE,
    "attn_norm": "input_layernorm",
    "ffn_norm": "pre_ff_layernorm.weight",
}
_FALCON_OUTER = {"output_norm": "model.final_layernorm"}
# Of a layer the only norm, whatever the layer is.
_NEMOTRON = {**_MATRICES, **_STATE_SPACE, "attn_norm": "norm"}
_NEMOTRON_MOE = {
    **_EXPERTS,
    **{f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("up", "down")},
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
}
_GPT_OSS = {
    **_EXPERTS,
    "ffn_gate_inp": "mlp.router",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks": "self_attn.sinks",
}
# Without an ending in files either; decays are -exp(A_log) there.
_ENDLESS = ("linear_attn.decay", "mamba.decay", "mamba.D", "pre_ff_layernorm.weight")
# Without ".weight" in transformers.
_BARE = (
    "layer_scalar",
    "mlp.moe_statics.e_score_correction_bias",
    "mlp.gate.e_score_correction_bias",
    "self_attn.sinks",
    "feed_forward.expert_bias",
    "linear_attn.dt_bias",
    "mamba.dt_bias",
    *_ENDLESS,
)
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LFM2_OUTER = {
    "token_embd_norm": "model.embedding_norm"
}  # it stands behind the layers, whatever it is called
_GEMMA4_OUTER = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,5})\.([a-z_][a-z0-9_.]*?)(?:\.(weight|bias|scale))?")
_WHOLE = re.compile(r"([a-z_]+)\.(weight|bias)")


@dataclasses.dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """model_type   the family in transformers
    layer        names inside a layer: GGUF's -> transformers'; those that end with ".scale" are all
                 of the name
    permuted     rows of queries and keys stand in pairs (i, i + half) there, one after the other,
                 in halves here
    norm_offset  what the file's norms have on top of transformers' (Gemma's norms multiply by 1 +
                 weight)
    outer        names outside the layers, beside those of all
    keys         metadata keys "architecture.KEY" that only some architectures have
    dense        tensors behind the pooling, which are no part of the decoder
    both_ways    its attention is bidirectional
    experts      it is a mixture of experts
    no_keys      0 key heads of a layer mean that it does not attend
    alone        an MLP of no width means that a layer has none; and there is no rope, whatever keys
                 say of it
    """

    model_type: str
    layer: Mapping[str, str]
    permuted: bool = False
    norm_offset: float = 0.0
    outer: Mapping[str, str] = dataclasses.field(default_factory=dict)
    keys: frozenset[str] = frozenset()
    dense: tuple[str, ...] = ()
    both_ways: bool = False
    experts: bool = False
    no_keys: bool = False
    alone: bool = False


_SOFTCAPS = {"attn_logit_softcapping", "final_logit_softcapping"}
_DENSE_KEYS = {f"dense_{number}_feat_{side}" for number in (2, 3) for side in ("in", "out")}
_SSM_SIZES = {
    "ssm.conv_kernel",
    "ssm.state_size",
    "ssm.group_count",
    "ssm.inner_size",
    "ssm.time_step_rank",
}
_DELTA_KEYS = frozenset(
    _SSM_SIZES
    | {
        "rope.dimension_sections",
        "full_attention_interval",
        "attention.recurrent_layers",
        "nextn_predict_layers",
    }
)
_NEMOTRON_KEYS = frozenset({"attention.layer_norm_epsilon", *_SSM_SIZES})
_EXPERT_KEYS = frozenset({"expert_feed_forward_length"})
_WINDOW = {"attention.sliding_window", "attention.sliding_window_pattern"}
ARCHITECTURES: Mapping[str, GgufArchitecture] = MappingProxyType(
    {
        "llama": GgufArchitecture(
            "llama", {**_MATRICES, **_PRE_NORMS, **_MIXTRAL}, permuted=True, experts=True
        ),
        "qwen2": GgufArchitecture("qwen2", {**_MATRICES, **_PRE_NORMS}),
        "qwen3": GgufArchitecture("qwen3", {**_MATRICES, **_PRE_NORMS, **_HEAD_NORMS}),
        "qwen2moe": GgufArchitecture(
            "qwen2_moe",
            {**_MATRICES, **_PRE_NORMS, **_EXPERTS, **_SHARED},
            keys=_EXPERT_KEYS | {"expert_shared_feed_forward_length"},
            experts=True,
        ),
        "qwen3moe": GgufArchitecture(
            "qwen3_moe",
            {**_MATRICES, **_PRE_NORMS, **_HEAD_NORMS, **_EXPERTS},
            keys=_EXPERT_KEYS,
            experts=True,
        ),
        "olmoe": GgufArchitecture(
            "olmoe", {**_MATRICES, **_PRE_NORMS, **_HEAD_NORMS, **_EXPERTS}, experts=True
        ),
        "qwen3vl": GgufArchitecture(
            "qwen3_vl_text",
            {**_MATRICES, **_PRE_NORMS, **_HEAD_NORMS},
            keys=frozenset({"rope.dimension_sections", "n_deepstack_layers"}),
        ),
        "mistral3": GgufArchitecture(
            "ministral3",
            {**_MATRICES, **_PRE_NORMS},
            permuted=True,
            # The last two are Ollama's, of the part for images.
            keys=frozenset(
                {
                    "rope.scaling.yarn_log_multiplier",
                    "attention.temperature_scale",
                    "image_token_index",
                    "spatial_merge_size",
                }
            ),
        ),
        "minicpm": GgufArchitecture(
            "minicpm",
            {**_MATRICES, **_PRE_NORMS},
            permuted=True,
            keys=frozenset(
                {"embedding_scale", "residual_scale", "logit_scale", "rope.scaling.attn_factor"}
            ),
        ),
        "hunyuan-dense": GgufArchitecture(
            "hunyuan_v1_dense",
            {
                **_MATRICES,
                **_PRE_NORMS,
                "attn_q_norm": "self_attn.query_layernorm",
                "attn_k_norm": "self_attn.key_layernorm",
            },
        ),
        "gemma": GgufArchitecture("gemma", {**_MATRICES, **_PRE_NORMS}, norm_offset=1.0),
        "gemma2": GgufArchitecture(
            "gemma2",
            {**_MATRICES, **_BOTH_NORMS},
            norm_offset=1.0,
            keys=frozenset(_SOFTCAPS | _WINDOW),
        ),
        "gemma3": GgufArchitecture(
            "gemma3_text",
            {**_MATRICES, **_BOTH_NORMS, **_HEAD_NORMS},
            norm_offset=1.0,
            keys=frozenset({"final_logit_softcapping", "rope.freq_base_swa"} | _WINDOW),
        ),
        "gemma-embedding": GgufArchitecture(
            "gemma3_text",
            {**_MATRICES, **_BOTH_NORMS, **_HEAD_NORMS},
            norm_offset=1.0,
            both_ways=True,
            keys=frozenset({"rope.freq_base_swa", *_WINDOW, *_DENSE_KEYS}),
            dense=("dense_2.weight", "dense_3.weight"),
        ),
        "gemma4": GgufArchitecture(
            "gemma4_text",
            {**_MATRICES, **_BOTH_NORMS, **_HEAD_NORMS, **_GEMMA4},
            outer=_GEMMA4_OUTER,
            keys=frozenset(
                {
                    "final_logit_softcapping",
                    "rope.freq_base_swa",
                    "rope.dimension_count_swa",
                    "attention.key_length_swa",
                    "attention.value_length_swa",
                    "attention.shared_kv_layers",
                    "embedding_length_per_layer_input",
                }
                | _WINDOW
                | _EXPERT_KEYS
            ),
            experts=True,
        ),
        "phi3": GgufArchitecture(
            "phi3",
            {**_FUSED, **_PRE_NORMS},
            keys=frozenset({"attention.sliding_window", "rope.scaling.attn_factor"}),
        ),
        "olmo2": GgufArchitecture(
            "olmo2",
            {**_MATRICES, **_POST_NORMS, **_HEAD_NORMS},
            keys=frozenset({"rope.freq_base_swa"} | _WINDOW),
        ),
        "exaone4": GgufArchitecture(
            "exaone4", {**_MATRICES, **_POST_NORMS, **_HEAD_NORMS}, keys=frozenset(_WINDOW)
        ),
        "ernie4_5": GgufArchitecture("ernie4_5", {**_MATRICES, **_PRE_NORMS}),
        "ernie4_5-moe": GgufArchitecture(
            "ernie4_5_moe",
            {**_MATRICES, **_PRE_NORMS, **_ERNIE_MOE},
            experts=True,
            keys=_EXPERT_KEYS
            | {
                "expert_shared_count",
                "expert_shared_feed_forward_length",
                "leading_dense_block_count",
                "interleave_moe_layer_step",
            },
        ),
        "glm4": GgufArchitecture(
            "glm4",
            {
                **{name: to for name, to in _MATRICES.items() if not name.startswith("ffn")},
                **_GLM4_MLP,
                **_GLM4_NORMS,
            },
        ),
        "granite": GgufArchitecture(
            "granite",
            {**_MATRICES, **_PRE_NORMS},
            permuted=True,
            # Granite 4 without mamba layers has their sizes all the same, and no tensor of theirs.
            keys=frozenset(
                {"attention.scale", "embedding_scale", "residual_scale", "logit_scale", *_SSM_SIZES}
            ),
        ),
        "granitemoe": GgufArchitecture(
            "granitemoe",
            {**_MATRICES, **_PRE_NORMS, **_IN_BLOCK},
            permuted=True,
            experts=True,
            keys=frozenset({"attention.scale", "embedding_scale", "residual_scale", "logit_scale"}),
        ),
        "granitehybrid": GgufArchitecture(
            "granitemoehybrid",
            {**_MATRICES, **_PRE_NORMS, **_STATE_SPACE, **_IN_BLOCK, **_SHARED_MLP},
            permuted=True,
            experts=True,
            no_keys=True,
            keys=frozenset(
                {
                    "attention.scale",
                    "embedding_scale",
                    "residual_scale",
                    "logit_scale",
                    *_SSM_SIZES,
                    "expert_shared_feed_forward_length",
                }
            ),
        ),
        "gpt-oss": GgufArchitecture(
            "gpt_oss", {**_MATRICES, **_GPT_OSS}, keys=_EXPERT_KEYS | _WINDOW, experts=True
        ),
        "falcon-h1": GgufArchitecture(
            "falcon_h1", _FALCON, outer=_FALCON_OUTER, keys=frozenset(_SSM_SIZES)
        ),
        "nemotron_h": GgufArchitecture(
            "nemotron_h", _NEMOTRON, permuted=True, no_keys=True, alone=True, keys=_NEMOTRON_KEYS
        ),
        "nemotron_h_moe": GgufArchitecture(
            "nemotron_h",
            {**_NEMOTRON, **_NEMOTRON_MOE},
            permuted=True,
            no_keys=True,
            alone=True,
            experts=True,
            keys=_NEMOTRON_KEYS
            | _EXPERT_KEYS
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
        ),
        "lfm2": GgufArchitecture(
            "lfm2", _LFM2, outer=_LFM2_OUTER, keys=frozenset({"shortconv.l_cache"}), no_keys=True
        ),
        "lfm2moe": GgufArchitecture(
            "lfm2_moe",
            {**_LFM2, **_LFM2_MOE},
            outer=_LFM2_OUTER,
            experts=True,
            no_keys=True,
            keys=_EXPERT_KEYS
            | {"shortconv.l_cache", "leading_dense_block_count", "expert_gating_func"},
        ),
        "qwen35": GgufArchitecture(
            "qwen3_5_text",
            {**_MATRICES, **_DELTA, **_HEAD_NORMS},
            norm_offset=1.0,
            keys=_DELTA_KEYS,
        ),
        "qwen35moe": GgufArchitecture(
            "qwen3_5_moe_text",
            {
                **_MATRICES,
                **_DELTA,
                **_HEAD_NORMS,
                **_EXPERTS,
                **_SHARED,
                "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
            },
            norm_offset=1.0,
            experts=True,
            keys=_DELTA_KEYS | _EXPERT_KEYS | {"expert_shared_feed_forward_length"},
        ),
        "smollm3": GgufArchitecture("smollm3", {**_MATRICES, **_PRE_NORMS}, permuted=True),
    }
)
"""Architectures that are read, by general.architecture. Mistral's files are of architecture llama,
OLMo 3's of olmo2.
"""


OTHER_PARTS = ("v.", "mm.", "a.")
"""How names of tensors for images and sound begin, which Ollama's files hold beside the language
model's.
"""


def is_other_part(name: str) -> bool:
    """Whether a tensor belongs to a part for images or sound."""
    return name.startswith(OTHER_PARTS)


def is_ahead(name: str, layers: int) -> bool:
    """Whether a tensor is of a layer behind the model's own, which guesses more than the next
    token.
    """
    found = _LAYER.fullmatch(name)
    return found is not None and int(found[1]) >= layers


def counted_parts(names: Iterable[str], layers: int) -> dict[str, int]:
    """How many of the tensors each other part has, of a model with so many layers of its own:
    "nextn" are those that guess more than the next token.
    """
    counts: dict[str, int] = {}
    for name in names:
        if is_other_part(name) or is_ahead(name, layers):
            part = name.partition(".")[0] if is_other_part(name) else "nextn"
            counts[part] = counts.get(part, 0) + 1
    return counts


def hf_name(architecture: GgufArchitecture, name: str) -> str | None:
    """transformers' name of a tensor; None where the architecture has no such tensor."""
    found = _LAYER.fullmatch(name)
    if found is not None:
        is_scale = found[3] == "scale"
        inner = architecture.layer.get(f"{found[2]}.scale" if is_scale else found[2])
        # A name without an ending, and an ending that is none of its name's.
        if inner is None or (found[3] is None) != (inner in _ENDLESS):
            return None
        if is_scale:
            return f"model.layers.{found[1]}.{inner}"
        return f"model.layers.{found[1]}.{inner}" + ("" if inner in _BARE else f".{found[3]}")
    found = _WHOLE.fullmatch(name)
    outer = None if found is None else architecture.outer.get(found[1]) or _OUTER.get(found[1])
    return None if found is None or outer is None else f"{outer}.{found[2]}"
