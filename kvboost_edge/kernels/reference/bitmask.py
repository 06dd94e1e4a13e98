"""The mask of logits, bit by bit."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["mask_logits"]


def mask_logits(
    words: npt.NDArray[np.int32], logits: npt.NDArray[np.float32], out: npt.NDArray[np.float32]
) -> None:
    """Into out [vocab_size]: the logits whose bit in words [ceil(vocab_size / 32)] is set, the
    lowest first; else -inf.
    """
    bits = np.unpackbits(words.astype("<i4").view(np.uint8), bitorder="little", count=len(logits))
    out[:] = np.where(bits == 1, logits, np.float32(-np.inf))
