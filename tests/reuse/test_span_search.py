"""Runs of a prompt in blocks of another context, against an oracle that compares every block at
every position.
"""

import itertools
import os
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.reuse.index_cases import OTHER, ROOT, Offered, told
from kvboost_edge.errors import ConfigError, RequestError
from kvboost_edge.kernels.span_scan import scan, scan_entry
from kvboost_edge.kernels.span_tables import MOST_TRIED
from kvboost_edge.reuse.span_index import SpanIndex
from kvboost_edge.reuse.span_search import find_runs

LONG = os.environ.get("KVBOOST_EDGE_TEST_LONG") == "1"
HEADER = list(range(900, 910))
LAST = [999]
A = list(range(100, 141))
B = list(range(200, 237))
C = list(range(300, 350))


def joined(parts):
    return list(itertools.chain.from_iterable(parts))


def served(*documents, block_size=4):
    offered = Offered(64, block_size)
    offered.chain(joined(documents))
    return offered


def test_reordered_documents_are_found_exactly():
    offered = served(HEADER, A, B, C, [998] * 4)
    assert told(offered.find(C + B + A + LAST)) == [(0, 50, -88), (50, 37, -1), (87, 41, 77)]


def test_roots_with_colliding_slots_are_distinguished():
    """There are fewer slots than roots over time. The numbers of a root pass through each slot
    once.
    """
    offered = Offered(2, 4)
    (block,) = offered.chain(A[:4])
    slots = set()
    for _ in range(2 * len(offered.index.tables.heads)):
        (own,) = offered.chain(B[:4], root=OTHER)
        number = offered.index.root_number(OTHER)
        slots.add((number - offered.index.root_number(ROOT)) % len(offered.index.tables.heads))
        assert told(offered.find([*A[:4], *B[:4], 1], root=OTHER)) == [(4, 4, 4)]
        assert told(offered.find([*A[:4], *B[:4], 1])) == [(0, 4, 0)]
        offered.withdraw(own)
    assert 0 in slots
    assert block in offered.blocks


@pytest.mark.parametrize("least", [1, 37, 38, 41, 42])
def test_runs_below_the_minimum_are_ignored(least):
    offered = served(HEADER, A, B)
    lengths = [run.length for run in offered.find(B + A + LAST, least=least)]
    assert lengths == [length for length in (37, 41) if length >= least]
    assert lengths or least == 42


def test_ties_prefer_the_longest_run_then_context_then_the_newest():
    offered = Offered(64, 4)
    offered.chain(A[:20] + [1] * 4)
    offered.chain([2] * 8 + A[:12] + [3] * 4)
    offered.chain([2] * 4 + A[:12] + [5] * 4)
    offered.chain([6] * 4 + A[:12] + [7] * 4)
    assert told(offered.find(A[:21])) == [(0, 20, 0)]
    assert told(offered.find(A[:12] + LAST)) == [(0, 12, -8)]
    newest = [block.block_id for block in offered.blocks if block.tokens == tuple(A[:4])][-1]
    offered.withdraw(
        next(
            block
            for block in offered.blocks
            if block.first_position == 8 and block.tokens[0] == A[0]
        )
    )
    (run,) = offered.find(A[:12] + LAST)
    assert (run.context, run.pieces[0].block_id) == (4, newest)


def test_a_frequent_text_is_found_through_its_neighbours():
    """Each document begins with a block of its own, followed by the same block as in all others."""
    offered = Offered(256, 4)
    common = [7, 7, 7, 8]
    documents = [
        [1000 + number, 1, 2, 3, *common, 2000 + number, 4, 5, 6]
        for number in range(5 * MOST_TRIED)
    ]
    for document in documents:
        offered.chain(document)
    for document in documents:
        assert told(offered.find(document + LAST)) == [(0, 12, 0)]
        assert [run.length for run in offered.find(document[3:] + LAST)][-1] >= 4


def test_the_best_of_many_children_is_found():
    offered = Offered(256, 4)
    (header,) = offered.chain([7, 7, 7, 8])
    children = [[1000 + number, 1, 2, 3] for number in range(5 * MOST_TRIED)]
    for child in children:
        offered.chain(child, parent=header)
    for child in children:
        assert told(offered.find([5, 7, 7, 7, 8, *child, *LAST])) == [(1, 8, 1)]
    # of those that end inside, only the newest are tried
    assert [
        told(offered.find([7, 7, 7, 8, *child[:2], *LAST]))[0][1] for child in children[-9:]
    ] == [4, *[6] * 8]


def test_start_and_minimum_length_are_checked_by_name():
    index = SpanIndex(4, 4)
    for start in (-1, 6):
        with pytest.raises(RequestError, match=f"start={start} is outside a prompt of 5 tokens"):
            find_runs([1, 2, 3, 4, 5], start, index, ROOT)
    for least in (0, -3, 1.5, True):
        with pytest.raises(ConfigError, match=f"min_chunk_tokens={least}"):
            find_runs([1, 2, 3, 4, 5], 0, index, ROOT, least)
    with pytest.raises(RequestError, match="token ids"):
        find_runs([1, 2, -3], 0, index, ROOT)


def test_all_token_ids_are_distinguished():
    offered = Offered(16, 4)
    ids = [0, 1, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1, 0, 0]
    offered.chain(ids)
    assert told(offered.find([9, *ids, 9])) == [(1, 8, 1)]
    assert offered.find([9, 1, 0, *ids[2:4], 9]) == []


@pytest.mark.parametrize("hash_bits", [1, 8, 61])
def test_hash_collisions_give_no_false_runs(hash_bits, scale):
    """Each of the 4,000 positions (10,000 in `make test-all`) is looked up among blocks of which at least one in 256 has its
    hash, except with 61 bits.
    """
    rng = random.Random(hash_bits)
    offered = Offered(300, 16, hash_bits)
    for _ in range(30):
        offered.chain([rng.randrange(3) for _ in range(160)])
    assert (
        len(
            {
                hash_value & (1 << hash_bits) - 1
                for hash_value in offered.index.tables.hashes.tolist()
            }
        )
        > 1
    )
    texts = [offered.blocks[rng.randrange(300)].tokens for _ in range(scale(8, 20))]
    total = 0
    for text in texts:
        prompt = [rng.randrange(3) for _ in range(500)]
        prompt[200:216] = text
        runs = offered.find(prompt, least=16)
        total += len(runs)
        assert any(run.prompt_start <= 200 and run.prompt_stop >= 216 for run in runs)
    assert total >= len(texts)


def test_find_runs_uses_the_signature_compiled_ahead():
    scan_entry.compile()
    served(A).find(A)
    assert [tuple(signature) for signature in scan.dispatcher.signatures] == [scan_entry.arguments]


def periodic(period, count):
    return list(itertools.islice(itertools.cycle(range(1, period + 1)), count))


@pytest.mark.parametrize("stored", [1, 16, 17, 32])
@pytest.mark.parametrize("wanted", [1, 16, 17, 32])
def test_repeated_tokens_fit_the_buffers(stored, wanted):
    offered = Offered(64, 16)
    offered.chain(periodic(stored, 640))
    for least in (1, 32, 100):
        offered.find(periodic(wanted, 500), least=least)


@st.composite
def pools(draw):
    """Draw branching contexts over few tokens. Some blocks are withdrawn, and some of those are
    offered again.
    """
    size = draw(st.sampled_from([1, 2, 3, 4]))
    tokens = st.lists(st.integers(0, draw(st.integers(1, 2))), min_size=size, max_size=size)
    offered = Offered(80, size, draw(st.sampled_from([1, 8, 61])))
    for _ in range(draw(st.integers(10, 40))):
        parents = [block for block in offered.ever if block.root == ROOT]
        parent = draw(st.sampled_from([None, *parents[-3:], *parents[:2]]))
        content = draw(tokens)
        root = draw(st.sampled_from([ROOT, ROOT, ROOT, OTHER]))
        key = (parent and parent.serial, tuple(content), parent is None and root)
        if key not in {
            (b.parent_serial or None, b.tokens, not b.parent_serial and b.root)
            for b in offered.ever
        }:
            offered.offer(offered.make(content, parent, root))
        if offered.blocks and draw(st.integers(0, 3)) == 0:
            offered.withdraw(draw(st.sampled_from(offered.blocks)))
        used = {block.block_id for block in offered.blocks}
        back = [
            block
            for block in offered.ever
            if block not in offered.blocks and block.block_id not in used
        ]
        if back and draw(st.integers(0, 3)) == 0:
            offered.offer(draw(st.sampled_from(back)))
    return offered


@settings(max_examples=300 if LONG else 90)
@given(pools(), st.data())
def test_runs_equal_the_reference(offered, data):
    offered.index.check()
    after = {block.parent_serial: block for block in offered.ever if block.parent_serial}
    stretches = [list(block.tokens) for block in offered.ever]
    stretches += [
        [*block.tokens, *after[block.serial].tokens]
        for block in offered.ever
        if block.serial in after
    ]
    some = st.one_of(st.sampled_from(stretches), st.lists(st.integers(0, 2), max_size=3))
    for _ in range(3):
        prompt = joined(data.draw(st.lists(some, min_size=1, max_size=12)))
        start = data.draw(st.integers(0, min(3, len(prompt))))
        least = data.draw(st.sampled_from([1, 1, 2, 3, 5, 8]))
        offered.find(prompt, start, data.draw(st.sampled_from([ROOT, ROOT, ROOT, OTHER])), least)


def test_runs_of_long_random_texts_equal_the_reference(scale):
    """The search above seldom draws runs over many blocks, and groups and families beyond the tried
    number.
    """
    rng = random.Random(5)
    for _ in range(scale(12, 30)):
        size = rng.choice([2, 4, 8])
        offered = Offered(400, size)
        texts = [[rng.randrange(2) for _ in range(rng.randrange(size, 40))] for _ in range(4)]
        parents = [None]
        seen = set()
        while len(offered.blocks) < 120:
            text = joined(rng.choices(texts, k=3))
            text = text[rng.randrange(len(text)) :]
            parent = rng.choice(parents)
            for start in range(0, len(text) - size + 1, size):
                content = tuple(text[start : start + size])
                key = (parent.serial if parent else 0, content)
                if key in seen:
                    parent = next(b for b in offered.ever if (b.parent_serial, b.tokens) == key)
                    continue
                seen.add(key)
                parent = offered.offer(offered.make(content, parent))
            parents.append(parent)
        for block in rng.sample(offered.blocks, 15):
            offered.withdraw(block)
        offered.index.check()
        for least in (1, size, 12):
            offered.find(joined(rng.choices(texts, k=6)), rng.randrange(4), least=least)


def test_numbers_of_a_run_are_python_integers():
    (run,) = served(HEADER, A).find(A + LAST)
    numbers = [run.prompt_start, run.length, run.delta, run.context, *itertools.chain(*run.pieces)]
    assert not any(isinstance(number, np.generic) for number in numbers)
    assert {type(number) for number in numbers} == {int}
