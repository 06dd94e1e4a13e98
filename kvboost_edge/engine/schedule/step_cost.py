"""The time of a step, predicted from the steps that ran.

A step's time is taken as the sum of two parts, each linear in the size of the step:

    decoding    base + row * sequences + attend * tokens before them
    prompts     row * tokens + attend * tokens before each of them, summed

`base` is mostly the reading of the weights, `row` the arithmetic of the linear layers, `attend`
that of attention. The factors differ between models. They change with the depth, with the machine's
clock and with what else runs on it, so each step corrects them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvboost_edge.engine.schedule.sequence import Sequence
from kvboost_edge.engine.schedule.step_plan import ScheduledTokens

__all__ = ["StepCost", "StepShape"]

Floats = npt.NDArray[np.float64]

# Usual ratios of the factors: where learning starts. To decode one more sequence costs a twentieth
# of reading the weights; 30,000 tokens of attention cost as much as that. A prompt's token attends
# to 5,000 tokens in the time that its linear layers take.
_DECODE_RATIOS = np.array((1.0, 1 / 20, 1 / 30_000))
_PROMPT_RATIOS = np.array((1.0, 1 / 5_000))
_RATE = 0.3  # part of a step's error by which the factors are corrected
_MOST = 2.0  # one step changes a prediction by less than this factor
_LEAST_PROMPT = 0.1  # of a step's time: the part that its prompts are taken to have at least


class StepShape(NamedTuple):
    """The size of a step.

    Attributes:
        sequences: sequences that decode.
        decode_depth: tokens before each of their tokens, summed.
        tokens: tokens of prompts.
        prompt_depth: tokens before each of those, summed.
    """

    sequences: int = 0
    decode_depth: float = 0.0
    tokens: int = 0
    prompt_depth: float = 0.0

    @classmethod
    def of(cls, work: Iterable[ScheduledTokens[Sequence]]) -> StepShape:
        """Return the size of planned work. Draft tokens do not count."""
        sequences = tokens = 0
        decode = prompt = 0.0
        for one in work:
            count = one.certain_stop - one.start
            if count == 1:
                sequences += 1
                decode += one.start
            else:
                tokens += count
                prompt += count * (one.start + count / 2)
        return cls(sequences, decode, tokens, prompt)


class _Factors:
    """Positive factors in `seconds = factors @ inputs`.

    Each factor is multiplied by the step's error to the power of its share in the prediction, an
    exponentiated gradient step: what explains most of a time learns most from it.
    """

    def __init__(self, ratios: Floats) -> None:
        self.values = np.zeros(len(ratios))
        self._ratios = ratios

    @property
    def is_known(self) -> bool:
        return bool(self.values[0])

    def observe(self, inputs: Floats, seconds: float) -> None:
        """Learn from a time above 0 for these inputs, one of them above 0."""
        if not self.is_known:
            self.values = self._ratios * (seconds / float(self._ratios @ inputs))
            return
        parts = self.values * inputs
        predicted = float(parts.sum())
        error = min(max(seconds / predicted, 1 / _MOST), _MOST)
        self.values = self.values * error ** (_RATE * parts / predicted)


class StepCost:
    """The factors of a step's time. Not thread-safe: the engine's thread alone uses it."""

    def __init__(self) -> None:
        self._decode = _Factors(_DECODE_RATIOS)
        self._prompt = _Factors(_PROMPT_RATIOS)

    @property
    def knows_decode(self) -> bool:
        """Whether a step that only decodes was observed."""
        return self._decode.is_known

    @property
    def knows_prompts(self) -> bool:
        """Whether a step with tokens of a prompt was observed."""
        return self._prompt.is_known

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learn from a step that took so long."""
        if seconds <= 0.0:
            return
        if not shape.tokens:
            if shape.sequences:
                self._decode.observe(_decode_inputs(shape), seconds)
            return
        left = max(seconds - self.decode_seconds(shape), _LEAST_PROMPT * seconds)
        self._prompt.observe(np.array((shape.tokens, shape.prompt_depth)), left)

    def decode_seconds(self, shape: StepShape) -> float:
        """Return the predicted time of a step's decoding; 0 where nothing is known."""
        return float(self._decode.values @ _decode_inputs(shape))

    def prompt_token(self, position: int) -> float:
        """Return the seconds that one more token of a prompt at this position adds to a step."""
        row, attend = self._prompt.values
        return float(row + attend * position)


def _decode_inputs(shape: StepShape) -> Floats:
    return np.array((1.0, shape.sequences, shape.decode_depth))
