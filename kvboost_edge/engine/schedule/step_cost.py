"""The time of a step, predicted from earlier steps.

The predicted time is the sum of two parts, each linear in the size of the step:

decoding    base + row * sequences + attend * tokens before them prompts     row * tokens + attend *
tokens before each of them, summed

`base` is mostly the time to read the weights, `row` the arithmetic of the linear layers, `attend`
the arithmetic of attention. The factors differ between models. They change with the depth, the
machine's clock and its other load, so each step corrects them.
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

# Usual ratios of the factors, from which learning starts. Decoding one more sequence costs a
# twentieth of reading the weights. Attention to 30,000 tokens costs as much as reading the weights.
# A prompt token attends to 5,000 tokens in the time of its linear layers.
_DECODE_RATIOS = np.array((1.0, 1 / 20, 1 / 30_000))
_PROMPT_RATIOS = np.array((1.0, 1 / 5_000))
_RATE = 0.3  # part of a step's error that is corrected
_MOST = 2.0  # largest factor by which one step changes a prediction
_LEAST_PROMPT = 0.1  # smallest part of a step's time that is attributed to prompts


class StepShape(NamedTuple):
    """The size of a step.

    Attributes:
        sequences: sequences that decode.
        decode_depth: sum of the tokens before each decoded token.
        tokens: tokens of prompts.
        prompt_depth: sum of the tokens before each prompt token.
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

    Each factor is multiplied by the step's error to the power of its share in the prediction (an
    exponentiated gradient step). The factor that explains most of a time learns most from it.
    """

    def __init__(self, ratios: Floats) -> None:
        self.values = np.zeros(len(ratios))
        self._ratios = ratios

    @property
    def is_known(self) -> bool:
        return bool(self.values[0])

    def observe(self, inputs: Floats, seconds: float) -> None:
        """Learn from a measured time; the time and one of the inputs are above 0."""
        if not self.is_known:
            self.values = self._ratios * (seconds / float(self._ratios @ inputs))
            return
        parts = self.values * inputs
        predicted = float(parts.sum())
        error = min(max(seconds / predicted, 1 / _MOST), _MOST)
        self.values = self.values * error ** (_RATE * parts / predicted)


class StepCost:
    """The factors of a step's time. Only the engine's thread uses it."""

    def __init__(self) -> None:
        self._decode = _Factors(_DECODE_RATIOS)
        self._prompt = _Factors(_PROMPT_RATIOS)

    @property
    def knows_decode(self) -> bool:
        """True once a step that only decodes was observed."""
        return self._decode.is_known

    @property
    def knows_prompts(self) -> bool:
        """True once a step with prompt tokens was observed."""
        return self._prompt.is_known

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learn from the time of a step."""
        if seconds <= 0.0:
            return
        if not shape.tokens:
            if shape.sequences:
                self._decode.observe(_decode_inputs(shape), seconds)
            return
        left = max(seconds - self.decode_seconds(shape), _LEAST_PROMPT * seconds)
        self._prompt.observe(np.array((shape.tokens, shape.prompt_depth)), left)

    def decode_seconds(self, shape: StepShape) -> float:
        """Return the predicted time of a step's decoding; 0 before any measurement."""
        return float(self._decode.values @ _decode_inputs(shape))

    def prompt_token(self, position: int) -> float:
        """Return the seconds that another prompt token at this position adds to a step."""
        row, attend = self._prompt.values
        return float(row + attend * position)


def _decode_inputs(shape: StepShape) -> Floats:
    return np.array((1.0, shape.sequences, shape.decode_depth))
