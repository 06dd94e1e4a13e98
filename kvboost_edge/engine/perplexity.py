"""Perplexity of a model on a text, and its change under other weights or cache settings."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvboost_edge.errors import ConfigError, RequestError
from kvboost_edge.reuse.quality_verdict import kl_divergence, log_softmax

if TYPE_CHECKING:
    from kvboost_edge.engine.engine import CPUPagedEngine

__all__ = ["MIN_WINDOW", "Difference", "TextScore", "score_text"]

Floats = npt.NDArray[np.float32]
MIN_WINDOW = 4  # number of tokens in a window, without leading special tokens
_ROWS = 64  # rows of logits held at a time, tens of MB with a large vocabulary


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """A comparison of a second engine with the first, over all scored tokens.

    Attributes:
        perplexity: perplexity of the second engine.
        mean_kl: mean KL(first || second), in nats.
        max_kl: largest KL(first || second), in nats.
        top1_agreement: share of tokens for which both engines have the same most likely token.
    """

    perplexity: float
    mean_kl: float
    max_kl: float
    top1_agreement: float


@dataclasses.dataclass(frozen=True, slots=True)
class TextScore:
    """The score of a text.

    Attributes:
        tokens: number of tokens in the text.
        scored_tokens: number of tokens that were predicted. Each prediction sees at least half a
            window of earlier tokens of the text, or all if there are fewer.
        window: window size in tokens.
        perplexity: exp(mean negative log-likelihood) of the scored tokens.
        difference: comparison with a second engine, or None.
    """

    tokens: int
    scored_tokens: int
    window: int
    perplexity: float
    difference: Difference | None = None


def score_text(
    engine: CPUPagedEngine,
    token_ids: Sequence[int],
    *,
    window: int = 512,
    num_leading: int = 0,
    against: CPUPagedEngine | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> TextScore:
    """Compute the perplexity of a text with a sliding window.

    The window moves by half its size. Each token after the first and after the leading ones is
    scored once.

    Args:
        window: window size in tokens.
        num_leading: number of leading special tokens of the text, such as BOS. Each window begins
            with them, because many models predict badly without them.
        against: second engine to compare with.
        progress: called with (tokens scored, tokens to score).

    Raises:
        ConfigError: `window` is out of range.
        RequestError: the text has no token to score, or the vocabularies differ.
    """
    _check(engine, token_ids, window, num_leading, against)
    total = len(token_ids) - max(1, num_leading)
    nll = 0.0
    other_nll = 0.0
    kl_sum = 0.0
    kl_max = 0.0
    agreed = 0
    done = 0
    for ids, start in _pieces(token_ids, window, num_leading):
        rows = engine.logits(ids[:-1], start)
        others = None if against is None else against.logits(ids[:-1], start)
        for i, row in enumerate(rows):
            target = ids[start + 1 + i]
            logs = log_softmax(row)
            nll -= float(logs[target])
            if others is not None:
                other = log_softmax(others[i])
                other_nll -= float(other[target])
                kl = kl_divergence(logs, other)
                kl_sum = kl_sum + kl
                kl_max = max(kl_max, kl)
                agreed += int(np.argmax(row) == np.argmax(others[i]))
            done += 1
        if progress is not None:
            progress(done, total)
    difference = None
    if against is not None:
        difference = Difference(math.exp(other_nll / done), kl_sum / done, kl_max, agreed / done)
    return TextScore(len(token_ids), done, window, math.exp(nll / done), difference)


def _pieces(
    token_ids: Sequence[int], window: int, num_leading: int
) -> Iterator[tuple[list[int], int]]:
    """Split the windows into pieces of at most `_ROWS` scored tokens.

    The pieces of a window share a prefix, which the engine caches.

    Yields:
        The piece's tokens from the start of its window, and the index of the first logits row to
            score. Row i predicts token i + 1.
    """
    lead = list(token_ids[:num_leading])
    room = window - num_leading
    first = num_leading
    scored = max(1, num_leading)
    while scored < len(token_ids):
        stop = min(first + room, len(token_ids))
        while scored < stop:
            piece = min(scored + _ROWS, stop)
            yield lead + list(token_ids[first:piece]), num_leading + scored - 1 - first
            scored = piece
        first = stop - room // 2


def _check(
    engine: CPUPagedEngine,
    token_ids: Sequence[int],
    window: int,
    num_leading: int,
    against: CPUPagedEngine | None,
) -> None:
    least = max(2, num_leading + 1)
    if len(token_ids) < least:
        raise RequestError(
            f"the text has {len(token_ids)} tokens; give at least {least}, because the first is "
            "not scored"
        )
    longest = min(e.runner_info.max_context for e in (engine, against) if e is not None)
    if window < (smallest := MIN_WINDOW + num_leading):
        raise ConfigError(f"window={window} is too small; give at least {smallest} tokens")
    if window > longest:
        raise ConfigError(
            f"window={window} exceeds the model's context; give at most {longest} tokens"
        )
    if against is not None and against.runner_info.vocab_size != engine.runner_info.vocab_size:
        raise RequestError(
            f"vocabularies of {engine.runner_info.vocab_size} and {against.runner_info.vocab_size} "
            "tokens cannot be compared; use two variants of the same model"
        )
