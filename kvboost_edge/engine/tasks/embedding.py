"""Embedding and reranking, which pool the last hidden states of prefill-only requests."""

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
from kvboost_edge.engine.tasks.blocking_calls import Calls
from kvboost_edge.errors import RequestError
from kvboost_edge.models.config.pooling import Pooling
from kvboost_edge.options import as_int

__all__ = ["Embedding", "Embeds"]

_LOG = logging.getLogger(__name__)

# The prompt format that Qwen3-Reranker was trained on. Its prefix is shared by all documents and
# computed once.
_RERANK_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_RERANK_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
    'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
_RERANK_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class Embedding:
    """Embedding and reranking of one engine, for use from any thread except the engine's."""

    def __init__(self, parts: EngineParts, builder: RequestBuilder, calls: Calls) -> None:
        self.pooling = parts.pooling
        self.size = len(parts.dense[-1]) if parts.dense else parts.runner.info.hidden_size
        self._parts = parts
        self._builder = builder
        self._calls = calls
        self._is_reranker = any("rerank" in name.lower() for name in parts.names)
        self._warned: set[str] = set()
        # Submit twice as many requests as run at a time, so that one is always waiting for a free
        # slot.
        self._window = 2 * parts.max_num_seqs

    def embed(
        self, texts: Sequence[Document], dimensions: int | None, options: dict[str, Any]
    ) -> Floats:
        """Implement `Embeds.embed`."""
        if not self.size:
            name = self._parts.runner.info.name
            raise RequestError(
                f"runner {name!r} does not return hidden states for embeddings; use runner='native'"
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
            self._warn_once(
                "the model's files do not name the pooling method, so the last token is used "
                "(pooling 'last'); embeddings are poor if the model was not trained for this"
            )
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
        if not self._is_reranker:
            self._warn_once(
                "neither the model's path nor its files contain the word 'rerank'; scores are poor "
                "if the model was not trained on Qwen3-Reranker's prompt"
            )
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
        """Return the token ids of "yes" and "no".

        Raises:
            RequestError: The model cannot rerank.
        """
        if self.pooling.source:
            raise RequestError(
                f"the model is an embedding model (according to {self.pooling.source}) and cannot "
                "rerank; load a reranker such as Qwen3-Reranker, or compare embeddings"
            )
        tokenizer = self._parts.tokenizer
        found = {
            text: tokenizer.encode(text, False)
            for text in ("yes", "no", "<|im_start|>", "<|im_end|>")
        }
        for text, ids in found.items():
            if len(ids) != 1:
                raise RequestError(
                    f"reranking needs {text!r} as a single token, which this tokenizer lacks; "
                    "use a Qwen3-Reranker model"
                )
        return found["yes"][0], found["no"][0]

    def _request(
        self, text: Document, name: str, terms: Terms, start: int, *, wants_states: bool = True
    ) -> Request:
        """Build a request for logits or hidden states.

        Args:
            text: The text or its token ids.
            name: Name of the input, which error messages begin with.
            terms: Terms of the request.
            start: Index of the first token whose row is wanted, or -1 for the last row.
            wants_states: Whether to return hidden states instead of logits.

        Raises:
            RequestError: The text is invalid.
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

    def _warn_once(self, message: str) -> None:
        """Log a warning, once per engine."""
        if message not in self._warned:
            self._warned.add(message)
            _LOG.warning(message)


class Embeds:
    """A mixin with the embedding and reranking methods of an engine."""

    _embedding: Embedding

    @property
    def pooling(self) -> Pooling:
        """The model's pooling. Its `source` is "" for a model that generates text."""
        return self._embedding.pooling

    @property
    def generates(self) -> bool:
        """Whether the model generates text. False for an embedding model."""
        return not self.pooling.source

    @property
    def embedding_size(self) -> int:
        """Length of an embedding, or 0 if the runner returns no hidden states."""
        return self._embedding.size

    def embed(
        self, texts: Sequence[Document], dimensions: int | None = None, **options: Any
    ) -> Floats:
        """Return unit vectors of texts as float32 [len(texts), dimensions].

        The tokenizer adds special tokens to texts, such as the end-of-text token of embedding
        models. For a model that was not trained to embed, the state of the last token is returned
        and a warning is logged.

        Args:
            texts: Texts or lists of token ids. Token ids are used unchanged.
            dimensions: Number of leading values of each vector to return, for models trained for
                truncation (Matryoshka). None returns all `embedding_size` values.
            **options: `normalize=False` does not scale the vectors to length 1. `handles` is a list
                that receives the requests' handles, which allows cancelling. All other options are
                fields of `Terms`.

        Raises:
            RequestError: An input or an option is invalid. The message names it.
        """
        return self._embedding.embed(texts, dimensions, options)

    def rerank(self, query: str, documents: Sequence[str], **options: Any) -> list[float]:
        """Return a score in [0, 1] for how well each document answers the query.

        The score is the probability of "yes" relative to "no" after Qwen3-Reranker's prompt. A
        warning is logged if neither the model's path nor its files call it a reranker.

        Args:
            query: The question.
            documents: The texts to score.
            **options: `instruction` describes the task. `handles` is a list that receives the
                requests' handles. All other options are fields of `Terms`.
        """
        return self._embedding.rerank(query, documents, options)


def _terms_of(options: dict[str, Any]) -> tuple[list[RequestHandle], Terms]:
    """Split options into the handles list and `Terms`.

    Raises:
        RequestError: An option is unknown or not supported.
    """
    handles = options.pop("handles", None)
    terms = Terms.taken_from(options)
    for name in sorted(options):
        raise RequestError(f"unknown option {name!r}")
    if terms.mode is GenerationMode.CHUNK_KV_REUSE:
        raise RequestError(
            "mode='chunk_kv_reuse' is approximate, but embeddings and scores must be exact; use "
            "mode='prefix_cache'"
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
    """Pool hidden states into one float32 vector of `width` values.

    Args:
        states: float32 [num_tokens, hidden_size]. The mean over the tokens is used.
        dense: Matrices to multiply the mean by, in order.
        width: Number of leading values to return.
        normalize: Whether to scale the vector to length 1.
    """
    # Sum in float64 and in row order, so that the mean does not depend on how the rows arrived.
    # Multiply each text separately, because the result of a batched product would depend on the
    # number of texts.
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
    """Return the softmax probability of `yes` over the two logits."""
    return float(0.5 * (1.0 + np.tanh(0.5 * (float(yes) - float(no)))))
