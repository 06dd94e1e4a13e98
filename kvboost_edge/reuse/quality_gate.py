"""Whether reuse at other positions is good enough for a model: its text, its measure, its bound,
and where the outcome is kept. Of plain numbers; who runs the model is above.

No sign during a request tells a harmless reuse from a harmful one. What can be known is how a model
takes reuse on text whose full computation is affordable; and the bound is the model's own: putting
the same documents into another order, which nobody would call wrong, moves its answers too.
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
    "Material",
    "Verdict",
    "compare",
    "log_softmax",
    "make_material",
    "outcome_stamp",
    "read",
    "write",
]

ANSWER_TOKENS = 16  # of each answer, at most
_VERSION = 1  # of text, measure and bound: with any of them changed, older outcomes count no more
_NEGLIGIBLE = 1e-3  # nats; kernels with other rounding differ by some 2e-4
_LEAST_DOCUMENTS = 3

Floats = npt.NDArray[np.float32]


class Material(NamedTuple):
    """Token ids of the test: each prompt is the introduction, all documents, a question."""

    introduction: tuple[int, ...]
    documents: tuple[tuple[int, ...], ...]
    questions: tuple[tuple[int, ...], ...]

    def prompts(self, *, reordered: bool = False) -> list[list[int]]:
        """One for each question; `reordered`: no document behind the one it was behind."""
        documents = (*self.documents[1::2], *self.documents[::2]) if reordered else self.documents
        head = [*self.introduction, *(token for document in documents for token in document)]
        return [[*head, *question] for question in self.questions]


def make_material(
    encode: Callable[[str], Sequence[int]],
    before: Sequence[int],
    behind: Sequence[int] | None,
    *,
    most_tokens: int,
    least_tokens: int,
) -> Material | None:
    """The test for a tokenizer, from the built-in text: prompts of `most_tokens` with their answers
    at most, of documents that have `least_tokens` at least, as many as there are passages where
    that is possible. None where there cannot be three.

    Args:
        encode: token ids of a text, without special tokens.
        before, behind: what a chat begins with, and what stands between a question and its answer;
            behind None: no chat, a text to go on with.
    """
    introduction = (*before, *encode(INTRODUCTION))
    passages = [tuple(encode(passage)) for passage in PASSAGES]
    endings = encode(TEXT_ENDING) if behind is None else behind
    questions = tuple((*encode(question), *endings) for question in QUESTIONS)
    room = most_tokens - len(introduction) - max(map(len, questions)) - ANSWER_TOKENS
    for count in range(len(passages), _LEAST_DOCUMENTS - 1, -1):
        ends = [len(passages) * i // count for i in range(count + 1)]
        joined = [sum(passages[first:end], ()) for first, end in itertools.pairwise(ends)]
        documents = tuple(document[: max(0, room // count)] for document in joined)
        if min(map(len, documents)) >= least_tokens:
            return Material(introduction, documents, questions)
    return None


class Comparison(NamedTuple):
    """Distributions of the next token against those of the full computation: the sum of KL(full ||
    other) in nats, how often both find the same token the most likely, and over how many tokens.
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
    """Of logits float32 [num_tokens, vocab_size]."""
    kl = 0.0
    for p, q in zip(full, other, strict=True):
        p_logs = log_softmax(p)
        q_logs = log_softmax(q)
        kl += max(0.0, float(np.sum(np.exp(p_logs) * (p_logs - q_logs))))
    return Comparison(kl, int(np.sum(full.argmax(axis=1) == other.argmax(axis=1))), len(full))


def log_softmax(row: Floats) -> npt.NDArray[np.float64]:
    """Natural-log probabilities [vocab_size] of logits."""
    wide = row.astype(np.float64)
    wide -= wide.max()
    return np.asarray(wide - np.log(np.exp(wide).sum()), np.float64)


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """What the test found, means over the tokens of the answers.

    Attributes:
        kl_reuse: KL(full || reuse) in nats.
        kl_order: KL(full || the documents in another order, computed in full).
        agreement: share of tokens where reuse and full computation find the same one the most
            likely.
        num_tokens: over how many.
        reused_share: of the prompts' tokens, that was shared at other positions.
    """

    kl_reuse: float
    kl_order: float
    agreement: float
    num_tokens: int
    reused_share: float

    @property
    def passed(self) -> bool:
        """Whether reuse moves answers no more than another order does, or not to speak of."""
        return self.kl_reuse <= self.bound

    @property
    def bound(self) -> float:
        """The most KL(full || reuse) may be."""
        return max(self.kl_order, _NEGLIGIBLE)

    def __str__(self) -> str:
        return (
            f"KL(full || reuse) {self.kl_reuse:.3g} nats, KL(full || other document order) "
            f"{self.kl_order:.3g} nats, {self.agreement:.0%} of {self.num_tokens} tokens agree, "
            f"{self.reused_share:.0%} of the prompts reused"
        )


def outcome_stamp(
    model: bytes, repair: Repair, lead: Sequence[int], material: Material
) -> FileStamp:
    """What an outcome depends on, as the memo of files wants it.

    Args:
        model: digest of model, numerics and KV format.
        lead: what the documents are computed behind.
    """
    repaired = [str(repair.strategy), repair.num_seam_tokens, repair.block_ratio or 0]
    text = json.dumps([_VERSION, model.hex(), repaired, list(lead), material])
    return FileStamp(f"reuse gate {hashlib.sha256(text.encode()).hexdigest()}", 0, 0, 0, 0)


def read(stamp: FileStamp, cache_dir: Path | None = None) -> Verdict | None:
    """A kept outcome; None where there is none."""
    facts = recall(stamp, cache_dir)
    try:
        return Verdict(**{field.name: facts[field.name] for field in dataclasses.fields(Verdict)})
    except KeyError:
        return None


def write(stamp: FileStamp, verdict: Verdict, cache_dir: Path | None = None) -> None:
    """Keep an outcome in the cache directory, where that can be written."""
    remember(stamp, dataclasses.asdict(verdict), cache_dir)
