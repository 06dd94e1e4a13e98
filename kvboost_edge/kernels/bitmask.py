"""Token masks for structured output: the logits of forbidden tokens become -inf."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvboost_edge.kernels.entry import KernelEntry
from kvboost_edge.kernels.jit import kernel
from kvboost_edge.kernels.signature import array

__all__ = ["WORD_BITS", "mask_logits", "mask_logits_entry"]

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]

WORD_BITS = 32
_ALL = -1
_NONE = 0
_NEVER = np.float32(-np.inf)


@kernel
def mask_logits(words: Ints, logits: Floats, out: Floats) -> None:
    """Copy the logits of allowed tokens and set the others to -inf.

    Args:
        words: int32 [ceil(vocab_size / 32)]; bit i % 32 of word i // 32 allows token i.
        logits: float32 [vocab_size].
        out: float32 [vocab_size], written.
    """
    # Nearly all words are all ones (inside a JSON string) or all zeros (elsewhere), so these two
    # cases copy or fill 32 logits at once.
    whole = len(logits) // WORD_BITS
    for word in range(whole):
        bits = words[word]
        first = word * WORD_BITS
        if bits == _ALL:
            for i in range(WORD_BITS):
                out[first + i] = logits[first + i]
        elif bits == _NONE:
            for i in range(WORD_BITS):
                out[first + i] = _NEVER
        else:
            for i in range(WORD_BITS):
                out[first + i] = logits[first + i] if (bits >> i) & 1 else _NEVER
    for token in range(whole * WORD_BITS, len(logits)):
        out[token] = logits[token] if (words[whole] >> (token - whole * WORD_BITS)) & 1 else _NEVER


_FLOATS = array("float32")
mask_logits_entry = KernelEntry(mask_logits, array("int32"), _FLOATS, _FLOATS)
"""Entry of `mask_logits` for ahead-of-time compilation; sampling structured output needs it."""
