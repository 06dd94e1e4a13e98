"""From runs that were found to spans that a table shares: seams are computed, and what is computed
is whole blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvboost_edge.kvcache.block_table import Span
from kvboost_edge.reuse.found_runs import Run

__all__ = ["cut_spans", "plan_spans"]


def plan_spans(
    runs: Iterable[Run], start: int, block_size: int, num_seam_tokens: int
) -> list[Span]:
    """The spans of a prompt whose first `start` tokens, whole blocks, are shared exactly.

    The first block of a prompt is never part of one: all later tokens lean on its keys, see Xiao et
    al., "Efficient Streaming Language Models with Attention Sinks", 2023. Before a span there are
    whole blocks of computed tokens, so that each stretch of them closes its last block: the next
    ones attend to it quantized. For that up to a block less one is computed beyond the seam; of a
    run that leaves less than a block nothing is shared.
    """
    spans: list[Span] = []
    position = max(start, block_size)
    for run in runs:
        first = max(run.prompt_start + num_seam_tokens, position)
        first += (position - first) % block_size
        if run.prompt_stop - first >= block_size:
            spans.append(_span_of(run, first, block_size))
            position = run.prompt_stop
    return spans


def cut_spans(spans: Iterable[Span], computed: Sequence[int], block_size: int) -> list[Span]:
    """The same spans without the blocks of tokens that begin at these positions, each whole blocks
    behind the start of its span and whole itself.
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
    """Positions [start, stop) of a span."""
    index, last = ((position - span.first_position) // block_size for position in (start, stop - 1))
    first_position = span.first_position + index * block_size
    return Span(span.block_ids[index : last + 1], first_position, start, stop, span.delta)
