"""Recurrent mixers against NumPy: equal to the bit for any chunking, with snapshots where they were
requested.
"""

import itertools

import numpy as np
import pytest

from helpers.backends.state_views import matrices, tail
from helpers.kernels.mixer_cases import Conv, Delta, DeltaShape, Ssd, SsdShape, assert_same
from helpers.kernels.recurrent_cases import Piece, poisoned_pool

LENGTHS = (1, 2, 15, 16, 17, 64, 300)
CONVS = {
    "conv: of whole units": Conv(1024, 2),
    "conv: of more than a unit": Conv(528, 3),
    "conv: with bias": Conv(16, 2, bias=True),
    "conv: longer": Conv(32, 7),
}
MIXERS = {
    **CONVS,
    "delta: one head": Delta(DeltaShape(1, 1, 16, 16)),
    "delta: shared keys": Delta(DeltaShape(2, 4, 32, 48)),
    "delta: shared keys, tiled": Delta(DeltaShape(2, 6, 16, 32, tiled=True)),
    "delta: as in models": Delta(DeltaShape(1, 2, 128, 128)),
    "delta: with bias": Delta(DeltaShape(1, 2, 16, 16), 2, bias=True),
    "ssd: one head": Ssd(SsdShape(1, 1, 16, 32)),
    "ssd: groups": Ssd(SsdShape(2, 6, 32, 48, limit=(0.3, 1.5))),
    "ssd: norm before gates": Ssd(SsdShape(2, 4, 16, 16, "gated_after")),
    "ssd: no norm": Ssd(SsdShape(1, 3, 64, 32, "none", (0.01, 0.5))),
    "ssd: as in models": Ssd(SsdShape(1, 2, 128, 64)),
    "ssd: a wide state": Ssd(SsdShape(1, 1, 256, 64)),
    "ssd: without bias": Ssd(SsdShape(1, 2, 16, 16), bias=False),
}
CUT = [
    *CONVS,
    "delta: shared keys",
    "delta: shared keys, tiled",
    "ssd: groups",
    "ssd: a wide state",
]
DRAFTED = [
    "conv: of more than a unit",
    "conv: longer",
    "delta: shared keys, tiled",
    "delta: as in models",
    "delta: with bias",
    "ssd: groups",
    "ssd: as in models",
    "ssd: a wide state",
    "ssd: without bias",
]
ONE_OF_EACH = ["conv: of more than a unit", "delta: shared keys", "ssd: groups"]


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.some(2)
def test_mixers_equal_the_reference_bit_for_bit(name, length):
    mixer = MIXERS[name]
    rows = MIXERS[name].rows(length)
    pool = poisoned_pool(mixer.specs, 2)
    out = mixer.run(rows, [Piece(length, -1, 1)], pool)
    expected, state = mixer.expected(rows)
    np.testing.assert_array_equal(out, expected)
    assert_same(mixer.state(pool, 1), state)
    assert np.isnan(tail(pool, 0, 1)).all()
    assert np.isnan(matrices(pool, 0, 1)).all()
    assert np.isnan(tail(pool, 1, 0)).all()


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.some(3)
def test_rounding_stays_small_over_a_long_text(name):
    mixer = MIXERS[name]
    rows = MIXERS[name].rows(300, 1)
    exact, exact_state = mixer.expected(rows.astype(np.float64))
    out, state = mixer.expected(rows)
    assert np.linalg.norm(out - exact) <= 2e-6 * np.linalg.norm(exact)
    apart = state.matrices - exact_state.matrices
    assert np.linalg.norm(apart) <= 2e-6 * np.linalg.norm(exact_state.matrices)


@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("cuts", [(1,), (2, 3), (16, 17), tuple(range(1, 20))], ids=str)
def test_chunking_changes_no_bit(name, cuts):
    """The state is updated in one slot, or alternates between two slots."""
    mixer = MIXERS[name]
    length = 40
    rows = mixer.rows(length)
    whole, state = mixer.expected(rows)
    bounds = [0, *cuts, length]
    for slots in ([0] * len(bounds), [index % 2 for index in range(len(bounds))]):
        pool = poisoned_pool(mixer.specs, 2)
        for index, (first, stop) in enumerate(itertools.pairwise(bounds)):
            piece = Piece(stop - first, slots[index - 1] if index else -1, slots[index])
            np.testing.assert_array_equal(
                mixer.run(rows[first:stop], [piece], pool), whole[first:stop]
            )
        assert_same(mixer.state(pool, slots[len(bounds) - 2]), state)


@pytest.mark.parametrize("name", ONE_OF_EACH)
@pytest.mark.parametrize("threads", [1, 2])
def test_sequences_with_snapshots_are_independent(name, threads):
    mixer = MIXERS[name]
    pool = poisoned_pool(mixer.specs, 12)
    old, other, third = (mixer.expected(mixer.rows(count))[1] for count in (9, 8, 7))
    before = {-1: None, 0: old, 9: other, 10: third}
    for slot in (0, 9, 10):
        mixer.put(pool, slot, before[slot])
    # Two pieces read one slot, one reads and writes the same slot, one has a single row, and one
    # has none.
    pieces = [
        Piece(20, -1, 1, ((1, 2), (2, 3), (16, 4), (20, 5))),
        Piece(5, 0, 6),
        Piece(1, 0, 7, ((1, 8),)),
        Piece(0, 9, 9),
        Piece(17, 10, 10, ((3, 11),)),
    ]
    rows = mixer.rows(sum(piece.rows for piece in pieces))
    out = mixer.run(rows, pieces, pool, threads)
    first = 0
    for piece in pieces:
        own = rows[first : first + piece.rows]
        expected, state = mixer.expected(own, before[piece.read])
        np.testing.assert_array_equal(out[first : first + piece.rows], expected)
        assert_same(mixer.state(pool, piece.write), state)
        for count, slot in piece.saves:
            _, saved = mixer.expected(own[:count], before[piece.read])
            assert_same(mixer.state(pool, slot), saved)
        first += piece.rows
    assert_same(mixer.state(pool, 0), old)


@pytest.mark.parametrize("name", DRAFTED)
def test_states_advance_by_accepted_drafts_only(name):
    mixer = MIXERS[name]
    num_drafts = 9
    _, before = mixer.expected(mixer.rows(9))
    rows = mixer.rows(2 * (1 + num_drafts))
    halves = np.split(rows, 2)
    wholes = [
        mixer.expected(half, state)[0] for half, state in zip(halves, (before, None), strict=True)
    ]
    for count in range(num_drafts + 1):
        pool = poisoned_pool(mixer.specs, 4, 2 * num_drafts)
        mixer.put(pool, 0, before)
        pieces = [
            Piece(1 + num_drafts, 0, 0, drafts=num_drafts),
            Piece(1 + num_drafts, -1, 1, drafts=num_drafts),
        ]
        np.testing.assert_array_equal(mixer.run(rows, pieces, pool), np.concatenate(wholes))
        counts = (count, num_drafts - count)
        mixer.accept(pieces, pool, counts, [(i, n, 2 + i) for i, n in enumerate(counts) if n])
        for slot, (half, state, right) in enumerate(
            zip(halves, (before, None), counts, strict=True)
        ):
            _, expected = mixer.expected(half[: 1 + right], state)
            assert_same(mixer.state(pool, slot), expected)
            if right:
                assert_same(mixer.state(pool, 2 + slot), expected)
        assert np.isnan(tail(pool, 0, 0)).all()


@pytest.mark.parametrize("name", DRAFTED)
@pytest.mark.parametrize("accepted", range(6))
def test_drafts_do_not_change_slots_before_acceptance(name, accepted):
    mixer = MIXERS[name]
    num_drafts = 5
    _, before = mixer.expected(mixer.rows(9))
    rows = mixer.rows(2 + num_drafts)
    whole, _ = mixer.expected(rows, before)
    certain, some, right = (
        mixer.expected(rows[: 2 + count], before)[1] for count in (0, min(2, accepted), accepted)
    )
    pool = poisoned_pool(mixer.specs, 4, num_drafts)
    mixer.put(pool, 0, before)
    pieces = [Piece(len(rows), 0, 0, ((2, 1),), drafts=num_drafts)]
    np.testing.assert_array_equal(mixer.run(rows, pieces, pool), whole)
    assert_same(mixer.state(pool, 0), certain)
    assert_same(mixer.state(pool, 1), certain)
    if accepted:
        saves = [(0, min(2, accepted), 2)]
        mixer.accept(pieces, pool, [accepted], saves, written=[3])
        assert_same(mixer.state(pool, 3), right)
        assert_same(mixer.state(pool, 0), certain)
        mixer.accept(pieces, pool, [accepted], saves)
        assert_same(mixer.state(pool, 2), some)
    assert_same(mixer.state(pool, 0), right)
    assert_same(mixer.state(pool, 1), certain)
    assert np.isnan(tail(pool, 1, 0)).all()


@pytest.mark.parametrize("name", ONE_OF_EACH)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "accepted", [(0, 3, 0, 2), (2, 0, 1, 0), (3, 3, 0, 4), (0, 0, 0, 1)], ids=str
)
def test_each_sequence_accepts_its_own_drafts(name, accepted, threads):
    """The slot of a sequence whose drafts were all rejected may belong to another one by now."""
    mixer = MIXERS[name]
    pieces = [
        Piece(4, -1, 0, drafts=3),
        Piece(6, 1, 1, drafts=3),
        Piece(3, -1, 2),
        Piece(5, 3, 3, drafts=4),
    ]
    pieces = [
        piece._replace(drafts=max(piece.drafts, count))
        for piece, count in zip(pieces, accepted, strict=True)
    ]
    pool = poisoned_pool(mixer.specs, 12, sum(piece.drafts for piece in pieces))
    _, old = mixer.expected(mixer.rows(9))
    for slot in (1, 3):
        mixer.put(pool, slot, old)
    rows = mixer.rows(sum(piece.rows for piece in pieces))
    mixer.run(rows, pieces, pool, threads)
    taken = [index for index, count in enumerate(accepted) if not count]
    pool.poison(taken)
    mixer.accept(
        pieces, pool, accepted, [(i, n, 4 + i) for i, n in enumerate(accepted) if n], threads
    )
    first = 0
    for index, (piece, count) in enumerate(zip(pieces, accepted, strict=True)):
        own = rows[first : first + piece.rows - piece.drafts + count]
        first += piece.rows
        if count:
            _, state = mixer.expected(own, old if piece.read >= 0 else None)
            assert_same(mixer.state(pool, index), state)
            assert_same(mixer.state(pool, 4 + index), state)
        else:
            assert np.isnan(matrices(pool, index, 1)).all()
            assert np.isnan(tail(pool, index, 1)).all()


# The part of a head's outputs that one bad number in its state affects: the delta rule has a norm
# over the head.
@pytest.mark.parametrize(
    ("name", "part"), [("delta: shared keys", slice(None)), ("ssd: no norm", 7)]
)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_nan_state_affects_only_its_head_and_sequence(name, part, bad):
    mixer = MIXERS[name]
    pool = poisoned_pool(mixer.specs, 2)
    _, old = mixer.expected(mixer.rows(9))
    old.matrices[1, 5, 7] = bad
    mixer.put(pool, 0, old)
    out = mixer.run(mixer.rows(20), [Piece(10, 0, 0), Piece(10, -1, 1)], pool)
    out = out.reshape(20, len(old.matrices), -1)
    assert not np.isfinite(out[:10, 1, part]).any()
    assert np.isfinite(out[10:]).all()
    assert np.isfinite(np.delete(out[:10], 1, axis=1)).all()
