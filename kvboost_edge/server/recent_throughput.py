"""Token throughput and sources of prompt tokens over the last minute."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvboost_edge.engine.request.results import GenerationResult

__all__ = ["Speeds"]

# Keep one sum per second, which bounds the memory for any number of requests.
_WINDOW_SECONDS = 60


@dataclasses.dataclass(slots=True)
class _Sums:
    """Sums over the requests that ended within the same second.

    Attributes:
        second: the second, on the monotonic clock.
        hit_tokens: prompt tokens found in the cache, by tier.
        span_tokens: prompt tokens reused at other positions.
        prompt_tokens: computed prompt tokens.
        prompt_seconds: time spent on prompts.
        output_tokens: generated tokens.
        output_seconds: time spent on outputs.
    """

    second: int
    hit_tokens: Counter[str] = dataclasses.field(default_factory=Counter)
    span_tokens: int = 0
    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    output_tokens: int = 0
    output_seconds: float = 0.0


class Speeds:
    """Token totals as in llama.cpp, and mean speeds over the last minute.

    As in llama.cpp, the totals count only computed prompt tokens.
    """

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.prompt_seconds = 0.0
        self.output_tokens = 0
        self.output_seconds = 0.0
        self._lock = threading.Lock()
        self._recent: deque[_Sums] = deque()  # sums by second, oldest first

    def observe(self, result: GenerationResult) -> None:
        """Count a finished sequence."""
        with self._lock:
            second = self._forget_old()
            if not self._recent or self._recent[-1].second != second:
                self._recent.append(_Sums(second))
            for sums in (self, self._recent[-1]):
                sums.prompt_tokens += result.computed_prompt_tokens
                sums.prompt_seconds += result.prompt_ms / 1e3
                sums.output_tokens += result.generated_tokens
                sums.output_seconds += result.decode_ms / 1e3
            self._recent[-1].hit_tokens.update(result.hit_tokens)
            self._recent[-1].span_tokens += result.reused_span_tokens

    def recent(self) -> tuple[float, float]:
        """Return prompt and output tokens per second of the requests that ended in the last minute.

        A speed is 0 if no request ended.
        """
        with self._lock:
            self._forget_old()
            prompt_tokens = sum(sums.prompt_tokens for sums in self._recent)
            prompt_seconds = sum(sums.prompt_seconds for sums in self._recent)
            output_tokens = sum(sums.output_tokens for sums in self._recent)
            output_seconds = sum(sums.output_seconds for sums in self._recent)
        return (
            prompt_tokens / prompt_seconds if prompt_seconds else 0.0,
            output_tokens / output_seconds if output_seconds else 0.0,
        )

    def recent_prompts(self) -> tuple[Mapping[str, int], int, int]:
        """Return the prompt tokens of the last minute: hits by tier, reused at other positions, and
        computed.
        """
        with self._lock:
            self._forget_old()
            hits = sum((sums.hit_tokens for sums in self._recent), Counter[str]())
            spans = sum(sums.span_tokens for sums in self._recent)
            return hits, spans, sum(sums.prompt_tokens for sums in self._recent)

    def _forget_old(self) -> int:
        """Drop the sums that are older than a minute, and return the current second."""
        second = int(time.monotonic())
        while self._recent and self._recent[0].second <= second - _WINDOW_SECONDS:
            self._recent.popleft()
        return second
