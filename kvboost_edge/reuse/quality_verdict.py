"""Quality gate of non-prefix KV reuse: the test text, the measure, its bound and stored verdicts.

A single request does not show whether reuse harms its answer. The gate therefore tests a model on
text that is short enough to be computed in full. The bound is the model's own sensitivity to the
order of the documents, which should not affect the answer either. This module handles only numbers,
and callers run the model.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvboost_edge.host.file_memo import FileStamp, recall, remember
from kvboost_edge.reuse.builtin_texts import INTRODUCTION, PASSAGES, QUESTIONS, TEXT_ENDING
from kvboost_edge.reuse.recompute import Repair

__all__ = [
    "ANSWER_TOKENS",
    "Comparison",
    "QualityPrompts",
    "Verdict",
    "compare",
    "kl_divergence",
    "log_softmax",
    "make_material",
    "outcome_stamp",
    "read",
    "write",
]

ANSWER_TOKENS = 16  # maximum number of tokens in an answer
_VERSION = 1  # increment to invalidate stored verdicts when the text, measure or bound changes
_NEGLIGIBLE = 1e-3  # in nats. Kernels that round differently are about 2e-4 apart.
_LEAST_DOCUMENTS = 3

Floats = npt.NDArray[np.float32]


class QualityPrompts(NamedTuple):
    """Token ids of the test prompts.

    Each prompt consists of the introduction, all documents and one question.
    """

    introduction: tuple[int, ...]
    documents: tuple[tuple[int, ...], ...]
    questions: tuple[tuple[int, ...], ...]

    def prompts(self, *, reordered: bool = False) -> list[list[int]]:
        """Return one prompt per question.

        If `reordered` is true, every document follows a different one than in the original order.
        """
        documents = (*self.documents[1::2], *self.documents[::2]) if reordered else self.documents
        head = [*self.introduction, *(token for document in documents for token in document)]
        return [[*head, *question] for question in self.questions]


def make_material(
    encode: Callable[[str], Sequence[int]],
    before: Sequence[int],
    after: Sequence[int] | None,
    *,
    most_tokens: int,
    least_tokens: int,
) -> QualityPrompts | None:
    """Return the test material for a tokenizer, or None if fewer than three documents fit.

    The material has as many documents as possible, at most one per built-in passage.

    Args:
        encode: function that returns the token ids of a text, without special tokens.
        before: tokens at the beginning of a chat.
        after: tokens between a question and its answer. None means plain text completion without a
            chat.
        most_tokens: maximum number of tokens in a prompt and its answer.
        least_tokens: minimum number of tokens in a document.
    """
    introduction = (*before, *encode(INTRODUCTION))
    passages = [tuple(encode(passage)) for passage in PASSAGES]
    endings = encode(TEXT_ENDING) if after is None else after
    questions = tuple((*encode(question), *endings) for question in QUESTIONS)
    room = most_tokens - len(introduction) - max(map(len, questions)) - ANSWER_TOKENS
    for count in range(len(passages), _LEAST_DOCUMENTS - 1, -1):
        ends = [len(passages) * i // count for i in range(count + 1)]
        joined = [sum(passages[first:end], ()) for first, end in itertools.pairwise(ends)]
        documents = tuple(document[: max(0, room // count)] for document in joined)
        if min(map(len, documents)) >= least_tokens:
            return QualityPrompts(introduction, documents, questions)
    return None


class Comparison(NamedTuple):
    """Comparison of next-token distributions with those of a full computation.

    Attributes:
        kl: sum of KL(full || other) over all tokens, in nats.
        num_agreed: number of tokens for which both have the same most likely token.
        num_tokens: number of tokens compared.
    """

    kl: float = 0.0
    num_agreed: int = 0
    num_tokens: int = 0

    def __add__(self, other: Any) -> Comparison:
        return Comparison(*(one + two for one, two in zip(self, other, strict=True)))

    @property
    def mean_kl(self) -> float:
        return self.kl / max(1, self.num_tokens)

    @property
    def agreement(self) -> float:
        return self.num_agreed / max(1, self.num_tokens)


def compare(full: Floats, other: Floats) -> Comparison:
    """Compare the logits of a full computation with others, float32 [num_tokens, vocab_size]."""
    kl = 0.0
    for p, q in zip(full, other, strict=True):
        p_logs = log_softmax(p)
        q_logs = log_softmax(q)
        kl += kl_divergence(p_logs, q_logs)
    return Comparison(kl, int(np.sum(full.argmax(axis=1) == other.argmax(axis=1))), len(full))


def kl_divergence(p_logs: npt.NDArray[np.float64], q_logs: npt.NDArray[np.float64]) -> float:
    """Return KL(p || q) in nats from log probabilities, float64 [vocab_size].

    It is infinite if a token is possible in p and impossible in q, or if an input is NaN.
    """
    possible = p_logs != -np.inf  # an impossible token contributes 0
    p_logs = p_logs[possible]
    kl = float(np.sum(np.exp(p_logs) * (p_logs - q_logs[possible])))
    # Rounding can make the sum of equal distributions slightly negative.
    return np.inf if np.isnan(kl) else max(0.0, kl)


def log_softmax(row: Floats) -> npt.NDArray[np.float64]:
    """Return the log probabilities of a row of logits, float64 [vocab_size]."""
    wide = row.astype(np.float64)
    wide -= wide.max()
    return np.asarray(wide - np.log(np.exp(wide).sum()), np.float64)


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """Result of the quality test, averaged over the tokens of all answers.

    Attributes:
        kl_reuse: KL(full || reuse), in nats.
        kl_order: KL(full || full computation with reordered documents), in nats.
        agreement: fraction of tokens for which reuse and full computation have the same most likely
            token.
        num_tokens: number of tokens compared.
        reused_share: fraction of the prompt tokens that were reused at other positions.
    """

    kl_reuse: float
    kl_order: float
    agreement: float
    num_tokens: int
    reused_share: float

    @property
    def passed(self) -> bool:
        """True if reuse changes answers no more than reordering does, or by a negligible amount."""
        return self.kl_reuse <= self.bound

    @property
    def bound(self) -> float:
        """Maximum KL(full || reuse) that passes, in nats."""
        return max(self.kl_order, _NEGLIGIBLE)

    def __str__(self) -> str:
        return (
            f"KL(full || reuse) {self.kl_reuse:.3g} nats, KL(full || other document order) "
            f"{self.kl_order:.3g} nats, {self.agreement:.0%} of {self.num_tokens} tokens agree, "
            f"{self.reused_share:.0%} of the prompts reused"
        )


def outcome_stamp(
    model: bytes, repair: Repair, lead: Sequence[int], material: QualityPrompts
) -> FileStamp:
    """Return the file memo key of a verdict, which covers everything the verdict depends on.

    Args:
        model: digest of the model, numerics and KV format.
        repair: recompute settings.
        lead: tokens that precede the documents when they are computed.
        material: the test material.
    """
    repaired = [str(repair.strategy), repair.num_boundary_tokens, repair.block_ratio or 0]
    text = json.dumps([_VERSION, model.hex(), repaired, list(lead), material])
    return FileStamp(f"reuse gate {hashlib.sha256(text.encode()).hexdigest()}", 0, 0, 0, 0)


def read(stamp: FileStamp, cache_dir: Path | None = None) -> Verdict | None:
    """Return the stored verdict for a key, or None if it is not stored."""
    facts = recall(stamp, cache_dir)
    try:
        return Verdict(**{field.name: facts[field.name] for field in dataclasses.fields(Verdict)})
    except KeyError:
        return None


def write(stamp: FileStamp, verdict: Verdict, cache_dir: Path | None = None) -> None:
    """Store a verdict in the cache directory, if the directory is writable."""
    remember(stamp, dataclasses.asdict(verdict), cache_dir)
