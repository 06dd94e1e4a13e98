"""Python threads continue while a large prefill computes on one thread."""

import threading
import time

import numpy as np

from helpers.kernels.paged_cases import make_case
from kvboost_edge.kernels.attention import storage
from kvboost_edge.kernels.attention.float_launch import AttentionWorkspace, paged_attention
from kvboost_edge.kernels.attention.paged import AttentionOptions, KVPool, PagedBatch, aligned_empty


def test_python_threads_run_during_a_prefill():
    """With the GIL held, no other thread could record a time in the middle of the call."""
    tokens = 4096
    dim = 64
    size = 64
    case = make_case(
        np.random.default_rng(0),
        [(tokens, tokens)],
        kv_heads=2,
        per_group=8,
        dim=dim,
        block_size=size,
    )
    blocks = tokens // size + 3
    pool = KVPool(
        aligned_empty((blocks, 2, dim, size), np.float32),
        aligned_empty((blocks, 2, size, dim), np.float32),
    )
    layout = case.whole
    storage.write_kv(case.keys[0], case.values[0], pool, layout.slot_mapping)
    batch = PagedBatch(layout.cu_seqlens_q, layout.seq_lens, layout.block_tables)
    space = AttentionWorkspace(1)
    options = AttentionOptions(0.1)
    times = []
    stop = threading.Event()

    def tick():
        while not stop.wait(0.001):
            times.append(time.perf_counter())

    ticker = threading.Thread(target=tick)
    ticker.start()
    paged_attention(case.queries[0], pool, batch, options, space)  # compiles the kernels
    start = time.perf_counter()
    paged_attention(case.queries[0], pool, batch, options, space)
    end = time.perf_counter()
    stop.set()
    ticker.join()
    quarter = (end - start) / 4
    assert quarter > 0.02, "the kernel call is too short for this test"
    assert any(start + quarter < moment < end - quarter for moment in times)
