"""The interface of LMCache's engine as callers use it: every class, method, keyword and positional
form.
"""

import dataclasses
import inspect

import numpy as np
import pytest
import torch

import kvboost_edge
from helpers.compat.lmcache_cases import equal, kv_of, kv_slice
from kvboost_edge import (
    LMCacheEngine,
    LMCacheEngineBuilder,
    LMCacheEngineConfig,
    LMCacheEngineMetadata,
)
from kvboost_edge.compat import lmcache
from kvboost_edge.compat.lmcache import v1
from kvboost_edge.errors import ConfigError, RequestError

FORMATS = ("vllm", "huggingface")
TOKENS = np.arange(50, 60)
EMPTY = inspect.Parameter.empty


def parameters(call):
    found = inspect.signature(call).parameters.values()
    return [(p.name, p.default) for p in found if p.name not in ("self", "cls")]


@pytest.fixture
def engine():
    metadata = LMCacheEngineMetadata("model", 1, 0, "vllm")
    made = LMCacheEngine(LMCacheEngineConfig(4), metadata)
    yield made
    made.close()


def test_the_names_are_importable_from_both_modules():
    for name in lmcache.__all__:
        assert getattr(lmcache, name) is getattr(kvboost_edge, name)


def test_signatures_equal_lmcaches():
    assert parameters(LMCacheEngine) == [("config", EMPTY), ("metadata", EMPTY)]
    assert parameters(LMCacheEngine.store) == [
        ("tokens", EMPTY),
        ("kv_tensors_raw", EMPTY),
        ("kv_tensors_mask", None),
        ("skip_existing", True),
        ("blocking", True),
    ]
    assert parameters(LMCacheEngine.retrieve) == [
        ("tokens", EMPTY),
        ("mask", None),
        ("return_tuple", True),
    ]
    assert parameters(LMCacheEngine.lookup) == [("tokens", EMPTY)]
    assert parameters(LMCacheEngine.close) == []
    assert parameters(LMCacheEngineBuilder.get_or_create) == [
        ("instance_id", EMPTY),
        ("config", EMPTY),
        ("metadata", EMPTY),
    ]
    for call in (LMCacheEngineBuilder.get, LMCacheEngineBuilder.destroy):
        assert parameters(call) == [("instance_id", EMPTY)]


def test_configurations_by_position_and_keyword():
    assert LMCacheEngineConfig() == LMCacheEngineConfig(256, False, "memory")
    assert LMCacheEngineConfig(
        chunk_size=8, save_decode_cache=True, backend="file:///place"
    ) == LMCacheEngineConfig(8, True, "file:///place")
    assert LMCacheEngineConfig(backend="cpu").places == (("memory", "cpu"),)
    several = LMCacheEngineConfig(8, False, ["memory", "file:///place"])
    assert several.places == (("memory", "memory"), ("disk", "/place"))


def test_metadata_by_position_and_keyword():
    metadata = LMCacheEngineMetadata("model", 2, 1, "huggingface")
    assert metadata == LMCacheEngineMetadata(
        model_name="model", world_size=2, worker_id=1, fmt="huggingface"
    )
    assert dataclasses.astuple(metadata) == ("model", 2, 1, "huggingface")


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("place", ["memory", "cpu", "file"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, "bfloat16"])
def test_store_retrieve_and_lookup(fmt, place, dtype, tmp_path):
    config = LMCacheEngineConfig(4, backend=f"file://{tmp_path}" if place == "file" else place)
    engine = LMCacheEngine(config, LMCacheEngineMetadata("model", 1, 0, fmt))
    kv = kv_of(TOKENS, fmt, np.float32 if dtype == "bfloat16" else dtype)
    tokens = TOKENS
    if dtype == "bfloat16":
        kv = tuple(tuple(torch.from_numpy(a.copy()).bfloat16() for a in pair) for pair in kv)
        tokens = torch.from_numpy(TOKENS)
    assert engine.store(tokens, kv) is None
    assert engine.lookup(tokens) == engine.lookup(tokens=tokens) == 10
    found, mask = engine.retrieve(tokens)
    assert len(found) == len(kv)
    for one, other in zip(found, kv, strict=True):
        for a, b in zip(one, other, strict=True):
            assert a.dtype == b.dtype
            assert bool((a == b).all())
    assert type(mask) is type(tokens)
    assert bool(mask.all())
    engine.close()


def test_store_by_position_and_keyword(engine):
    kv = kv_of(TOKENS)
    mask = np.arange(10) >= 4
    engine.store(TOKENS[:4], kv_slice(kv, 0, 4), None, True, True)
    engine.store(TOKENS, kv_slice(kv, 4, 10), mask, True, True)
    assert equal(engine.retrieve(TOKENS)[0], kv)
    other = kv_of(TOKENS, salt=0.5)
    engine.store(
        tokens=TOKENS,
        kv_tensors_raw=kv_slice(other, 4, 10),
        kv_tensors_mask=mask,
        skip_existing=True,
        blocking=True,
    )
    assert equal(engine.retrieve(TOKENS)[0], kv), "existing chunks must stay"
    engine.store(TOKENS, kv_slice(other, 4, 10), mask, skip_existing=False)
    assert equal(kv_slice(engine.retrieve(TOKENS)[0], 4, 10), kv_slice(other, 4, 10))
    engine.store(TOKENS + 100, kv, blocking=False)
    assert engine.lookup(TOKENS + 100) == 10


@pytest.mark.parametrize("skipped", [0, 3, 4, 7, 9, 10])
def test_retrieve_by_position_and_keyword(engine, skipped):
    kv = kv_of(TOKENS)
    engine.store(TOKENS, kv)
    mask = np.arange(10) >= skipped
    for found, ret_mask in (
        engine.retrieve(TOKENS, mask),
        engine.retrieve(TOKENS, mask, True),
        engine.retrieve(tokens=TOKENS, mask=mask, return_tuple=True),
    ):
        assert np.array_equal(ret_mask, mask)
        assert equal(found, kv_slice(kv, skipped, 10)) if skipped < 10 else found == ()
    blob, ret_mask = engine.retrieve(TOKENS, mask, return_tuple=False)
    assert np.array_equal(ret_mask, mask)
    if skipped < 10:
        expected = np.stack([np.stack(pair) for pair in kv_slice(kv, skipped, 10)])
        assert np.array_equal(blob, expected)


def test_a_miss_returns_an_empty_tuple_and_a_false_mask(engine):
    found, mask = engine.retrieve(TOKENS)
    assert found == ()
    assert mask.shape == (10,)
    assert not mask.any()


def test_hit_and_miss_counters(engine):
    assert (engine.hit_tokens_count, engine.miss_tokens_count, engine.hit_rate) == (0, 0, 0.0)
    engine.store(TOKENS[:8], kv_of(TOKENS[:8]))
    engine.retrieve(TOKENS)
    assert (engine.hit_tokens_count, engine.miss_tokens_count, engine.hit_rate) == (8, 2, 0.8)


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("store", (TOKENS, kv_of(TOKENS[:9])), "9 tokens, expected 10"),
        (
            "store",
            (TOKENS, kv_of(TOKENS[:7]), np.arange(10) >= 3),
            "not a multiple of chunk_size=4",
        ),
        ("store", (TOKENS, kv_of(TOKENS), np.arange(10) < 4), "False for the first tokens"),
        ("retrieve", (TOKENS, np.arange(10) < 4), "False for the first tokens"),
        ("retrieve", (TOKENS, np.ones(9, bool)), "10 booleans"),
        ("lookup", ([[1, 2]],), "one row of integers"),
    ],
)
def test_invalid_arguments_are_a_value_error(engine, name, args, message):
    with pytest.raises(ValueError, match=message):
        getattr(engine, name)(*args)
    assert engine.lookup(TOKENS) == 0


def test_builder_creates_gets_and_destroys_engines():
    config = LMCacheEngineConfig(4)
    metadata = LMCacheEngineMetadata("model", 1, 0, "vllm")
    builder = LMCacheEngineBuilder
    try:
        assert builder.get("main") is builder.get(instance_id="main") is None
        engine = builder.get_or_create("main", config, metadata)
        again = builder.get_or_create(instance_id="main", config=config, metadata=metadata)
        assert engine is again is builder.get("main")
        with pytest.raises(ValueError, match="another configuration"):
            builder.get_or_create("main", LMCacheEngineConfig(8), metadata)
    finally:
        builder.destroy("main")
    assert builder.destroy(instance_id="main") is None
    assert builder.get("main") is None


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("cuda", "cuda"),
        ("lm://localhost:65432", "lm"),
        ("redis://localhost:6379", "secret"),
    ],
)
def test_unsupported_backends_are_refused_by_name(backend, message, monkeypatch):
    monkeypatch.delenv("KVBOOST_EDGE_REDIS_SECRET", raising=False)
    with pytest.raises(ConfigError, match=message):
        LMCacheEngine(
            LMCacheEngineConfig(backend=backend), LMCacheEngineMetadata("model", 1, 0, "vllm")
        )


def test_the_v1_engine():
    config = v1.LMCacheEngineConfig.from_defaults(
        chunk_size=4, local_cpu=True, max_local_cpu_size=0.01, save_unfull_chunk=True
    )
    engine = v1.LMCacheEngine(config, v1.LMCacheMetadata(model_name="model"))
    engine.post_init()
    kv = kv_of(TOKENS)
    engine.store(TOKENS, kvcaches=kv)
    engine.store(tokens=TOKENS, mask=None, kvcaches=kv)
    assert engine.lookup(TOKENS) == 10
    assert engine.lookup(tokens=TOKENS, search_range=["LocalCPUBackend"]) == 10
    assert engine.lookup(TOKENS, lookup_id="request", pin=True) == 10
    engine.lookup_unpin(["request"])
    target = tuple(tuple(np.zeros_like(a) for a in pair) for pair in kv)
    assert engine.retrieve(TOKENS, None, kvcaches=target).all()
    assert equal(target, kv)
    assert engine.health()
    assert engine.clear(tokens=TOKENS, locations=["LocalCPUBackend"]) == 3
    assert engine.lookup(TOKENS) == 0
    for name in ("store_layer", "retrieve_layer", "move", "compress", "freeze"):
        with pytest.raises(RequestError, match=rf"{name}\(\) is not supported"):
            getattr(engine, name)
    engine.close()
    assert v1.LMCacheEngineConfig.from_env({"LMCACHE_CHUNK_SIZE": "4"}).chunk_size == 4
