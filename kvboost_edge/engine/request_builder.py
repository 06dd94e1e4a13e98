"""The request builder: checks a caller's arguments and makes frozen requests. It holds no
resources.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvboost_edge.config import (
    MAX_WEIGHT,
    MOST_DRAFT_TOKENS,
    EngineConfig,
    GenerationMode,
    RecomputeStrategy,
)
from kvboost_edge.engine.build import EngineParts
from kvboost_edge.engine.memory.state_budget import (
    most_draft_tokens,
    speculation_refusal,
    states_refusal,
)
from kvboost_edge.engine.request.answer_ids import AnswerStore
from kvboost_edge.engine.request.grammar import KINDS, Grammar, read_grammar
from kvboost_edge.engine.request.prompts import Prompt, encode_prompt, resolve_max_tokens
from kvboost_edge.engine.request.request import (
    Request,
    RequestArrival,
    SamplingParams,
    as_float,
    as_int,
    check_mode,
    resolve_sampling,
)
from kvboost_edge.engine.spec_decode.drafting import prepare_drafts
from kvboost_edge.errors import RequestError
from kvboost_edge.kvcache.hashing import HASH_BYTES, narrowed_root, shared_root
from kvboost_edge.reuse.recompute import Repair
from kvboost_edge.reuse.span_search import prepare_search
from kvboost_edge.text.message_boundaries import user_starts

__all__ = ["Intake", "Seeds", "Terms"]

_MAX_PRIORITY = 2**31 - 1
_MAX_NAME = 1024
_REPAIRS = ("recompute_strategy", "recompute_overlap", "recompute_ratio")
_GATES = {"auto": "passed", "off": "off"}  # nothing runs untested unless the test is off
_MAX_TTL = 1e9  # some 30 years: what no clock's arithmetic minds


class Seeds:
    """Hands out seeds in [0, 2^64). Safe to use from any thread.

    seed   None: each seed is random. Given: it depends on this number, the tenant and how many
           seeds that tenant drew before, and on nothing that other tenants do. Who knows the number
           can work out a tenant's seeds from its name, so a server of several tenants leaves it
           out.
    """

    def __init__(self, seed: int | None) -> None:
        self._key: bytes | None = None
        self._counts: dict[bytes, itertools.count[int]] = {}
        if seed is not None:
            self._key = hashlib.blake2b(
                seed.to_bytes(seed.bit_length() // 8 + 1, "little")
            ).digest()

    def draw(self, tenant: bytes) -> int:
        """The next seed of a tenant."""
        if self._key is None:
            return secrets.randbits(64)
        number = next(self._counts.setdefault(tenant, itertools.count()))
        digest = hashlib.blake2b(
            tenant + number.to_bytes(8, "little"), digest_size=8, key=self._key
        ).digest()
        return int.from_bytes(digest, "little")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How a request runs, apart from prompt and sampling. Checked on construction (RequestError).

    mode         how it may use the cache
    tenant       whose prefixes it shares; None or "": the engine's own. What one tenant cached no
                 other can find out
    cache_salt   narrows further: only requests of the same tenant and salt share prefixes
    priority     lower runs earlier, then the tenants' shares and the order of arrival decide;
                 -(2^31 - 1) .. 2^31 - 1
    weight       the tenant's share beside other tenants', in [0.001, 1000]; the same for all its
                 requests
    deadline     seconds of `time.monotonic`; past it the request ends with finish_reason "timeout"
    expect_reuse   it will come again: its blocks are kept like those that came again, not like
                   those seen once
    cache_key    a name for prompts of this tenant and salt that begin alike: what two calls under
                 it have in common outlives the tenant's other blocks for an hour. A digest of it is
                 kept, never the name
    retention    seconds for which the full blocks of its prompt outlive the tenant's other blocks
                 once it is done: they are given up last, and all the same when room is needed.
                 Nobody waits for it; `pin` is a promise
    pin          once it is done, the full blocks of its prompt stay in the pool; only the same
                 tenant can unpin them
    ttl          seconds after which that ends by itself, counted from the end of the request; None:
                 never
    pins         (tokens, seconds): of the prompt's first tokens the full blocks stay in the pool
                 for so long once it is done, where other pins leave room; where not, nothing fails,
                 and the handle says what was pinned
    pin_share    the part of `max_pinned_blocks` that the tenant's pins may take, in (0, 1]; the
                 same for all its requests. Below 1 there are other tenants, and no error tells of
                 what they pinned
    snapshot_hints   positions of the prompt, in tokens, where others that begin alike may go on
                     differently, such as
                 starts of messages: a model that keeps states beside keys and values keeps one
                 before each. None given:
                 where the chat template begins messages of the user
    recompute_strategy, recompute_overlap, recompute_ratio   with mode="chunk_kv_reuse", in place of
                                                             the engine's
    speculation, max_draft_tokens   in place of the engine's
    """

    mode: GenerationMode | str = GenerationMode.PREFIX_CACHE
    tenant: str | None = None
    cache_salt: str | None = None
    priority: int = 0
    weight: float = 1.0
    deadline: float | None = None
    expect_reuse: bool = False
    cache_key: str | None = dataclasses.field(default=None, repr=False)
    retention: float | None = None
    pin: bool = False
    ttl: float | None = None
    pins: tuple[tuple[int, float], ...] = ()
    pin_share: float = 1.0
    snapshot_hints: tuple[int, ...] = ()
    recompute_strategy: RecomputeStrategy | str | None = None
    recompute_overlap: int | None = None
    recompute_ratio: float | None = None
    speculation: str | None = None
    max_draft_tokens: int | None = None

    @classmethod
    def taken_from(cls, options: dict[str, Any]) -> Terms:
        """Take the fields out of keyword options; what is left are sampling options."""
        given = {
            field.name: options.pop(field.name)
            for field in dataclasses.fields(cls)
            if field.name in options
        }
        return cls(**given)

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", check_mode(self.mode))
        for name in ("tenant", "cache_salt"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise RequestError(f"{name}={value!r} must be a string or None")
            if value is not None and len(value) > _MAX_NAME:
                raise RequestError(
                    f"{name} has {len(value)} characters; at most {_MAX_NAME} are allowed"
                )
        if self.cache_salt == "":
            raise RequestError(
                "cache_salt='' must have at least one character; leave it out to share with your "
                "own"
            )
        self._check_key()
        self._check_drafts()
        for num_tokens, seconds in self.pins:
            if as_int("pins", num_tokens) < 0 or not 0 < as_float("pins", seconds) <= _MAX_TTL:
                raise RequestError(
                    f"pins={self.pins!r} must be pairs of tokens and of (0, {_MAX_TTL:g}] seconds"
                )
        if any(as_int("snapshot_hints", position) < 0 for position in self.snapshot_hints):
            raise RequestError(
                f"snapshot_hints={self.snapshot_hints!r} must be positions in the prompt, from 0 on"
            )
        priority = as_int("priority", self.priority)
        if abs(priority) > _MAX_PRIORITY:
            raise RequestError(
                f"priority={self.priority!r} must be in {-_MAX_PRIORITY}..{_MAX_PRIORITY}"
            )
        object.__setattr__(self, "priority", priority)
        weight = as_float("weight", self.weight)
        if not 1 / MAX_WEIGHT <= weight <= MAX_WEIGHT:
            raise RequestError(
                f"weight={self.weight!r} must be in [{1 / MAX_WEIGHT:g}, {MAX_WEIGHT:g}]"
            )
        object.__setattr__(self, "weight", weight)
        pin_share = as_float("pin_share", self.pin_share)
        if not 0 < pin_share <= 1:
            raise RequestError(f"pin_share={self.pin_share!r} must be in (0, 1]")
        object.__setattr__(self, "pin_share", pin_share)
        if self.deadline is not None:
            deadline = as_float("deadline", self.deadline)
            if not math.isfinite(deadline):
                raise RequestError(
                    f"deadline={self.deadline!r} must be finite seconds of time.monotonic()"
                )
            object.__setattr__(self, "deadline", deadline)
        for name in ("expect_reuse", "pin"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name}={getattr(self, name)!r} must be True or False")
        if self.ttl is not None and not self.pin:
            raise RequestError(f"ttl={self.ttl!r} is how long a pin lasts; give pin=True with it")
        for name in ("ttl", "retention"):
            value = getattr(self, name)
            if value is not None:
                seconds = as_float(name, value)
                if not 0 < seconds <= _MAX_TTL:
                    raise RequestError(f"{name}={value!r} must be in (0, {_MAX_TTL:g}] seconds")
                object.__setattr__(self, name, seconds)

    def _check_drafts(self) -> None:
        if self.speculation not in (None, "auto", "on", "off"):
            raise RequestError(
                f"speculation={self.speculation!r} is not one of 'auto', 'on', 'off'"
            )
        if self.max_draft_tokens is not None:
            most = as_int("max_draft_tokens", self.max_draft_tokens)
            if not 1 <= most <= MOST_DRAFT_TOKENS:
                raise RequestError(
                    f"max_draft_tokens={self.max_draft_tokens!r} must be in 1..{MOST_DRAFT_TOKENS}"
                )
            object.__setattr__(self, "max_draft_tokens", most)

    def _check_key(self) -> None:
        """The key itself stays out of every message."""
        key = self.cache_key
        if key is not None and not isinstance(key, str):
            raise RequestError(f"cache_key must be a string or None, not {type(key).__name__}")
        if key is not None and not 1 <= len(key) <= _MAX_NAME:
            raise RequestError(f"cache_key has {len(key)} characters; 1 to {_MAX_NAME} are allowed")


class Intake:
    """Builds the requests of one engine and numbers them. Safe to use from any thread."""

    def __init__(
        self,
        parts: EngineParts,
        config: EngineConfig,
        check_open: Callable[[], None],
        answers: AnswerStore,
    ) -> None:
        self._answers = answers
        self._parts = parts
        self._config = config
        self._seeds = Seeds(config.seed)
        self._check_open = check_open
        self._next_index = itertools.count()

    def read(
        self, prompt: Prompt, options: dict[str, Any], entry: RequestArrival | None = None
    ) -> Request:
        """A request from a prompt and keyword options: fields of `Terms`, and `sampling` or those
        of `SamplingParams`.

        entry   when the caller's call began, None: now
        """
        terms = Terms.taken_from(options)
        sampling = options.pop("sampling", None)
        return self.make(prompt, terms, resolve_sampling(sampling, options), entry=entry)

    def read_all(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        options: Any,
    ) -> list[Request]:
        """One request for each prompt; `sampling` may be a list as long as the prompts."""
        entry = RequestArrival(time.perf_counter())
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            raise RequestError(f"prompts must be a list of prompts, not {type(prompts).__name__}")
        terms = Terms.taken_from(options)
        if isinstance(sampling, Sequence):
            if len(sampling) != len(prompts):
                raise RequestError(
                    f"sampling has {len(sampling)} entries for {len(prompts)} prompts; give one "
                    "for each"
                )
            params = [resolve_sampling(item, options) for item in sampling]
        else:
            params = [resolve_sampling(sampling, options)] * len(prompts)
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
        """Check everything and freeze it."""
        if entry is None:
            entry = RequestArrival(time.perf_counter())
        self._check_open()
        info = self._parts.runner.info
        tokenizer = self._parts.tokenizer
        params.check_vocabulary(info.vocab_size)
        prefill_only = prefill_only or params.max_new_tokens == 0
        needs_logits = prefill_only or logits_start is not None
        self._check_kind(terms, generates=not needs_logits, wants_states=wants_states)
        repair = self._repair(terms, params, needs_exact=needs_logits)
        root = self.root(terms)
        text, ids = encode_prompt(
            prompt, tokenizer, info.vocab_size, lambda answer: self._answers.find(root, answer)
        )
        max_tokens = self._max_tokens(len(ids), params, needs_logits=needs_logits)
        shown = text if entry.prompt_text is None else entry.prompt_text
        if not shown and entry.prompt_text is None:
            shown = tokenizer.decode(ids, skip_special_tokens=False)
        index = next(self._next_index)
        tenant = self._tenant_root(terms)
        eos = frozenset() if params.ignore_eos else self._parts.eos_token_ids
        return Request(
            index=index,
            prompt=shown,
            prompt_ids=tuple(ids),
            params=params,
            mode=GenerationMode(terms.mode),
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
            weight=terms.weight,
            priority=terms.priority,
            deadline=terms.deadline,
            expect_reuse=terms.expect_reuse or terms.retention is not None,
            cache_key=narrowed_root(root, "cache_key", terms.cache_key)
            if terms.cache_key
            else None,
            retention=terms.retention,
            pin=terms.pin,
            ttl=terms.ttl,
            pins=terms.pins,
            pin_share=terms.pin_share,
            snapshot_hints=self._hints(terms, ids),
            repair=repair,
            gate="" if repair is None else _GATES[self._config.reuse_gate],
            max_draft_tokens=0 if needs_logits else self._most_drafted(terms),
            grammar=self._grammar(params, needs_logits=needs_logits),
            always_drafts=(terms.speculation or self._config.speculation) == "on",
            prefix_hashes=self._known_hashes(entry.prefix_hashes, len(ids)),
        )

    def _max_tokens(self, num_tokens: int, params: SamplingParams, *, needs_logits: bool) -> int:
        """Return the most tokens of prompt and output; RequestError beyond the model's context."""
        limit = self._parts.runner.info.max_context
        if not needs_logits:
            return resolve_max_tokens(num_tokens, params, limit)
        if num_tokens > limit:
            raise RequestError(f"{num_tokens} tokens are more than the model's context of {limit}")
        return num_tokens

    def _check_kind(self, terms: Terms, *, generates: bool, wants_states: bool) -> None:
        """RequestError for what a model of this kind does not do."""
        stores_kv = self._parts.runner.info.stores_kv
        if generates and self._parts.pooling.source:
            raise RequestError(
                f"the model makes embeddings ({self._parts.pooling.source} says so) and generates "
                "no text; use engine.embed or /v1/embeddings, or serve a model that chats"
            )
        if not stores_kv and not wants_states:
            raise RequestError(
                "the model attends both ways: it makes vectors of texts (engine.embed, "
                "/v1/embeddings), predicts no token, and stores no keys and values that a prompt "
                "could find"
            )
        if terms.pin and not stores_kv:
            raise RequestError(
                "pin=True: the model attends both ways, and nothing of a text is kept"
            )

    def _known_hashes(self, known: bytes, num_tokens: int) -> bytes:
        """Hashes of blocks that the prompt has; whether they are right nobody needs to know."""
        full = num_tokens // self._config.block_size
        if len(known) % HASH_BYTES or len(known) > full * HASH_BYTES:
            raise RequestError(
                f"prefix_hashes has {len(known)} bytes; the prompt has {full} full blocks of "
                f"{self._config.block_size} tokens, each with a hash of {HASH_BYTES} bytes"
            )
        return known

    def _hints(self, terms: Terms, ids: Sequence[int]) -> tuple[int, ...]:
        """Where states are kept besides where they are in any case: where the user's messages
        begin.
        """
        if not self._parts.runner.info.kv_spec.states:
            return ()
        return terms.snapshot_hints or user_starts(self._parts.tokenizer, ids)

    def _grammar(self, params: SamplingParams, *, needs_logits: bool) -> Grammar | None:
        """What the answer has to fit; RequestError where there will be none."""
        grammar = read_grammar({kind: getattr(params, kind) for kind in KINDS})
        if grammar is not None and needs_logits:
            raise RequestError(f"{grammar.kind} is what an answer fits, and none is generated here")
        return grammar

    def _most_drafted(self, terms: Terms) -> int:
        """Most tokens guessed ahead in a step; 0: none. Torch's results depend on the batch: there
        only who asks for it has drafts.
        """
        chosen = terms.speculation or self._config.speculation
        states = self._parts.manager.states
        refusal = speculation_refusal(self._config, states)
        if refusal is not None:
            if chosen == "on":
                raise RequestError(f"speculation='on' is refused: {refusal}")
            return 0
        if chosen == "off" or (chosen == "auto" and self._parts.runner.info.name != "native"):
            return 0
        prepare_drafts()
        most = most_draft_tokens(self._config, states)
        asked = terms.max_draft_tokens or most
        return asked if states is None else min(asked, most)

    def own_repair(self, options: Mapping[str, Any] | None = None) -> Repair:
        """How the engine repairs reuse, unless recompute_* options say otherwise; RequestError for
        any other option, and where nothing is reused at other positions.
        """
        given = dict(options or {})
        for name in sorted(given.keys() - set(_REPAIRS)):
            raise RequestError(
                f"option {name!r} does not go with mode='chunk_kv_reuse' here; known: "
                f"{', '.join(_REPAIRS)}"
            )
        terms = Terms(mode=GenerationMode.CHUNK_KV_REUSE, **given)
        repair = self._repair(terms, SamplingParams(), needs_exact=False)
        assert repair is not None
        return repair

    def _repair(self, terms: Terms, params: SamplingParams, *, needs_exact: bool) -> Repair | None:
        """How a request that shares at other positions is repaired; RequestError where it cannot
        share there.
        """
        given = {name: value for name in _REPAIRS if (value := getattr(terms, name)) is not None}
        if terms.mode is not GenerationMode.CHUNK_KV_REUSE:
            if given:
                raise RequestError(
                    f"{next(iter(given))} is for mode='chunk_kv_reuse', and "
                    f"mode={str(terms.mode)!r}"
                )
            return None
        exact = (
            "pin"
            if terms.pin or terms.pins
            else "prompt_logprobs"
            if params.prompt_logprobs is not None
            else None
        )
        if needs_exact or exact:
            raise RequestError(
                f"mode='chunk_kv_reuse' is approximate, and {exact or 'what is asked for'} needs "
                "exact keys and values; use mode='prefix_cache'"
            )
        refusal = states_refusal(self._parts.runner.info) or self._parts.runner.moved_keys_refusal
        if refusal is not None:
            raise RequestError(f"mode='chunk_kv_reuse' is refused: {refusal}")
        prepare_search()
        return Repair.checked(*(given.get(name, getattr(self._config, name)) for name in _REPAIRS))

    def token_ids(self, prompt: Prompt, terms: Terms) -> list[int]:
        """The ids a request with this prompt would have; draws no seed and no number."""
        self._check_open()
        root = self.root(terms)
        info = self._parts.runner.info
        find = functools.partial(self._answers.find, root)
        return encode_prompt(prompt, self._parts.tokenizer, info.vocab_size, find)[1]

    def root(self, terms: Terms) -> bytes:
        """Where the prefix hashes of a tenant and salt start."""
        return shared_root(self._parts.root, terms.tenant, terms.cache_salt)

    def _tenant_root(self, terms: Terms) -> bytes:
        return shared_root(self._parts.root, terms.tenant, None)

    def renumbered(self, request: Request) -> Request:
        """The same request as the latest arrival: the arrival number decides who runs first."""
        return dataclasses.replace(request, index=next(self._next_index))
