"""The output of a running sequence, with text, logits, log probabilities and times."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvboost_edge.engine.request.request import Request
from kvboost_edge.engine.request.results import TokenLogprobs
from kvboost_edge.engine.samplers.sampling import token_logprobs
from kvboost_edge.engine.schedule.feature import SequenceFeatures
from kvboost_edge.text.detokenizer import IncrementalDetokenizer
from kvboost_edge.text.line_limits import LineLimits
from kvboost_edge.text.stop_strings import StopChecker

if TYPE_CHECKING:
    from kvboost_edge.text.tokenizer import Tokenizer

__all__ = ["OutputText", "PhaseMarks", "TokenScores"]

Floats = npt.NDArray[np.float32]


class OutputText:
    """The output text of a sequence, up to the part that can no longer change."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self._stop_ids = request.stop_ids
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        params = request.params
        self._stops = StopChecker(params.stop, included=params.include_stop_str_in_output)
        self._shows_stop_token = params.include_stop_str_in_output
        self._lines = LineLimits(params.min_indent, params.max_decode_ms)
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def push(self, token_id: int, *, is_whole: bool, is_last: bool) -> tuple[str, str | None]:
        """Append a token and return the text that it completes.

        Args:
            is_whole: whether the token completes the output, so that nothing can follow it.
            is_last: whether the token is the last one that the request allows.

        Returns:
            The text, and the finish reason "stop", "length" or None.
        """
        text, reason = self._read(token_id, is_whole, is_last)
        text, ended = self._lines.push(text)
        self._pieces.append(text)
        return text, "length" if ended and reason is None else reason

    def _read(self, token_id: int, is_whole: bool, is_last: bool) -> tuple[str, str | None]:
        self._num_tokens += 1
        if token_id in self._stop_ids:
            shown = self._detokenizer.push(token_id) if self._shows_stop_token else ""
            text, stopped = self._stops.push(shown + self._detokenizer.flush())
            return (text if stopped else text + self._stops.flush()), "stop"
        counts = self._num_tokens > self._min_tokens
        text, stopped = self._stops.push(self._detokenizer.push(token_id), counts=counts)
        if stopped:
            return text, "stop"
        if not is_last and not is_whole:
            return text, None
        rest, stopped = self._stops.push(self._detokenizer.flush(), counts=counts)
        if stopped:
            return text + rest, "stop"
        return text + rest + self._stops.flush(), "stop" if is_whole else "length"


class TokenScores:
    """Logits and log probabilities that a request asked for.

    Attributes:
        logits: arrays of float32 [num_rows, vocab_size] for a logits request.
    """

    def __init__(self, request: Request) -> None:
        self.logits: list[Floats] = []
        self._request = request
        self._chosen: list[TokenLogprobs] = []
        self._prompt: list[TokenLogprobs | None] = [None]

    @property
    def chosen(self) -> tuple[TokenLogprobs, ...] | None:
        """Log probabilities of the output tokens, or None if not requested."""
        return None if self._request.params.logprobs is None else tuple(self._chosen)

    @property
    def prompt(self) -> tuple[TokenLogprobs | None, ...] | None:
        """Log probabilities of the prompt tokens, or None if not requested."""
        return None if self._request.params.prompt_logprobs is None else tuple(self._prompt)

    @property
    def prompt_logits_from(self) -> int | None:
        """Index of the first prompt token whose logits are still needed, or None."""
        known = len(self._prompt)
        return known - 1 if known < self._request.num_prompt_tokens else None

    def keep_logits(self, first: int, rows: Floats) -> None:
        """Store the rows of logits that the request wants.

        Args:
            first: position of the first row. The following rows are at consecutive positions.
        """
        if self._request.logits_start is not None:
            wanted = rows[max(0, self._request.logits_start - first) :]
            if len(wanted):
                self.logits.append(wanted.copy())

    def read_prompt(self, first: int, logits: Floats) -> bool:
        """Compute log probabilities of prompt tokens and return whether the prompt is complete.

        Args:
            first: position of the first row.
            logits: [num_tokens, vocab_size]. Each row predicts the token after its position.
        """
        count = self._request.params.prompt_logprobs
        if count is None:
            return False
        known = self._prompt
        prompt = self._request.prompt_ids
        for row in logits[len(known) - 1 - first :]:
            if len(known) == len(prompt):
                break
            known.append(token_logprobs(row, prompt[len(known)], count))
        return len(known) == len(prompt)

    def note_chosen(self, logits: Floats, token_id: int) -> TokenLogprobs | None:
        """Store and return the log probabilities of a chosen token, or None if not requested."""
        count = self._request.params.logprobs
        if count is None:
            return None
        logprobs = token_logprobs(logits, token_id, count)
        self._chosen.append(logprobs)
        return logprobs


class PhaseMarks:
    """Timestamps of a request's phases, in seconds of `time.perf_counter`."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self.looked_up_at: float | None = None
        self.admitted_at: float | None = None
        self.token_times: list[float] = []
        self._step_seconds = 0.0
        self._own_seconds = 0.0

    def took_part(self, seconds: float, share: float) -> None:
        """Record a step that computed some of the request's tokens.

        Args:
            seconds: duration of the step.
            share: the request's share of the step's tokens, in (0, 1].
        """
        self._step_seconds += seconds
        self._own_seconds += seconds * share

    @property
    def step_share(self) -> float:
        """Mean share of the tokens in the request's steps, weighted by step time. Initially 0."""
        return self._own_seconds / self._step_seconds if self._step_seconds else 0.0

    def phases(self, now: float, features: SequenceFeatures) -> dict[str, float]:
        """Return the duration of each phase in milliseconds.

        A phase that was not reached has duration 0.
        """
        request = self._request
        spans = features.spans
        load_seconds = features.restored.seconds
        looked_up = self.looked_up_at
        admitted = self.admitted_at
        first = self.token_times[0] if self.token_times else now
        let_in = first if admitted is None else admitted
        looked = let_in if admitted is None or looked_up is None else looked_up
        probed = let_in + spans.probe_seconds
        whole = min(max(spans.recomputed_at or probed, probed), max(first, probed))
        return {
            "tokenize": (request.tokenized_at - request.entered_at) * 1e3,
            "queue": (looked - request.tokenized_at - load_seconds) * 1e3,
            "lookup": (let_in - looked) * 1e3,
            "load": load_seconds * 1e3,
            "probe": spans.probe_seconds * 1e3,
            "repair": (whole - probed) * 1e3,
            "prefill": (first - whole) * 1e3,
            "decode": (now - first) * 1e3,
        }
