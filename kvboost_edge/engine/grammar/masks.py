"""Token masks for structured output, which prevent tokens that would violate the grammar.

Each sequence has its own llguidance parser. After each token, the parser reports which tokens may
follow. The parser advances with accepted tokens only. Draft tokens are masked and sampled row by
row, like any other token. Where the grammar allows only one text, its tokens become draft tokens.
Other drafts are chosen or cut so that the grammar allows their tokens, as far as their masks are
fast.

A mask usually takes less than a millisecond and is computed on the engine thread. Masks of an
ambiguous grammar can take a hundred times as long. They are computed in a separate thread, and the
sequence skips forward passes until its mask is ready.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvboost_edge.engine.schedule.feature import Constraint, Lookahead
from kvboost_edge.errors import RequestError
from kvboost_edge.kernels.aot import compile_ahead
from kvboost_edge.kernels.bitmask import WORD_BITS, mask_logits, mask_logits_entry

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["GrammarConstraint", "first_line", "prepare_masks"]

Floats = npt.NDArray[np.float32]

# Limits on mask computation, in seconds of CPU time.
_SLOW_SECONDS = 0.004  # slower masks would delay the engine thread
_CHEAP_SECONDS = 0.001  # slower masks would take as long as a pass of a small draft model
# Tokens after a slow mask whose masks use a separate thread. Likewise, tokens after a mask of draft
# tokens that is not cheap, for which only the first draft token is masked.
_SLOW_TOKENS = 32
_TOKEN_SECONDS = 0.05  # average per token, after at least _MEASURED_TOKENS tokens
_TOTAL_SECONDS = 2.0  # total for all masks of a request, unless its grammar counts as slow
_MEASURED_TOKENS = 8
# Length of a forced text in tokens. If the model deviates from a longer one, forced tokens are no
# longer computed for the request.
_LONG_TEXT = 256


@functools.cache
def prepare_masks() -> None:
    """Compile the mask kernel in a separate process, unless its machine code is cached on disk.

    Raises:
        BackendUnavailable: The compilation failed. The message contains the compiler's error.
    """
    compile_ahead([mask_logits_entry], 1)


class GrammarConstraint(Constraint):
    """The grammar of one sequence, with its parser and the mask of allowed tokens.

    Args:
        matcher: The llguidance parser.
        room: float32 [vocab_size], the buffer that `masked` writes to. All grammars of an engine
            share it.
        submit: Function that runs another function in a thread for slow masks. With None, masks are
            computed in the caller's thread.
        is_slow: True if all masks but the first count as slow. Their time in total is not limited.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        room: Floats,
        submit: Callable[[Callable[[], None]], Future[None]] | None = None,
        *,
        is_slow: bool = False,
    ) -> None:
        self._matcher = matcher
        self._room = room
        self._submit = submit
        self._is_slow = is_slow
        self._words = np.empty(-(-len(room) // WORD_BITS), np.int32)
        self._forced: list[int] = []
        self._asks = True
        self._slow_tokens = self._first_only_tokens = 0
        self._is_cheap = True
        self._seconds = 0.0
        self._num_tokens = 0
        self._pending: Future[None] | None = None
        self._find()

    @property
    def is_ready(self) -> bool:
        """True if the next mask is ready, or fast enough to compute on demand."""
        return self._pending is None or self._pending.done()

    def masked(self, logits: Floats) -> Floats:
        """Return a copy of logits [vocab_size] with disallowed tokens set to -inf.

        The result is valid until the next call.
        """
        self._settle()
        if not self._is_found:
            self._find()
        mask_logits(self._words, logits, self._room)
        return self._room

    def constrain(self, logits: Floats, largest: int | None) -> tuple[Floats, int | None]:
        """Return the masked logits. The second value is None because their maximum is unknown."""
        return self.masked(logits), None

    def advance(self, token_id: int) -> bool:
        """Accept the chosen token and return whether the output must end after it."""
        began = time.thread_time()
        if not self._matcher.consume_token(token_id):
            self._check()
        self._seconds += time.thread_time() - began
        self._num_tokens += 1
        self._first_only_tokens = max(0, self._first_only_tokens - 1)
        self._is_found = False
        if self._forced and self._forced[0] != token_id:
            self._asks = len(self._forced) <= _LONG_TEXT
            self._forced = []
        self._forced = self._forced[1:]
        is_stopped = self._matcher.is_stopped()
        if self._expects_slow and self._submit is not None and not is_stopped:
            self._pending = self._submit(self._find)
        return is_stopped

    def forced(self) -> list[int]:
        """Return the tokens that must follow.

        The list is empty if the forced text has several tokenizations. It is also empty after a
        mask failed, in which case the next call of `masked` raises the error.
        """
        if self._pending is not None and self._pending.exception() is not None:
            return []
        if not self._forced and self._asks and not self._matcher.is_stopped():
            self._forced = list(self._matcher.compute_ff_tokens())
        return self._forced

    def lookahead(self) -> Lookahead:
        """Return the grammar for the next draft tokens.

        It allows all tokens after a mask failed, in which case the next call of `masked` raises the
        error.
        """
        if self._pending is not None and self._pending.exception() is not None:
            return Lookahead()
        if not self._is_found:
            try:
                self._find()
            except RequestError:
                return Lookahead()
        follows = self._is_cheap and not (self._expects_slow or self._first_only_tokens)
        return _GrammarLookahead(
            self._matcher, self._words, self._room, self._stop_following, follows=follows
        )

    @property
    def _expects_slow(self) -> bool:
        """True if the next masks are expected to be slow."""
        return self._is_slow or self._slow_tokens > 0

    def _stop_following(self) -> None:
        """Mask only the first draft token for some time."""
        self._first_only_tokens = _SLOW_TOKENS

    def _settle(self) -> None:
        """Wait for a mask that another thread computes, and raise the error if it failed."""
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
        self._is_cheap = seconds <= _CHEAP_SECONDS
        self._slow_tokens = (
            _SLOW_TOKENS if seconds > _SLOW_SECONDS else max(0, self._slow_tokens - 1)
        )
        self._check_time()
        self._is_found = True

    def _check_time(self) -> None:
        """Check the time spent on masks so far.

        Raises:
            RequestError: The masks took too long.
        """
        each = self._seconds / max(self._num_tokens, _MEASURED_TOKENS)
        taken = f"its masks took {self._seconds:.2f} s for {self._num_tokens} tokens"
        most = f"{1e3 * _TOKEN_SECONDS:.0f} ms per token"
        if self._is_slow:
            if each > _TOKEN_SECONDS:
                raise RequestError(
                    f"the grammar is too slow: {taken}; at most {most} are allowed. Exclude from "
                    "each repetition the characters that may follow it, and make fewer rules match "
                    "the same text"
                )
        elif self._seconds > _TOTAL_SECONDS or each > _TOKEN_SECONDS:
            raise RequestError(
                f"the grammar is too ambiguous: {taken}; at most {_TOTAL_SECONDS:g} s in total and "
                f"{most} are allowed. Make fewer rules match the same text"
            )

    def _check(self) -> None:
        """Check the parser.

        Raises:
            RequestError: The parser failed.
        """
        if self._matcher.is_error():
            raise RequestError(
                f"the grammar's parser failed: {first_line(self._matcher.get_error())}"
            )


class _GrammarLookahead(Lookahead):
    """The grammar of one sequence after draft tokens.

    It reads the next token's mask, which the sequence needs as well. Masks of later tokens come
    from a copy of the parser, which can fail or reach its limits without ending the request. They
    delay the engine thread, so later tokens are no longer masked once the copy takes too long.

    Args:
        matcher: The sequence's parser.
        words: The next token's mask.
        room: The buffer that `masked` writes to.
        on_slow: Function to call if the copy takes too long.
        follows: False if later tokens are not masked, because their masks would take too long.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        words: npt.NDArray[np.int32],
        room: Floats,
        on_slow: Callable[[], None],
        *,
        follows: bool,
    ) -> None:
        self._matcher = matcher
        self._copy: LLMatcher | None = None
        self._words = words
        self._room = room
        self._on_slow = on_slow
        self._follows = follows
        self._is_masked = self._is_found = True

    def masked(self, logits: Floats) -> Floats:
        if self._copy is not None and self._is_masked and not self._is_found:
            with self._timed():
                self._copy.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
            self._is_found = True
            self._is_masked = not self._copy.is_error()
        if not self._is_masked:
            return logits
        mask_logits(self._words, logits, self._room)
        return self._room

    def advance(self, token_id: int) -> bool:
        self._is_masked = self._is_masked and self._follows
        if not self._is_masked:
            return False
        with self._timed():
            if self._copy is None:
                self._copy = self._matcher.deep_copy()
                self._words = np.empty_like(self._words)
            self._copy.consume_token(token_id)
        is_valid = not self._copy.is_error()
        self._is_masked = is_valid and self._follows
        self._is_found = False
        return is_valid and self._copy.is_stopped()

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        if not self._follows:
            first = token_ids[0]
            is_allowed = self._words[first // WORD_BITS] >> (first % WORD_BITS) & 1
            return len(token_ids) if is_allowed else 0
        with self._timed():
            copy = self._matcher.deep_copy()
            count = copy.validate_tokens(list(token_ids))
        return len(token_ids) if copy.is_error() else count

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        """Mask no later tokens if the copy takes too long."""
        began = time.thread_time()
        yield
        if time.thread_time() - began > _CHEAP_SECONDS:
            self._follows = False
            self._on_slow()


def first_line(text: str) -> str:
    """Return the first non-empty line of an error message, cut to 500 characters."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")[
        :500
    ]
