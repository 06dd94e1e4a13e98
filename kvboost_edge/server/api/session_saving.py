"""Saving and restoring named sessions, for /v1/sessions and llama.cpp's slots.

A session is computed like a prompt without an answer, and its blocks are pinned until it ends. If
other pins leave no room, a session with a disk cache is stored without a pin.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from starlette.requests import Request

from kvboost_edge.config import SESSION_SECONDS
from kvboost_edge.engine.request.answer_ids import KeptAnswers
from kvboost_edge.engine.request.request import SamplingParams
from kvboost_edge.engine.request.results import GenerationResult
from kvboost_edge.engine.request.terms import Terms
from kvboost_edge.errors import CapacityError, KVBoostError, RequestError
from kvboost_edge.server.api.checks import room_for
from kvboost_edge.server.api.generation import record_cache_use
from kvboost_edge.server.api.prompt_encoding import encode_prefix, estimate_prefix, prefix_size
from kvboost_edge.server.api.schemas.sessions import SessionRequest
from kvboost_edge.server.api.schemas.shared import check_in_vocabulary
from kvboost_edge.server.api.schemas.strict import bad_field
from kvboost_edge.server.api.usage import costs, usage_of
from kvboost_edge.server.api_errors import ApiError
from kvboost_edge.server.models.registry import Models
from kvboost_edge.server.models.server import server_of
from kvboost_edge.server.response_types import SavedSession, SessionView
from kvboost_edge.server.state import ModelState, tenant_of
from kvboost_edge.server.work.bridge import (
    EncodedPrompt,
    EngineRequest,
    off_loop,
    running,
    wait_all,
)
from kvboost_edge.shareable import shareable_end
from kvboost_edge.tiers.disk.session_records import Session, SessionInfo, SessionStore

__all__ = [
    "KeptSession",
    "delete_session",
    "keep_session",
    "missing_session",
    "saved_prefill",
    "saved_view",
    "session_view",
]


class KeptSession(NamedTuple):
    """A session that was saved or restored.

    Attributes:
        info: properties of the session.
        result: result of computing its tokens.
        pinned: True if the full blocks are pinned in the pool.
        tokenize_ms: time spent on tokenization, in milliseconds.
        cause: cause of the cache miss.
    """

    info: SessionInfo
    result: GenerationResult
    pinned: bool
    tokenize_ms: float
    cause: str


async def keep_session(
    request: Request,
    state: ModelState,
    name: str,
    source: SessionRequest | Sequence[int] | Session,
    *,
    cache_salt: str | None = None,
    prefill: str | None = None,
    ttl: float | None = None,
    pin: bool = True,
    priority: int = 0,
    slot: int = -1,
) -> KeptSession:
    """Compute the tokens of a session, pin them, and store its record.

    Args:
        request: the HTTP request.
        state: the model.
        name: name of the session.
        source: conversation to save: a request body or token ids. A stored session is restored.
        cache_salt: salt of the prefix cache.
        prefill: prefill of the requests that continue the conversation; None for the server's
            default.
        ttl: lifetime in seconds; None for that of the stored session, or the default.
        pin: whether to pin the tokens.
        priority: priority of the computation.
        slot: llama.cpp's slot that holds the conversation afterwards.

    Raises:
        ApiError: the session exceeds a limit of the tenant or the pool (400).
    """
    store = state.sessions
    engine = state.engine
    if not pin and not store.on_disk:
        raise bad_field(
            "pin", "pin: false needs a disk cache, and this server has none (--disk-cache-dir)"
        )
    tenant = tenant_of(request)
    models = server_of(request).models
    terms = Terms(
        cache_salt=cache_salt, prefill=prefill, priority=priority, pin_holder=_pin_holder(name)
    )
    rendered = _RenderedSession(state, tenant, name, source, terms, ttl=ttl, pin=pin, slot=slot)
    async with (
        state.admit(request, rendered.estimate) as admission,
        running(engine, rendered, admission) as started,
        record_cache_use(request, admission, rendered, started) as run,
    ):
        results = await wait_all(admission, run.handles)
        if run.watch is not None:
            run.watch.finish(results[0])
        session = rendered.session
        assert session is not None
        pinned = run.handles[0].pinned_tokens > 0
        if pin and not pinned and not store.on_disk:
            raise ApiError(
                400,
                f"the session cannot be kept: its {session.info.num_tokens} tokens do not fit "
                "next to the pinned blocks of the pool, and there is no disk cache; delete "
                "sessions, enlarge the pool (--max-cache-bytes), or set --disk-cache-dir",
                code="capacity_exceeded",
            )
        # The thread stores the record and unpins the session that it replaces, even if the client
        # disconnects meanwhile.
        default = engine.config.prefill_of(None)
        info = await off_loop(
            lambda: _store(models, store, tenant, cache_salt, session, pinned, default)
        )
    return KeptSession(info, results[0], pinned, run.tokenize_ms, run.cause)


async def delete_session(request: Request, cache_salt: str | None, name: str) -> int:
    """Delete a session and end its pin.

    Returns:
        The number of blocks that were unpinned, without those that something else pins.

    Raises:
        ApiError: there is no such session (404).
    """
    models = server_of(request).models
    store = server_of(request).shared.sessions
    tenant = tenant_of(request)

    def delete() -> int | None:
        found = store.remove(tenant, cache_salt, name)
        return None if found is None else _unpin(models, tenant, cache_salt, found)

    unpinned = await off_loop(delete)
    if unpinned is None:
        raise missing_session(name)
    return unpinned


def _store(
    models: Models,
    store: SessionStore,
    tenant: str | None,
    cache_salt: str | None,
    session: Session,
    pinned: bool,
    default: str,
) -> SessionInfo:
    """Store a session, and end the pin that its record no longer names. Blocks on the disk.

    Args:
        default: prefill of the model's requests by default.
    """
    try:
        info, before = store.put(tenant, cache_salt, session)
    except CapacityError:
        kept = store.find(tenant, cache_salt, session.info.name)
        if pinned and (kept is None or not _same_pin(kept.info, session.info, default)):
            _unpin(models, tenant, cache_salt, session)
        raise
    if before is not None and not (pinned and _same_pin(before.info, info, default)):
        _unpin(models, tenant, cache_salt, before)
    return info


def _unpin(models: Models, tenant: str | None, cache_salt: str | None, session: Session) -> int:
    """End the pin of a session, and return the number of blocks that were unpinned."""
    served = models.find(session.info.model)
    if served is None or (state := served.state) is None:
        return 0  # unloading a model ends its pins
    try:
        return state.engine.unpin(
            session.token_ids,
            tenant=tenant,
            cache_salt=cache_salt,
            prefill=session.info.prefill,
            holder=_pin_holder(session.info.name),
        )
    # The engine has stopped, which ends its pins, or does not have the session's prefill.
    except KVBoostError:
        return 0


def saved_prefill(state: ModelState, info: SessionInfo, param: str) -> str | None:
    """Return the prefill that a session was saved with; None for the server's default.

    Args:
        state: the model.
        info: the session.
        param: field that names the session, for the error.

    Raises:
        ApiError: the server does not support this prefill (400).
    """
    try:
        state.engine.config.prefill_of(info.prefill)
    except RequestError as error:
        message = (
            f"the session {info.name!r} was saved with prefill={info.prefill!r}, but this server "
            "computes all prompts exactly; start it with --prefill on-request, or save the session "
            "again"
        )
        raise bad_field(param, message) from error
    return info.prefill


def _pin_holder(name: str) -> str:
    """Return the holder of a session's pins."""
    return f"session {name}"


def _same_pin(one: SessionInfo, other: SessionInfo, default: str) -> bool:
    pins = {(info.model, info.prefix, info.prefill or default) for info in (one, other)}
    return len(pins) == 1


def session_view(store: SessionStore, info: SessionInfo) -> SessionView:
    """Return a session as JSON."""
    return {
        "object": "session",
        "name": info.name,
        "model": info.model,
        "tokens": info.num_tokens,
        "bytes": info.num_bytes,
        "created": int(info.created),
        "expires": int(info.expires),
        "stored": "disk" if store.on_disk else "pool",
    }


def saved_view(store: SessionStore, kept: KeptSession) -> SavedSession:
    """Return a session that was saved or restored as JSON."""
    spent = costs([kept.result], 1, kept.tokenize_ms, cause=kept.cause)
    return {
        **session_view(store, kept.info),
        "pinned": kept.pinned,
        "usage": usage_of([kept.result], 1),
        "timings": spent["timings"],
        "kvboost": spent["kvboost"],
    }


def missing_session(name: str) -> ApiError:
    """Return the error for a session that does not exist (404)."""
    message = (
        f"there is no session {name[:128]!r} of this API key and salt: it was never saved, was "
        "deleted, or has expired; GET /v1/sessions lists the sessions"
    )
    return ApiError(404, message, code="session_not_found", param="name")


class _RenderedSession(EngineRequest):
    """Computation of a session's tokens.

    Attributes:
        session: the session, once its tokens are known.
    """

    # Checking the limits reads the records of all sessions.
    renders = True

    def __init__(
        self,
        state: ModelState,
        tenant: str | None,
        name: str,
        source: SessionRequest | Sequence[int] | Session,
        terms: Terms,
        *,
        ttl: float | None,
        pin: bool,
        slot: int,
    ) -> None:
        is_body = isinstance(source, SessionRequest)
        self.session: Session | None = None
        self.slot = slot
        self._state = state
        self._tenant = tenant
        self._name = name
        self._body = source if isinstance(source, SessionRequest) else None
        self._stored = source if isinstance(source, Session) else None
        given = source.tokens if isinstance(source, SessionRequest) else source
        self._ids = given.token_ids if isinstance(given, Session) else given
        self._ttl = ttl
        self._pin = pin
        self._field = "messages" if is_body else "name"
        super().__init__(
            size=len(self._ids)
            if self._ids is not None
            else prefix_size(state, self._required_body),
            terms=terms,
        )

    @property
    def estimate(self) -> int:
        """Estimated number of tokens."""
        return (
            len(self._ids)
            if self._ids is not None
            else estimate_prefix(self._state, self._required_body)
        )

    @property
    def _required_body(self) -> SessionRequest:
        assert self._body is not None
        return self._body

    def encode(self, answers: KeptAnswers) -> list[EncodedPrompt]:
        state = self._state
        ids = list(self._ids) if self._ids is not None else self._encoded(answers)
        self._check(ids)
        stored = self._stored
        ttl = self._ttl or (SESSION_SECONDS if stored is None else stored.info.ttl)
        spec = state.engine.runner_info.kv_spec
        session = Session.of(
            self._name,
            state.model_name,
            ids,
            self._content() if stored is None else stored.content,
            num_shareable=shareable_end(state.engine.config, len(ids), self.terms.prefill),
            block_size=state.engine.config.block_size,
            block_bytes=spec.bytes_per_block,
            state_bytes=spec.bytes_per_state,
            prefill=self.terms.prefill,
            ttl=ttl,
            now=time.time(),
        )
        if stored is not None:
            info = dataclasses.replace(session.info, created=stored.info.created)
            session = dataclasses.replace(session, info=info)
        state.sessions.check(self._tenant, self.terms.cache_salt, session)
        self.session = session
        pins = ((len(ids), ttl),) if self._pin else ()
        return [EncodedPrompt(ids, from_text=self._ids is None, pins=pins)]

    def params(self, prompt: EncodedPrompt, choice: int) -> SamplingParams:
        count = len(prompt.token_ids)
        return SamplingParams(
            max_new_tokens=room_for(self._state, count, self._field, 0, self._field)
        )

    def _encoded(self, answers: KeptAnswers) -> list[int]:
        return encode_prefix(self._state, self._required_body, answers)

    def _check(self, ids: Sequence[int]) -> None:
        """Raise ApiError for tokens that the model or the cache cannot take."""
        check_in_vocabulary("tokens", ids, self._state.engine.runner_info.vocab_size)
        config = self._state.engine.config
        shared = min(len(ids), shareable_end(config, len(ids), self.terms.prefill))
        if shared < config.block_size:
            raise bad_field(
                self._field if self._body is None or self._body.tokens is None else "tokens",
                f"{len(ids)} tokens cannot be saved: they have no full block of "
                f"{config.block_size} tokens that later prompts can share; save a longer "
                "conversation",
            )

    def _content(self) -> dict[str, Any]:
        """Return the messages, tools and template variables as the client sent them."""
        body = self._body
        if body is None or body.messages is None:
            return {}
        return {
            "messages": [
                message.model_dump(mode="json", exclude_unset=True) for message in body.messages
            ],
            "tools": body.tools,
            "chat_template_kwargs": body.chat_template_kwargs,
        }
