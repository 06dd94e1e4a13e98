"""The interface of LMCache's engine: names, signatures, and what it stores for each format and
backend.
"""

import inspect

import numpy as np
import pytest
import torch

import kvboost_edge
from helpers.compat.lmcache_cases import kv_of
from kvboost_edge import (
    LMCacheEngine,
    LMCacheEngineBuilder,
    LMCacheEngineConfig,
    LMCacheEngineMetadata,
)
from kvboost_edge.compat import lmcache
from kvboost_edge.errors import ConfigError

FORMATS = ("vllm", "huggingface")
TOKENS = np.arange(50, 60)
EMPTY = inspect.Parameter.empty


def parameters(call):
    found = inspect.signature(call).parameters.values()
    return [(p.name, p.default) for p in found if p.name not in ("self", "cls")]


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
