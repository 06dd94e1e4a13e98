"""Search for the runs of a prompt in the span index."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from kvboost_edge.errors import ConfigError, RequestError
from kvboost_edge.kernels.aot import compile_ahead
from kvboost_edge.kernels.span_scan import scan, scan_entry
from kvboost_edge.kernels.span_tables import NUM_FIELDS, SpanSearch
from kvboost_edge.kvcache.hashing import encode_tokens
from kvboost_edge.reuse.found_runs import Run, RunBlock
from kvboost_edge.reuse.span_index import SpanIndex

__all__ = ["DEFAULT_MIN_CHUNK_TOKENS", "find_runs", "prepare_search"]

DEFAULT_MIN_CHUNK_TOKENS = 32


@functools.cache
def prepare_search() -> None:
    """Compile the search kernel in another process, unless its machine code is cached on disk.

    Raises:
        BackendUnavailable: the compilation failed. The message contains the compiler output.
    """
    # Without this, the first search would spend 1.6 s on compiling in the engine thread.
    compile_ahead([scan_entry], 1)


def find_runs(
    prompt_tokens: Sequence[int],
    start: int,
    index: SpanIndex,
    root: bytes,
    min_chunk_tokens: int = DEFAULT_MIN_CHUNK_TOKENS,
) -> list[Run]:
    """Return the runs of a prompt that the index holds, in order and without overlap.

    A run grows from the first position at which the tokens of a whole indexed block occur. It is
    extended in both directions for as long as the tokens agree, but not before `start` or the end
    of the previous run. Both ends may be inside a block. If several blocks match, the MOST_TRIED
    newest ones are tried. The longest run wins, then the one with more context, then the newest.
    The search continues after that run.

    A run of at least 2 * block_size - 1 tokens contains a whole block, so it is always found. Two
    adjacent runs may have the same delta, if a block between them is gone or was not tried. Tokens
    are compared, so hash collisions cannot produce a wrong run. The runs are valid until the index
    changes. The search time depends on the prompt, not on the size of the index.

    Args:
        prompt_tokens: token ids of the whole prompt. The last token is never part of a run, because
            it must be computed.
        start: number of tokens served by an exact prefix, which are never part of a run.
        index: the span index.
        root: root of the blocks that may be used.
        min_chunk_tokens: minimum length of a run, in tokens.

    Raises:
        RequestError: `start` is outside the prompt, or a token id is outside [0, 2^32).
        ConfigError: `min_chunk_tokens` is below 1.
    """
    if (
        isinstance(min_chunk_tokens, bool)
        or not isinstance(min_chunk_tokens, int)
        or min_chunk_tokens < 1
    ):
        raise ConfigError(f"min_chunk_tokens={min_chunk_tokens!r} must be an integer of at least 1")
    if not 0 <= start <= len(prompt_tokens):
        raise RequestError(f"start={start} is outside a prompt of {len(prompt_tokens)} tokens")
    tokens = np.frombuffer(encode_tokens(prompt_tokens), dtype="<u4").astype(np.uint32)
    size = index.block_size
    stop = len(tokens) - 1
    number = index.root_number(root)
    if number is None or stop - start < max(size, min_chunk_tokens):
        return []
    most = (stop - start) // max(min_chunk_tokens, size)
    found = np.empty((most, NUM_FIELDS), dtype=np.int64)
    path = np.empty((stop - start) // size + 2 * most, dtype=np.int32)
    search = SpanSearch(
        tokens, np.empty(len(tokens), dtype=np.int64), start, stop, number, min_chunk_tokens
    )
    count = scan(index.tables, search, found, path)
    runs: list[Run] = []
    block_ids = path.tolist()
    used = 0
    for prompt_start, length, context, num_blocks in found[:count].tolist():
        first = int(index.tables.first_positions[block_ids[used]])
        pieces = _pieces(block_ids[used : used + num_blocks], context - first, length, size)
        runs.append(Run(prompt_start, length, pieces, prompt_start - context, context))
        used += num_blocks
    return runs


def _pieces(block_ids: list[int], offset: int, length: int, size: int) -> tuple[RunBlock, ...]:
    """Return the parts of a run that begins `offset` slots into its first block."""
    pieces = [RunBlock(block_id, 0, size) for block_id in block_ids]
    pieces[0] = pieces[0]._replace(valid_from=offset)
    pieces[-1] = pieces[-1]._replace(valid_to=offset + length - (len(block_ids) - 1) * size)
    return tuple(pieces)
