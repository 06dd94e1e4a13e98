"""Sparse prefill: which prompt tokens attend to selected key blocks only.

The queries of the sparse range of a prompt attend to selected key blocks
(kernels/attention/block_selection.py). All other queries attend to all tokens: those before
`FIRST_POSITION`, the last `DENSE_TAIL` tokens of the prompt or a few more, and all generated
tokens.

A selection depends on all queries of a query block, so a step never cuts one. Where the range ends
depends on the prompt's length. KV of tokens after the range is therefore not shared, see
`shareable_end`.

KV of sparse and of exact prefill never mixes, because the roots of their prefix hashes differ, see
`shared_root`.
"""

from __future__ import annotations

from kvboost_edge import shareable
from kvboost_edge.engine.request.request import Request
from kvboost_edge.engine.schedule.feature import Prefill
from kvboost_edge.segments import QUERY_BLOCK

__all__ = ["SparsePrefill", "make_prefill"]


class SparsePrefill(Prefill):
    """The sparse prefill of one sequence."""

    def __init__(self, request: Request) -> None:
        self.sparse_range = shareable.FIRST_POSITION, request.num_shareable

    def query_block_start(self, position: int) -> int:
        """Return the start of the position's query block."""
        return position // QUERY_BLOCK * QUERY_BLOCK

    def whole_query_blocks(self, start: int, count: int) -> int:
        """Return the number of tokens to compute so that the last query block is complete.

        Fewer tokens than planned are computed, or more if they would not complete one query block.
        """
        stop = start + count
        first, end = self.sparse_range
        if not first < stop < end:
            return count
        stop = stop // QUERY_BLOCK * QUERY_BLOCK
        return (stop if stop > start else stop + QUERY_BLOCK) - start


def make_prefill(request: Request) -> Prefill:
    """Return the prefill of a request's sequence."""
    return SparsePrefill(request) if request.prefill == "sparse" else Prefill()
