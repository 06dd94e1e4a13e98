"""Tests of KVBoost's chunk registry against the rules in KVBoost's documentation."""

import dataclasses
import hashlib

import pytest

from kvboost_edge.chunk_registry import ChunkRegistry, ChunkStrategy
from kvboost_edge.errors import ConfigError, RequestError

IDS = list(range(1000, 1300))


def windows(ids, chunk_size, least):
    """Return the windows of `chunk_size` tokens that contain at least `least` tokens."""
    starts = range(0, len(ids), chunk_size)
    parts = [(start, min(start + chunk_size, len(ids))) for start in starts]
    return [(start, end, ids[start:end]) for start, end in parts if end - start >= least]


def test_parameters_by_position_and_keyword():
    assert ChunkRegistry() == ChunkRegistry(128, ChunkStrategy.FIXED, 32, 0)
    assert ChunkRegistry(chunk_size=64, strategy="document", min_chunk_tokens=8, boundary_window=0)
    assert ChunkRegistry(64, "document").strategy is ChunkStrategy.DOCUMENT
    with pytest.raises(dataclasses.FrozenInstanceError):
        ChunkRegistry().chunk_size = 4
    for wrong in ((0,), (64, "other"), (64, "semantic", 32, 64), (64, "fixed", 32, 8)):
        with pytest.raises(ConfigError):
            ChunkRegistry(*wrong)


@pytest.mark.parametrize("length", [0, 31, 32, 128, 159, 160, 300])
@pytest.mark.parametrize("least", [1, 32])
def test_fixed_chunks_drop_short_ones(length, least):
    ids = IDS[:length]
    registry = ChunkRegistry(min_chunk_tokens=least)
    assert registry.split(ids) == registry.split(ids, "text", None) == windows(ids, 128, least)
    hashes = [
        hashlib.sha256(b"".join(token.to_bytes(4, "little") for token in part)).hexdigest()
        for _, _, part in windows(ids, 128, least)
    ]
    assert registry.chunk_ids_for(ids) == hashes


def test_a_document_is_one_chunk():
    registry = ChunkRegistry(strategy=ChunkStrategy.DOCUMENT)
    assert registry.split(token_ids=IDS[:5], text="", boundary_tokens=set()) == [(0, 5, IDS[:5])]


def test_semantic_chunks_need_token_texts():
    registry = ChunkRegistry(16, "semantic", 1, 4)
    with pytest.raises(RequestError, match=r"engine\.chunk_registry, which has a tokenizer"):
        registry.split(IDS)
    with pytest.raises(RequestError, match="boundary_tokens= is not supported"):
        registry.split(IDS, "", {1})
    speaking = dataclasses.replace(
        registry, piece_of=lambda token: "end. " if token == 1017 else "word "
    )
    cuts = [(start, end) for start, end, _ in speaking.split(IDS[:36])]
    assert cuts[0] == (0, 18), "the chunk must end after the sentence within the window"
    assert cuts[-1][1] == 36
