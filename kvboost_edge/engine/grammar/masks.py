"""Token masks for structured output: tokens that would leave the grammar are never chosen.

Each sequence has its own llguidance parser, which reports after each token which tokens may follow.
The parser advances with accepted tokens only: draft tokens are masked and sampled row by row, like
any other token. Where only one text can follow, its tokens become draft tokens.

A mask usually takes less than a millisecond, and the engine thread computes it on demand. An
ambiguous grammar takes a hundred times as long. Its masks are computed in a separate thread, and
the sequence skips forward passes until its mask is ready.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvboost_edge.engine.schedule.feature import Constraint
from kvboost_edge.errors import RequestError
from kvboost_edge.kernels.aot import compile_ahead
from kvboost_edge.kernels.bitmask import WORD_BITS, mask_logits, mask_logits_entry

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["GrammarConstraint", "first_line", "prepare_masks"]

Floats = npt.NDArray[np.float32]

# Seconds of processor time.
_SLOW_SECONDS = 0.004  # a slower mask would delay the engine thread
_SLOW_TOKENS = 32  # the masks of this many tokens after a slow one use a separate thread
_TOKEN_SECONDS = 0.05  # average per token, over at least _MEASURED_TOKENS
_TOTAL_SECONDS = 2.0  # all masks of a request
_MEASURED_TOKENS = 8
# Tokens. If the model leaves a longer forced text, forced tokens are no longer computed.
_LONG_TEXT = 256


@functools.cache
def prepare_masks() -> None:
    """Compile the mask kernel in a separate process, unless its machine code is on disk.

    Raises BackendUnavailable with the compiler's message if that fails.
    """
    compile_ahead([mask_logits_entry], 1)


class GrammarConstraint(Constraint):
    """The grammar of one sequence: its parser, and the mask of tokens that may follow.

    Args:
        matcher: The parser.
        room: float32 [vocab_size], the buffer that `masked` writes. All grammars of an engine share
            it.
        submit: Runs a function in a thread for slow masks; None computes them in the caller's
            thread.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        room: Floats,
        submit: Callable[[Callable[[], None]], Future[None]] | None = None,
    ) -> None:
        self._matcher = matcher
        self._room = room
        self._submit = submit
        self._words = np.empty(-(-len(room) // WORD_BITS), np.int32)
        self._forced: list[int] = []
        self._asks = True
        self._slow_tokens = 0
        self._seconds = 0.0
        self._num_tokens = 0
        self._pending: Future[None] | None = None
        self._find()

    @property
    def is_ready(self) -> bool:
        """True if the next mask is ready or fast enough to compute on demand."""
        return self._pending is None or self._pending.done()

    def masked(self, logits: Floats) -> Floats:
        """Return the logits [vocab_size] with those of tokens that cannot follow set to -inf.

        The result is valid until the next call.
        """
        self._settle()
        if not self._is_found:
            self._find()
        mask_logits(self._words, logits, self._room)
        return self._room

    def constrain(self, logits: Floats, largest: int | None) -> tuple[Floats, int | None]:
        """Return the masked logits, and None because their maximum is unknown."""
        return self.masked(logits), None

    def advance(self, token_id: int) -> bool:
        """Accept the chosen token; return whether the text must end after it."""
        began = time.thread_time()
        if not self._matcher.consume_token(token_id):
            self._check()
        self._seconds += time.thread_time() - began
        self._num_tokens += 1
        self._is_found = False
        if self._forced and self._forced[0] != token_id:
            self._asks = len(self._forced) <= _LONG_TEXT
            self._forced = []
        self._forced = self._forced[1:]
        is_stopped = self._matcher.is_stopped()
        if self._slow_tokens and self._submit is not None and not is_stopped:
            self._pending = self._submit(self._find)
        return is_stopped

    def forced(self) -> list[int]:
        """Return the tokens that must follow.

        Empty where their text has several tokenizations, or after a mask failed: the next call of
        `masked` raises its error.
        """
        if self._pending is not None and self._pending.exception() is not None:
            return []
        if not self._forced and self._asks and not self._matcher.is_stopped():
            self._forced = list(self._matcher.compute_ff_tokens())
        return self._forced

    def _settle(self) -> None:
        """Wait for the mask that another thread computes, and raise its error."""
        if self._pending is not None:
            pending = self._pending
            self._pending = None
            pending.result()

    def _find(self) -> None:
        """Compute the mask of tokens that may follow."""
        began = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        self._check()
        seconds = time.thread_time() - began
        self._seconds += seconds
        self._slow_tokens = (
            _SLOW_TOKENS if seconds > _SLOW_SECONDS else max(0, self._slow_tokens - 1)
        )
        self._check_time()
        self._is_found = True

    def _check_time(self) -> None:
        """Raise RequestError if the masks so far took too long."""
        each = self._seconds / max(self._num_tokens, _MEASURED_TOKENS)
        if self._seconds > _TOTAL_SECONDS or each > _TOKEN_SECONDS:
            raise RequestError(
                f"the grammar is too ambiguous: its masks took {self._seconds:.2f} s for "
                f"{self._num_tokens} tokens; at most {_TOTAL_SECONDS:g} s in total and "
                f"{1e3 * _TOKEN_SECONDS:.0f} ms per token are allowed. Make fewer rules match the "
                "same text"
            )

    def _check(self) -> None:
        """Raise RequestError if the parser failed."""
        if self._matcher.is_error():
            raise RequestError(
                f"the grammar's parser failed: {first_line(self._matcher.get_error())}"
            )


def first_line(text: str) -> str:
    """Return the first non-empty line of an error's text, at most 500 characters."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")[
        :500
    ]
