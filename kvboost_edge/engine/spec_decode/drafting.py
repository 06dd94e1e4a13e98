"""Draft tokens by prompt lookup, copied from after an earlier occurrence of the last tokens.

Earlier occurrences are found in the request (with a suffix automaton) and in the tenant's recent
prompts and answers (with a ring buffer). The method follows Oliaro et al., "SuffixDecoding" (2024),
and Saxena, "Prompt Lookup Decoding" (2023). The number of draft tokens depends on their cost.
Reading the weights dominates a pass with few rows, see `_COSTS`.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvboost_edge.host.tenant_lru import TenantLRU
from kvboost_edge.kernels.aot import compile_ahead
from kvboost_edge.kernels.ngram_cache import (
    GRAM,
    Ring,
    append_entry,
    append_tokens,
    find_end,
    find_entry,
    new_ring,
)
from kvboost_edge.kernels.suffix_automaton import (
    MATCH_END,
    MATCH_LENGTH,
    NUM_TOKENS,
    Automaton,
    automaton_bytes,
    extend,
    extend_entry,
    new_automaton,
)

__all__ = [
    "DraftProposal",
    "Drafter",
    "TenantHistory",
    "expected_rate",
    "most_drafted",
    "pass_cost",
    "prepare_drafts",
]

_LEAST_MATCH = 3  # tokens; shorter matches are often coincidental
_ASTRAY = 3  # consecutive drafts without an accepted token before a source is dropped
_LONGEST_TAIL = 64  # number of tokens compared with the ring
_LEAST_ROOM = 1024  # initial capacity of an automaton, in tokens
_RING = "ring"
_RING_TOKENS = 1 << 17  # 1.6 MB per tenant
_MOST_RING_BYTES = 2 << 20
_MOST_TENANTS = 32
_MOST_AUTOMATA_BYTES = 64 << 20  # for all sequences of an engine; 350,000 to 700,000 tokens

# Pairs of row count and duration of a pass relative to one row. Measured by bench_speculation.py
# with a 0.5B model and 4-bit weights on two AVX512-VNNI cores. With 135M parameters, 8 rows cost
# 2.7 if passes follow each other directly (benchmarks/LOG.md). Kernels exist for 2, 4 and 8 rows.
# From 12 rows on, passes are compute-bound.
_COSTS = (
    *((1, 1.0), (2, 1.08), (3, 1.35), (4, 1.17), (6, 1.64), (8, 1.56)),
    *((12, 2.54), (16, 3.28), (24, 4.31), (32, 5.57), (48, 7.85), (64, 10.23)),
)
_LEVELS = (0, 1, 3, 7, 15, 31, 63)  # numbers of draft tokens per sequence to choose from
_LEAST_GAIN = 1.02

_MEMORY = 0.8  # decay of earlier outcomes after a step with a draft
# Decay of earlier outcomes after a step without a draft. A source that failed is tried again after
# about 30 tokens.
_FADING = 0.97
_PRIOR = 2.0  # weight of the match length in the estimate, counted in drafts


@functools.cache
def prepare_drafts() -> None:
    """Compile the drafting kernels in a separate process, unless they are cached on disk.

    Raises:
        BackendUnavailable: The compilation failed. The message contains the compiler's error.
    """
    compile_ahead([extend_entry, append_entry, find_entry], 1)


class DraftProposal(NamedTuple):
    """Proposed draft tokens for a sequence.

    Attributes:
        token_ids: Token ids proposed after the sequence's last token.
        chance: Estimated probability that a token is accepted if all tokens before it are.
        source: Where the tokens come from: "lookup", "grammar" or "draft_model".
    """

    token_ids: list[int]
    chance: float
    source: str = "lookup"


class TenantHistory:
    """Recent prompts and answers of each tenant, used to draft for the tenant's later requests.

    Each cache salt of a tenant has a separate history. The class limits the memory of the rings and
    of all automata.
    """

    def __init__(
        self,
        most_automata_bytes: int = _MOST_AUTOMATA_BYTES,
        most_tenants: int = _MOST_TENANTS,
    ) -> None:
        self._rings: TenantLRU[Ring] = TenantLRU(
            _MOST_RING_BYTES, max_owners=most_tenants, root_bytes=0
        )
        self._most_automata_bytes = most_automata_bytes
        self._automata_bytes = 0

    @classmethod
    def within(cls, num_bytes: int) -> TenantHistory:
        """Create a history limited to `num_bytes`, half for rings and half for automata."""
        half = num_bytes // 2
        return cls(
            min(_MOST_AUTOMATA_BYTES, half),
            max(1, min(_MOST_TENANTS, half // _MOST_RING_BYTES)),
        )

    @property
    def nbytes(self) -> int:
        """Size of the rings and automata, in bytes."""
        return self._rings.num_bytes + self._automata_bytes

    def reserve(self, nbytes: int) -> bool:
        """Reserve memory for an automaton.

        Args:
            num_bytes: Bytes to reserve. A negative number frees memory.

        Returns:
            Whether the memory was available.
        """
        if self._automata_bytes + nbytes > self._most_automata_bytes:
            return False
        self._automata_bytes += nbytes
        return True

    def keep(self, tenant: bytes, token_ids: Sequence[int]) -> None:
        """Append a text to a tenant's ring."""
        ring = self._rings.peek(tenant, _RING) or new_ring(_RING_TOKENS)
        self._rings.keep(tenant, tenant, _RING, ring, ring.nbytes)
        append_tokens(np.array(token_ids[-_RING_TOKENS:], np.int32), *ring)

    def find(self, tenant: bytes, tail: Sequence[int], most: int) -> tuple[int, list[int]]:
        """Find the latest of the longest matches of the end of `tail` in a tenant's ring.

        Returns:
            The length of the match in tokens, and up to `most` tokens that followed it.
        """
        ring = self._rings.peek(tenant, _RING)
        if ring is None or len(tail) < GRAM:
            return 0, []
        found = np.empty(2, np.int64)
        find_end(np.array(tail, np.int32), found, *ring)
        length, end = found.tolist()
        stop = min(end + most, int(ring.total[0]))
        return length, ring.tokens[
            np.arange(end, stop) % len(ring.tokens)
        ].tolist() if length else []

    def forget(self) -> None:
        """Delete all rings."""
        self._rings.clear()


class Drafter:
    """A drafter for one sequence, which learns how often its draft tokens are accepted."""

    def __init__(
        self,
        tenant: bytes,
        memory: TenantHistory,
        max_tokens: int = 1 << 31,
        *,
        reads_history: bool = True,
    ) -> None:
        """Create the drafter of one sequence.

        Args:
            tenant: Root hash of the sequence's prefixes.
            memory: The history to draft from.
            max_tokens: Maximum length of the sequence in tokens.
            reads_history: Whether drafts may come from the tenant's other requests.
        """
        self._tenant = tenant
        self._memory = memory
        self._reads_history = reads_history
        self._most_room = 1 << (max_tokens - 1).bit_length()
        self._automaton: Automaton | None = None
        self._right = self._wrong = 0.0
        # Position that the current draft was copied from, and the length of the text at that time.
        # After a changed word, the earlier text often continues the same way.
        self._source: tuple[int, int] | None = None
        self._num_astray = 0

    def propose(self, token_ids: Sequence[int], most: int) -> DraftProposal | None:
        """Propose 1 to `most` draft tokens after `token_ids`, or None.

        Args:
            token_ids: All tokens of the sequence. Each call must extend those of the previous call.
            most: Maximum number of draft tokens.
        """
        length, end = self._match(token_ids)
        if self._reads_history:
            tail = token_ids[-_LONGEST_TAIL:]
            remembered, others = self._memory.find(self._tenant, tail, most)
            if remembered > length and others:
                return self._draft(others, remembered)
        if length >= _LEAST_MATCH:
            self._source = end, len(token_ids)
        elif self._source is None or self._num_astray >= _ASTRAY:
            return None
        else:
            start, known = self._source
            length = _LEAST_MATCH
            end = start + len(token_ids) - known
        # If the copied tokens reach the end of the text, as in a repeated line, continue by
        # cycling.
        following = list(token_ids[end : end + most])
        return self._draft(list(itertools.islice(itertools.cycle(following), most)), length)

    def _draft(self, token_ids: list[int], match: int) -> DraftProposal:
        prior = match / (match + 4)
        right = self._right + _PRIOR * prior
        wrong = self._wrong + _PRIOR * (1 - prior)
        return DraftProposal(token_ids, right / (right + wrong))

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        """Record the outcome of a draft. Both numbers are 0 for a step without a draft."""
        if num_drafted:
            self._num_astray = 0 if num_accepted else self._num_astray + 1
        fading = _MEMORY if num_drafted else _FADING
        self._right = self._right * fading + num_accepted
        self._wrong = self._wrong * fading + (num_accepted < num_drafted)

    def release(self) -> None:
        """Free the automaton's memory."""
        if self._automaton is not None:
            self._memory.reserve(-automaton_bytes(self._automaton.room))
            self._automaton = None

    def _match(self, token_ids: Sequence[int]) -> tuple[int, int]:
        """Find the longest earlier match of the last tokens.

        Returns:
            The length of the match and the position after it, or 0, 0 if no memory is left for an
                automaton.
        """
        automaton = self._automaton
        if automaton is None or automaton.room < len(token_ids):
            automaton = self._grown(len(token_ids))
            if automaton is None:
                return 0, 0
        known = int(automaton.counts[NUM_TOKENS])
        if known < len(token_ids):
            extend(np.array(token_ids[known:], np.int32), *automaton)
        return int(automaton.counts[MATCH_LENGTH]), int(automaton.counts[MATCH_END])

    def _grown(self, count: int) -> Automaton | None:
        """Create an automaton with room for twice the tokens, or return None if no memory is left.

        The capacity never exceeds what the sequence's maximum length needs.
        """
        self.release()
        room = min(
            max(_LEAST_ROOM, 1 << (2 * count - 1).bit_length()), max(_LEAST_ROOM, self._most_room)
        )
        if self._memory.reserve(automaton_bytes(room)):
            self._automaton = new_automaton(room)
        return self._automaton


def most_drafted(drafts: Sequence[DraftProposal], num_rows: int) -> int:
    """Return the limit of draft tokens per sequence with the highest expected tokens per time.

    Args:
        drafts: The drafts of sequences that compute one token each.
        num_rows: Rows of the pass without draft tokens, including those of these sequences.

    Returns:
        The limit, or 0 if draft tokens save no time.
    """
    others = num_rows - len(drafts)
    best = 0
    best_rate = _LEAST_GAIN * num_rows / pass_cost(num_rows)
    for level in _LEVELS[1:]:
        counts = [min(level, len(draft.token_ids)) for draft in drafts]
        made = sum(
            _expected(draft.chance, count) for draft, count in zip(drafts, counts, strict=True)
        )
        rate = (others + made) / pass_cost(num_rows + sum(counts))
        if rate > best_rate:
            best = level
            best_rate = rate
    return best


def expected_rate(chance: float, count: int, num_rows: int, extra: float = 0.0) -> float:
    """Return the expected tokens per time of a pass in which one sequence has draft tokens.

    Args:
        chance: See `DraftProposal`.
        count: Number of draft tokens of the sequence.
        num_rows: Rows of the pass without draft tokens, each of which makes a token.
        extra: Cost of making the draft tokens, relative to a pass with one row.
    """
    made = num_rows - 1 + _expected(chance, count)
    return made / (pass_cost(num_rows + count) + extra)


def _expected(chance: float, count: int) -> float:
    """Return the expected number of tokens per step with `count` draft tokens."""
    return count + 1.0 if chance >= 1 else (1 - chance ** (count + 1)) / (1 - chance)


def pass_cost(num_rows: int) -> float:
    """Return the cost of a pass relative to one row, interpolated linearly from measurements."""
    at = min(max(1, bisect.bisect_left(_COSTS, (num_rows, 0.0))), len(_COSTS) - 1)
    (low, less) = _COSTS[at - 1]
    (high, more) = _COSTS[at]
    return less + (more - less) * (num_rows - low) / (high - low)
