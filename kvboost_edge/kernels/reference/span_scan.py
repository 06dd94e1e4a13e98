"""Brute-force span search, which compares every block at every position without hashes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvboost_edge.kernels.span_tables import MOST_TRIED

__all__ = ["StoredBlock", "StoredRun", "scan"]


class StoredBlock(NamedTuple):
    """A block that the search can find.

    `serial` identifies the block, `parent_serial` the block before it.
    """

    root: bytes
    block_id: int
    serial: int
    parent_serial: int
    tokens: tuple[int, ...]
    first_position: int


class StoredRun(NamedTuple):
    """A run of prompt tokens that stored blocks hold.

    Attributes:
        first: index of the run's first token in the prompt.
        context: position of that token when its KV was computed.
        slots: (block id, slot in the block) of each token.
    """

    first: int
    context: int
    slots: tuple[tuple[int, int], ...]


def scan(
    blocks: Sequence[StoredBlock], prompt: Sequence[int], start: int, root: bytes, min_tokens: int
) -> list[StoredRun]:
    """Return the runs of prompt[start:-1] that are in the blocks of a root, left to right.

    `blocks` are in the order in which they were stored.
    """
    newest_first = [block for block in reversed(blocks) if block.root == root]
    wanted = tuple(prompt[:-1])
    runs: list[StoredRun] = []
    floor = place = start
    while place < len(wanted):
        candidates = [
            _run(newest_first, wanted, floor, place, block)
            for block in _at(newest_first, wanted, place)
        ]
        # `max` returns the first of several equal runs
        best = max(candidates, key=lambda run: (len(run.slots), run.context), default=None)
        if best is None or len(best.slots) < min_tokens:
            place += 1
            continue
        runs.append(best)
        floor = place = best.first + len(best.slots)
    return runs


def _at(
    newest_first: Sequence[StoredBlock], wanted: tuple[int, ...], place: int
) -> list[StoredBlock]:
    """Return the whole blocks that match at an index, up to the limit of candidates."""
    found = [
        block for block in newest_first if wanted[place : place + len(block.tokens)] == block.tokens
    ]
    return found[:MOST_TRIED]


def _run(
    newest_first: Sequence[StoredBlock],
    wanted: tuple[int, ...],
    floor: int,
    place: int,
    block: StoredBlock,
) -> StoredRun:
    """Return the run through a block at `place`, extended in both directions."""
    before = list(_before(newest_first, wanted, floor, place, block))[::-1]
    after = list(_after(newest_first, wanted, place, block))
    return StoredRun(place - len(before), block.first_position - len(before), (*before, *after))


def _before(
    newest_first: Sequence[StoredBlock],
    wanted: tuple[int, ...],
    floor: int,
    place: int,
    block: StoredBlock,
) -> Iterator[tuple[int, int]]:
    """Yield the slots before a block at `place`, in reverse order."""
    by_serial = {block.serial: block for block in newest_first}
    while block.parent_serial in by_serial:
        block = by_serial[block.parent_serial]
        for offset in reversed(range(len(block.tokens))):
            place -= 1
            if place < floor or wanted[place] != block.tokens[offset]:
                return
            yield block.block_id, offset


def _after(
    newest_first: Sequence[StoredBlock], wanted: tuple[int, ...], place: int, block: StoredBlock
) -> Iterator[tuple[int, int]]:
    """Yield the slots of a block at `place` and of the blocks after it."""
    count = len(block.tokens)
    while count:
        yield from ((block.block_id, offset) for offset in range(count))
        if count < len(block.tokens):
            return
        place += count
        children = [other for other in newest_first if other.parent_serial == block.serial][
            :MOST_TRIED
        ]
        children += [
            other
            for other in _at(newest_first, wanted, place)
            if other.parent_serial == block.serial
        ]
        counts = [_num_same(other.tokens, wanted[place:]) for other in children]
        count = max(counts, default=0)
        if count:
            block = children[counts.index(count)]


def _num_same(tokens: tuple[int, ...], wanted: tuple[int, ...]) -> int:
    """Return the length of the common prefix of two token sequences."""
    count = 0
    while count < min(len(tokens), len(wanted)) and tokens[count] == wanted[count]:
        count += 1
    return count
