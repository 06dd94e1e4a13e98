"""The measured time of a forward pass by its number of rows and their depth.

A pass with few rows mostly reads the weights, so more rows cost little. How little depends on the
model and the machine: with 0.5 billion parameters, four rows take 1.2 times as long as one and
eight rows 1.8 times (AVX512-VNNI). With processors whose kernels do not exist for each number of
rows, the time is not a smooth function of the rows.

The model of a pass is `scale * (linear(rows) + attend * depth)`. Its factors start from typical
ratios and each measured pass corrects them (an extended Kalman filter on their logarithms). The
filter attributes a deviation to the factors that are least certain: the first pass sets the scale,
the first passes with a new number of rows set `linear`, and a machine that slows down later changes
the scale.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

__all__ = ["PassCosts"]

Floats = npt.NDArray[np.float64]

# Numbers of rows and typical durations relative to one row: 5% more than bench_speculation.py
# measured with a 0.5B model and 4-bit weights. Lower times at first cost more on slower machines
# than higher ones on fast machines. Up to 8 rows are multiplied at once. From there on, passes are
# compute-bound.
_ROWS = np.array((1, 2, 3, 4, 6, 8, 9, 12, 16, 24, 32, 48, 64), np.float64)
_TYPICAL = np.array((1.0, 1.08, 1.18, 1.26, 1.55, 1.9, 2.35, 2.8, 3.5, 4.8, 6.2, 9.0, 12.0))
_ATTEND = 1 / 30_000  # typical time of attention to one token, relative to a pass of one row

_SCALE = 0  # index of the logarithm of the scale in the state; 1 is that of `attend`
_LINEAR = 2  # index of the first logarithm of `linear`, which stays that of one row

# Standard deviations of the logarithms before any measurement.
_UNKNOWN = 100.0  # variance of the scale; the first pass sets it alone
_UNSURE_SCALE = 1.0
_UNSURE_ATTEND = 0.7
_UNSURE_DOUBLING = 0.2  # of `linear` for each doubling of the rows, shared by all larger numbers
_UNSURE_ROWS = 0.06  # of `linear` for one number of rows alone
_FORGET = 0.001  # share of these uncertainties that returns with each pass

_LEAST_NOISE = 0.04  # standard deviation of a measurement's logarithm
_MOST_NOISE = 0.5
_NOISE_RATE = 0.05
# Standard deviations. A larger deviation corrects no more than this one. Other programs make passes
# slower and never faster, so slow ones count less.
_CLIP_LOW = 2.0
_CLIP = 1.5


class PassCosts:
    """The seconds of a forward pass, learned from measured passes.

    Only the engine thread uses it. Before the first measurement, times are relative to a pass of
    one row.
    """

    def __init__(self) -> None:
        self._state = np.concatenate(((0.0, math.log(_ATTEND)), np.log(_TYPICAL)))
        self._prior = _prior_covariance()
        self._covariance = self._prior.copy()
        self._covariance[_SCALE, _SCALE] = _UNKNOWN
        self._noise = 0.1
        self._num_observed = 0
        self._linear = _TYPICAL.copy()

    @property
    def is_known(self) -> bool:
        """True once a pass has been observed."""
        return self._num_observed > 0

    def guess(self, seconds: float) -> None:
        """Set the expected seconds of a pass of one row, until the first measurement."""
        if not self.is_known:
            self._state[_SCALE] = math.log(seconds)

    def seconds(self, num_rows: int, depth: float) -> float:
        """Return the expected seconds of a pass.

        Args:
            num_rows: rows of the pass, at least 1.
            depth: sum of the positions of the rows.
        """
        return float(self.seconds_of(np.array((float(num_rows),)), np.array((depth,)))[0])

    def seconds_of(self, num_rows: Floats, depth: Floats) -> Floats:
        """Return the expected seconds of several passes, see `seconds`."""
        scale, attend = np.exp(self._state[:_LINEAR])
        linear = np.interp(num_rows, _ROWS, self._linear)
        beyond = np.maximum(num_rows / _ROWS[-1], 1.0)  # compute-bound
        seconds: Floats = scale * (linear * beyond + attend * depth)
        return seconds

    def observe(self, num_rows: int, depth: float, seconds: float) -> None:
        """Update the factors with a measured pass. Passes with more than 64 rows are ignored."""
        if seconds <= 0.0 or not 1 <= num_rows <= _ROWS[-1]:
            return
        gradient, expected = self._gradient(num_rows, depth)
        error = math.log(seconds / expected)
        spread = self._covariance @ gradient
        variance = float(gradient @ spread)
        if self._num_observed:
            self._noise += _NOISE_RATE * (
                min(max(1.25 * abs(error), _LEAST_NOISE), _MOST_NOISE) - self._noise
            )
            deviation = math.sqrt(variance + self._noise**2)
            error = min(max(error, -_CLIP_LOW * deviation), _CLIP * deviation)
        gain = spread / (variance + self._noise**2)
        self._state += gain * error
        self._covariance -= np.outer(gain, spread)
        self._covariance += _FORGET * (self._prior - self._covariance)
        self._linear = np.exp(self._state[_LINEAR:])
        self._num_observed += 1

    def _gradient(self, num_rows: int, depth: float) -> tuple[Floats, float]:
        """Return the gradient of the logarithm of the expected seconds, and the seconds."""
        scale, attend = np.exp(self._state[:_LINEAR])
        at = min(int(np.searchsorted(_ROWS, num_rows)), len(_ROWS) - 1)
        low = max(0, at - 1)
        share = (num_rows - _ROWS[low]) / (_ROWS[at] - _ROWS[low]) if at else 1.0
        parts = np.zeros(len(self._state))
        parts[_LINEAR + low] = (1 - share) * self._linear[low]
        parts[_LINEAR + at] += share * self._linear[at]
        parts[1] = attend * depth
        total = float(parts.sum())
        gradient = parts / total
        gradient[_SCALE] = 1.0
        gradient[_LINEAR] = 0.0
        return gradient, float(scale * total)


def _prior_covariance() -> Floats:
    """Return the covariance of the state before any measurement.

    The errors of `linear` for different numbers of rows are related: they add up with each doubling
    of the rows. One row is the reference and has none.
    """
    doublings = np.log2(_ROWS)
    linear = _UNSURE_DOUBLING**2 * np.minimum.outer(doublings, doublings)
    linear += _UNSURE_ROWS**2 * np.diag(doublings > 0)
    covariance = np.zeros((_LINEAR + len(_ROWS),) * 2)
    covariance[_SCALE, _SCALE] = _UNSURE_SCALE**2
    covariance[1, 1] = _UNSURE_ATTEND**2
    covariance[_LINEAR:, _LINEAR:] = linear
    return covariance
