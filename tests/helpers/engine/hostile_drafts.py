"""Drafters that propose good and bad tokens of every kind. The answer must not depend on the
drafts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np

from helpers.engine.fake_runner import VOCAB_SIZE, Bench
from kvboost_edge.engine.request.request import Request
from kvboost_edge.engine.spec_decode.draft_lengths import DraftProposal
from kvboost_edge.engine.spec_decode.prompt_lookup import PromptLookup, TenantHistory

KINDS = ("right", "wrong", "random", "one off", "repeating")


class HostileDrafter(PromptLookup):
    """Drafter with right and wrong proposals.

    Args:
        kind: kind of its proposals.
        truth: the complete sequence of the request.
    """

    def __init__(self, kind: str, truth: Sequence[int], vocab_size: int, seed: int) -> None:
        super().__init__(b"", TenantHistory())
        self._kind = kind
        self._truth = list(truth)
        self._vocab_size = vocab_size
        self._random = random.Random(seed)
        self.outcomes: list[tuple[int, int]] = []

    def propose(self, token_ids: Sequence[int], most: int) -> DraftProposal | None:
        count = self._random.randint(1, most)
        right = [*self._truth[len(token_ids) :], *[0] * count][:count]
        wrong = [(token_id + 1) % self._vocab_size for token_id in right]
        at = self._random.randrange(count)
        drafted = {
            "right": right,
            "wrong": wrong,
            "random": [self._random.randrange(self._vocab_size) for _ in right],
            "one off": [*right[:at], wrong[at], *right[at + 1 :]],
            "repeating": [token_ids[-1]] * count,
        }[self._kind]
        return DraftProposal(drafted, np.full(count, self._random.random()))

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        self.outcomes.append((num_drafted, num_accepted))


class CutDrafter(PromptLookup):
    """Drafter that proposes `num_right` right tokens, followed by wrong ones up to `num_drafts`."""

    def __init__(
        self, truth: Sequence[int], num_right: int, num_drafts: int, vocab_size: int
    ) -> None:
        super().__init__(b"", TenantHistory())
        self._truth = list(truth)
        self._num_right = num_right
        self._num_drafts = num_drafts
        self._vocab_size = vocab_size
        self.outcomes: list[tuple[int, int]] = []

    def propose(self, token_ids: Sequence[int], most: int) -> DraftProposal | None:
        following = self._truth[len(token_ids) :][: min(most, self._num_drafts)]
        drafted = [
            token_id if index < self._num_right else (token_id + 1) % self._vocab_size
            for index, token_id in enumerate(following)
        ]
        return DraftProposal(drafted, np.ones(len(drafted))) if drafted else None

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        self.outcomes.append((num_drafted, num_accepted))


def hostile(
    truth_of: Callable[[Request], Sequence[int]], kind_of: Callable[[Request], str], vocab_size: int
) -> Callable[[Request], PromptLookup | None]:
    """Return a replacement for `Speculation.drafter`."""

    def drafter(request: Request) -> PromptLookup | None:
        if not request.max_draft_tokens:
            return None
        return HostileDrafter(kind_of(request), truth_of(request), vocab_size, request.index)

    return drafter


def draft_in_turn(bench: Bench, kinds: Sequence[str] = KINDS, answer: Sequence[int] = ()) -> Bench:
    """Give the requests of a bench drafts of these kinds in turn.

    Args:
        answer: tokens that the requests sample, if they are not the greedy ones.
    """
    bench.scheduler.speculation.prompt_lookup = hostile(
        lambda request: [
            *request.prompt_ids,
            *(answer or bench.runner.expected(request.prompt_ids, 200)),
        ],
        lambda request: kinds[request.index % len(kinds)],
        VOCAB_SIZE,
    )
    return bench
