"""The index of offered blocks: what it refuses, and that its links are right after every change."""

import random

import numpy as np
import pytest

from helpers.kvcache.manager_cases import B, prefill
from helpers.raising import assert_raises
from helpers.reuse.index_cases import OTHER, ROOT, Offered
from kvboost_edge.errors import CacheCorruption, ConfigError
from kvboost_edge.kernels.reference.span_scan import StoredBlock
from kvboost_edge.kvcache.hashing import encode_tokens
from kvboost_edge.kvcache.manager import KVCacheManager
from kvboost_edge.kvcache.prefix_index import ROOT_SERIAL
from kvboost_edge.reuse.span_index import SpanIndex

TEXT = list(range(50, 74))
TOKENS = encode_tokens(range(4))


@pytest.mark.parametrize("name", ["num_blocks", "block_size"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True, None])
def test_sizes_are_checked_by_name(name, value):
    with pytest.raises(ConfigError, match=f"{name}={value}"):
        SpanIndex(**{"num_blocks": 4, "block_size": 4, name: value})


@pytest.mark.parametrize("value", [0, 62])
def test_the_width_of_a_hash_is_checked(value):
    assert_raises(ConfigError, f"hash_bits={value}", SpanIndex, 4, 4, hash_bits=value)


def two_blocks():
    index = SpanIndex(8, 4)
    index.offer(ROOT, 0, 1, ROOT_SERIAL, TOKENS, 0)
    index.offer(ROOT, 3, 7, 6, TOKENS, 12)
    return index


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((ROOT, 0, 9, 0, TOKENS, 0), "block 0 or serial 9 is already in the span index"),
        ((ROOT, 1, 7, 0, TOKENS, 0), "block 1 or serial 7 is already in the span index"),
        ((ROOT, 8, 9, 0, TOKENS, 0), "stale block id 8: the index has blocks 0 .. 7"),
        ((ROOT, -1, 9, 0, TOKENS, 0), "stale block id -1"),
        ((ROOT, 1, 9, 0, TOKENS[:-4], 0), "block 1 must have 4 tokens and .* not 12 bytes"),
        ((ROOT, 1, 9, 0, TOKENS, -1), "at position -1"),
        ((ROOT, 1, 9, 9, TOKENS, 0), "serial 9 must be greater than its parent's serial 9"),
        ((ROOT, 1, 0, 0, TOKENS, 0), "serial 0 must be greater than its parent's serial 0"),
        ((ROOT, 1, 9, 1, TOKENS, 5), "block 1 at position 5 does not adjoin block 0 at position 0"),
        ((OTHER, 1, 9, 1, TOKENS, 4), "does not adjoin block 0"),
        (
            (ROOT, 1, 6, 1, TOKENS, 4),
            "block 1 at position 4 does not adjoin block 3 at position 12",
        ),
        ((OTHER, 1, 6, 2, TOKENS, 8), "does not adjoin block 3"),
    ],
)
def test_contradictory_blocks_are_refused_without_a_change(arguments, message):
    index = two_blocks()
    assert_raises(CacheCorruption, message, index.offer, *arguments)
    index.check()
    assert (len(index), 0 in index, 1 in index, 3 in index, index.root_number(OTHER)) == (
        2,
        True,
        False,
        True,
        None,
    )


@pytest.mark.parametrize("block_id", [1, 8, -1])
def test_an_unknown_block_cannot_be_withdrawn(block_id):
    index = two_blocks()
    assert_raises(
        CacheCorruption, f"block {block_id} is not in the span index", index.withdraw, block_id
    )
    index.withdraw(0)
    assert_raises(CacheCorruption, "block 0 is not in the span index", index.withdraw, 0)
    index.check()


def test_a_roots_number_is_released_with_its_last_block():
    offered = Offered(8, 4)
    first = offered.chain(TEXT[:8])
    number = offered.index.root_number(ROOT)
    offered.chain(TEXT[:4], root=OTHER)
    for block in first:
        offered.withdraw(block)
    assert offered.index.root_number(ROOT) is None
    assert offered.find([*TEXT, 1]) == []
    offered.chain(TEXT[:4])
    assert len({number, offered.index.root_number(ROOT), offered.index.root_number(OTHER)}) == 3


@pytest.mark.parametrize("hash_bits", [1, 4, 61])
def test_links_are_consistent_after_every_change(hash_bits):
    rng = random.Random(hash_bits)
    offered = Offered(24, 2, hash_bits)
    for _ in range(600):
        back = [block for block in offered.ever[-30:] if block not in offered.blocks]
        taken = {block.block_id for block in offered.blocks}
        back = [block for block in back if block.block_id not in taken]
        if len(taken) == 24 or (taken and rng.random() < 0.4):
            offered.withdraw(rng.choice(offered.blocks))
        elif back and rng.random() < 0.5:
            offered.offer(rng.choice(back))
        else:
            parent = rng.choice([None, *offered.ever[-12:]])
            offered.offer(
                offered.make(
                    [rng.randrange(2), rng.randrange(2)], parent, rng.choice([ROOT, OTHER])
                )
            )
        offered.index.check()
    assert len(offered.index) == len(offered.blocks)


LINKS = ["heads", "next_groups", "older", "parents", "first_children", "older_siblings"]


@pytest.mark.parametrize("name", LINKS)
def test_a_broken_link_is_detected(name):
    offered = Offered(16, 4, hash_bits=1)
    (header, *_) = offered.chain(TEXT)
    offered.chain(TEXT[:4] * 2, parent=header)
    offered.chain(TEXT[4:12])
    offered.index.check()
    links = getattr(offered.index.tables, name)
    used = [int(place) for place in (links != -1).nonzero()[0]]
    if name == "next_groups":  # only the entries of leaders matter
        used = [place for place in used if offered.index._newer[place] == -1]
    assert used, f"no {name} are set: the test shows nothing"
    for place in used:
        before = links[place]
        links[place] = -1
        with pytest.raises(CacheCorruption):
            offered.index.check()
        links[place] = before
    offered.index.check()


def test_blocks_published_by_a_pool_are_accepted():
    """Serials, parents and tokens equal those of the manager's entries, through evictions and
    duplicates.
    """
    rng = random.Random(11)
    manager = KVCacheManager(12, B)
    offered = Offered(12, B)
    known = {}
    # of every serial ever used: a parent may be evicted
    roots = {ROOT_SERIAL: b""}
    depths = {ROOT_SERIAL: -1}
    live = []
    withdrawn = num_runs = 0
    for _ in range(400):
        if len(live) == 2:
            manager.free(live.pop(rng.randrange(2)))
        prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 5 * B))]
        num_runs += len(offered.find([*prompt, 7], least=B))
        live.append(
            prefill(manager, prompt, rng.choice([ROOT, OTHER]), use_cache=rng.random() < 0.8)
        )
        entries = manager._index.entries()
        serials = {entry.serial for entry in entries.values()}
        for gone in [block for block in offered.blocks if block.serial not in serials]:
            offered.withdraw(gone)
            withdrawn += 1
        for block_id, entry in sorted(entries.items(), key=lambda item: item[1].serial):
            serial = entry.serial
            parent = entry.parent_serial
            key = entry.address
            if serial not in roots:
                roots[serial] = roots[parent] or key.parent_hash
                depths[serial] = depths[parent] + 1
                tokens = tuple(np.frombuffer(key.tokens, dtype="<u4").tolist())
                position = depths[serial] * B
                known[serial] = offered.offer(
                    StoredBlock(roots[serial], block_id, serial, parent, tokens, position)
                )
            assert known[serial].block_id == block_id
        assert len(offered.index) == len(entries)
        offered.index.check()
    assert set(roots.values()) == {b"", ROOT, OTHER}
    assert withdrawn > 400
    assert num_runs > 100
