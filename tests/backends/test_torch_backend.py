"""The torch backend apart from the contract of all backends, which is tested in test_contract.py."""

import numpy as np
import pytest
import torch

from kvboost_edge.backends.base import AttentionParams, BatchLayout, KVSpec, LayerKVSpec
from kvboost_edge.backends.torch_backend import TorchBackend
from kvboost_edge.errors import BackendUnavailable, CapacityError, ConfigError
from kvboost_edge.kvcache.block_table import CopyOp

BLOCK = 16
KV_HEADS = 2
Q_HEADS = 6
DIM = 16
LENGTHS = ((5, 5), (1, 40), (33, 50), (1, 17), (5, 80))  # new tokens, all tokens


def make_spec(dtype="float32", num_layers=1):
    return KVSpec((LayerKVSpec(KV_HEADS, DIM),) * num_layers, BLOCK, dtype)


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


def attend_plainly(queries, keys, values, params):
    """Attend with one query at a time in float64. The queries [n, heads, d] are at the last n
    positions of the keys.
    """
    per_kv = queries.shape[1] // keys.shape[1]
    out = torch.empty(queries.shape, dtype=torch.float64)
    lse = torch.empty(queries.shape[:2], dtype=torch.float64)
    for i in range(len(queries)):
        position = len(keys) - len(queries) + i
        first = max(0, position - params.window + 1) if params.window else 0
        for head in range(queries.shape[1]):
            seen = keys[first : position + 1, head // per_kv].double()
            scores = seen @ queries[i, head].double() * params.softmax_scale
            if params.softcap:
                scores = params.softcap * torch.tanh(scores / params.softcap)
            extra = (
                []
                if params.sinks is None
                else [torch.tensor([float(params.sinks[head])], dtype=torch.float64)]
            )
            lse[i, head] = torch.cat([scores, *extra]).logsumexp(0)
            weights = torch.exp(scores - lse[i, head])
            out[i, head] = weights @ values[first : position + 1, head // per_kv].double()
    return out, lse


@pytest.mark.parametrize(
    "params",
    [
        AttentionParams(0.4),
        AttentionParams(0.4, window=7),
        AttentionParams(0.4, window=20, softcap=3.0),
        AttentionParams(0.4, sinks=np.array([-1, 0, 1, 2, 30, 200], np.float32)),
    ],
    ids=["plain", "window", "window and softcap", "sinks"],
)
@pytest.mark.parametrize("max_scores", [1 << 20, 1])
def test_a_ragged_batch_equals_the_reference(params, max_scores, monkeypatch):
    monkeypatch.setattr(
        "kvboost_edge.backends.torch.masked_attention._MAX_SCORES", {"cpu": max_scores}
    )
    rng = np.random.default_rng(3)
    backend = TorchBackend(make_spec(), 24)
    backend.poison_blocks(range(24))
    layout = make_layout(LENGTHS, rng, 24)
    generator = torch.Generator().manual_seed(3)
    keys, values = (
        [torch.randn(n, KV_HEADS, DIM, generator=generator) for _, n in LENGTHS] for _ in range(2)
    )
    queries = [torch.randn(new, Q_HEADS, DIM, generator=generator) * 2 for new, _ in LENGTHS]
    whole = make_whole(layout)
    backend.write_kv(0, torch.cat(keys), torch.cat(values), backend.prepare(whole))
    out, lse = backend.attention(0, torch.cat(queries), backend.prepare(layout), params)
    start = 0
    for query, key, value in zip(queries, keys, values, strict=True):
        expected_out, expected_lse = attend_plainly(query, key, value, params)
        torch.testing.assert_close(
            out[start : start + len(query)].double(), expected_out, rtol=1e-5, atol=1e-5
        )
        torch.testing.assert_close(
            lse[start : start + len(query)].double(), expected_lse, rtol=1e-5, atol=1e-5
        )
        start += len(query)


def make_whole(layout):
    """Return a layout of the same sequences in which all their tokens are new."""
    positions = [np.arange(total) for total in layout.seq_lens]
    slots = [
        table[at // BLOCK].astype(np.int64) * BLOCK + at % BLOCK
        for table, at in zip(layout.block_tables, positions, strict=True)
    ]
    starts = np.cumsum([0, *layout.seq_lens]).astype(np.int32)
    return BatchLayout(starts, layout.seq_lens, layout.block_tables, np.concatenate(slots))


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


def test_block_copies_cover_all_layers_in_order():
    backend = TorchBackend(make_spec(num_layers=2), 4)
    layout = make_layout(((16, 16),), np.random.default_rng(0), 4)
    source = int(layout.block_tables[0, 0])
    first, second = [block for block in range(4) if block != source][:2]
    for layer in range(2):
        rows = torch.full((16, KV_HEADS, DIM), float(layer + 1))
        backend.write_kv(layer, rows, -rows, backend.prepare(layout))
    backend.copy_blocks([CopyOp(source, first), CopyOp(first, second)])
    sums = backend.checksum_blocks(range(4))
    assert sums[source] == sums[first] == sums[second]
    assert len(set(sums)) == 2, "the blocks that were not written must differ from the copies"


@pytest.mark.parametrize(("dtype", "nbytes"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_pool_bytes_equal_the_allocation(dtype, nbytes):
    backend = TorchBackend(make_spec(dtype, num_layers=3), 5)
    assert (
        backend.pool_bytes
        == 5 * 3 * 2 * BLOCK * KV_HEADS * DIM * nbytes
        == 5 * backend.spec.bytes_per_block
    )
    backend.close()
    assert backend.pool_bytes == 0


def test_bfloat16_values_are_rounded_to_nearest():
    backend = TorchBackend(make_spec("bfloat16"), 2)
    layout = make_layout(((1, 1),), np.random.default_rng(0), 2)
    value = torch.full(
        (1, KV_HEADS, DIM), 1 + 2**-8 + 2**-9
    )  # between two bfloat16 values, nearer to the upper one
    batch = backend.prepare(layout)
    backend.write_kv(0, value, value, batch)
    out, _ = backend.attention(0, torch.zeros(1, Q_HEADS, DIM), batch, AttentionParams(1.0))
    assert out.unique().tolist() == [1 + 2**-7]


def test_missing_devices_are_refused():
    with pytest.raises(BackendUnavailable, match="nonsense"):
        TorchBackend(make_spec(), 2, device="nonsense")


def test_a_pool_beyond_memory_is_refused_with_the_calculation():
    with pytest.raises(CapacityError, match=r"num_blocks=\d+ x 4096 bytes"):
        TorchBackend(make_spec("float32", num_layers=1), 1 << 48)


def test_copies_outside_the_pool_are_refused():
    with pytest.raises(ConfigError, match="0 -> 2"):
        TorchBackend(make_spec(), 2).copy_blocks([CopyOp(0, 2)])
