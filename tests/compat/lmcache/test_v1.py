"""The names of LMCache's later engine without a connector: the caller's arrays stand for GPU
memory.
"""

import dataclasses

import numpy as np
import pytest
import torch

from helpers.compat.lmcache_cases import HEAD_SIZE, HEADS, LAYERS, equal, kv_of, kv_slice
from helpers.raising import assert_raises
from kvboost_edge.compat.lmcache.v1 import LMCacheEngine, LMCacheEngineConfig, LMCacheMetadata
from kvboost_edge.errors import ConfigError, RequestError

GIB = 1 << 30
ANY = LMCacheMetadata("model")


def empty(length, dtype=np.float32):
    return tuple(
        tuple(np.full((length, HEADS, HEAD_SIZE), 7, dtype) for _ in range(2))
        for _ in range(LAYERS)
    )


@pytest.fixture
def make(tmp_path):
    made = []

    def engine(metadata=ANY, **options):
        config = LMCacheEngineConfig.from_defaults(
            **{
                "chunk_size": 4,
                "local_disk": str(tmp_path),
                "max_local_disk_size": 0.01,
                "save_unfull_chunk": True,
                **options,
            }
        )
        made.append(LMCacheEngine(config, metadata))
        return made[-1]

    yield engine
    for one in made:
        one.close()


@pytest.mark.parametrize("skipped", [0, 3, 4, 9])
def test_retrieve_writes_into_the_callers_arrays(make, skipped):
    engine = make()
    engine.post_init()
    tokens = np.arange(11)
    kv = kv_of(tokens)
    engine.store(tokens, kvcaches=kv)
    assert engine.lookup(tokens) == engine.lookup(tokens=tokens.tolist()) == 11
    target = empty(14)
    longer = np.arange(14)
    ret_mask = engine.retrieve(longer, np.arange(14) >= skipped, kvcaches=target)
    assert np.flatnonzero(ret_mask).tolist() == list(range(skipped, 8))
    if skipped < 8:
        assert equal(kv_slice(target, skipped, 8), kv_slice(kv, skipped, 8))
    assert all(
        (array[8:] == 7).all() and (array[:skipped] == 7).all() for pair in target for array in pair
    )


def test_a_masked_store_stores_the_unmasked_rows(make):
    engine = make()
    tokens = np.arange(11)
    kv = kv_of(tokens)
    engine.store(tokens[:4], kvcaches=kv_slice(kv, 0, 4))
    engine.store(tokens, mask=tokens >= 4, kvcaches=kv)
    target = empty(11)
    assert engine.retrieve(tokens, kvcaches=target).all()
    assert equal(target, kv)


def test_tensors_are_written_in_place(make):
    engine = make()
    tokens = torch.arange(8)
    kv = tuple(tuple(torch.from_numpy(a).bfloat16() for a in pair) for pair in kv_of(tokens))
    engine.store(tokens, kvcaches=kv)
    target = tuple(tuple(torch.zeros_like(a) for a in pair) for pair in kv)
    ret_mask = engine.retrieve(tokens, kvcaches=target)
    assert ret_mask.dtype == torch.bool
    assert all(
        torch.equal(a, b)
        for x, y in zip(target, kv, strict=True)
        for a, b in zip(x, y, strict=True)
    )


def test_mismatched_arrays_are_refused_before_writing(make):
    engine = make()
    tokens = np.arange(8)
    engine.store(tokens, kvcaches=kv_of(tokens))
    for wrong in (empty(8, np.float16), empty(8)[:1]):
        with pytest.raises(RequestError, match="pass arrays like the stored ones"):
            engine.retrieve(tokens, kvcaches=wrong)
        assert all((array == 7).all() for pair in wrong for array in pair)
    for wrong in (None, (), empty(7), [(1, 2)], np.zeros((2, 2, 8, 3, 4))):
        assert_raises(RequestError, "kvcaches must hold", engine.retrieve, tokens, kvcaches=wrong)
        assert_raises(RequestError, "kvcaches must hold", engine.store, tokens, kvcaches=wrong)


def test_search_range_selects_the_backends(make):
    engine = make()
    tokens = np.arange(8)
    engine.store(tokens, kvcaches=kv_of(tokens))
    assert engine.clear(locations=["LocalCPUBackend"]) == 2
    assert engine.lookup(tokens, search_range=["LocalCPUBackend"]) == 0
    assert engine.lookup(tokens, search_range=["LocalDiskBackend"]) == engine.lookup(tokens) == 8
    assert engine.lookup(tokens, search_range=["RemoteBackend"]) == 0
    with pytest.raises(RequestError, match="GdsBackend"):
        engine.lookup(tokens, search_range=["GdsBackend"])


def test_pinned_chunks_stay_in_memory_until_released(make):
    chunk = (LAYERS * 2 * HEADS * HEAD_SIZE * 4 * 4 + 16) / GIB
    engine = make(max_local_cpu_size=2.5 * chunk)
    tokens = np.arange(8)
    others = np.arange(100, 140)
    here = {"search_range": ["LocalCPUBackend"]}
    engine.store(tokens, kvcaches=kv_of(tokens))
    with pytest.raises(RequestError, match="lookup_id"):
        engine.lookup(tokens, pin=True)
    assert engine.lookup(tokens, pin=True, lookup_id="a") == 8
    engine.store(others, kvcaches=kv_of(others))
    assert engine.lookup(tokens, **here) == 8
    engine.lookup_unpin(["a", "unknown"])
    engine.lookup_unpin("a")
    engine.store(others + 100, kvcaches=kv_of(others))
    assert engine.lookup(tokens, **here) == 0


def test_clear_removes_a_sequence_from_chosen_backends(make):
    engine = make()
    tokens = np.arange(8)
    kept = np.arange(50, 58)
    for each in (tokens, kept):
        engine.store(each, kvcaches=kv_of(each))
    assert engine.clear(tokens) == 4, "clear must remove two chunks from each of two backends"
    assert (engine.lookup(tokens), engine.lookup(kept)) == (0, 8)
    engine.store(tokens, kvcaches=kv_of(tokens))
    assert engine.clear(tokens=tokens, locations=["LocalCPUBackend"]) == 2
    assert engine.lookup(tokens, search_range=["LocalCPUBackend"]) == 0
    assert engine.lookup(tokens) == 8
    with pytest.raises(
        RequestError, match="disk cannot be cleared as a whole; pass the tokens to drop"
    ):
        engine.clear()
    assert engine.health()


def test_worker_metadata_is_not_part_of_the_key(make):
    base = LMCacheMetadata("m", kv_dtype="float32", kv_shape=(LAYERS, 2, 4, HEADS, HEAD_SIZE))
    tokens = np.arange(8)
    make(base).store(tokens, kvcaches=kv_of(tokens))
    for change, found in (
        (
            {
                "engine_id": "e",
                "role": "worker",
                "local_worker_id": 3,
                "served_model_name": "s",
                "chunk_size": 8,
            },
            8,
        ),
        ({"kv_shape": (LAYERS, 2, 8, HEADS, HEAD_SIZE)}, 8),
        ({"model_name": "n"}, 0),
        ({"world_size": 2}, 0),
        ({"worker_id": 1}, 0),
        ({"kv_dtype": "float16"}, 0),
        ({"kv_shape": None}, 0),
    ):
        assert make(dataclasses.replace(base, **change)).lookup(tokens) == found
    with pytest.raises(RequestError, match="kv_shape="):
        make(dataclasses.replace(base, kv_shape=(9, 2, 4, 9, 9))).store(
            tokens, kvcaches=kv_of(tokens)
        )


def test_unsupported_calls_are_refused_by_name(make):
    engine = make()
    for name in (
        "store_layer",
        "retrieve_layer",
        "async_lookup_and_prefetch",
        "move",
        "compress",
        "freeze",
    ):
        assert_raises(RequestError, rf"{name}\(\) is not supported", getattr, engine, name)
    with pytest.raises(AttributeError):
        _ = engine.no_such_name
    for call in (
        lambda: engine.lookup(hashes=[1]),
        lambda: engine.store(hashes=[1], offsets=[4]),
        lambda: engine.lookup([1], request_configs={}),
        lambda: engine.clear(request_configs={}),
    ):
        assert_raises(RequestError, "is not supported", call)
    assert_raises(RequestError, "needs tokens", engine.lookup)
    for options, message in (
        ({"use_mla": True}, "use_mla"),
        ({"kv_shape": (1, 2)}, "kv_shape"),
        ({"model_name": ""}, "model"),
    ):
        assert_raises(ConfigError, message, LMCacheMetadata, **{"model_name": "m", **options})
