"""The compiled backend apart from the contract: its threads, its plans, and its checks of the
kernels' arguments.
"""

import threading
import tracemalloc
import weakref

import numpy as np
import pytest

from helpers.kernels.paged_cases import make_case
from kvboost_edge.backends.base import AttentionParams, BatchLayout, KVSpec, LayerKVSpec
from kvboost_edge.backends.cpu import CPUBackend
from kvboost_edge.errors import CapacityError, ConfigError
from kvboost_edge.host.processor import default_num_threads
from kvboost_edge.kernels.team import KernelTeam

SPEC = KVSpec((LayerKVSpec(2, 24),), 16, "float32")
CASE = make_case(
    np.random.default_rng(0), ((1, 1300), (50, 90)), kv_heads=2, per_group=3, dim=24, block_size=16
)
BLOCKS = 100


def attend(num_threads, params):
    backend = CPUBackend(SPEC, BLOCKS, num_threads=num_threads)
    try:
        backend.write_kv(
            0, np.concatenate(CASE.keys), np.concatenate(CASE.values), backend.prepare(CASE.whole)
        )
        queries = CASE.rows(CASE.queries, CASE.spans)
        return backend.attention(0, queries, backend.prepare(CASE.layout(CASE.spans)), params)
    finally:
        backend.close()


@pytest.mark.parametrize(
    "params", [AttentionParams(0.2), AttentionParams(0.2, window=600, softcap=5.0)]
)
def test_the_number_of_threads_changes_no_bit(params):
    expected = attend(1, params)
    for num_threads in (2, 3, 5):
        for mine, other in zip(attend(num_threads, params), expected, strict=True):
            np.testing.assert_array_equal(mine, other)


def test_default_and_given_number_of_threads():
    backend = CPUBackend(SPEC, 4)
    assert 1 <= backend.num_threads <= default_num_threads()
    backend.close()
    assert CPUBackend(SPEC, 4, num_threads=3).num_threads == 3
    with pytest.raises(ConfigError, match="num_threads=0"):
        CPUBackend(SPEC, 4, num_threads=0)


def test_close_leaves_no_thread():
    before = set(threading.enumerate())
    attend(3, AttentionParams(0.2))
    assert set(threading.enumerate()) == before


def test_an_error_of_the_threads_leaves_no_pool_open(monkeypatch):
    backend = CPUBackend(SPEC, BLOCKS)
    monkeypatch.setattr(
        KernelTeam, "close", lambda self: (_ for _ in ()).throw(RuntimeError("no thread"))
    )
    with pytest.raises(RuntimeError, match="no thread"):
        backend.close()
    assert backend._pools == []


def test_close_frees_the_buffers_of_attention():
    backend = CPUBackend(SPEC, BLOCKS, num_threads=2)
    workspace = backend.kernel_access.workspace
    kept = [weakref.ref(buffer.base) for buffer in (workspace.scratch(9), workspace.partials(3, 5))]
    assert all(one() is not None for one in kept)
    backend.close()
    assert [one() for one in kept] == [None, None]


def test_plans_are_cached_per_layer_shape():
    backend = CPUBackend(SPEC, BLOCKS, num_threads=1)
    batch = backend.prepare(CASE.layout(CASE.spans))
    assert batch.plan(3, 2, 0) is batch.plan(3, 2, 0)
    assert batch.plan(3, 2, 0) is not batch.plan(3, 2, 100)
    backend.close()


def test_rows_of_another_batch_size_are_refused():
    backend = CPUBackend(SPEC, BLOCKS, num_threads=1)
    batch = backend.prepare(CASE.layout(CASE.spans))
    with pytest.raises(ConfigError, match="50 query rows were given for a batch of 51 tokens"):
        backend.attention(0, np.zeros((50, 6, 24), np.float32), batch, AttentionParams(0.2))
    with pytest.raises(ConfigError, match="2 KV heads of size 24"):
        backend.attention(0, np.zeros((51, 6, 16), np.float32), batch, AttentionParams(0.2))
    with pytest.raises(ConfigError, match=r"\(51, 2, 24\)"):
        backend.write_kv(
            0, np.zeros((51, 1, 24), np.float32), np.zeros((51, 1, 24), np.float32), batch
        )
    backend.close()


@pytest.mark.parametrize("block_size", [8, 24, 0])
def test_invalid_block_sizes_are_refused(block_size):
    with pytest.raises(ConfigError, match=f"block_size={block_size} must be a multiple of 16"):
        CPUBackend(KVSpec((LayerKVSpec(2, 24),), block_size, "float32"), 4)


def test_a_pool_beyond_memory_is_refused_with_the_calculation():
    with pytest.raises(CapacityError, match=r"num_blocks=\d+ x 6144 bytes"):
        CPUBackend(SPEC, 1 << 48)


def test_a_long_prompt_needs_no_copy_of_the_open_blocks():
    spec = KVSpec((LayerKVSpec(1, 64),) * 8, 16, "float16", (8, 8))
    backend = CPUBackend(spec, 40, num_threads=1, num_open=64)
    layout = BatchLayout(
        cu_seqlens_q=np.array([0, 320], np.int32),
        seq_lens=np.array([320], np.int32),
        block_tables=np.arange(20, dtype=np.int32)[None],
        slot_mapping=np.arange(320, dtype=np.int64),
    )
    tracemalloc.start()
    try:
        backend.prepare(layout)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        backend.close()
    assert peak < 64 * spec.bytes_per_open_block / 8
