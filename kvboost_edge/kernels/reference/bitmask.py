"""Token masks for structured output in plain NumPy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["mask_logits"]


def mask_logits(
    words: npt.NDArray[np.int32], logits: npt.NDArray[np.float32], out: npt.NDArray[np.float32]
) -> None:
    """Copy the logits of allowed tokens and set the others to -inf.

    Args:
        words: int32 [ceil(vocab_size / 32)], one bit per token, lowest bit first.
        logits: float32 [vocab_size].
        out: float32 [vocab_size], written.
    """
    bits = np.unpackbits(words.astype("<i4").view(np.uint8), bitorder="little", count=len(logits))
    out[:] = np.where(bits == 1, logits, np.float32(-np.inf))
