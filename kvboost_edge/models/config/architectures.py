"""Compatibility of model families, decided from the config alone."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.config.model_config import read_config_object
from kvboost_edge.models.config.nested import text_config
from kvboost_edge.models.config.quant_config import packed_layout
from kvboost_edge.models.families.family import Architecture
from kvboost_edge.models.families.hunyuan import is_static_dynamic
from kvboost_edge.models.families.registry import ASSISTANTS, MODEL_TYPES

__all__ = [
    "LATENT",
    "LONG_RANGE",
    "PHI3_LENGTH",
    "SUPPORTED_ARCHITECTURES",
    "UNSUPPORTED_ARCHITECTURES",
    "Architecture",
    "CompatibilityReport",
    "PinnedContext",
    "check_model_compatibility",
    "has_two_ranges",
    "is_bidirectional",
    "pin_notice",
    "pinned_context",
    "states_refusal",
]

LONG_RANGE = "kvboost-edge: rope_range=long"
"""Config key that selects longrope's factors for sequences beyond the original length.

The engine sets it. Model files never contain it.
"""
PHI3_LENGTH = 4096
"""Default `original_max_position_embeddings` of Phi-3."""


@dataclasses.dataclass(frozen=True, slots=True)
class CompatibilityReport:
    """Result of a compatibility check.

    Attributes:
        model_type: the config's `model_type`.
        supported: True if the model runs.
        tested: True if this project tests the family.
        reason: reason for refusing the model, or warnings about it; "" if neither applies.
    """

    model_type: str
    supported: bool
    tested: bool
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class PinnedContext:
    """Context limit of a model whose RoPE frequencies depend on the sequence length.

    Attributes:
        rope_type: "dynamic" or "longrope".
        length: longest sequence, in tokens, for which the frequencies are constant. The engine
            refuses longer sequences.
    """

    rope_type: str
    length: int


SUPPORTED_ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {name: known.architecture for name, known in MODEL_TYPES.items()}
)
"""Supported families by `model_type`."""

_STATE_SPACE = (
    "this kind of recurrent state is not supported (short convolutions, gated delta rules and "
    "Mamba2 are)"
)
_ARRANGED = (
    "its kind of recurrent state is supported, but not this arrangement of layers and tensors"
)
LATENT = "its multi-head latent attention (MLA) is not supported"
"""Reason for refusing a model with multi-head latent attention."""
_LATENT_RANK = "kv_lora_rank"  # only models with latent attention have it
_OWN_ATTENTION = (
    "it computes attention in its own modules (ALiBi or older code), which cannot be replaced"
)
_FALCON = (
    "the Falcon models of 2023 use LayerNorm, parallel attention and MLP, and in some cases ALiBi, "
    "which are not supported; Falcon 3 (a Llama) and Falcon-H1 are"
)
_BIDIRECTIONAL = (
    "bidirectional attention is supported for gemma3_text (EmbeddingGemma) only; for embeddings "
    "use that, or a causal model such as Qwen3-Embedding"
)
_BIDIRECTIONAL_TYPES = ("gemma3_text",)
_KEEP_STATES: dict[str, str] = {
    **dict.fromkeys(
        "mamba falcon_mamba rwkv xlstm jamba zamba recurrent_gemma minimax bailing_hybrid".split(),
        _STATE_SPACE,
    ),
    **dict.fromkeys("bamba zamba2 qwen3_next olmo_hybrid".split(), _ARRANGED),
    "mamba2": "models without attention layers are not supported",
    "kimi_linear": (
        "its recurrent state has a decay per channel, and its other layers use latent attention; "
        "neither is supported"
    ),
    "lfm3": "its norms before and after each layer and its gates per head are not supported",
    **dict.fromkeys(
        ("qwen4_exp", "qwen4_exp_text"),
        "its layers exchange several streams of hidden states, which is not supported",
    ),
}
_REFUSED: dict[str, str] = {
    **_KEEP_STATES,
    **dict.fromkeys(
        "deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa kimi_k2 minicpm3 "
        "longcat_flash".split(),
        LATENT,
    ),
    **dict.fromkeys("falcon RefinedWebModel RefinedWeb".split(), _FALCON),
    **dict.fromkeys("bloom mpt gptj codegen gpt_neo xglm".split(), _OWN_ATTENTION),
    **dict.fromkeys(
        "bert roberta distilbert albert electra deberta modernbert".split(), "it is an encoder"
    ),
    **dict.fromkeys(
        ASSISTANTS,
        "it only drafts tokens for another model; give that model, and this one as draft_model",
    ),
    "llama4": "its chunked attention is not supported",
    "gemma3n": (
        "its layers exchange several streams of hidden states (AltUp), which is not supported"
    ),
}


UNSUPPORTED_ARCHITECTURES: Mapping[str, str] = MappingProxyType(_REFUSED)
"""Reason for each refused family, by `model_type`."""


def check_model_compatibility(model: Any, strict: bool = True) -> CompatibilityReport:
    """Decide whether a model can run, without loading its weights.

    Args:
        model: a model directory, a config as a dict, or a transformers config or model.
        strict: raise an error for an unsupported model, and issue a UserWarning (once per family)
            for an untested one. Without it, only the report says so.

    Raises:
        ModelFormatError: the model is not supported and `strict` is set, or the directory has no
            valid config.
    """
    config = _config_of(model)
    model_type = _model_type(config)
    reason = next(_objections(model_type, config), "")
    known = SUPPORTED_ARCHITECTURES.get(model_type)
    if reason:
        if strict:
            raise ModelFormatError(f"model_type={model_type!r} is not supported: {reason}")
        return CompatibilityReport(model_type, False, False, reason)
    tested = known is not None and known.tested
    if not tested:
        reason = (
            f"model_type={model_type!r} should run but is not tested here; check it with "
            "verify_correctness()"
        )
        if strict:
            _warn_once(reason)
    notices = [reason, pin_notice(config)]
    return CompatibilityReport(
        model_type, True, tested, "; ".join(notice for notice in notices if notice)
    )


def states_refusal(config: Mapping[str, Any]) -> str:
    """Return why no runner supports the recurrent layers of this model type; "" for other
    model types.
    """
    types = [str(part.get("model_type")) for part in (config, text_config(config))]
    return next(
        (f"model_type={one!r}: {_KEEP_STATES[one]}" for one in types if one in _KEEP_STATES), ""
    )


def pinned_context(config: Mapping[str, Any]) -> PinnedContext | None:
    """Return the context limit within which the RoPE frequencies of a model are constant.

    Cached keys are valid only within this limit. The result is None if the RoPE type is not
    "dynamic" or "longrope", or if the config does not give the original length.

    Args:
        config: the object in config.json, or `to_dict()` of a transformers config.

    Raises:
        ModelFormatError: the length is not a positive integer.
    """
    inner = text_config(config)
    found = []
    for rope in _rope_parts(inner):
        kind = _kind_of(rope, inner)
        if kind not in ("dynamic", "longrope") or (kind == "longrope" and inner.get(LONG_RANGE)):
            continue
        if is_static_dynamic(inner.get("model_type"), rope):
            continue
        name = "original_max_position_embeddings"
        # Some families store the length outside the RoPE settings, and transformers prefers that
        # value.
        length = inner.get(name)
        length = rope.get(name) if length is None else length
        if length is None and inner.get("model_type") == "phi3":
            length = PHI3_LENGTH
        if length is None:
            continue
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise ModelFormatError(f"config: {name}={length!r} must be an integer of at least 1")
        found.append(PinnedContext(kind, length))
    return min(found, key=lambda pinned: pinned.length, default=None)


def has_two_ranges(config: Mapping[str, Any]) -> bool:
    """Return whether the model uses longrope, which has two sets of factors."""
    inner = text_config(config)
    return any(_kind_of(rope, inner) == "longrope" for rope in _rope_parts(inner))


def _kind_of(rope: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    if kind == "su" or (kind == "yarn" and config.get("model_type") == "phi3"):
        return "longrope"  # older names of longrope
    return kind


def pin_notice(config: Mapping[str, Any]) -> str:
    """Return a notice if the context limit is below the config's, with the reason; otherwise ""."""
    pinned = pinned_context(config)
    longest = text_config(config).get("max_position_embeddings")
    if pinned is None or (isinstance(longest, int) and longest <= pinned.length):
        return ""
    hint = "; rope_range='long' uses the factors for longer ones (native runner)" * has_two_ranges(
        config
    )
    return (
        f"the context is limited to {pinned.length} tokens, because RoPE of type "
        f"{pinned.rope_type!r} changes with the length of longer sequences{hint}"
    )


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(reason, UserWarning, stacklevel=3)


def _config_of(model: Any) -> Mapping[str, Any]:
    if isinstance(model, Mapping):
        return model
    if isinstance(model, (str, Path)):
        return read_config_object(Path(model))
    config = getattr(model, "config", model)
    to_dict = getattr(config, "to_dict", None)
    if not callable(to_dict):
        raise ModelFormatError(
            f"{type(model).__name__} has no config; give a model directory, a config dict, or a "
            "transformers model"
        )
    fields = to_dict()
    return dict(fields)


def _model_type(config: Mapping[str, Any]) -> str:
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise ModelFormatError("the config lacks the key 'model_type'")
    return model_type


def _objections(model_type: str, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the reasons why the model cannot run, most specific first."""
    try:
        inner = text_config(config)
    except ModelFormatError as error:
        yield str(error)
        return
    if config.get("is_encoder_decoder") or inner.get("is_encoder_decoder"):
        yield "it is an encoder-decoder; only decoder-only models run"
    if model_type in _REFUSED:
        yield _REFUSED[model_type]
    if model_type not in SUPPORTED_ARCHITECTURES:
        if any(part.get(_LATENT_RANK) for part in (config, inner)):
            yield LATENT
        code = _remote_code(config)
        if code:
            yield f"it needs code from its own repository ({code}), which is never run"
        yield f"unknown model type; supported: {', '.join(sorted(SUPPORTED_ARCHITECTURES))}"
    if inner.get("quantization_config") or config.get("quantization_config"):
        try:
            packed_layout(config)
        except ModelFormatError as error:
            yield f"its quantization is not supported: {error}"
    if (is_bidirectional(config) and model_type not in _BIDIRECTIONAL_TYPES) or inner.get(
        "is_causal"
    ) is False:
        yield _BIDIRECTIONAL
    if inner.get("alibi"):
        yield _OWN_ATTENTION


def is_bidirectional(config: Mapping[str, Any]) -> bool:
    """Return whether attention is bidirectional, as in models that only embed texts."""
    return text_config(config).get("use_bidirectional_attention") in (True, "all")


def _remote_code(config: Mapping[str, Any]) -> str:
    """Return the model class that `auto_map` names, or "" without such an entry."""
    auto_map = config.get("auto_map")
    if not isinstance(auto_map, Mapping):
        return ""
    for name in ("AutoModelForCausalLM", "AutoModel", "AutoConfig"):
        if auto_map.get(name):
            return str(auto_map[name])
    return ""


def rope_types(config: Mapping[str, Any]) -> set[str]:
    """Return the RoPE types that a config names for any of its layers."""
    parts = _rope_parts(text_config(config))
    return {
        str(kind) for part in parts if (kind := part.get("rope_type", part.get("type"))) is not None
    }


def _rope_parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the RoPE settings in a config: one entry for all layers, or one per layer type."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.get(name)
        if not isinstance(rope, Mapping):
            continue
        yield rope
        yield from (part for part in rope.values() if isinstance(part, Mapping))
