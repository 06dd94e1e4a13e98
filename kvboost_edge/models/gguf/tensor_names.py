"""Mapping from GGUF tensor names to transformers'."""

from __future__ import annotations

import re
from collections.abc import Iterable

from kvboost_edge.models.families.gguf_names import GgufArchitecture
from kvboost_edge.models.families.mtp import GGUF_MTP

__all__ = [
    "OTHER_PARTS",
    "count_ahead",
    "counted_parts",
    "hf_name",
    "is_ahead",
    "is_other_part",
    "mtp_name",
]

# Names without an ending in GGUF files. Decays are stored as -exp(A_log).
_ENDLESS = ("linear_attn.decay", "mamba.decay", "mamba.D", "pre_ff_layernorm.weight")
# Names without ".weight" in transformers.
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
_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,5})\.([a-z_][a-z0-9_.]*?)(?:\.(weight|bias|scale))?")
_WHOLE = re.compile(r"([a-z_.]+)\.(weight|bias)")

OTHER_PARTS = ("v.", "mm.", "a.")
"""Prefixes of vision and audio tensors. Ollama's files contain them besides the language model."""


def is_other_part(name: str) -> bool:
    """Return whether a tensor belongs to a vision or audio part."""
    return name.startswith(OTHER_PARTS)


def is_ahead(name: str, layers: int) -> bool:
    """Return whether a tensor belongs to a layer for multi-token prediction.

    These layers follow the `layers` layers of the model.
    """
    return _block_of(name) >= layers


def count_ahead(names: Iterable[str], layers: int) -> int:
    """Return the number of layers for multi-token prediction that have tensors."""
    return len({block for name in names if (block := _block_of(name)) >= layers})


def _block_of(name: str) -> int:
    """Return the number of the block that a tensor belongs to, or -1 if it belongs to none."""
    found = _LAYER.fullmatch(name)
    return -1 if found is None else int(found[1])


def counted_parts(names: Iterable[str], layers: int) -> dict[str, int]:
    """Return the number of tensors in each part other than the language model.

    The part "nextn" is multi-token prediction. `layers` is the number of layers of the model.
    """
    counts: dict[str, int] = {}
    for name in names:
        if is_other_part(name) or is_ahead(name, layers):
            part = name.partition(".")[0] if is_other_part(name) else "nextn"
            counts[part] = counts.get(part, 0) + 1
    return counts


def mtp_name(architecture: GgufArchitecture, name: str) -> str | None:
    """Return our name for a tensor in the block of an MTP head, or None for other tensors."""
    inner = name.split(".", 2)[2]
    stem, _, ending = inner.rpartition(".")
    if stem in GGUF_MTP and ending == "weight":
        return f"{GGUF_MTP[stem]}.weight"
    return hf_name(architecture, f"blk.0.{inner}")


def hf_name(architecture: GgufArchitecture, name: str) -> str | None:
    """Return transformers' name for a tensor, or None if the architecture does not use it."""
    found = _LAYER.fullmatch(name)
    if found is not None:
        is_scale = found[3] == "scale"
        inner = architecture.layer.get(f"{found[2]}.scale" if is_scale else found[2])
        # The ending is missing, or there is an ending where none is allowed.
        if inner is None or (found[3] is None) != (inner in _ENDLESS):
            return None
        if is_scale:
            return f"model.layers.{found[1]}.{inner}"
        return f"model.layers.{found[1]}.{inner}" + ("" if inner in _BARE else f".{found[3]}")
    found = _WHOLE.fullmatch(name)
    outer = None if found is None else architecture.outer.get(found[1]) or _OUTER.get(found[1])
    return None if found is None or outer is None else f"{outer}.{found[2]}"
