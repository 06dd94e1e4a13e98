"""The time limit of each step, which keeps requests from holding up each other.

- While sequences decode, a step may take 1.75 times as long as decoding alone, plus 40 ms. Prompts
  are computed in the time that decoding leaves.
- While several prompts are computed and nothing decodes, a step takes 0.2 s, so that new requests
  can join soon.
- While only one request exists, a step takes up to 1 s.

A sequence whose reused spans are scored first counts as a prompt. Its tokens cost less, because
scoring runs only some layers, but the scoring pass reads the weights of these layers once more.

Background requests do not count as decoding. While other requests run, they get the time that the
others leave in a step of this length, or no time if they need an idle engine.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from typing import NamedTuple

from kvboost_edge.engine.schedule.sequence import Sequence
from kvboost_edge.engine.schedule.step_cost import StepCost, StepShape
from kvboost_edge.engine.schedule.step_plan import ScheduledTokens

__all__ = ["StepLimit", "StepPacing"]

_STRETCH = 1.75  # maximum step time relative to decoding alone
_EXTRA = 0.04  # seconds added to that maximum
_PROMPTS = 0.2  # seconds per step with several prompts
_ALONE = 1.0  # seconds per step with a single request
_FIRST_TOKENS = 64  # prompt tokens in a step with decoding, before step times are known
_LEAST_TOKENS = 4  # minimum prompt tokens per step, however long they take
_MEASURED_EVERY = 32  # steps with prompts before a step only decodes, which measures decoding


class StepLimit(NamedTuple):
    """The size limit of a step.

    Attributes:
        total: limit in units of work.
        prices: units per token, by sequence index. The default is 1.
        spare: indices of background sequences, which get what other sequences leave. Empty while no
            other sequence runs.
    """

    total: int
    prices: dict[int, int]
    spare: frozenset[int] = frozenset()

    def price(self, sequence: Sequence) -> int:
        """Return the cost of a sequence's next token in units of work."""
        return self.prices.get(sequence.index, 1)


class StepPacing:
    """Step limits computed from the predicted cost of the tokens.

    Attributes:
        target: maximum step time in seconds while sequences decode. None derives it from the time
            of decoding alone. 0 applies only `max_batch_tokens`.
    """

    def __init__(self, target: float | None = 0.0) -> None:
        self._target = target
        self._cost = StepCost()
        self._since_measured = 0

    def observe(self, work: Several[ScheduledTokens[Sequence]], seconds: float) -> None:
        """Update the cost model with the measured time of a step."""
        shape = StepShape.of(work)
        self._cost.observe(shape, seconds)
        if not shape.tokens:
            self._since_measured = 0
        elif shape.sequences:
            self._since_measured += 1

    def limit(
        self, running: Several[Sequence], num_waiting: int, max_batch_tokens: int
    ) -> tuple[list[Sequence], StepLimit]:
        """Return the sequences to compute or score in the next step, and the step's limit.

        Args:
            running: running sequences, of which at most one prepares.
            num_waiting: number of all other sequences.
            max_batch_tokens: maximum number of tokens in a step.
        """
        everyone, spare = _with_spare([one for one in running if one.is_ready or one.prepares])
        plain = StepLimit(max_batch_tokens, {}, spare)
        if self._target == 0.0:
            return everyone, plain
        decoding = [one for one in everyone if one.decodes and one.index not in spare]
        others = [
            one for one in everyone if one.index in spare or (one.num_due and not one.decodes)
        ]
        room = max_batch_tokens - len(decoding)  # maximum number of other tokens
        if not others or room < len(others):
            return everyone, plain
        if decoding and (not self._cost.knows_decode or self._since_measured >= _MEASURED_EVERY):
            return decoding, plain
        is_alone = len(running) + num_waiting == 1
        if not self._cost.knows_prompts:
            tokens = min(room, _FIRST_TOKENS) if decoding else room
            return everyone, StepLimit(len(decoding) + tokens, {}, spare)
        seconds = _ALONE if is_alone else self._seconds_for_others(decoding)
        seconds -= sum(map(self._scoring_seconds, others))
        limit = self._limit_of(others, seconds, room, len(decoding))
        return everyone, limit._replace(spare=spare)

    def _limit_of(
        self, others: list[Sequence], seconds: float, room: int, num_decoding: int
    ) -> StepLimit:
        """Return the limit of a step with prompts or background sequences.

        A unit of their work is one microsecond. A decoding sequence costs one unit, so that each
        gets its token before any prompt does.

        Args:
            seconds: time for the prompts and background sequences.
            room: maximum number of their tokens.
        """
        costs = {one.index: self._token_seconds(one) * 1e6 for one in others}
        total = max(1, int(max(seconds * 1e6, _LEAST_TOKENS * min(costs.values()))))
        least = -(-total // room)  # lower prices would allow more than `room` tokens
        prices = {index: max(least, round(cost)) for index, cost in costs.items()}
        return StepLimit(total + num_decoding, prices)

    def _token_seconds(self, sequence: Sequence) -> float:
        """Return the predicted seconds that a sequence's next token adds to a step."""
        probe = sequence.spans.probe
        if probe is not None:
            return probe.layer_share * self._cost.prompt_token(probe.position)
        position = sequence.num_computed_tokens
        if sequence.decodes:
            return self._cost.decoded_token(position)
        return self._cost.prompt_token(position)

    def _scoring_seconds(self, sequence: Sequence) -> float:
        """Return the predicted seconds of a sequence's scoring pass without its tokens."""
        probe = sequence.spans.probe
        return 0.0 if probe is None else probe.layer_share * self._cost.decode_seconds(StepShape())

    def _seconds_for_others(self, decoding: list[Sequence]) -> float:
        """Return the seconds of a step that decoding leaves for prompts and the background."""
        if not decoding:
            return max(self._target or 0.0, _PROMPTS)
        depth = sum(one.num_computed_tokens for one in decoding)
        alone = self._cost.decode_seconds(StepShape(len(decoding), depth))
        target = _STRETCH * alone + _EXTRA if self._target is None else self._target
        return target - alone


def _with_spare(ready: list[Sequence]) -> tuple[list[Sequence], frozenset[int]]:
    """Return the sequences that may run now, and the indices of those that get what others leave.

    Args:
        ready: running sequences whose features are ready.
    """
    waiting = [one for one in ready if one.is_background]
    if not waiting or len(waiting) == len(ready):
        return ready, frozenset()
    allowed = [one for one in ready if not one.needs_idle]
    return allowed, frozenset(one.index for one in allowed if one.is_background)
