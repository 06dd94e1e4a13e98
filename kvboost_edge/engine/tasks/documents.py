"""Computation of separate documents whose KV prompts can reuse at other positions.

A document is computed after a header and a primer, and the KV of these is dropped. The text before
a document affects how well its KV works elsewhere. Text of the same kind works best (SmolLM2: KL
0.067 nats, compared with 0.128 after prose of another kind; see docs/chunk_reuse.md). The primer is
therefore taken from the end of the other documents. If they are too short, built-in text fills it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvboost_edge.config import ChunkStrategy, EngineConfig
from kvboost_edge.engine.build import EngineParts
from kvboost_edge.engine.core import EngineCore
from kvboost_edge.engine.handle import RequestHandle
from kvboost_edge.engine.request.prompts import Document, Prompt, encode_document, encode_prompt
from kvboost_edge.engine.request.request import Request, RequestArrival, SamplingParams
from kvboost_edge.engine.request.results import WarmResult
from kvboost_edge.engine.request.terms import Terms
from kvboost_edge.engine.request_builder import RequestBuilder
from kvboost_edge.engine.tasks.blocking_calls import Calls
from kvboost_edge.errors import ConfigError, KVBoostError, RequestError
from kvboost_edge.kvcache.hashing import LoneRoot
from kvboost_edge.options import as_int
from kvboost_edge.reuse.builtin_texts import PRIMER
from kvboost_edge.reuse.chunking import CHUNK_OPTIONS, Chunk, ChunkOptions, chunk_options, cut

__all__ = ["Documents", "LoneText", "SeparateTexts"]

_OPTIONS = (*CHUNK_OPTIONS, "primer_tokens")
_ALONE = 64  # tokens; a text with less context before it counts as computed without context


class LoneText(NamedTuple):
    """Tokens to compute after a context whose KV is dropped."""

    context: tuple[int, ...]
    tokens: tuple[int, ...]


class SeparateTexts(NamedTuple):
    """Texts to compute separately.

    Attributes:
        texts: The texts.
        chunk_size: Maximum chunk length in tokens that the texts were split into.
    """

    texts: list[LoneText]
    chunk_size: int


class Documents:
    """Document computation of one engine. Safe to use from any thread except the engine thread."""

    def __init__(
        self, parts: EngineParts, config: EngineConfig, builder: RequestBuilder, core: EngineCore
    ) -> None:
        self._parts = parts
        self._config = config
        self._builder = builder
        self._core = core
        self._calls = Calls(core, builder)
        # One request is always waiting for a free slot, and other requests wait for few of them.
        self._window = 2 * parts.max_num_seqs
        self._options = chunk_options(config)

    def read(
        self,
        text: Prompt | None,
        position_offset: object,
        documents: Sequence[Document] | None,
        whose: Terms,
        given: Mapping[str, Any],
    ) -> SeparateTexts | None:
        """Validate the arguments of `warm` and return the texts to compute separately.

        Args:
            text: A text to compute.
            position_offset: Number of tokens before the text.
            documents: Documents to compute instead of a text.
            whose: Request terms, such as tenant and salt.
            given: Options that override the engine's.

        Returns:
            The texts, or None for a text at the start of prompts.
        """
        position = as_int("position_offset", position_offset)
        if (text is None) == (documents is None) or (documents is not None and position):
            raise RequestError("give either a text, with a position_offset if needed, or documents")
        if documents is None and given:
            raise RequestError(f"{sorted(given)[0]}= applies to documents, not to a text")
        if documents is None and not position:
            return None
        if whose.pin:
            raise RequestError(
                "pin=True pins prompt prefixes and cannot be combined with documents or "
                "position_offset"
            )
        if documents is not None:
            return self._read_documents(documents, given)
        assert text is not None
        return self._read_text(text, position)

    def _read_documents(
        self, documents: Sequence[Document], given: Mapping[str, Any]
    ) -> SeparateTexts:
        unknown = sorted(set(given) - set(_OPTIONS))
        if unknown:
            raise RequestError(
                f"unknown option {unknown[0]!r} of warm; options for documents are "
                f"{', '.join(_OPTIONS)}"
            )
        options, primer_tokens = self._resolve(given)
        if isinstance(documents, (str, bytes)) or not isinstance(documents, Sequence):
            raise RequestError(
                f"documents must be a list of texts or of token ids, not {type(documents).__name__}"
            )
        if not documents:
            raise RequestError("documents is an empty list; give at least one document")
        tokenizer = self._parts.tokenizer
        vocab_size = self._parts.runner.info.vocab_size
        ids = [
            encode_document(f"document {i}", one, tokenizer, vocab_size)
            for i, one in enumerate(documents)
        ]
        chunks = cut(ids, options, lambda token: tokenizer.codec.piece((token,)))
        texts = [self._text_of(chunk, ids, primer_tokens) for chunk in chunks]
        return SeparateTexts(
            texts,
            max(map(len, ids))
            if options.strategy == ChunkStrategy.DOCUMENT
            else options.chunk_size,
        )

    def _read_text(self, text: Prompt, position: int) -> SeparateTexts:
        """Return the text with `position` tokens of context before it."""
        info = self._parts.runner.info
        longest = self._parts.runner.info.max_context
        if isinstance(text, str):
            ids = encode_document("the text", text, self._parts.tokenizer, info.vocab_size)
        else:
            _, ids = encode_prompt(text, self._parts.tokenizer, info.vocab_size)
        if not 0 <= position <= longest - len(ids):
            raise RequestError(
                f"position_offset={position} must be in 0..{longest - len(ids)}, so that the "
                f"text's {len(ids)} tokens fit in the model's context of {longest} tokens"
            )
        return SeparateTexts([LoneText(self.lead(position), tuple(ids))], len(ids))

    def warm(
        self, alone: SeparateTexts, whose: Terms, handles: list[RequestHandle] | None = None
    ) -> WarmResult:
        """Compute the texts that are not cached, and report how much of all texts can be found.

        Args:
            alone: The texts.
            whose: Request terms, such as tenant and salt.
            handles: List that receives the handles of the computed texts.
        """
        texts = alone.texts
        root = self._builder.root(whose)
        self.compute(texts, whose, handles)
        held = [text for text in texts if self._context_of(text, root) is not None]
        total, stored = (sum(len(text.tokens) for text in some) for some in (texts, held))
        return WarmResult.of_chunks(
            len(held), stored, total, alone.chunk_size, self._config.min_chunk_tokens
        )

    def lead(self, length: int, others: Sequence[int] = ()) -> tuple[int, ...]:
        """Return `length` tokens of context, made of the header, the primer and `others`.

        The end of `others` comes last. The primer fills the room before it.
        """
        header = self.header[:length]
        if room := length - len(header):
            others = others[-room:]
        missing = room - len(others) if room else 0
        if not missing:
            return (*header, *others) if room else header
        primer = self._primer * -(-missing // len(self._primer))
        return (*header, *primer[len(primer) - missing :], *others)

    @property
    def header(self) -> tuple[int, ...]:
        """The special tokens that the tokenizer adds before a text."""
        return self._parts.tokenizer.leading_ids

    @functools.cached_property
    def _primer(self) -> tuple[int, ...]:
        return tuple(self._parts.tokenizer.encode(PRIMER, False))

    def _resolve(self, given: Mapping[str, Any]) -> tuple[ChunkOptions, int]:
        """Return the chunk options of a call and the number of primer tokens."""
        primer_tokens = as_int(
            "primer_tokens", given.get("primer_tokens", self._config.primer_tokens)
        )
        if primer_tokens < 0:
            raise RequestError(f"primer_tokens={primer_tokens} must be at least 0")
        cutting = {name: value for name, value in given.items() if name in CHUNK_OPTIONS}
        if not cutting:
            return self._options, primer_tokens
        try:
            return chunk_options(self._config, cutting), primer_tokens
        except ConfigError as error:
            raise RequestError(str(error)) from None

    def _text_of(
        self, chunk: Chunk, documents: Sequence[list[int]], primer_tokens: int
    ) -> LoneText:
        """Return a chunk with its context, which is header, primer and the text before it."""
        document = documents[chunk.document]
        tokens = chunk.tokens(document)
        before = chunk.num_context_tokens
        # Size the primer so that the chunk starts at a block boundary.
        count = len(self.header) + primer_tokens
        if primer_tokens:
            count += -(count + before) % self._config.block_size
        longest = self._parts.runner.info.max_context
        if count + len(tokens) > longest:
            raise RequestError(
                f"document {chunk.document}: {len(tokens)} tokens after {count} tokens of header "
                f"and primer exceed the model's context of {longest}; lower "
                f"primer_tokens={primer_tokens}, or split the document with "
                "chunk_strategy='fixed' and chunk_size"
            )
        others = _end_of_others(documents, chunk.document, primer_tokens)
        return LoneText((*self.lead(count, others), *tokens[:before]), tuple(tokens[before:]))

    def compute(
        self, texts: Sequence[LoneText], whose: Terms, handles: list[RequestHandle] | None = None
    ) -> None:
        """Compute texts so that prompts of this tenant and salt can reuse their KV.

        Cached texts, and texts too short to be found, are skipped. The KV of the contexts is
        dropped afterwards.
        """
        root = self._builder.root(whose)
        least = max(self._config.min_chunk_tokens, self._config.block_size)
        missing = []
        for text in dict.fromkeys(texts):
            known = self._context_of(text, root)
            if len(text.tokens) >= least and (
                known is None or known < min(_ALONE, len(text.context))
            ):
                missing.append(text)
        requests = [self._request(text, whose) for text in missing]
        for request in requests:
            self._core.scheduler.check_fits(request)
        try:
            self._calls.run_in_turn(requests, [] if handles is None else handles, self._window)
        finally:
            with contextlib.suppress(KVBoostError):  # the engine may have been closed
                self.forget(*dict.fromkeys(request.root for request in requests))

    def forget(self, *roots: bytes) -> None:
        """Drop the unused blocks under these roots, including those of a `LoneRoot`."""
        with self._core.reading():
            manager = self._parts.manager
            manager.reset(
                itertools.chain.from_iterable(manager.content.under(root) for root in roots)
            )

    def _context_of(self, text: LoneText, root: bytes) -> int | None:
        """Return the number of context tokens of a cached text, or None if it is not cached."""
        # Take the lock per text so that the engine can run steps in between.
        with self._core.reading():
            return self._core.scheduler.sharing.context_of(text.tokens, root)

    def _request(self, text: LoneText, whose: Terms) -> Request:
        """Build the request that computes a text."""
        # Pad the last block, because only full blocks are shared. Later tokens do not change the
        # text's KV.
        size = self._config.block_size
        longest = self._parts.runner.info.max_context
        count = len(text.context) + len(text.tokens)
        fill = -count % size if count + -count % size <= longest else 0
        ids = (
            *text.context,
            *text.tokens,
            *(self._primer * (fill // len(self._primer) + 1))[:fill],
        )
        entry = RequestArrival(time.perf_counter(), prompt_text="")
        request = self._builder.make(ids, whose, SamplingParams(), entry=entry, prefill_only=True)
        return dataclasses.replace(
            request,
            root=LoneRoot.of(request.root, len(text.context) // size),
            fills_drafter=False,  # drafters do not run for sequences with reused spans
        )


def _end_of_others(documents: Sequence[list[int]], number: int, length: int) -> list[int]:
    """Return up to `length` tokens from the end of the other documents.

    Tokens of the documents before document `number` come last.
    """
    found: list[int] = []
    for other in (*reversed(documents[:number]), *reversed(documents[number + 1 :])):
        if len(found) >= length:
            break
        found = other + found
    return found[-length:] if length else []
