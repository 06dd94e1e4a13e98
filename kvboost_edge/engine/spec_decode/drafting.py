"""Draft tokens by prompt lookup: what followed the last tokens where they occurred before.

They are looked for in the request itself (a suffix automaton), and in what its tenant asked and was
answered lately (a ring). After Oliaro et al., "SuffixDecoding" (2024), and Saxena, "Prompt Lookup
Decoding" (2023). How many tokens are tried is a matter of cost: a pass of few rows is bound by
reading the weights once, see `_COSTS`.
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

__all__ = ["DraftProposal", "Drafter", "TenantHistory", "most_drafted", "prepare_drafts"]

_LEAST_MATCH = 3  # tokens: shorter ends of a text stand in it by chance
_ASTRAY = 3  # drafts in a row of which nothing was right: what was followed so far ends there
_LONGEST_TAIL = 64  # tokens that are compared with the ring: a longer match says no more
_LEAST_ROOM = 1024  # tokens an automaton begins with
_RING = "ring"
_RING_TOKENS = 1 << 17  # 1.6 MB a tenant
_MOST_RING_BYTES = 2 << 20
_MOST_TENANTS = 32
_MOST_AUTOMATA_BYTES = 64 << 20  # of all sequences of an engine: texts of 350,000 to 700,000 tokens

# The time of a pass by its rows, in terms of one row: bench_speculation.py, a 0.5B model of 4 bits
# on two AVX512-VNNI cores. Of 135M 8 rows are 2.7, where passes of one kind follow one another
# (benchmarks/LOG.md). There are kernels for 2, 4 and 8 rows; from 12 on the arithmetic decides.
_COSTS = (
    *((1, 1.0), (2, 1.08), (3, 1.35), (4, 1.17), (6, 1.64), (8, 1.56)),
    *((12, 2.54), (16, 3.28), (24, 4.31), (32, 5.57), (48, 7.85), (64, 10.23)),
)
_LEVELS = (0, 1, 3, 7, 15, 31, 63)  # most drafts of a sequence that are weighed
_LEAST_GAIN = 1.02

_MEMORY = 0.8  # of earlier steps' outcomes in the next estimate
# Of outcomes, by each step without a draft: what failed once is tried again some 30 tokens later.
_FADING = 0.97
_PRIOR = 2.0  # drafts that the length of a match counts for


@functools.cache
def prepare_drafts() -> None:
    """Compile what drafts need in a process beside this one, unless its machine code is on disk.
    BackendUnavailable with what the compiler said.
    """
    compile_ahead([extend_entry, append_entry, find_entry], 1)


class DraftProposal(NamedTuple):
    """token_ids: proposed after a sequence's last token. chance: that one of them is right when
    those before are.
    """

    token_ids: list[int]
    chance: float


class TenantHistory:
    """What each tenant asked and was answered lately, for its own requests alone (a tenant's salts
    are tenants of their own): bounded in tokens, and in tenants. And who counts the bytes of the
    automata: bounded together.
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
        """Make a history of at most so many bytes: half for rings, one at least, half for
        automata.
        """
        half = num_bytes // 2
        return cls(
            min(_MOST_AUTOMATA_BYTES, half),
            max(1, min(_MOST_TENANTS, half // _MOST_RING_BYTES)),
        )

    @property
    def nbytes(self) -> int:
        """Of rings and automata."""
        return self._rings.num_bytes + self._automata_bytes

    def reserve(self, nbytes: int) -> bool:
        """Take bytes for automata, or give some back (below 0); whether they were there."""
        if self._automata_bytes + nbytes > self._most_automata_bytes:
            return False
        self._automata_bytes += nbytes
        return True

    def keep(self, tenant: bytes, token_ids: Sequence[int]) -> None:
        """Remember tokens that belong together."""
        ring = self._rings.peek(tenant, _RING) or new_ring(_RING_TOKENS)
        self._rings.keep(tenant, tenant, _RING, ring, ring.nbytes)
        append_tokens(np.array(token_ids[-_RING_TOKENS:], np.int32), *ring)

    def find(self, tenant: bytes, tail: Sequence[int], most: int) -> tuple[int, list[int]]:
        """How many of the last tokens of `tail` stood there one behind another, and up to `most`
        that followed.
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
        """Drop everything."""
        self._rings.clear()


class Drafter:
    """Proposes for one sequence and learns from what becomes of it."""

    def __init__(
        self,
        tenant: bytes,
        memory: TenantHistory,
        max_tokens: int = 1 << 31,
        *,
        reads_history: bool = True,
    ) -> None:
        """Make the drafter of one sequence.

        Args:
            tenant: the root of its prefixes.
            max_tokens: of the sequence, at its end.
            reads_history: drafts may come from the tenant's other requests too.
        """
        self._tenant = tenant
        self._memory = memory
        self._reads_history = reads_history
        self._most_room = 1 << (max_tokens - 1).bit_length()
        self._automaton: Automaton | None = None
        self._right = self._wrong = 0.0
        # Where in the text its own draft came from, and how long the text was then: behind a word
        # that was exchanged the old text goes on.
        self._source: tuple[int, int] | None = None
        self._num_astray = 0

    def propose(self, token_ids: Sequence[int], most: int) -> DraftProposal | None:
        """Up to `most` tokens, at least 1, to follow those of the sequence, which only grow from
        call to call.
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
        # Where what followed goes on into the draft itself, as in a run of one line repeated, so
        # does the draft.
        following = list(token_ids[end : end + most])
        return self._draft(list(itertools.islice(itertools.cycle(following), most)), length)

    def _draft(self, token_ids: list[int], match: int) -> DraftProposal:
        prior = match / (match + 4)
        right = self._right + _PRIOR * prior
        wrong = self._wrong + _PRIOR * (1 - prior)
        return DraftProposal(token_ids, right / (right + wrong))

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        """What became of a draft; 0, 0: none was computed."""
        if num_drafted:
            self._num_astray = 0 if num_accepted else self._num_astray + 1
        fading = _MEMORY if num_drafted else _FADING
        self._right = self._right * fading + num_accepted
        self._wrong = self._wrong * fading + (num_accepted < num_drafted)

    def release(self) -> None:
        """Give the automaton's memory back."""
        if self._automaton is not None:
            self._memory.reserve(-automaton_bytes(self._automaton.room))
            self._automaton = None

    def _match(self, token_ids: Sequence[int]) -> tuple[int, int]:
        """How many of the last tokens stood in the text before, and the position behind them; 0, 0
        without memory.
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
        """A new automaton with room for twice the tokens, as far as the sequence gets there:
        amortised it costs each token twice. None where others have the memory.
        """
        self.release()
        room = min(
            max(_LEAST_ROOM, 1 << (2 * count - 1).bit_length()), max(_LEAST_ROOM, self._most_room)
        )
        if self._memory.reserve(automaton_bytes(room)):
            self._automaton = new_automaton(room)
        return self._automaton


def most_drafted(drafts: Sequence[DraftProposal], num_rows: int) -> int:
    """Most tokens of each draft to compute in a pass that has `num_rows` rows without them, one of
    each of these sequences among them: whatever makes most tokens in the time, 0 where nothing
    makes more than none.
    """
    others = num_rows - len(drafts)
    best = 0
    best_rate = _LEAST_GAIN * num_rows / _cost(num_rows)
    for level in _LEVELS[1:]:
        counts = [min(level, len(draft.token_ids)) for draft in drafts]
        made = sum(
            _expected(draft.chance, count) for draft, count in zip(drafts, counts, strict=True)
        )
        rate = (others + made) / _cost(num_rows + sum(counts))
        if rate > best_rate:
            best = level
            best_rate = rate
    return best


def _expected(chance: float, count: int) -> float:
    """Tokens that a step makes of a sequence with `count` drafts."""
    return count + 1.0 if chance >= 1 else (1 - chance ** (count + 1)) / (1 - chance)


def _cost(num_rows: int) -> float:
    """What a pass of so many rows costs, in terms of one row; a straight line between the measured
    ones and beyond.
    """
    at = min(max(1, bisect.bisect_left(_COSTS, (num_rows, 0.0))), len(_COSTS) - 1)
    (low, less) = _COSTS[at - 1]
    (high, more) = _COSTS[at]
    return less + (more - less) * (num_rows - low) / (high - low)
