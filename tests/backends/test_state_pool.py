"""Slots of recurrent states: the places of their parts, bytes in and out, poison, and refused
passes.
"""

import dataclasses

import numpy as np
import pytest

from helpers.backends.state_views import draft, matrices, tail
from helpers.raising import assert_raises
from kvboost_edge.backends.base import BatchLayout, KVSpec, LayerKVSpec, LayerStateSpec, PassStates
from kvboost_edge.backends.batch_layout import check_layout
from kvboost_edge.backends.select import choose_backend, load_module, make_backend
from kvboost_edge.backends.state_pool import StatePool
from kvboost_edge.errors import BackendUnavailable, CapacityError, ConfigError

CONV = LayerStateSpec(2, 24)
DELTA = LayerStateSpec(3, 80, 4, 32, 48, 8)
SPEC = KVSpec((LayerKVSpec(1, 16),), 16, "float32", states=(CONV, DELTA))


def test_state_bytes_are_rounded_to_cache_lines():
    assert (CONV.tail_bytes, CONV.nbytes) == (192, 192)
    assert (DELTA.tail_bytes, DELTA.nbytes) == (960, 960 + 4 * 4 * 32 * 48)
    assert LayerStateSpec(2, 20).nbytes == 192
    assert LayerStateSpec(3, 8192, 32, 128, 128).nbytes == (2 << 20) + (96 << 10), (
        "wrong size of a layer's state in Qwen3.5-4B"
    )
    assert SPEC.bytes_per_state == CONV.nbytes + DELTA.nbytes
    assert dataclasses.replace(SPEC, states=()).bytes_per_state == 0
    assert (CONV.draft_bytes, DELTA.draft_bytes, SPEC.bytes_per_draft) == (128, 384, 512)


def assert_apart(parts):
    """Check that a write to one part changes none of the others."""
    for number, part in enumerate(parts):
        part[:] = number
    for number, part in enumerate(parts):
        assert float(part.min()) == float(part.max()) == number


def test_draft_rows_follow_the_slots():
    pool = StatePool(SPEC.states, 3, 2)
    assert pool.nbytes == 3 * SPEC.bytes_per_state + 2 * SPEC.bytes_per_draft == pool.region.nbytes
    assert pool.drafts_address == pool.address(0) + 3 * pool.slot_bytes
    assert pool.draft_row_bytes == 512
    pool.write_slots(range(3), np.zeros((3, pool.slot_bytes), np.uint8))
    parts = [draft(pool, row, layer) for row in range(2) for layer in range(2)]
    assert [part.size for part in parts] == [24, 88] * 2
    assert_apart(parts)
    assert draft(pool, 1, 1).ctypes.data == pool.drafts_address + 512 + 128
    assert not pool.read_slots(range(3)).any()
    pool.poison_drafts()
    assert all(np.isnan(part).all() for part in parts)
    assert not pool.read_slots(range(3)).any()
    pool.close()
    assert (pool.nbytes, pool.num_draft_rows) == (0, 0)


def test_slot_parts_do_not_overlap():
    pool = StatePool(SPEC.states, 3)
    assert (pool.slot_bytes, pool.nbytes) == (SPEC.bytes_per_state, 3 * SPEC.bytes_per_state)
    assert (pool.offset(0), pool.offset(1)) == (0, CONV.nbytes)
    assert [pool.address(slot) - pool.address(0) for slot in range(3)] == [
        slot * pool.slot_bytes for slot in range(3)
    ]
    assert pool.address(0) % 64 == 0
    pool.write_slots(range(3), np.zeros((3, pool.slot_bytes), np.uint8))
    parts = [
        part
        for slot in range(3)
        for part in (tail(pool, slot, 0), tail(pool, slot, 1), matrices(pool, slot, 1))
    ]
    assert len(parts) == 9
    assert_apart(parts)
    assert tail(pool, 2, 1).ctypes.data == pool.address(2) + pool.offset(1)
    assert matrices(pool, 2, 1).ctypes.data == pool.address(2) + pool.offset(1) + DELTA.tail_bytes
    assert matrices(pool, 2, 1).shape == (4, 3, 32, 16)


def test_slots_round_trip_as_bytes():
    pool = StatePool(SPEC.states, 4)
    data = np.random.default_rng(0).integers(0, 256, (2, pool.slot_bytes)).astype(np.uint8)
    pool.write_slots([3, 1], data)
    np.testing.assert_array_equal(pool.read_slots([3, 1]), data)
    assert pool.checksums([1, 3]) == pool.checksums([3, 1])[::-1]
    assert pool.checksums([1]) != pool.checksums([3])
    out = pool.read_slots([1])
    pool.poison([1])
    np.testing.assert_array_equal(out[0], data[1])
    assert np.isnan(tail(pool, 1, 0)).all()
    assert np.isnan(matrices(pool, 1, 1)).all()
    np.testing.assert_array_equal(pool.read_slots([3])[0], data[0])


def test_invalid_slots_are_refused():
    pool = StatePool(SPEC.states, 2)
    row = np.zeros((1, pool.slot_bytes), np.uint8)
    for call in (
        lambda: pool.address(2),
        lambda: pool.read_slots([-1]),
        lambda: pool.write_slots([2], row),
        lambda: pool.poison([0, 5]),
        lambda: pool.checksums([2]),
    ):
        assert_raises(ConfigError, r"must be in the pool's 0\.\.1", call)
    with pytest.raises(ConfigError, match="contain duplicates"):
        pool.write_slots([1, 1], np.zeros((2, pool.slot_bytes), np.uint8))
    assert_raises(ConfigError, "data of shape", pool.write_slots, [1], row[:, 1:])
    assert_raises(CapacityError, "max_state_bytes", StatePool, SPEC.states, 1 << 40)


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_backends_allocate_state_slots(name):
    backend = make_backend(choose_backend(name), SPEC, 4, 1, num_state_slots=3, num_draft_rows=2)
    assert backend.states is not None
    assert (backend.states.num_slots, backend.states.num_draft_rows) == (3, 2)
    layout = _layout([2, 1], [-1, -1], [0, 1])
    backend.prepare(layout)
    backend.prepare(_layout([3, 1], [-1, -1], [0, 1], certain=[1, 1]))
    with pytest.raises(
        ConfigError, match=r"the layout has 3 draft tokens, but the backend has num_draft_rows=2"
    ):
        backend.prepare(_layout([3, 2], [-1, -1], [0, 1], certain=[1, 1]))
    with pytest.raises(
        ConfigError, match=r"the layout has no recurrent state slots, but .* num_state_slots=3"
    ):
        backend.prepare(dataclasses.replace(layout, states=None))
    backend.close()
    for states, slots in (((), 2), (SPEC.states, 0)):
        with pytest.raises(ConfigError, match=f"num_state_slots={slots}"):
            make_backend(
                choose_backend(name),
                dataclasses.replace(SPEC, states=states),
                4,
                1,
                num_state_slots=slots,
            )
    plain = make_backend(choose_backend(name), dataclasses.replace(SPEC, states=()), 4, 1)
    assert plain.states is None
    with pytest.raises(
        ConfigError, match=r"the layout has recurrent state slots, but .* num_state_slots=0"
    ):
        plain.prepare(layout)
    plain.close()


@pytest.mark.parametrize(
    ("name", "device"),
    [("torch", "cpu"), ("torch", "mps"), ("torch", "cuda:0"), ("cuda", "cuda:0")],
)
def test_torch_backends_refuse_states_by_name(name, device, monkeypatch):
    """The machine appears to have such a device. States are refused before its kernels are tried."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr("kvboost_edge.backends.torch.apple.missing", lambda: None)
    assert "2 recurrent layers" in str(load_module(name).unsupported_reason(device, SPEC))
    choice = dataclasses.replace(choose_backend("cpu"), name=name, device=device)
    with pytest.raises(BackendUnavailable, match="2 recurrent layers"):
        make_backend(choice, SPEC, 4, num_state_slots=3)


def _layout(rows, read, written, saves=None, certain=None):
    starts = np.cumsum([0, *rows]).astype(np.int32)
    states = PassStates(
        np.array(read, np.int32),
        np.array(written, np.int32),
        np.array(saves or [], np.int32).reshape(-1, 3),
        None if certain is None else np.array(certain, np.int32),
    )
    lengths = np.array(rows, np.int32)
    tables = np.zeros((len(rows), 1), np.int32)
    return BatchLayout(starts, lengths, tables, np.zeros(starts[-1], np.int64), states=states)


def test_valid_slot_layouts_are_accepted():
    check_layout(
        _layout([2, 3, 0], [5, 5, 7], [0, 1, 7], [[0, 2, 2], [1, 1, 3], [1, 3, 4]]), 16, 1, 8
    )


@pytest.mark.parametrize(
    ("read", "written", "saves", "reason"),
    [
        ([0], [0, 1], [], "need state_in and state_out of shape"),
        ([8, 0], [0, 1], [], r"out of range 0\.\.7"),
        ([-2, 0], [0, 1], [], r"out of range 0\.\.7"),
        ([-1, 0], [-1, 1], [], r"out of range 0\.\.7"),
        ([-1, -1], [0, 1], [[0, 1, 8]], r"out of range 0\.\.7"),
        ([-1, -1], [3, 3], [], "contain duplicates"),
        ([-1, -1], [0, 1], [[0, 1, 1]], "contain duplicates"),
        ([-1, -1], [0, 1], [[0, 1, 4], [1, 1, 4]], "contain duplicates"),
        ([1, -1], [0, 1], [], "while other sequences read them"),
        ([5, -1], [0, 1], [[1, 1, 5]], "while other sequences read them"),
        ([5, -1], [0, 1], [[0, 1, 5]], "while other sequences read them"),
        ([-1, -1], [0, 1], [[0, 0, 4]], "must have row counts from 1"),
        ([-1, -1], [0, 1], [[0, 3, 4]], "must have row counts from 1"),
        ([-1, -1], [0, 1], [[2, 1, 4]], "contains sequences outside"),
        ([-1, -1], [0, 1], [[0, 2, 4], [0, 1, 5]], "must be sorted"),
        ([-1, -1], [0, 1], [[0, 1, 4], [0, 1, 5]], "must be sorted"),
        ([-1, -1], [0, 1], [[1, 1, 4], [0, 1, 5]], "must be sorted"),
    ],
)
def test_invalid_slot_layouts_are_refused(read, written, saves, reason):
    with pytest.raises(ConfigError, match=reason):
        check_layout(_layout([2, 3], read, written, saves), 16, 1, 8)


@pytest.mark.parametrize(
    ("certain", "saves", "reason"),
    [
        ([2, 4], [], "must have numbers from 1"),
        ([0, 3], [], "must have numbers from 1"),
        ([2, 3, 1], [], "must have numbers from 1"),
        ([2, 1], [[1, 2, 4]], r"certain rows of each sequence, \[2, 1\]"),
    ],
)
def test_certain_rows_and_saves_are_checked(certain, saves, reason):
    check_layout(_layout([2, 3, 0], [-1, -1, 5], [0, 1, 2], [[1, 1, 4]], [2, 1, 0]), 16, 1, 8, 2)
    with pytest.raises(ConfigError, match=reason):
        check_layout(_layout([2, 3], [-1, -1], [0, 1], saves, certain), 16, 1, 8, 31)
