"""The torch backend apart from the contract of all backends, which is tested in test_contract.py."""

import numpy as np
import pytest

from helpers.backends.makers import MIX, Arrays, small_case
from helpers.kernels.paged_cases import assert_close, num_blocks_for
from kvboost_edge.backends.base import AttentionParams, BatchLayout, KVSpec, LayerKVSpec
from kvboost_edge.backends.torch_backend import TorchBackend
from kvboost_edge.errors import BackendUnavailable, CapacityError

BLOCK = 16
LENGTHS = ((5, 5), (1, 40), (33, 50), (1, 17), (5, 80))  # new tokens, all tokens


def make_spec(dim=16):
    return KVSpec((LayerKVSpec(2, dim),), BLOCK, "float32")


def make_layout(lengths, rng, num_blocks):
    free = rng.permutation(num_blocks).tolist()
    tables = np.full((len(lengths), 8), -1, np.int32)
    slots = []
    for row, (new, total) in zip(tables, lengths, strict=True):
        for index in range(-(-total // BLOCK)):
            row[index] = free.pop()
        positions = np.arange(total - new, total)
        slots.append(row[positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK)
    starts = np.cumsum([0] + [new for new, _ in lengths]).astype(np.int32)
    return BatchLayout(
        starts, np.array([total for _, total in lengths], np.int32), tables, np.concatenate(slots)
    )


def test_a_batch_in_the_smallest_pieces_equals_the_reference(monkeypatch):
    monkeypatch.setattr("kvboost_edge.backends.torch.masked_attention._MAX_SCORES", {"cpu": 1})
    case = small_case(3)
    arrays = Arrays(TorchBackend(make_spec(dim=24), num_blocks_for(MIX, BLOCK)))
    arrays.write_whole(case)
    sinks = np.array([-1, 0, 1, 2, 30, 200], np.float32)
    for params in (
        AttentionParams(0.4),
        AttentionParams(0.4, window=20, softcap=3.0),
        AttentionParams(0.4, window=7, sinks=sinks),
    ):
        found = arrays.attend_new(case, params)
        assert_close(found, case.expected(case.spans, params, "float32"))


def test_the_window_bounds_the_gathered_blocks():
    backend = TorchBackend(make_spec(), 24)
    batch = backend.prepare(make_layout(((1, 120), (1, 98)), np.random.default_rng(0), 24))
    (group,) = batch.groups(20)
    assert group.blocks.shape == (2, 3)  # positions 100..119 are in 2 blocks, 78..97 in 3
    assert group is batch.groups(20)[0], "groups must be built once per pass and window"


def test_sequences_with_equally_many_new_tokens_share_a_group():
    backend = TorchBackend(make_spec(), 24)
    batch = backend.prepare(make_layout(LENGTHS, np.random.default_rng(0), 24))
    assert sorted((group.q_len, len(group.blocks)) for group in batch.groups(0)) == [
        (1, 2),
        (5, 2),
        (33, 1),
    ]


def test_missing_devices_are_refused():
    with pytest.raises(BackendUnavailable, match="nonsense"):
        TorchBackend(make_spec(), 2, device="nonsense")


def test_a_pool_beyond_memory_is_refused_with_the_calculation():
    with pytest.raises(CapacityError, match=r"num_blocks=\d+ x 4096 bytes"):
        TorchBackend(make_spec(), 1 << 48)
