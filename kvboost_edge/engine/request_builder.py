"""The request builder, which checks a caller's arguments and creates immutable requests."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvboost_edge import shareable
from kvboost_edge.config import EngineConfig
from kvboost_edge.engine.build import EngineParts
from kvboost_edge.engine.request.answer_ids import AnswerStore
from kvboost_edge.engine.request.prompts import Prompt, encode_prompt, resolve_max_tokens
from kvboost_edge.engine.request.request import (
    Request,
    RequestArrival,
    RequestFeature,
    RequestInputs,
    SamplingParams,
    resolve_sampling,
)
from kvboost_edge.engine.request.terms import Terms
from kvboost_edge.errors import RequestError
from kvboost_edge.kvcache.hashing import HASH_BYTES, narrowed_root, shared_root

__all__ = ["RequestBuilder", "Seeds"]


class Seeds:
    """A thread-safe source of sampling seeds in [0, 2^64).

    Args:
        seed: None makes every seed random. A number makes seeds reproducible: each seed is then
            derived from the number, the tenant, and how many seeds the tenant has drawn. Anyone who
            knows the number and a tenant's name can compute that tenant's seeds. Servers with
            several tenants should therefore use None.
    """

    def __init__(self, seed: int | None) -> None:
        self._key: bytes | None = None
        self._counts: dict[bytes, itertools.count[int]] = {}
        if seed is not None:
            self._key = hashlib.blake2b(
                seed.to_bytes(seed.bit_length() // 8 + 1, "little")
            ).digest()

    def draw(self, tenant: bytes) -> int:
        """Return the next seed for a tenant."""
        if self._key is None:
            return secrets.randbits(64)
        number = next(self._counts.setdefault(tenant, itertools.count()))
        digest = hashlib.blake2b(
            tenant + number.to_bytes(8, "little"), digest_size=8, key=self._key
        ).digest()
        return int.from_bytes(digest, "little")


class RequestBuilder:
    """A thread-safe builder that creates and numbers the requests of one engine."""

    def __init__(
        self,
        parts: EngineParts,
        config: EngineConfig,
        check_open: Callable[[], None],
        answers: AnswerStore,
        features: Sequence[RequestFeature] = (),
    ) -> None:
        self._answers = answers
        self._features = features
        self._parts = parts
        self._config = config
        self._seeds = Seeds(config.seed)
        self._check_open = check_open
        self._next_index = itertools.count()

    def read(
        self, prompt: Prompt, options: dict[str, Any], entry: RequestArrival | None = None
    ) -> Request:
        """Build a request from a prompt and keyword options.

        Args:
            options: `terms` or fields of `Terms`, and `sampling` or fields of `SamplingParams`.
            entry: start time of the caller's call, or None for now.
        """
        terms = Terms.taken_from(options, options.pop("terms", None))
        sampling = options.pop("sampling", None)
        params = self._parts.sampling.fill_sampled(resolve_sampling(sampling, options))
        return self.make(prompt, terms, params, entry=entry)

    def read_all(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        options: Any,
    ) -> list[Request]:
        """Build one request per prompt.

        Args:
            sampling: sampling parameters for all prompts, or a list with one entry per prompt.
        """
        entry = RequestArrival(time.perf_counter())
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            raise RequestError(f"prompts must be a list of prompts, not {type(prompts).__name__}")
        terms = Terms.taken_from(options)
        if isinstance(sampling, Sequence):
            if len(sampling) != len(prompts):
                raise RequestError(
                    f"sampling has {len(sampling)} entries for {len(prompts)} prompts; give one "
                    "entry per prompt"
                )
            params = [resolve_sampling(item, options) for item in sampling]
        else:
            params = [resolve_sampling(sampling, options)] * len(prompts)
        params = [self._parts.sampling.fill_sampled(item) for item in params]
        return [self.make(p, terms, s, entry=entry) for p, s in zip(prompts, params, strict=True)]

    def make(
        self,
        prompt: Prompt,
        terms: Terms,
        params: SamplingParams,
        *,
        entry: RequestArrival | None = None,
        prefill_only: bool = False,
        logits_start: int | None = None,
        wants_states: bool = False,
    ) -> Request:
        """Check all arguments and return an immutable request.

        Args:
            entry: start time of the caller's call, or None for now.
            prefill_only: compute the prompt's KV but generate nothing.
            logits_start: index of the first token whose logits are returned, or None to generate
                text.
            wants_states: return hidden states instead of logits.
        """
        if entry is None:
            entry = RequestArrival(time.perf_counter())
        self._check_open()
        info = self._parts.runner.info
        tokenizer = self._parts.tokenizer
        params.check_vocabulary(info.vocab_size)
        prefill_only = prefill_only or params.max_new_tokens == 0
        needs_logits = prefill_only or logits_start is not None
        self._check_kind(terms, generates=not needs_logits, wants_states=wants_states)
        root = self.root(terms)
        text, ids = encode_prompt(
            prompt, tokenizer, info.vocab_size, lambda answer: self._answers.find(root, answer)
        )
        max_tokens = self._max_tokens(len(ids), params, needs_logits=needs_logits)
        shown = text if entry.prompt_text is None else entry.prompt_text
        if not shown and entry.prompt_text is None:
            shown = tokenizer.decode(ids, skip_special_tokens=False)
        inputs = RequestInputs(terms, params, ids, generates=not needs_logits)
        # Check features before taking an index and a seed, so that a refused request uses up
        # neither.
        fields: dict[str, Any] = {}
        for feature in self._features:
            fields.update(feature.prepare(inputs))
        index = next(self._next_index)
        tenant = self.tenant_root(terms)
        prefill = self._config.prefill_of(terms.prefill)
        num_shareable = shareable.shareable_end(self._config, len(ids), prefill)
        eos = frozenset() if params.ignore_eos else self._parts.eos_token_ids
        request = Request(
            index=index,
            prompt=shown,
            prompt_ids=tuple(ids),
            params=params,
            terms=terms,
            max_tokens=max_tokens,
            seed=self._seeds.draw(tenant) if params.seed is None else params.seed,
            stop_ids=eos | frozenset(params.stop_token_ids),
            entered_at=entry.at,
            tokenized_at=time.perf_counter(),
            logits_start=logits_start,
            wants_states=wants_states,
            stores_nothing=not info.stores_kv,
            prefill_only=prefill_only,
            root=root,
            suppressed=self._parts.suppressed,
            tenant=tenant,
            cache_key=narrowed_root(root, "cache_key", terms.cache_key)
            if terms.cache_key
            else None,
            prefix_hashes=self._known_hashes(entry.prefix_hashes, len(ids)),
            prefill=prefill,
            approximations=_approximations(self._config, prefill, num_shareable),
            num_shareable=num_shareable,
            **fields,
        )
        if needs_logits or params.max_new_tokens is not None:
            return request
        return dataclasses.replace(request, max_tokens=self._fitting_tokens(request))

    def _fitting_tokens(self, request: Request) -> int:
        """Return the request's maximum number of tokens, lowered to what fits in the pool."""
        shareable = request.shareable_ids if request.shares_prompt else ()
        manager = self._parts.manager
        slots = manager.fitting_blocks(shareable, request.root) * manager.block_size
        # The last token needs no slot, because its KV is never computed. A prompt that does not fit
        # keeps room for one token, so that the scheduler refuses it.
        return min(request.max_tokens, max(slots, request.num_prompt_tokens) + 1)

    def _max_tokens(self, num_tokens: int, params: SamplingParams, *, needs_logits: bool) -> int:
        """Return the maximum number of tokens in prompt and output together.

        Raises:
            RequestError: the number exceeds the model's context.
        """
        limit = self._parts.runner.info.max_context
        if not needs_logits:
            return resolve_max_tokens(num_tokens, params, limit)
        if num_tokens > limit:
            raise RequestError(
                f"{num_tokens} tokens are more than the model's context of {limit}; shorten the "
                "input"
            )
        return num_tokens

    def _check_kind(self, terms: Terms, *, generates: bool, wants_states: bool) -> None:
        """Check that this kind of model supports the call.

        Raises:
            RequestError: the model does not support the call.
        """
        stores_kv = self._parts.runner.info.stores_kv
        if generates and self._parts.pooling.source:
            raise RequestError(
                f"the model is an embedding model (according to {self._parts.pooling.source}) and "
                "cannot generate text; use engine.embed or /v1/embeddings, or load a generative "
                "model"
            )
        if not stores_kv and not wants_states:
            raise RequestError(
                "the model is bidirectional: it computes embeddings, but cannot generate text or "
                "cache KV; use engine.embed or /v1/embeddings"
            )
        if terms.pin and not stores_kv:
            raise RequestError(
                "pin=True has no effect: the model is bidirectional, and its KV is not cached; "
                "remove pin"
            )

    def _known_hashes(self, known: bytes, num_tokens: int) -> bytes:
        """Return the caller's hashes of the prompt's blocks. Only their number is checked."""
        full = num_tokens // self._config.block_size
        if len(known) % HASH_BYTES or len(known) > full * HASH_BYTES:
            raise RequestError(
                f"prefix_hashes has {len(known)} bytes, expected {full} x {HASH_BYTES}: one hash "
                f"for each of the prompt's full blocks of {self._config.block_size} tokens"
            )
        return known

    def token_ids(self, prompt: Prompt, terms: Terms) -> list[int]:
        """Return the token ids of a prompt without creating a request."""
        self._check_open()
        root = self.root(terms)
        info = self._parts.runner.info
        find = functools.partial(self._answers.find, root)
        return encode_prompt(prompt, self._parts.tokenizer, info.vocab_size, find)[1]

    def root(self, terms: Terms) -> bytes:
        """Return the root of the prefix hashes for a tenant, salt and prefill."""
        prefill = self._config.prefill_of(terms.prefill)
        return shared_root(self._parts.root, terms.tenant, terms.cache_salt, prefill)

    def tenant_root(self, terms: Terms) -> bytes:
        """Return the root that identifies the tenant, whatever its salts and prefill."""
        return shared_root(self._parts.root, terms.tenant, None)

    def renumbered(self, request: Request) -> Request:
        """Return a copy of the request with a new index, as if it had just arrived."""
        return dataclasses.replace(request, index=next(self._next_index))


def _approximations(config: EngineConfig, prefill: str, num_shareable: int) -> tuple[str, ...]:
    """Return the labels of the options that make an answer approximate."""
    if prefill == "sparse" and num_shareable == shareable.FIRST_POSITION:
        return ()  # no token is in the sparse range
    return config.approximations_of(prefill)
