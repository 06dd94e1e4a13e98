"""Helpers for the tests of reuse: an index next to a list of the blocks offered to it, and runs
read back slot by slot.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvboost_edge.kernels.reference.span_scan import StoredBlock, StoredRun
from kvboost_edge.kernels.reference.span_scan import scan as slow_scan
from kvboost_edge.kvcache.hashing import encode_tokens
from kvboost_edge.kvcache.prefix_index import ROOT_SERIAL
from kvboost_edge.reuse.found_runs import Run
from kvboost_edge.reuse.span_index import SpanIndex
from kvboost_edge.reuse.span_search import find_runs

ROOT = b"r" * 32
OTHER = b"o" * 32


class Offered:
    """An index, and the blocks it holds in the order in which they were offered. Serials count up,
    as `PrefixIndex` assigns them.
    """

    def __init__(self, num_blocks: int, block_size: int, hash_bits: int = 61) -> None:
        self.index = SpanIndex(num_blocks, block_size, hash_bits=hash_bits)
        self.blocks: list[StoredBlock] = []
        self.ever: list[StoredBlock] = []

    def offer(self, block: StoredBlock) -> StoredBlock:
        tokens = encode_tokens(block.tokens)
        self.index.offer(
            block.root,
            block.block_id,
            block.serial,
            block.parent_serial,
            tokens,
            block.first_position,
        )
        self.blocks.append(block)
        return block

    def make(
        self,
        tokens: Sequence[int],
        parent: StoredBlock | None = None,
        root: bytes = ROOT,
        first_position: int = 0,
    ) -> StoredBlock:
        """Make a new block without offering it."""
        if parent is not None:
            root = parent.root
            first_position = parent.first_position + len(parent.tokens)
        parent_serial = ROOT_SERIAL if parent is None else parent.serial
        serial = len(self.ever) + 1
        self.ever.append(
            StoredBlock(root, self.free_id(), serial, parent_serial, tuple(tokens), first_position)
        )
        return self.ever[-1]

    def free_id(self) -> int:
        return min(set(range(self.index.num_blocks)) - {block.block_id for block in self.blocks})

    def chain(
        self, tokens: Sequence[int], root: bytes = ROOT, parent: StoredBlock | None = None
    ) -> list[StoredBlock]:
        """Offer the full blocks of a text, each as the child of the one before it."""
        size = self.index.block_size
        made = []
        for start in range(0, len(tokens) - size + 1, size):
            parent = self.offer(self.make(tokens[start : start + size], parent, root))
            made.append(parent)
        return made

    def withdraw(self, block: StoredBlock) -> None:
        self.index.withdraw(block.block_id)
        self.blocks.remove(block)

    def find(
        self, prompt: Sequence[int], start: int = 0, root: bytes = ROOT, least: int = 1
    ) -> list[Run]:
        """Call `find_runs` and compare the runs with the oracle and with the tokens themselves."""
        found = find_runs(prompt, start, self.index, root, least)
        assert [stored(run) for run in found] == slow_scan(self.blocks, prompt, start, root, least)
        held = {block.block_id: block for block in self.blocks}
        end = start
        for run in found:
            assert end <= run.prompt_start, (
                "a run must not overlap the previous one or begin before the start"
            )
            assert run.length >= least
            assert run.prompt_stop < len(prompt), "a run must not cover the last token"
            assert run.delta == run.prompt_start - run.context
            positions = []
            for offset, (block_id, slot) in enumerate(stored(run).slots):
                assert held[block_id].root == root
                assert held[block_id].tokens[slot] == prompt[run.prompt_start + offset]
                positions.append(held[block_id].first_position + slot)
            assert positions == list(range(run.context, run.context + run.length))
            end = run.prompt_stop
        return found


def stored(run: Run) -> StoredRun:
    """Convert a run to the oracle's form."""
    slots = [
        (piece.block_id, slot)
        for piece in run.pieces
        for slot in range(piece.valid_from, piece.valid_to)
    ]
    assert len(slots) == run.length
    return StoredRun(run.prompt_start, run.context, tuple(slots))


def told(runs: list[Run]) -> list[tuple[int, int, int]]:
    """Return (prompt_start, length, delta) of each run."""
    return [(run.prompt_start, run.length, run.delta) for run in runs]
