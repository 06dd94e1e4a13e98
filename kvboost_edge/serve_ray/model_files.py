"""Model files as seen by the ingress and the replicas. The ingress needs only the tokenizer."""

from __future__ import annotations

from kvboost_edge.config import EngineConfig
from kvboost_edge.engine.build import load_tokenizer
from kvboost_edge.host.file_memo import NO_CACHE
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.locate import locate_model
from kvboost_edge.text.tokenizer import Tokenizer

__all__ = ["model_digest", "open_tokenizer"]


def open_tokenizer(path_or_id: str, config: EngineConfig) -> tuple[Tokenizer, str]:
    """Return a model's tokenizer with its chat template, and the digest of all its files.

    Missing or invalid files raise the same errors as loading the model.
    """
    checkpoint = _open(path_or_id, config)
    return load_tokenizer(checkpoint), checkpoint.fingerprint()


def model_digest(path_or_id: str, config: EngineConfig) -> str:
    """Return the digest of a model's files. A file is read again only if it has changed."""
    return _open(path_or_id, config).fingerprint()


def _open(path_or_id: str, config: EngineConfig) -> Checkpoint:
    path = locate_model(
        path_or_id,
        revision=config.revision,
        token=config.token,
        local_files_only=config.local_files_only,
    )
    cache_dir = None if config.pack_cache else NO_CACHE
    return Checkpoint.open(path, cache_dir=cache_dir, rope_range=config.rope_range)
