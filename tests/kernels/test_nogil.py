"""While a large prefill computes on one thread, a Python thread keeps ticking every 5 ms."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.kernels.paged_cases import make_case
from helpers.ticks import assert_ticks_go_on
from kvboost_edge.kernels.attention import storage
from kvboost_edge.kernels.attention.launch import AttentionWorkspace, paged_attention
from kvboost_edge.kernels.attention.paged import AttentionOptions, KVPool, PagedBatch, aligned_empty

pytestmark = pytest.mark.alone


def test_a_python_thread_keeps_ticking_during_a_prefill() -> None:
    """A held GIL would be one gap as long as the call."""
    tokens, dim, size = 4096, 64, 64
    case = make_case(np.random.default_rng(0), [(tokens, tokens)], kv_heads=2, per_group=8, dim=dim, block_size=size)
    blocks = tokens // size + 3
    pool = KVPool(aligned_empty((blocks, 2, dim, size), np.float32), aligned_empty((blocks, 2, size, dim), np.float32))
    layout = case.whole
    storage.write_kv(case.keys[0], case.values[0], pool, layout.slot_mapping)
    batch = PagedBatch(layout.cu_seqlens_q, layout.seq_lens, layout.block_tables)
    space, options = AttentionWorkspace(1), AttentionOptions(0.1)
    assert_ticks_go_on(lambda: paged_attention(case.queries[0], pool, batch, options, space))
