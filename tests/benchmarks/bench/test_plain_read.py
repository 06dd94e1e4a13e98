"""Tests of the benchmarks' plain read: every byte is read once with any number of threads; and of
the bytes per decoded token.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.bench.plain_read import plain_read, token_weights
from kvboost_edge.kernels.team import KernelTeam


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("steps", [0, 1, 5, 5000])
def test_reads_every_whole_step_once(num_threads, steps):
    data = np.random.default_rng(steps).integers(0, 256, 512 * steps + 511, dtype=np.uint8)
    words = data[: 512 * steps].view(np.uint32).astype(np.uint64)
    team = KernelTeam(num_threads)
    try:
        assert plain_read(data.ctypes.data, data.nbytes, team) == int(words.sum()) % (1 << 32)
    finally:
        team.close()


def test_a_token_reads_an_embedding_only_where_it_is_the_head():
    tied = {
        "embed": (64, 1000),
        "embed.scales": (1088, 100),
        "layer0.qkv": (1216, 500),
        "norm": (1728, 128),
    }
    assert token_weights(SimpleNamespace(_sections=tied, _base=4096)) == (4096 + 64, 1792)
    untied = {**tied, "head": (1856, 1000), "head.scales": (2880, 100)}
    assert token_weights(SimpleNamespace(_sections=untied, _base=4096)) == (
        4096 + 1216,
        2980 - 1216,
    )


def test_a_token_reads_only_its_share_of_the_experts():
    sections = {
        "embed": (0, 1000),
        "layer0.experts_down": (1000, 800),
        "layer0.experts_down.scales": (1800, 80),
    }
    assert token_weights(SimpleNamespace(_sections=sections, _base=64), 1 / 8) == (
        64,
        1000 + 100 + 10,
    )
