"""Detection of tied and separate output heads when the config is unclear or wrong."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.config.nested import is_nested
from kvboost_edge.models.weights.safetensors_source import SafetensorsSource

__all__ = ["with_found_head"]

_LOG = logging.getLogger(__name__)
_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_BYTES_AT_ONCE = 1 << 24


def with_found_head(
    config: Mapping[str, Any], model_dir: Path, *, is_embedding: bool
) -> Mapping[str, Any]:
    """Return the config with `tie_word_embeddings` corrected according to the files.

    The files decide in these cases:

    - An embedding model may have been saved without its unused head.
    - The parts of a composite config disagree.
    - The config ties the head to the embedding or does not say, but the files contain a different
      head, such as a fine-tuned one.
    """
    said = [part.get("tie_word_embeddings") for part in _parts(config)]
    if is_nested(config):
        unknown = (
            None in said or said[0] != said[1]
        )  # transformers versions differ in which part they use
    else:
        unknown = is_embedding and not said[0] and not config.get("quantization_config")
    if unknown:
        with SafetensorsSource(model_dir, split_experts=False) as source:
            return {
                **config,
                "tie_word_embeddings": not any(
                    name.startswith("lm_head.") for name in source.names()
                ),
            }
    other = _other_head(model_dir) if said[0] is not False else None
    if other is None:
        return config
    _LOG.warning(
        "the head %s differs from the embedding and is used, although the config does not "
        "mention it",
        other,
    )
    return {**config, "tie_word_embeddings": False}


def _parts(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    return (config, config["text_config"]) if is_nested(config) else (config,)


def _other_head(model_dir: Path) -> Path | None:
    """Return the file that contains a head different from the embedding, or None.

    The result is also None if files cannot be read. That error is reported when weights are read.
    """
    try:
        with SafetensorsSource(model_dir, split_experts=False) as source:
            has_both = {_EMBEDDING, _HEAD} <= source.names()
            return source.file_of(_HEAD) if has_both and _differ(source) else None
    except ModelFormatError:
        return None


def _differ(source: SafetensorsSource) -> bool:
    """Return whether head and embedding differ in their shape or in any number."""
    shape = source.shape(_HEAD)
    if source.shape(_EMBEDDING) != shape or len(shape) != 2:
        return True
    step = max(1, _BYTES_AT_ONCE // (4 * max(1, shape[1])))
    return not all(
        np.array_equal(
            source.rows(_HEAD, first, last), source.rows(_EMBEDDING, first, last), equal_nan=True
        )
        for first, last in (
            (first, min(first + step, shape[0])) for first in range(0, shape[0], step)
        )
    )
