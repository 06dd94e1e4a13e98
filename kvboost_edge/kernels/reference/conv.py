"""Short convolutions in plain NumPy, in float64 or with the kernels' float32 rounding steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvboost_edge.kernels.reference.floats import exp_f32, fma_f32

__all__ = ["conv_rows", "silu_rows"]

Floats = npt.NDArray[np.floating[Any]]


def conv_rows(
    inputs: Floats, tail: Floats, weights: Floats, bias: Floats | None = None
) -> tuple[Floats, Floats]:
    """Return the convolution of each channel, and the conv state after the last token.

    Args:
        inputs: [tokens, channels]; the results have the same dtype.
        tail: [taps, channels], the inputs before the first token, oldest first.
        weights: [taps + 1, channels], oldest input first.
        bias: [channels], or None.

    Returns:
        ([tokens, channels], [taps, channels]).
    """
    taps = len(tail)
    tokens = len(inputs)
    all_inputs = np.concatenate([tail, inputs]).astype(inputs.dtype)
    sums = (
        np.zeros_like(inputs)
        if bias is None
        else np.broadcast_to(bias, inputs.shape).astype(inputs.dtype)
    )
    for tap in range(taps + 1):
        sums = _add_product(weights[tap], all_inputs[tap : tap + tokens], sums)
    return sums, all_inputs[tokens:]


def silu_rows(x: Floats) -> Floats:
    """Return x / (1 + exp(-x))."""
    if x.dtype == np.float64:
        wide: Floats = x / (1.0 + np.exp(-x))
        return wide
    result: Floats = x / (
        np.float32(1.0) + exp_f32(np.minimum(-x, np.float32(88.0)).astype(np.float32))
    )
    return result


def _add_product(x: Floats, y: Floats, z: Floats) -> Floats:
    sums: Floats = x * y + z if z.dtype == np.float64 else fma_f32(x, y, z)
    return sums
