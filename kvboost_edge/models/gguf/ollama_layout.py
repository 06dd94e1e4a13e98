"""Translation of GGUF headers written by Ollama's converters to the layout of llama.cpp's.

Ollama converted some families itself. In these files keys and tensors have other names, and keys
are missing whose values Ollama's own runner knew. The rules are those by which Ollama presents its
files to llama.cpp (llama/compat in its repository).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import numpy as np

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.gguf.file import GgufHeader, GgufTensor

__all__ = ["in_llama_cpp_layout"]

_ARCHITECTURE = "general.architecture"
_TOKENIZER = "tokenizer.ggml."
_EMBEDDING = "token_embd.weight"
# Context from which the global layers of Gemma 3 have linear RoPE scaling.
_GEMMA3_LONG = 131072
# Gemma 3's chat format. The files lack a template, because Ollama keeps its own next to them.
_GEMMA3_TEMPLATE = (
    "{{ bos_token }}{% set start = 0 %}{% set system = '' %}"
    "{% if messages and messages[0].role == 'system' %}{% set start = 1 %}"
    "{% set system = messages[0].content | trim + '\n\n' %}{% endif %}"
    "{% for message in messages[start:] %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('user and assistant messages must alternate') }}{% endif %}"
    "<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}\n"
    "{% if loop.first %}{{ system }}{% endif %}{{ message.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


class _Layout:
    """Header that is being translated.

    Attributes:
        values: metadata, changed in place.
        tensors: tensors by name, changed in place.
    """

    def __init__(self, header: GgufHeader) -> None:
        self._header = header
        self.values: dict[str, Any] = dict(header.values)
        self.tensors: dict[str, GgufTensor] = dict(header.tensors)

    def header(self) -> GgufHeader:
        return dataclasses.replace(
            self._header,
            values=MappingProxyType(self.values),
            tensors=MappingProxyType(self.tensors),
        )

    def error(self, text: str) -> ModelFormatError:
        return ModelFormatError(
            f"{self._header.path} was converted by Ollama, and {text}; use the GGUF file of this "
            "model from the hub"
        )

    def setting(self, key: str, kind: type) -> Any:
        """Return the value of a key of the file, or None if it is missing.

        Raises:
            ModelFormatError: the value has another type.
        """
        return self._header.value(key, kind)

    def own(self, key: str) -> str:
        """Return the whole name of a key of the architecture."""
        return f"{self.values[_ARCHITECTURE]}.{key}"

    def has(self, *keys: str) -> bool:
        return any(self.own(key) in self.values for key in keys)

    def has_parts(self, *prefixes: str) -> bool:
        return any(name.startswith(prefixes) for name in self.tensors)

    def rename_architecture(self, name: str) -> None:
        """Rename the architecture, and with it the prefix of its keys."""
        old = f"{self.values[_ARCHITECTURE]}."
        for key in [key for key in self.values if key.startswith(old)]:
            self.values[f"{name}.{key.removeprefix(old)}"] = self.values.pop(key)
        self.values[_ARCHITECTURE] = name

    def rename_key(self, old: str, new: str) -> None:
        """Rename a key. If both names are present, the value under the new one is kept."""
        if self.own(old) in self.values:
            value = self.values.pop(self.own(old))
            self.values.setdefault(self.own(new), value)

    def default(self, key: str, value: Any) -> None:
        """Set a key that is missing."""
        self.values.setdefault(self.own(key), value)

    def drop(self, *keys: str) -> None:
        for key in keys:
            self.values.pop(self.own(key), None)

    def rename_tensors(self, old: str, new: str) -> None:
        """Replace a part of tensor names, unless they have the new name already."""
        renamed = {}
        for name, tensor in self.tensors.items():
            to = name if new in name else name.replace(old, new, 1)
            renamed[to] = dataclasses.replace(tensor, name=to)
        self.tensors = renamed

    def drop_tensors(self, *prefixes: str) -> None:
        self.tensors = {
            name: tensor for name, tensor in self.tensors.items() if not name.startswith(prefixes)
        }

    def set_pre_tokenizer(self, name: str) -> None:
        """Name the pre-tokenizer, which the file lacks or calls "default"."""
        if self.setting(f"{_TOKENIZER}pre", str) in (None, "", "default"):
            self.values[f"{_TOKENIZER}pre"] = name

    def cut_vocabulary(self) -> None:
        """Leave out tokens beyond the rows of the embedding, which are those of images."""
        embedding = self.tensors.get(_EMBEDDING)
        if embedding is None:
            return
        rows = embedding.shape[0]
        tokens = f"{_TOKENIZER}tokens"
        if self._header.has_strings(tokens) and self._header.length(tokens) > rows:
            self.values[tokens] = self.values[tokens]._replace(length=rows)
            for key in (f"{_TOKENIZER}scores", f"{_TOKENIZER}token_type"):
                if isinstance(self.values.get(key), np.ndarray):
                    self.values[key] = self.values[key][:rows]


def in_llama_cpp_layout(header: GgufHeader) -> GgufHeader:
    """Return a header in the layout of llama.cpp's converters. Headers in that layout do not
    change.

    Raises:
        ModelFormatError: a layout of Ollama's cannot be translated.
    """
    translate = _TRANSLATIONS.get(str(header.values.get(_ARCHITECTURE)))
    if translate is None:
        return header
    layout = _Layout(header)
    translate(layout)
    return layout.header()


def _gemma3(layout: _Layout) -> None:
    if "dense.0.weight" in layout.tensors:
        _embedding_gemma(layout)
        return
    own = ("rope.local.freq_base", "rope.global.freq_base", "mm.tokens_per_image")
    if (
        layout.has(*own)
        or layout.has_parts("v.", "mm.")
        or not layout.has("attention.layer_norm_rms_epsilon")
    ):
        _add_gemma3_keys(layout)
        layout.values.setdefault("tokenizer.chat_template", _GEMMA3_TEMPLATE)


def _add_gemma3_keys(layout: _Layout) -> None:
    layout.rename_key("rope.global.freq_base", "rope.freq_base")
    layout.rename_key("rope.local.freq_base", "rope.freq_base_swa")
    layout.rename_key("rope.scaling.extrapolation_factor", "rope.scaling.yarn_ext_factor")
    _rename_yarn_betas(layout)
    layout.default("attention.layer_norm_rms_epsilon", 1e-6)
    layout.default("rope.freq_base", 1e6)
    layout.default("rope.freq_base_swa", 1e4)
    context = layout.values.get(layout.own("context_length"))
    if isinstance(context, int) and context >= _GEMMA3_LONG:
        if not layout.has("rope.scaling.type", "rope.scaling.factor"):
            layout.default("rope.scaling.factor", 8.0)
        layout.default("rope.scaling.type", "linear")
    layout.cut_vocabulary()


def _embedding_gemma(layout: _Layout) -> None:
    layout.rename_architecture("gemma-embedding")
    layout.drop("attention.causal")
    layout.rename_tensors("dense.0.weight", "dense_2.weight")
    layout.rename_tensors("dense.1.weight", "dense_3.weight")
    if "output_norm.weight" not in layout.tensors and "norm.weight" in layout.tensors:
        norm = layout.tensors.pop("norm.weight")
        layout.tensors["output_norm.weight"] = dataclasses.replace(norm, name="output_norm.weight")
    for number in (2, 3):
        dense = layout.tensors.get(f"dense_{number}.weight")
        if dense is None or len(dense.shape) != 2:
            raise layout.error("lacks one of the two dense layers of EmbeddingGemma")
        layout.default(f"dense_{number}_feat_out", dense.shape[0])
        layout.default(f"dense_{number}_feat_in", dense.shape[1])
    layout.default("pooling_type", 1)
    _add_gemma3_keys(layout)


def _gemma4(layout: _Layout) -> None:
    if layout.setting(f"{_TOKENIZER}model", str) == "llama":
        layout.values[f"{_TOKENIZER}model"] = "gemma4"
    layout.drop_tensors("model.vision_tower.")
    layout.rename_tensors(".ffn_gate_inp.per_expert_scale", ".ffn_down_exps.scale")


def _gpt_oss(layout: _Layout) -> None:
    layout.rename_architecture("gpt-oss")
    if any(".attn_qkv." in name or ".ffn_gate_up_exps." in name for name in layout.tensors):
        raise layout.error("has the merged matrices of an early version; run `ollama pull` again")
    experts = layout.tensors.get("blk.0.ffn_gate_exps.weight")
    if experts is not None and len(experts.shape) == 3:
        layout.default("expert_feed_forward_length", experts.shape[1])
    layout.default("rope.scaling.type", "yarn")
    layout.values[f"{_TOKENIZER}pre"] = "gpt-4o"
    layout.rename_tensors(".attn_out.", ".attn_output.")
    layout.rename_tensors(".attn_sinks", ".attn_sinks.weight")
    layout.rename_tensors(".ffn_norm", ".post_attention_norm")


def _lfm2(layout: _Layout) -> None:
    if "token_embd_norm.weight" in layout.tensors or "output_norm.weight" not in layout.tensors:
        return
    layout.rename_tensors("output_norm.weight", "token_embd_norm.weight")
    layout.values[f"{_TOKENIZER}pre"] = "lfm2"
    gate = layout.tensors.get("blk.0.ffn_gate.weight")
    if gate is not None:  # some files give another width
        layout.values[layout.own("feed_forward_length")] = gate.shape[0]


def _mistral3(layout: _Layout) -> None:
    own = ("rope.scaling.beta_fast", "rope.scaling.mscale_all_dim", "rope.scaling_beta")
    if not layout.has(*own) and not layout.has_parts("v.", "mm."):
        return
    _rename_yarn_betas(layout)
    layout.rename_key("rope.scaling.mscale_all_dim", "rope.scaling.yarn_log_multiplier")
    layout.rename_key("rope.scaling_beta", "attention.temperature_scale")
    layout.set_pre_tokenizer("tekken")


def _rename_yarn_betas(layout: _Layout) -> None:
    for name in ("beta_fast", "beta_slow"):
        layout.rename_key(f"rope.scaling.{name}", f"rope.scaling.yarn_{name}")


def _nemotron_omni(layout: _Layout) -> None:
    has_experts = bool(layout.setting(layout.own("expert_count"), int))
    layout.rename_architecture("nemotron_h_moe" if has_experts else "nemotron_h")


def _olmo3(layout: _Layout) -> None:
    layout.rename_architecture("olmo2")


def _qwen3_5(layout: _Layout) -> None:
    reordered = layout.values.get(layout.own("ssm.v_head_reordered"))
    own = any(name.endswith(".ssm_dt") for name in layout.tensors)
    if not own and reordered is None and not layout.has_parts("v.", "mtp."):
        return
    groups, heads = (
        layout.setting(layout.own(key), int) for key in ("ssm.group_count", "ssm.time_step_rank")
    )
    if reordered is not True and groups != heads:
        raise layout.error("its value heads are in the order of an early version")
    if layout.values.get(layout.own("norm_top_k_prob"), True) is not True:
        raise layout.error("norm_top_k_prob is false, which is not supported")
    layout.drop(
        "ssm.v_head_reordered",
        "norm_top_k_prob",
        "image_token_id",
        "vision_start_token_id",
        "vision_end_token_id",
        "mrope_sections",
        "rope.mrope_section",
        "rope.mrope_interleaved",
    )
    counts = layout.values.get(layout.own("attention.head_count_kv"))
    if isinstance(counts, np.ndarray) and counts.size:
        layout.values[layout.own("attention.head_count_kv")] = int(counts.max())
        layout.default("attention.recurrent_layers", counts == 0)
    sections = layout.values.get(layout.own("rope.dimension_sections"))
    if isinstance(sections, np.ndarray) and len(sections) == 3:
        layout.values[layout.own("rope.dimension_sections")] = np.append(sections, 0)
    layout.rename_tensors(".ssm_dt", ".ssm_dt.bias")
    layout.drop_tensors("mtp.")


_TRANSLATIONS: dict[str, Callable[[_Layout], None]] = {
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "gptoss": _gpt_oss,
    "lfm2": _lfm2,
    "mistral3": _mistral3,
    "nemotron_h_omni": _nemotron_omni,
    "olmo3": _olmo3,
    "qwen35": _qwen3_5,
    "qwen35moe": _qwen3_5,
}
