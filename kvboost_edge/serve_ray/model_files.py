"""Model files as seen by the ingress and the replicas. The ingress needs only the tokenizer."""

from __future__ import annotations

from kvboost_edge.config import EngineConfig
from kvboost_edge.engine.build import load_tokenizer
from kvboost_edge.engine.memory.selection import find_model, open_checkpoint
from kvboost_edge.text.tokenizer import Tokenizer

__all__ = ["model_digest", "open_tokenizer"]


def open_tokenizer(path_or_id: str, config: EngineConfig) -> tuple[Tokenizer, str]:
    """Return a model's tokenizer with its chat template, and the digest of all its files.

    Missing or invalid files raise the same errors as loading the model.
    """
    checkpoint = open_checkpoint(find_model(path_or_id, config), config)
    return load_tokenizer(checkpoint), checkpoint.fingerprint()


def model_digest(path_or_id: str, config: EngineConfig) -> str:
    """Return the digest of a model's files. A file is read again only if it has changed."""
    return open_checkpoint(find_model(path_or_id, config), config).fingerprint()
