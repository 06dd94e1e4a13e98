"""Tensor names in composite models, and their names in the language model alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.families.mtp import ASSISTANT_HEAD, ASSISTANT_OUTER, MtpNames
from kvboost_edge.models.families.registry import STORED_NAMES

__all__ = ["assistant_names", "counted_parts", "is_other_part", "mtp_names", "text_names"]

_OTHER = re.compile(
    r"(?:^|\.)(vision_\w+|visual|audio_\w+|multi_modal_projector|embed_vision|embed_audio)\.|^(mtp)\."
)
# Prefix of the language model in current files, or in files of earlier transformers versions.
_INSIDE = re.compile(r"^(?:model\.language_model\.|language_model\.model\.)")
_AHEAD = "mtp."  # layers for multi-token prediction, which are unused
# Tensors that only layers for multi-token prediction have, and the prefix of such a layer. These
# layers follow those of the model.
_AHEAD_LAYER = re.compile(r"^(model\.layers\.\d+\.)(?:eh_proj|enorm|hnorm)\.")
_CLUSTERS = "masked_embedding."  # clusters of an assistant's vocabulary
_HEAD = re.compile(r"^language_model\.(?=lm_head\.)")


def is_other_part(name: str) -> bool:
    """Return whether a tensor belongs to a vision or audio part or to multi-token prediction."""
    return _OTHER.search(name) is not None


def text_names(names: Iterable[str]) -> Mapping[str, str]:
    """Return a mapping from tensor names in the files to names in the language model alone.

    For a composite model, it contains only the tensors of the language model. For other models, it
    contains all tensors except those for multi-token prediction, under Llama's names.
    """
    names = list(names)
    if not any(_INSIDE.match(name) for name in names):
        ahead = _ahead_prefixes(names)
        return {name: _in_llamas_words(name) for name in names if not name.startswith(ahead)}
    own = [name for name in names if not is_other_part(name)]
    return {name: _HEAD.sub("", _INSIDE.sub("model.", name)) for name in own}


def mtp_names(names: Iterable[str], stored: MtpNames, layers: int) -> Mapping[str, str]:
    """Return a mapping from the tensor names of an MTP head in the files to ours.

    Args:
        names: names of all tensors in the files.
        stored: names that the family uses.
        layers: number of layers of the model.

    Raises:
        ModelFormatError: a tensor for multi-token prediction does not belong to a head with one
            layer.
    """
    names = list(names)
    ahead = _ahead_prefixes(names)
    found = {}
    for name in names:
        if not name.startswith(ahead):
            continue
        own = stored.own_name(name, layers)
        if own is None:
            raise ModelFormatError(
                f"tensor {name!r} is not supported in a multi-token prediction head; supported are "
                f"heads with one layer, here '{stored.prefix.format(layers)}{stored.layer}'"
            )
        found[name] = own
    return found


def assistant_names(names: Iterable[str]) -> Mapping[str, str]:
    """Return a mapping from the tensor names of an assistant in the files to ours.

    The clusters of the vocabulary are left out, because logits are computed for all tokens.
    """
    names = set(names)
    embedding, head = ASSISTANT_HEAD
    found = {name: ASSISTANT_OUTER.get(name, name) for name in names}
    if head in names:
        del found[embedding]
    elif embedding in names:
        found[embedding] = head
    return {name: own for name, own in found.items() if not name.startswith(_CLUSTERS)}


def _ahead_prefixes(names: Iterable[str]) -> tuple[str, ...]:
    """Return the prefixes of tensors for multi-token prediction."""
    layers = {found[1] for name in names if (found := _AHEAD_LAYER.match(name))}
    return (_AHEAD, *sorted(layers))


def _in_llamas_words(name: str) -> str:
    for stored_name in STORED_NAMES:
        name = stored_name(name)
    return name


def counted_parts(names: Iterable[str]) -> dict[str, int]:
    """Return the number of tensors in each part other than the language model."""
    names = list(names)
    ahead = _ahead_prefixes(names)
    counts: dict[str, int] = {}
    for name in names:
        found = _OTHER.search(name)
        is_ahead = name.startswith(ahead)
        if found is not None or is_ahead:
            part = "mtp" if found is None or is_ahead else found[1]
            counts[part] = counts.get(part, 0) + 1
    return counts
