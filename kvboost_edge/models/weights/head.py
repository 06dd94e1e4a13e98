"""Whether a model directory has a head of its own, where its config does not say it well enough."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvboost_edge.models.config.nested import is_nested
from kvboost_edge.models.weights.safetensors_source import SafetensorsSource

__all__ = ["with_found_head"]


def with_found_head(config: Mapping[str, Any], model_dir: Path, *, is_embedding: bool) -> Mapping[str, Any]:
    """The config with `tie_word_embeddings` as the files have it: of an embedding model, which may have been saved
    without the head that nothing uses, and of a nested config whose parts do not agree."""
    if is_nested(config):
        said = [part.get("tie_word_embeddings") for part in (config, config["text_config"])]
        unknown = None in said or said[0] != said[1]  # versions of transformers differ in which of them counts
    else:
        unknown = is_embedding and not config.get("tie_word_embeddings") and not config.get("quantization_config")
    if not unknown:
        return config
    with SafetensorsSource(model_dir) as source:
        has_head = any(name.startswith("lm_head.") for name in source.names())
    return {**config, "tie_word_embeddings": not has_head}
