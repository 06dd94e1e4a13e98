"""Draft tokens by prompt lookup, copied from after an earlier occurrence of the last tokens.

Earlier occurrences are found in the request (with a suffix automaton) and in the tenant's recent
prompts and answers (with a ring buffer). The method follows Oliaro et al., "SuffixDecoding" (2024),
and Saxena, "Prompt Lookup Decoding" (2023).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import numpy as np

from kvboost_edge.engine.spec_decode.draft_lengths import DraftProposal
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

__all__ = ["PromptLookup", "TenantHistory", "prepare_drafts"]

_LEAST_MATCH = 3  # tokens; shorter matches are often coincidental
# Consecutive drafts without an accepted or allowed token before a source is dropped.
_ASTRAY = 3
_LONGEST_TAIL = 64  # number of tokens compared with the ring
_LEAST_ROOM = 1024  # initial capacity of an automaton, in tokens
_RING = "ring"
_RING_TOKENS = 1 << 17  # 1.6 MB per tenant
_MOST_RING_BYTES = 2 << 20
_MOST_TENANTS = 32
_MOST_AUTOMATA_BYTES = 64 << 20  # for all sequences of an engine; 350,000 to 700,000 tokens

_MEMORY = 0.8  # decay of earlier outcomes after a step with a draft
# Decay of earlier outcomes after a step without a draft. A source that failed is tried again after
# about 30 tokens.
_FADING = 0.97
_PRIOR = 3.0  # weight of the match length in the estimate, counted in drafts


@functools.cache
def prepare_drafts() -> None:
    """Compile the drafting kernels in a separate process, unless they are cached on disk.

    Raises:
        BackendUnavailable: The compilation failed. The message contains the compiler's error.
    """
    compile_ahead([extend_entry, append_entry, find_entry], 1)


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


class PromptLookup:
    """Prompt lookup for one sequence, which learns how often its draft tokens are accepted.

    Attributes:
        match_length: number of last tokens that occur earlier in the sequence, as of the last
            proposal.
    """

    def __init__(
        self,
        tenant: bytes,
        memory: TenantHistory,
        max_tokens: int = 1 << 31,
        *,
        reads_history: bool = True,
    ) -> None:
        """Create the prompt lookup of one sequence.

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
        self.match_length = 0

    def propose(self, token_ids: Sequence[int], most: int) -> DraftProposal | None:
        """Propose 1 to `most` draft tokens after `token_ids`, or None.

        Args:
            token_ids: All tokens of the sequence. Each call must extend those of the previous call.
            most: Maximum number of draft tokens.
        """
        length, end = self._match(token_ids)
        self.match_length = length
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
        prior = 1 - 1.5 / match
        right = self._right + _PRIOR * prior
        wrong = self._wrong + _PRIOR * (1 - prior)
        return DraftProposal(token_ids, np.full(len(token_ids), right / (right + wrong)))

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        """Record the outcome of a draft. Both numbers are 0 for a step without a draft."""
        if num_drafted:
            self._num_astray = 0 if num_accepted else self._num_astray + 1
        fading = _MEMORY if num_drafted else _FADING
        self._right = self._right * fading + num_accepted
        self._wrong = self._wrong * fading + (num_accepted < num_drafted)

    def learn_unverified(self, draft: Sequence[int], token_ids: Sequence[int]) -> None:
        """Record how much of an unverified proposal was right.

        Args:
            draft: the proposal, empty for a step without one.
            token_ids: tokens that the step generated. Later tokens of the proposal are not judged.
        """
        pairs = zip(draft, token_ids, strict=False)
        num_right = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        self.learn(min(num_right + 1, len(draft), len(token_ids)), num_right)

    def note_forbidden(self) -> None:
        """Record that the first token of a proposal is forbidden, so that nothing is drafted."""
        self._num_astray += 1

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
