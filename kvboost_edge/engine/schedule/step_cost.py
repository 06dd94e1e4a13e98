"""A prediction of step times from earlier steps.

The predicted time is the sum of two parts, which are linear in the size of the step:

- decoding: base + row * sequences + attend * (sum of their positions)
- prompts: row * tokens + attend * (sum of their positions)

`base` is mostly the time to read the weights. `row` is the time of the linear layers for a token,
and `attend` the time of attention for each earlier token. The factors depend on the model, the
depth, the machine's clock and its other load, so each step corrects them.
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

# Typical ratios of the factors, used as starting values. Decoding one more sequence takes 1/20 of
# the time to read the weights. Attention to 30,000 tokens takes as long as reading the weights. For
# a prompt token, attention to 5,000 tokens takes as long as its linear layers.
_DECODE_RATIOS = np.array((1.0, 1 / 20, 1 / 30_000))
_PROMPT_RATIOS = np.array((1.0, 1 / 5_000))
_RATE = 0.3  # fraction of a step's error that is corrected
_MOST = 2.0  # maximum factor by which one step changes a prediction
_LEAST_PROMPT = 0.1  # minimum share of a step's time attributed to prompts


class StepShape(NamedTuple):
    """The size of a step.

    Attributes:
        sequences: number of decoding sequences.
        decode_depth: sum of the positions of the decoded tokens.
        tokens: number of prompt tokens.
        prompt_depth: sum of the positions of the prompt tokens.
    """

    sequences: int = 0
    decode_depth: float = 0.0
    tokens: int = 0
    prompt_depth: float = 0.0

    @classmethod
    def of(cls, work: Iterable[ScheduledTokens[Sequence]]) -> StepShape:
        """Return the size of planned work, without draft tokens."""
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

    `observe` multiplies each factor by the step's error, raised to the factor's share of the
    prediction (an exponentiated gradient step). Factors with a larger share change more.
    """

    def __init__(self, ratios: Floats) -> None:
        self.values = np.zeros(len(ratios))
        self._ratios = ratios

    @property
    def is_known(self) -> bool:
        return bool(self.values[0])

    def observe(self, inputs: Floats, seconds: float) -> None:
        """Update the factors with a measured time. The time and one input must be positive."""
        if not self.is_known:
            self.values = self._ratios * (seconds / float(self._ratios @ inputs))
            return
        parts = self.values * inputs
        predicted = float(parts.sum())
        error = min(max(seconds / predicted, 1 / _MOST), _MOST)
        self.values = self.values * error ** (_RATE * parts / predicted)


class StepCost:
    """The predicted time of a step. Only the engine thread uses it."""

    def __init__(self) -> None:
        self._decode = _Factors(_DECODE_RATIOS)
        self._prompt = _Factors(_PROMPT_RATIOS)

    @property
    def knows_decode(self) -> bool:
        """True once a step that only decodes has been observed."""
        return self._decode.is_known

    @property
    def knows_prompts(self) -> bool:
        """True once a step with prompt tokens has been observed."""
        return self._prompt.is_known

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Update the factors with the measured time of a step."""
        if seconds <= 0.0:
            return
        if not shape.tokens:
            if shape.sequences:
                self._decode.observe(_decode_inputs(shape), seconds)
            return
        left = max(seconds - self.decode_seconds(shape), _LEAST_PROMPT * seconds)
        self._prompt.observe(np.array((shape.tokens, shape.prompt_depth)), left)

    def decode_seconds(self, shape: StepShape) -> float:
        """Return the predicted seconds for a step's decoding, or 0 before any measurement."""
        return float(self._decode.values @ _decode_inputs(shape))

    def decoded_token(self, position: int) -> float:
        """Return the predicted seconds that one more decoding sequence adds to a step.

        Returns 0 before any measurement.
        """
        _, row, attend = self._decode.values
        return float(row + attend * position)

    def prompt_token(self, position: int) -> float:
        """Return the predicted seconds that a prompt token at this position adds to a step."""
        row, attend = self._prompt.values
        return float(row + attend * position)


def _decode_inputs(shape: StepShape) -> Floats:
    return np.array((1.0, shape.sequences, shape.decode_depth))
