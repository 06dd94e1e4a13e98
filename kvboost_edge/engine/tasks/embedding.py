"""Embedding and reranking: prefill-only requests whose last hidden states are pooled."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvboost_edge.config import GenerationMode
from kvboost_edge.engine.build import EngineParts
from kvboost_edge.engine.handle import RequestHandle
from kvboost_edge.engine.request.prompts import Document
from kvboost_edge.engine.request.request import Request, RequestArrival, SamplingParams
from kvboost_edge.engine.request.terms import Terms
from kvboost_edge.engine.request_builder import RequestBuilder
from kvboost_edge.engine.schedule.sequence import Floats
from kvboost_edge.engine.tasks.calls import Calls
from kvboost_edge.errors import RequestError
from kvboost_edge.models.config.pooling import Pooling
from kvboost_edge.options import as_int

__all__ = ["Embedding", "Embeds"]

_LOG = logging.getLogger(__name__)

# The prompt that Qwen3-Reranker was trained on. Its common part is computed once.
_RERANK_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_RERANK_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
    'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
_RERANK_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class Embedding:
    """Embedding and reranking of one engine. Safe to use from any thread but the engine's."""

    def __init__(self, parts: EngineParts, builder: RequestBuilder, calls: Calls) -> None:
        self.pooling = parts.pooling
        self.size = len(parts.dense[-1]) if parts.dense else parts.runner.info.hidden_size
        self._parts = parts
        self._builder = builder
        self._calls = calls
        self._has_warned = False
        # Twice the requests that run at a time, so that a request always waits for a free slot.
        self._window = 2 * parts.max_num_seqs

    def embed(
        self, texts: Sequence[Document], dimensions: int | None, options: dict[str, Any]
    ) -> Floats:
        """Implement `Embeds.embed`."""
        if not self.size:
            name = self._parts.runner.info.name
            raise RequestError(
                f"runner {name!r} does not return hidden states for embeddings; use 'native'"
            )
        width = self.size if dimensions is None else as_int("dimensions", dimensions)
        if not 1 <= width <= self.size:
            raise RequestError(
                f"dimensions={dimensions!r} must be in 1..{self.size}, the length of a vector"
            )
        normalize = options.pop("normalize", True)
        if not isinstance(normalize, bool):
            raise RequestError(f"normalize={normalize!r} must be True or False")
        handles, terms = _terms_of(options)
        if not self.pooling.source:
            self._warn()
        starts_at_0 = self.pooling.kind == "mean"
        requests = [
            self._request(text, f"input {number}", terms, 0 if starts_at_0 else -1)
            for number, text in enumerate(_as_list("texts", texts))
        ]
        found = np.empty((len(requests), width), np.float32)
        for number, states in enumerate(self._calls.rows(requests, handles, self._window)):
            found[number] = _pooled(states, self._parts.dense, width, normalize)
        return found

    def rerank(self, query: str, documents: Sequence[str], options: dict[str, Any]) -> list[float]:
        """Implement `Embeds.rerank`."""
        yes, no = self._answer_ids()
        instruction = options.pop("instruction", _RERANK_INSTRUCTION)
        handles, terms = _terms_of(options)
        for name, text in (("query", query), ("instruction", instruction)):
            _check_text(name, text)
        requests = []
        for number, document in enumerate(_as_list("documents", documents)):
            _check_text(f"document {number}", document)
            content = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
            ids = self._parts.tokenizer.encode_framed(_RERANK_BEFORE, content, _RERANK_AFTER)
            requests.append(self._request(ids, f"document {number}", terms, -1, wants_states=False))
        rows = self._calls.rows(requests, handles, self._window)
        return [_share_of_yes(logits[-1, yes], logits[-1, no]) for logits in rows]

    def _answer_ids(self) -> tuple[int, int]:
        """Return the ids of "yes" and "no"; raise RequestError if the model cannot rerank."""
        if self.pooling.source:
            raise RequestError(
                f"the model makes embeddings ({self.pooling.source} says so) and cannot rerank; "
                "serve a reranker such as Qwen3-Reranker, or compare embeddings"
            )
        tokenizer = self._parts.tokenizer
        found = {
            text: tokenizer.encode(text, False)
            for text in ("yes", "no", "<|im_start|>", "<|im_end|>")
        }
        for text, ids in found.items():
            if len(ids) != 1:
                raise RequestError(
                    f"reranking needs {text!r} as a single token, as in Qwen3-Reranker's prompt; "
                    "other rerankers are not supported"
                )
        return found["yes"][0], found["no"][0]

    def _request(
        self, text: Document, name: str, terms: Terms, start: int, *, wants_states: bool = True
    ) -> Request:
        """Return a request for the rows from token `start` on; -1 for the last row.

        Errors begin with `name`.
        """
        entry = RequestArrival(time.perf_counter(), prompt_text="")
        try:
            ids = self._builder.token_ids(text, terms)
            return self._builder.make(
                ids,
                terms,
                SamplingParams(seed=0),
                entry=entry,
                logits_start=start % len(ids),
                wants_states=wants_states,
            )
        except RequestError as error:
            raise RequestError(f"{name}: {error}") from error

    def _warn(self) -> None:
        """Log a warning once per engine."""
        if not self._has_warned:
            self._has_warned = True
            _LOG.warning(
                "the model's files name no pooling: embeddings are the hidden state of the last "
                "token (pooling 'last'), which is poor for a model that was not trained for it"
            )


class Embeds:
    """Embedding and reranking methods of an engine."""

    _embedding: Embedding

    @property
    def pooling(self) -> Pooling:
        """The model's pooling; its `source` is "" for a model that generates text."""
        return self._embedding.pooling

    @property
    def embedding_size(self) -> int:
        """Length of an embedding; 0 if the runner returns no hidden states."""
        return self._embedding.size

    def embed(
        self, texts: Sequence[Document], dimensions: int | None = None, **options: Any
    ) -> Floats:
        """Return unit vectors of texts, float32 [len(texts), dimensions].

        The tokenizer adds its special tokens to texts, such as an embedding model's end of text. A
        model without embedding training returns the state of the last token and logs a warning.

        Args:
            texts: Texts, or lists of token ids, which are used unchanged.
            dimensions: Leading numbers of each vector to return, for models trained for that
                (Matryoshka); None for all, `embedding_size`.
            **options: `normalize=False` keeps the vectors' lengths. `handles`, a list, receives the
                requests' handles, for cancelling. All others are fields of `Terms`.

        Raises:
            RequestError: An input or an option is invalid; the message names it.
        """
        return self._embedding.embed(texts, dimensions, options)

    def rerank(self, query: str, documents: Sequence[str], **options: Any) -> list[float]:
        """Return how well each document answers the query, in [0, 1].

        The score is the probability of "yes" against "no" for Qwen3-Reranker's prompt.

        Args:
            query: The question.
            documents: The texts to judge.
            **options: `instruction` describes the task. `handles` and the fields of `Terms` as in
                `embed`.
        """
        return self._embedding.rerank(query, documents, options)


def _terms_of(options: dict[str, Any]) -> tuple[list[RequestHandle], Terms]:
    """Split the handles list and `Terms` from the options; raise RequestError for unknown ones."""
    handles = options.pop("handles", None)
    terms = Terms.taken_from(options)
    for name in sorted(options):
        raise RequestError(f"unknown option {name!r}")
    if terms.mode is GenerationMode.CHUNK_KV_REUSE:
        raise RequestError(
            "mode='chunk_kv_reuse' is approximate, and embeddings and scores are exact; use "
            "'prefix_cache'"
        )
    return [] if handles is None else handles, terms


def _as_list(name: str, items: Any) -> list[Any]:
    if isinstance(items, (str, bytes)) or not isinstance(items, Sequence):
        raise RequestError(f"{name} must be a list, not {type(items).__name__}")
    return list(items)


def _check_text(name: str, text: object) -> None:
    if not isinstance(text, str) or not text:
        raise RequestError(f"{name} must be a non-empty string")


def _pooled(states: Floats, dense: Sequence[Floats], width: int, normalize: bool) -> Floats:
    """Pool hidden states into one float32 vector of `width` numbers.

    Args:
        states: float32 [num_tokens, hidden_size]. Their mean is pooled; a single row is used as is.
        dense: Matrices to multiply the mean with, first to last.
        width: Leading numbers to return.
        normalize: Whether to scale the vector to length 1.
    """
    # In float64, row after row: the mean does not depend on how the rows arrived. Each text has its
    # own matrix products, because a batched one would depend on the number of texts.
    mean = states.mean(axis=0, dtype=np.float64)
    if dense:
        mean = functools.reduce(
            lambda vector, matrix: matrix @ vector, dense, mean.astype(np.float32)
        )
    vector: npt.NDArray[np.float64] = np.asarray(mean, np.float64)[:width]
    if normalize:
        vector = vector / max(
            float(np.sqrt(np.square(vector).sum())), float(np.finfo(np.float64).tiny)
        )
    return np.asarray(vector, np.float32)


def _share_of_yes(yes: np.float32, no: np.float32) -> float:
    """Return the softmax probability of the first of two logits."""
    return float(0.5 * (1.0 + np.tanh(0.5 * (float(yes) - float(no)))))
