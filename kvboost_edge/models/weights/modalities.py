"""Tensors of a model of several parts by their names: which are the language model's, and what it
calls them alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from kvboost_edge.models.families.registry import STORED_NAMES

__all__ = ["counted_parts", "is_other_part", "text_names"]

_OTHER = re.compile(
    r"(?:^|\.)(vision_\w+|visual|audio_\w+|multi_modal_projector|embed_vision|embed_audio)\.|^(mtp)\."
)
# Where the language model stands in the whole: now, and in files of earlier versions of
# transformers.
_INSIDE = re.compile(r"^(?:model\.language_model\.|language_model\.model\.)")
_AHEAD = "mtp."  # layers that guess more than the next token, which nothing here uses
_HEAD = re.compile(r"^language_model\.(?=lm_head\.)")


def is_other_part(name: str) -> bool:
    """Whether a tensor belongs to the part for images or sound, or to the layers that only guess
    tokens ahead.
    """
    return _OTHER.search(name) is not None


def text_names(names: Iterable[str]) -> Mapping[str, str]:
    """The file's name -> the name it has in the language model alone, for its tensors only. All
    names where no language model stands inside another, but those of layers that guess tokens
    ahead; as they are, or in Llama's words.
    """
    names = list(names)
    if not any(_INSIDE.match(name) for name in names):
        return {name: _in_llamas_words(name) for name in names if not name.startswith(_AHEAD)}
    own = [name for name in names if not is_other_part(name)]
    return {name: _HEAD.sub("", _INSIDE.sub("model.", name)) for name in own}


def _in_llamas_words(name: str) -> str:
    for stored_name in STORED_NAMES:
        name = stored_name(name)
    return name


def counted_parts(names: Iterable[str]) -> dict[str, int]:
    """How many of the tensors each other part has, by the name of the part."""
    counts: dict[str, int] = {}
    for name in names:
        found = _OTHER.search(name)
        if found is not None:
            part = found[1] or found[2]
            counts[part] = counts.get(part, 0) + 1
    return counts
