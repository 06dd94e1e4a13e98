"""KVBoost's attributes of an engine: readable figures, and the reasons why others are not
available.
"""

import functools

import pytest
from transformers import AutoTokenizer

from helpers.models.tiny_models import build_tiny_model
from kvboost_edge import ChunkStrategy, CPUPagedEngine
from kvboost_edge.errors import KVBoostError

PROMPT = "a b c d e f g h " * 20
OPTIONS = {"num_blocks": 64, "block_size": 16}


@pytest.fixture
def make(tiny_model_dir):
    return functools.partial(CPUPagedEngine.from_pretrained, tiny_model_dir, **OPTIONS)


def test_cache_manager_statistics(make):
    with make() as engine:
        cache = engine.cache_manager
        assert cache.hits == cache.misses == cache.evictions == cache.approximate_hits == 0
        for _ in range(2):
            engine.generate(PROMPT, 2)
        stats = engine.cache_stats()
        assert cache.stats() == engine.cache_manager.stats() == stats
        assert cache.hits == stats["cache_hits"] > 0
        assert cache.misses == stats["cache_misses"] > 0
        assert cache.max_cache_bytes == engine.paged_stats()["pool_bytes"]
        assert cache.kv_cache_bits == engine.config.kv_cache_bits
        assert engine.device == "cpu"
        assert engine.tokenizer.decode(engine.tokenizer.encode("a b")) == "a b"
    with pytest.raises(KVBoostError, match="closed"):
        cache.stats()


def test_views_are_read_only(make):
    with make() as engine:
        for name in ("model", "device", "tokenizer", "cache_manager", "chunk_registry"):
            with pytest.raises(AttributeError):
                setattr(engine, name, None)
        with pytest.raises(AttributeError):
            engine.cache_manager.max_cache_bytes = 1


def test_the_chunk_registry_chunks_like_warm(make):
    with make(chunk_size=32) as engine:
        registry = engine.chunk_registry
        assert (registry.chunk_size, registry.strategy) == (32, ChunkStrategy.FIXED)
        ids = engine.tokenizer.encode(PROMPT)
        parts = registry.split(ids)
        assert [token for _, _, part in parts for token in part] == ids
        assert {end - start for start, end, _ in parts[:-1]} == {32}
    with make(chunk_size=32, chunk_strategy="semantic", chunk_boundary_window=4) as engine:
        parts = engine.chunk_registry.split(ids)
        assert [token for _, _, part in parts for token in part] == ids
        assert all(28 <= end - start <= 36 for start, end, _ in parts[:-1])


@pytest.mark.usefixtures("one_torch_thread")
def test_model_returns_the_torch_runners_model(make, tiny_model_dir):
    model = build_tiny_model("llama")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    with CPUPagedEngine(model, tokenizer, **OPTIONS) as engine:
        assert engine.model is model
    with make() as engine:
        assert engine.runner_info.name == "native"
        with pytest.raises(AttributeError, match=r"pass it to CPUPagedEngine\(model, tokenizer\)"):
            _ = engine.model
        assert not hasattr(engine, "model")


def test_unsupported_attributes_name_an_alternative(make):
    with make() as engine:
        for name, way_out in (
            ("assembler", "mode= of generate"),
            ("allocator", "engine.paged_stats"),
            ("chunk_mapper", "engine.paged_stats"),
            ("selective_recompute", "engine.config.recompute_strategy"),
            ("cacheblend_recompute", "engine.config.recompute_strategy"),
            ("overlap_k", "engine.config.overlap_k"),
            ("sink_tokens", "engine.config.sink_tokens"),
        ):
            with pytest.raises(AttributeError) as failure:
                getattr(engine, name)
            assert f"CPUPagedEngine.{name} is not available: " in str(failure.value)
            assert way_out in str(failure.value)


def test_unsupported_cache_manager_calls_name_an_alternative(make):
    with make() as engine:
        cache = engine.cache_manager
        for name, way_out in (
            ("store", "engine.warm"),
            ("lookup", "engine.warm_result"),
            ("build_prefix_kv", "engine.warm_result"),
            ("clear", "engine.reset_cache"),
            ("pin_content", "engine.pin"),
            ("register_eviction_callback", "engine.take_cache_events"),
        ):
            with pytest.raises(AttributeError, match=f"{name} is not available: .*{way_out}"):
                getattr(cache, name)
        with pytest.raises(AttributeError, match="no attribute 'other'"):
            _ = cache.other
        with pytest.raises(AttributeError, match="no attribute 'other'"):
            _ = engine.other
