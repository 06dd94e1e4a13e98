"""Contiguous copies of running sequences' KV: gathered once from the pool, dropped when a block
changes, bounded in bytes.
"""

import numpy as np
import pytest

from kvboost_edge.models.onnx.past_kv import LayerPast, PastLayout
from kvboost_edge.runners.onnx.kv_buffers import PastBuffers

BLOCK = 16
HEADS = 2
DIM = 4
BLOCKS = 40
LAYERS = 2


class Pool:
    """A pool with random KV that plays the runner's part: it appends tokens to both the buffer and
    the blocks.
    """

    def __init__(self, *, shared, most_bytes=1 << 30):
        layers = tuple(LayerPast(("", ""), ("", ""), HEADS, DIM) for _ in range(LAYERS))
        self.rng = np.random.default_rng(0)
        self.blocks = self.rng.standard_normal((LAYERS, 2, BLOCKS, HEADS, BLOCK, DIM)).astype(
            np.float32
        )
        self.marks = np.zeros(BLOCKS, dtype=np.int64)
        self.shared = shared
        layout = PastLayout(layers, "float32", {"input_ids": "I64"}, shared)
        self.buffers = PastBuffers(layout, BLOCK, most_bytes, self.gather)

    def gather(self, ids):
        def row(blocks):
            return blocks[ids].swapaxes(0, 1).reshape(HEADS, len(ids) * BLOCK, DIM)

        return [(row(keys), row(values)) for keys, values in self.blocks]

    def compute(self, table, start, stop):
        """Run a pass: new keys are written to the present tensors and copied from there into the
        blocks.
        """
        ids = np.array(table, dtype=np.int32)
        buffer = self.buffers.take(ids, start, stop, self.marks)
        buffer.blocks = buffer.blocks[:0]
        new = self.rng.standard_normal((LAYERS, 2, HEADS, stop - start, DIM)).astype(np.float32)
        for layer in range(LAYERS):
            for kind in (0, 1):
                past = self.buffers.past(buffer, layer, kind)
                present = self.buffers.present(buffer, layer, kind, stop)
                assert present.flags.c_contiguous
                assert past.flags.c_contiguous
                if not self.shared:
                    assert past.shape[2] == start
                    assert present.shape[2] == stop
                    present[0, :, :start] = past[0]
                present[0, :, start:stop] = new[layer, kind]
        self.buffers.advance(buffer, stop)
        for token in range(start, stop):
            self.blocks[:, :, ids[token // BLOCK], :, token % BLOCK] = new[:, :, :, token - start]
        self.marks[np.unique(ids[np.arange(start, stop) // BLOCK])] += 1
        buffer.blocks = ids[: -(-stop // BLOCK)].copy()
        buffer.marks = self.marks[buffer.blocks]
        self.check(buffer, ids, stop)
        return buffer

    def check(self, buffer, ids, stop):
        """Assert that the buffer equals the blocks."""
        assert buffer.count == stop
        for layer, both in enumerate(self.gather(ids[: -(-stop // BLOCK)])):
            for kind in (0, 1):
                np.testing.assert_array_equal(
                    self.buffers.added(buffer, layer, kind, 0), both[kind][:, :stop]
                )


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "concat"])
def test_a_sequence_is_gathered_once_and_extended(shared):
    pool = Pool(shared=shared)
    pool.compute([3, 1, 4, 7], 32, 50)  # a prefix of two blocks is gathered from the pool
    for token in range(50, 60):
        pool.compute([3, 1, 4, 7], token, token + 1)
    assert pool.buffers.num_gathered == 1
    pool.compute([5, 9], 0, 20)  # a new sequence has nothing to gather
    pool.compute([3, 1, 4, 7], 60, 61)
    assert pool.buffers.num_gathered == 1
    table = list(range(10, 32))
    for start in range(0, 340, 20):  # beyond several capacities
        pool.compute(table, start, start + 20)
    assert pool.buffers.num_gathered == 1


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "concat"])
def test_rejected_tokens_are_dropped(shared):
    pool = Pool(shared=shared)
    pool.compute([3, 1], 0, 25)
    pool.compute([3, 1], 21, 24)
    pool.compute([3, 1], 24, 32)
    assert pool.buffers.num_gathered == 0


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "concat"])
def test_a_block_that_changed_is_gathered_again(shared):
    """The block changes by a copy into it, or because another sequence took it. In both cases the
    pool's contents are used.
    """
    pool = Pool(shared=shared)
    pool.compute([3, 1], 0, 20)
    pool.blocks[:, :, 3] = 7.0
    pool.marks[3] += 1
    pool.compute([3, 1], 20, 22)
    assert pool.buffers.num_gathered == 1
    pool.compute([6, 1], 0, 20)  # block 1 was freed and now belongs to this sequence
    pool.compute([3, 8], 16, 20)
    assert pool.buffers.num_gathered == 2


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "concat"])
def test_the_buffer_of_a_failed_pass_is_not_used_again(shared):
    pool = Pool(shared=shared)
    failed = pool.buffers.take(np.array([3, 1, 4], dtype=np.int32), 32, 40, pool.marks)
    assert len(failed.blocks) == 0
    assert pool.compute([7, 8], 16, 20) is not failed
    assert pool.buffers.num_gathered == 2


def test_sequences_with_a_common_prefix_have_separate_buffers():
    pool = Pool(shared=True)
    pool.compute([3, 1], 0, 20)
    pool.compute([3, 2], 16, 30)
    for token in range(20, 22):
        pool.compute([3, 1], token, token + 1)
        pool.compute([3, 2], token + 10, token + 11)
    assert pool.buffers.num_gathered == 1


def test_buffers_are_bounded_with_lru_eviction():
    one = 2 * LAYERS * HEADS * DIM * 4 * 64
    pool = Pool(shared=True, most_bytes=2 * one)
    for block in range(5):
        pool.compute([block, block + 10], 0, 20)
        assert pool.buffers.nbytes <= 2 * one
    pool.compute([3, 13], 20, 21)
    pool.compute([4, 14], 20, 21)
    assert pool.buffers.num_gathered == 0
    pool.compute([0, 10], 20, 21)
    assert pool.buffers.num_gathered == 1
    pool.buffers.clear()
    assert pool.buffers.nbytes == 0
