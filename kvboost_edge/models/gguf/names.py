"""What the tensors of a GGUF file are called in transformers, by architecture, and how their rows were reordered."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["ARCHITECTURES", "GgufArchitecture", "hf_name"]

_PRE_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_BOTH_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm", **_POST_NORMS}
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
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,5})\.([a-z_]+)\.(weight|bias)")
_WHOLE = re.compile(r"([a-z_]+)\.(weight|bias)")


@dataclasses.dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """model_type   the family in transformers
    layer        names inside a layer: GGUF's -> transformers'
    permuted     rows of queries and keys stand in pairs (i, i + half) there, one after the other, in halves here
    norm_offset  what the file's norms have on top of transformers' (Gemma's norms multiply by 1 + weight)
    keys         metadata keys "architecture.KEY" that only some architectures have
    dense        tensors behind the pooling, which are no part of the decoder
    both_ways    its attention is bidirectional
    """

    model_type: str
    layer: Mapping[str, str]
    permuted: bool = False
    norm_offset: float = 0.0
    keys: frozenset[str] = frozenset()
    dense: tuple[str, ...] = ()
    both_ways: bool = False


_SOFTCAPS = {"attn_logit_softcapping", "final_logit_softcapping"}
_DENSE_KEYS = {f"dense_{number}_feat_{side}" for number in (2, 3) for side in ("in", "out")}
_WINDOW = {"attention.sliding_window", "attention.sliding_window_pattern"}
ARCHITECTURES: Mapping[str, GgufArchitecture] = MappingProxyType(
    {
        "llama": GgufArchitecture("llama", {**_MATRICES, **_PRE_NORMS}, permuted=True),
        "qwen2": GgufArchitecture("qwen2", {**_MATRICES, **_PRE_NORMS}),
        "qwen3": GgufArchitecture("qwen3", {**_MATRICES, **_PRE_NORMS, **_HEAD_NORMS}),
        "gemma": GgufArchitecture("gemma", {**_MATRICES, **_PRE_NORMS}, norm_offset=1.0),
        "gemma2": GgufArchitecture(
            "gemma2", {**_MATRICES, **_BOTH_NORMS}, norm_offset=1.0, keys=frozenset(_SOFTCAPS | _WINDOW)
        ),
        "gemma3": GgufArchitecture(
            "gemma3_text", {**_MATRICES, **_BOTH_NORMS, **_HEAD_NORMS}, norm_offset=1.0,
            keys=frozenset({"final_logit_softcapping", "rope.freq_base_swa"} | _WINDOW),
        ),
        "gemma-embedding": GgufArchitecture(
            "gemma3_text", {**_MATRICES, **_BOTH_NORMS, **_HEAD_NORMS}, norm_offset=1.0, both_ways=True,
            keys=frozenset({"rope.freq_base_swa", *_WINDOW, *_DENSE_KEYS}),
            dense=("dense_2.weight", "dense_3.weight"),
        ),
        "phi3": GgufArchitecture("phi3", {**_FUSED, **_PRE_NORMS}, keys=frozenset({"attention.sliding_window"})),
        "olmo2": GgufArchitecture(
            "olmo2", {**_MATRICES, **_POST_NORMS, **_HEAD_NORMS}, keys=frozenset({"rope.freq_base_swa"} | _WINDOW)
        ),
        "exaone4": GgufArchitecture("exaone4", {**_MATRICES, **_POST_NORMS, **_HEAD_NORMS}, keys=frozenset(_WINDOW)),
        "ernie4_5": GgufArchitecture("ernie4_5", {**_MATRICES, **_PRE_NORMS}),
        "glm4": GgufArchitecture(
            "glm4",
            {**{name: to for name, to in _MATRICES.items() if not name.startswith("ffn")}, **_GLM4_MLP, **_GLM4_NORMS},
        ),
        "granite": GgufArchitecture(
            "granite", {**_MATRICES, **_PRE_NORMS}, permuted=True,
            keys=frozenset({"attention.scale", "embedding_scale", "residual_scale", "logit_scale"}),
        ),
        "smollm3": GgufArchitecture("smollm3", {**_MATRICES, **_PRE_NORMS}, permuted=True),
    }
)  # fmt: skip
"""Architectures that are read, by general.architecture. Mistral's files are of architecture llama, OLMo 3's of
olmo2."""


def hf_name(architecture: GgufArchitecture, name: str) -> str | None:
    """transformers' name of a tensor; None where the architecture has no such tensor."""
    found = _LAYER.fullmatch(name)
    if found is not None:
        inner = architecture.layer.get(found[2])
        return None if inner is None else f"model.layers.{found[1]}.{inner}.{found[3]}"
    found = _WHOLE.fullmatch(name)
    outer = None if found is None else _OUTER.get(found[1])
    return None if found is None or outer is None else f"{outer}.{found[2]}"
