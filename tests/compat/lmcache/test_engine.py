"""LMCache's engine over memory, disk, both and Redis, apart from what test_oracle.py covers."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from helpers.compat.lmcache_cases import (
    HEAD_SIZE,
    HEADS,
    LAYERS,
    equal,
    kv_of,
    kv_slice,
    num_tokens_of,
)
from helpers.raising import assert_raises
from kvboost_edge.errors import RequestError

T = True
F = False


def mask(skipped, total):
    return np.arange(total) >= skipped


# store and retrieve


@pytest.mark.parametrize("fmt", ["vllm", "huggingface"])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 11])
def test_stored_tokens_are_retrieved_including_a_partial_chunk(engines, length, fmt):
    engine = engines(fmt=fmt)
    tokens = np.arange(50, 50 + length)
    kv = kv_of(tokens, fmt)
    assert engine.lookup(tokens) == 0
    engine.store(tokens, kv)
    found, ret_mask = engine.retrieve(tokens)
    assert equal(found, kv)
    assert ret_mask.dtype == np.bool_
    assert ret_mask.tolist() == [T] * length
    assert engine.lookup(tokens) == length


@pytest.mark.parametrize("fmt", ["vllm", "huggingface"])
def test_the_blob_form_is_one_array(engines, fmt):
    engine = engines(fmt=fmt)
    tokens = np.arange(10)
    kv = kv_of(tokens, fmt)
    blob = np.stack([np.stack(pair) for pair in kv])
    engine.store(tokens, blob)
    found, ret_mask = engine.retrieve(tokens, return_tuple=False)
    rows = (10, HEADS) if fmt == "vllm" else (HEADS, 10)
    assert found.shape == (LAYERS, 2, *rows, HEAD_SIZE)
    assert np.array_equal(found, blob)
    assert ret_mask.all()
    assert equal(engine.retrieve(tokens)[0], kv)


def test_a_miss_returns_an_empty_tuple_and_a_false_mask(engine):
    tokens = np.arange(10)
    for return_tuple in (True, False):
        kv, ret_mask = engine.retrieve(tokens, return_tuple=return_tuple)
        assert kv == ()
        assert ret_mask.tolist() == [F] * 10
    engine.store(np.arange(1, 11), kv_of(np.arange(1, 11)))
    assert engine.retrieve(tokens)[0] == ()
    assert engine.retrieve([])[0] == ()
    assert engine.retrieve([])[1].shape == (0,)


def test_replaced_kv_may_have_another_dtype_and_shape(engine):
    tokens = np.arange(8)
    half = kv_of(tokens, dtype=np.float16)
    engine.store(tokens, kv_of(tokens))
    engine.store(tokens, half, skip_existing=False)
    assert equal(engine.retrieve(tokens)[0], half)
    words = kv_of(tokens, dtype=np.int16)  # the same number of bytes
    engine.store(tokens, words, skip_existing=False)
    assert equal(engine.retrieve(tokens)[0], words)
    engine.store(tokens, kv_slice(half, 4, 8), mask(4, 8), skip_existing=False)
    assert equal(engine.retrieve(tokens)[0], kv_slice(words, 0, 4)), (
        "all chunks of one result must have one dtype"
    )
    assert equal(engine.retrieve(tokens, mask(4, 8))[0], kv_slice(half, 4, 8))


def test_nonblocking_stores_complete_in_order(engines):
    tokens = np.arange(11)
    first = kv_of(tokens)
    second = kv_of(tokens, salt=0.5)
    engine = engines()
    mine = kv_of(tokens)
    engine.store(tokens, mine, blocking=False)
    for pair in mine:
        for array in pair:
            array[:] = -1  # the caller may change its arrays again
    engine.store(np.arange(100, 104), kv_of(np.arange(100, 104)))  # waits for the earlier stores
    assert equal(engine.retrieve(tokens)[0], first)
    engine.store(tokens, first, skip_existing=False, blocking=False)
    engine.store(tokens, second, skip_existing=False)
    assert equal(engine.retrieve(tokens)[0], second), "the later store must win"


def test_returned_arrays_are_copies(engine):
    tokens = np.arange(8)
    engine.store(tokens, kv_of(tokens))
    for return_tuple in (True, False):
        found, _ = engine.retrieve(tokens, return_tuple=return_tuple)
        for array in [a for pair in found for a in pair] if return_tuple else [found]:
            array[:] = -1
    assert equal(engine.retrieve(tokens)[0], kv_of(tokens))


def test_save_unfull_chunk_false_stores_full_chunks_only(engines):
    engine = engines(save_unfull_chunk=False)
    tokens = np.arange(11)
    engine.store(tokens, kv_of(tokens))
    assert engine.lookup(tokens) == 8
    engine.store(tokens[:3], kv_of(tokens[:3]))
    assert engine.lookup(tokens[:3]) == 0


# isolation


@pytest.mark.parametrize(
    "dtype",
    [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64, ">i8"],
)
def test_tokens_of_every_integer_dtype_are_equal(engine, dtype):
    """Known fault: the hash depended on the dtype of the tokens."""
    tokens = [5, 6, 7, 100, 9]
    engine.store(tokens, kv_of(tokens))
    assert engine.lookup(np.array(tokens, dtype)) == engine.lookup(tuple(tokens)) == 5


@pytest.mark.parametrize(
    "other", [{"model_name": "model2"}, {"world_size": 2}, {"worker_id": 1}, {"fmt": "huggingface"}]
)
def test_every_part_of_the_metadata_is_part_of_the_key(engines, backend, other):
    tokens = np.arange(8)
    engines().store(tokens, kv_of(tokens))
    assert engines().lookup(tokens) == (0 if backend == "memory" else 8), (
        "engines must not share their memory stores"
    )
    neighbour = engines(**other)
    assert neighbour.lookup(tokens) == 0
    assert neighbour.retrieve(tokens)[0] == ()


def test_engines_share_a_shared_backend(engines, backend):
    tokens = np.arange(11)
    engines().store(tokens, kv_of(tokens))
    expected = 0 if backend == "memory" else 11
    other = engines()
    assert other.lookup(tokens) == expected
    assert num_tokens_of(other.retrieve(tokens)[0]) == expected


def test_chunks_on_disk_survive_a_restart(tmp_path, engines):
    tokens = np.arange(11)
    first = engines(backend=("memory", f"file://{tmp_path}/again"))
    first.store(tokens, kv_of(tokens))
    first.close()
    second = engines(backend=("memory", f"file://{tmp_path}/again"))
    assert second.lookup(tokens) == 11
    assert equal(second.retrieve(tokens)[0], kv_of(tokens))
    assert second.stats()["memory"].blocks == 3, "chunks read from disk must be stored in memory"


# bad arguments


@pytest.mark.parametrize("skipped", [1, 2, 3, 5, 9, 11])
def test_a_store_mask_must_skip_whole_chunks(engine, skipped):
    tokens = np.arange(11)
    with pytest.raises(ValueError, match=rf"skips {skipped} tokens.*chunk_size=4"):
        engine.store(tokens, kv_of(tokens[skipped:]), mask(skipped, 11))
    assert engine.lookup(tokens) == 0


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([T, F, T, T], "False for the first"),
        ([T, T, T, F], "False for the first"),
        ([T] * 3, "4 booleans"),
        ([0, 0, 1, 1], "4 booleans"),
        ([[T] * 4], "4 booleans"),
        ("x", "4 booleans"),
        (5, "4 booleans"),
    ],
)
def test_invalid_masks_are_refused(engine, bad, message):
    tokens = np.arange(4)
    engine.store(tokens, kv_of(tokens))
    assert_raises(ValueError, message, engine.retrieve, tokens, bad)
    assert_raises(ValueError, message, engine.store, tokens, kv_of(tokens), bad)
    assert engine.miss_tokens_count == 0


@pytest.mark.parametrize(
    "bad",
    [
        [[1, 2], [3, 4]],
        [1.0, 2.0],
        [True, False],
        ["a"],
        [-1],
        [2**32],
        5,
        "tokens",
        [2**70],
        [None],
        [1, [2]],
        np.array(3),
    ],
)
def test_invalid_tokens_are_a_value_error(engine, bad):
    for call in (
        lambda: engine.lookup(bad),
        lambda: engine.retrieve(bad),
        lambda: engine.store(bad, kv_of([1])),
    ):
        with pytest.raises(RequestError):
            call()


def bad_kv():
    good = kv_of(np.arange(4))
    k = good[0][0]
    return {
        "too few tokens": (kv_slice(good, 0, 3), "for 3 tokens, expected 4"),
        "none": ((), "at least one"),
        "nothing": (None, "at least one"),
        "a pair missing": ((good[0], (k,)), "at least one"),
        "layers of other shapes": ((good[0], (k[:3], k[:3])), "the same type and shape"),
        "layers of other types": ((good[0], (k, k.astype(np.float64))), "the same type and shape"),
        "two axes": (((k[0], k[0]),), "3 axes"),
        "no heads": (((k[:, :0], k[:, :0]),), "are empty"),
        "a blob of other axes": (np.zeros((2, 3, 4, 3, 4)), r"\[num_layers, 2"),
        "objects": (((k.astype(object), k.astype(object)),), "cannot be stored"),
        "complex numbers": (((k.astype(complex), k.astype(complex)),), "cannot be stored"),
        "lists": ((([1.0], [1.0]),), "not list"),
    }


@pytest.mark.parametrize("name", bad_kv())
def test_invalid_kv_is_a_value_error_and_stores_nothing(engine, name):
    kv, message = bad_kv()[name]
    with pytest.raises(ValueError, match=message):
        engine.store(np.arange(4), kv)
    assert engine.lookup(np.arange(4)) == 0


def test_a_closed_engine_raises_and_may_be_closed_twice(engine):
    engine.close()
    engine.close()
    for call in (
        lambda: engine.lookup([1]),
        lambda: engine.retrieve([1]),
        lambda: engine.store([1], kv_of([1])),
    ):
        with pytest.raises(RequestError, match="closed"):
            call()


def test_invalid_arguments_are_refused_under_python_o():
    """Known fault: user input was checked by asserts, which `python -O` removes."""
    code = (
        "import numpy as np\n"
        "from kvboost_edge.compat.lmcache import *\n"
        "e = LMCacheEngine(LMCacheEngineConfig(4), LMCacheEngineMetadata('m', 1, 0, 'vllm'))\n"
        "kv = [(np.zeros((3, 1, 2)), np.zeros((3, 1, 2)))]\n"
        "for mask in ([False, True, True, True], [True, True, False, True]):\n"
        "    try: e.store([1, 2, 3, 4], kv, mask)\n"
        "    except ValueError: print('refused')\n"
    )
    done = subprocess.run(
        [sys.executable, "-O", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[3],
    )
    assert done.stdout == "refused\nrefused\n"
