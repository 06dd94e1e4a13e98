"""Span planning: converts the runs found in a prompt into spans that a table can share.

The tokens after chunk boundaries are recomputed, in whole blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvboost_edge.kvcache.block_table import Span
from kvboost_edge.reuse.found_runs import Run

__all__ = ["cut_spans", "plan_spans"]


def plan_spans(
    runs: Iterable[Run], start: int, block_size: int, num_boundary_tokens: int
) -> list[Span]:
    """Return the spans to share in a prompt.

    The first block of a prompt is never in a span. The computed tokens before each span form whole
    blocks, so up to `block_size - 1` tokens are recomputed in addition to those of the chunk
    boundary. A run with less than a block left is not shared.

    Args:
        runs: runs of the prompt, in order.
        start: number of tokens in the exactly shared prefix, a multiple of `block_size`.
        block_size: tokens per block.
        num_boundary_tokens: number of tokens to recompute after a chunk boundary.
    """
    spans: list[Span] = []
    # All later tokens attend strongly to the keys of the first block (Xiao et al., "Efficient
    # Streaming Language Models with Attention Sinks", 2023), so it is never reused.
    position = max(start, block_size)
    for run in runs:
        first = max(run.prompt_start + num_boundary_tokens, position)
        # Computed stretches end with a full block, because later tokens attend to its quantized KV.
        first += (position - first) % block_size
        if run.prompt_stop - first >= block_size:
            spans.append(_span_of(run, first, block_size))
            position = run.prompt_stop
    return spans


def cut_spans(spans: Iterable[Span], computed: Sequence[int], block_size: int) -> list[Span]:
    """Return the spans without the blocks that begin at the positions in `computed`.

    Each removed block must be full, and a whole number of blocks after the start of its span.
    """
    found: list[Span] = []
    wanted = set(computed)
    for span in spans:
        first = span.start
        for begin in range(span.start, span.stop, block_size):
            if begin in wanted:
                if begin > first:
                    found.append(_part_of(span, first, begin, block_size))
                first = begin + block_size
        if first < span.stop:
            found.append(_part_of(span, first, span.stop, block_size))
    return found


def _span_of(run: Run, first: int, block_size: int) -> Span:
    blocks = tuple(piece.block_id for piece in run.pieces)
    whole = Span(
        blocks,
        run.prompt_start - run.pieces[0].valid_from,
        run.prompt_start,
        run.prompt_stop,
        run.delta,
    )
    return _part_of(whole, first, run.prompt_stop, block_size)


def _part_of(span: Span, start: int, stop: int, block_size: int) -> Span:
    """Return the part of a span that serves positions [start, stop)."""
    index, last = ((position - span.first_position) // block_size for position in (start, stop - 1))
    first_position = span.first_position + index * block_size
    return Span(span.block_ids[index : last + 1], first_position, start, stop, span.delta)
