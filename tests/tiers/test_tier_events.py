"""Reported contents of a tier: everything once, then the changes; blocks that were removed without
notice are reported later.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.engine.fake_runner import fake_engine
from helpers.engine.hand_io_thread import DictTier, HandIOThread
from helpers.server.live_servers import wait_until
from kvboost_edge.kvcache.hashing import BlockAddress, prefix_hashes
from kvboost_edge.tiers.disk.tier import DiskTier
from kvboost_edge.tiers.tier_events import Holdings

numbers = st.sets(st.integers(0, 9))


def hash_of(number):
    return bytes([number]) * 32


def tier_with(held):
    tier = DictTier()
    tier.blocks = {
        hash_of(number): (BlockAddress(hash_of(number), b"", b""), b"") for number in held
    }
    return tier


@given(
    numbers,
    st.lists(st.tuples(numbers, numbers, st.booleans(), st.booleans()), max_size=12),
    st.booleans(),
)
def test_reported_events_add_up_to_the_contents(held, steps, few):
    """Added blocks are noted, while removed ones are not always.

    If `few`, each call checks only some of the blocks again, so a removal is reported within a few
    calls.
    """
    tier = tier_with(held)
    holdings = Holdings(tier)
    holdings.note([hash_of(9)])  # no client has asked, so there is nothing to remember
    first = holdings.take()
    assert (first.is_whole, set(first.published), first.evicted) == (
        True,
        {hash_of(one) for one in held},
        (),
    )
    told = set(first.published)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvboost_edge.tiers.tier_events._CHECKED_AGAIN", 2 if few else 100)
        for came, left, whole, notes_left in steps:
            held = (held | came) - left
            tier.blocks = tier_with(held).blocks
            holdings.note(map(hash_of, came | (left if notes_left else set())))
            found = holdings.take(whole)
            assert not set(found.published) & set(found.evicted)
            assert found.is_whole is whole
            assert whole or (not set(found.published) & told and set(found.evicted) <= told)
            told = set(found.published) | (set() if whole else told - set(found.evicted))
            assert told >= {hash_of(one) for one in held}, (
                "all stored blocks must be reported immediately"
            )
            if not few:
                assert told == {hash_of(one) for one in held}
        for _ in range(6):
            told -= set(holdings.take().evicted)
    assert told == {hash_of(one) for one in held}


def test_unknown_blocks_are_not_reported(monkeypatch):
    """The tier of a server returns None for blocks that it has not seen lately."""
    tier = tier_with({1})
    known = {hash_of(1)}
    monkeypatch.setattr(tier, "holds", lambda prefix_hash: True if prefix_hash in known else None)
    holdings = Holdings(tier)
    assert holdings.take().published == (hash_of(1),)
    holdings.note([hash_of(2)])
    assert holdings.take() == (False, (), ())
    known.clear()
    assert holdings.take() == (False, (), (hash_of(1),))


def test_the_io_thread_reports_working_tiers_and_failures_once():
    class Broken(DictTier):
        def write(self, blocks, payloads):
            raise RuntimeError("a fault")

    near = DictTier("near")
    far = Broken("far")
    io_thread = HandIOThread([near, far, DiskTier(None, "why")], 8)
    io_thread.start(lambda piece: io_thread.release(piece))
    assert {name: held.is_whole for name, held in io_thread.take_held().items()} == dict.fromkeys(
        ("near", "far", "disk"), True
    )
    tokens = bytes(64)
    addresses = [BlockAddress(hash_of(number), b"p", tokens) for number in (1, 2)]
    io_thread.store(addresses, np.zeros((2, 8), np.uint8))
    io_thread.pump()
    held = io_thread.take_held()
    assert set(held["near"].published) == {hash_of(1), hash_of(2)}
    assert set(held) == {"near", "far", "disk"}
    assert held["far"] == (True, (), ()), "a failed tier must report that it holds nothing"
    assert not held["disk"].published
    assert set(io_thread.take_held()) == {"near", "disk"}
    near.blocks.clear()
    io_thread.load(1, addresses[1:])
    io_thread.pump()
    assert set(io_thread.take_held()["near"].evicted) == {hash_of(1), hash_of(2)}


@pytest.mark.parametrize("kind", ["disk", "shelf"])
def test_tier_events_use_the_routers_hashes(kind, tmp_path):
    tier = DiskTier.open(tmp_path, bytes(32), max_bytes=1 << 20) if kind == "disk" else DictTier()
    prompt = list(range(70))
    with fake_engine(num_blocks=32, tiers=[tier]) as engine:
        first = engine.take_tier_events()[kind]
        assert (first.is_whole, first.published, first.evicted) == (True, (), ())
        engine.generate(prompt, 1)
        expected = set(prefix_hashes(prompt, engine.cache_root, engine.config.block_size))
        told = set()

        def is_told():
            told.update(engine.take_tier_events()[kind].published)
            return told == expected

        wait_until(is_told, "blocks to be written, and told of")
        if kind == "disk":
            tier.drop(list(expected)[:1])
            assert set(engine.take_tier_events()[kind].evicted) == set(list(expected)[:1])
            assert set(engine.take_tier_events(whole=True)[kind].published) == expected - set(
                list(expected)[:1]
            )


def test_an_engine_without_tiers_reports_no_events():
    with fake_engine(num_blocks=8) as engine:
        assert engine.take_tier_events() == {}
