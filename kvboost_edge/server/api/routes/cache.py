"""Routes of the cache: warm, unpin, reset and statistics."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Send

from kvboost_edge.config import ChunkStrategy, EngineConfig
from kvboost_edge.engine.handle import Handles
from kvboost_edge.engine.request.answer_ids import KeptAnswers
from kvboost_edge.engine.request.request import SamplingParams
from kvboost_edge.engine.request.results import GenerationResult, WarmResult
from kvboost_edge.engine.request.terms import Terms
from kvboost_edge.errors import RequestError
from kvboost_edge.reuse.chunking import chunk_options
from kvboost_edge.server.api.bodies import JsonRoute
from kvboost_edge.server.api.checks import (
    ModelParam,
    check_prefill,
    check_priority,
    loaded_model,
    looked_up,
    respond_when_loaded,
    room_for,
)
from kvboost_edge.server.api.generation import record_cache_use
from kvboost_edge.server.api.prompt_encoding import (
    encode_prefix,
    estimate_prefix,
    estimate_tokens,
    prefix_size,
)
from kvboost_edge.server.api.schemas.cache import (
    PromptPrefix,
    ResetRequest,
    UnpinRequest,
    WarmRequest,
)
from kvboost_edge.server.api.schemas.strict import bad_field
from kvboost_edge.server.api.usage import costs, usage_of
from kvboost_edge.server.engines import StatsProvider, replicas_of
from kvboost_edge.server.models.server import server_of
from kvboost_edge.server.models.shown import memory_of
from kvboost_edge.server.response_types import (
    ERRORS,
    AnswerCosts,
    Blocks,
    CacheResetResponse,
    CacheStats,
    EngineStats,
    PoolBytes,
    ReplicaPool,
    Stats,
    TierView,
    UnpinResponse,
    WarmResponse,
)
from kvboost_edge.server.state import ModelState
from kvboost_edge.server.work.admission import Admission
from kvboost_edge.server.work.bridge import (
    EncodedPrompt,
    EngineRequest,
    off_loop,
    running,
    to_its_end,
    wait_all,
)
from kvboost_edge.server.work.streams import dumps, json_response, send_json
from kvboost_edge.shareable import shareable_end

__all__ = ["router"]

router = APIRouter(route_class=JsonRoute, responses=ERRORS)

_NO_STORE = {"Cache-Control": "no-store"}
# Most blocks whose references and tokens are shown; reading them takes 1 us per block.
_MOST_DETAILS = 4096


@router.post("/v1/warm", response_class=JSONResponse, responses={200: {"model": WarmResponse}})
async def warm(request: Request, body: WarmRequest) -> Response:
    """Compute the KV of a text, messages or documents and store it in the cache.

    Later prompts that begin with the text or the messages reuse it. Documents are reused at any
    position of a prompt, but only by requests with kvboost.mode "chunk_kv_reuse".
    """

    async def work(state: ModelState, send: Send) -> None:
        body.check_together()
        if body.alone is not None:
            await send_json(send, dumps(await _warm_alone(state, request, body)))
            return
        engine = state.engine
        rendered = _RenderedWarm(state, body)
        estimate = estimate_prefix(state, body)
        async with (
            state.admit(request, estimate) as admission,
            running(engine, rendered, admission) as started,
            record_cache_use(request, admission, rendered, started) as run,
        ):
            results = await wait_all(admission, run.handles)
            if run.watch is not None:
                run.watch.finish(results[0])
            ids = run.prompts[0].token_ids
            whose = _whose(state, admission, body)
            stored = await off_loop(lambda: engine.warm_result(ids, **whose))
        spent = costs(results, 1, run.tokenize_ms, cause=run.cause)
        block_size = engine.config.block_size
        pinned_tokens = run.handles[0].pinned_tokens // block_size * block_size
        await send_json(send, dumps(_warmed(stored, results, spent, pinned_tokens)))

    return respond_when_loaded(request, body.model, work)


@router.post("/v1/unpin", response_class=JSONResponse, responses={200: {"model": UnpinResponse}})
async def unpin(request: Request, body: UnpinRequest) -> Response:
    """Unpin a text or messages that were warmed with `pin`. Their blocks stay cached."""

    async def work(state: ModelState, send: Send) -> None:
        body.check_together()
        engine = state.engine
        estimate = estimate_prefix(state, body)
        async with state.admit(request, estimate) as admission:
            whose = _whose(state, admission, body)

            def end() -> int:
                ids = encode_prefix(state, body, engine.kept_answers(**whose))
                return engine.unpin(ids, **whose) if ids else 0

            unpinned = await off_loop(end, prefix_size(state, body))
        answer: UnpinResponse = {"object": "unpin", "blocks_unpinned": unpinned}
        await send_json(send, dumps(answer))

    return respond_when_loaded(request, body.model, work)


@router.post(
    "/cache/reset", response_class=JSONResponse, responses={200: {"model": CacheResetResponse}}
)
async def reset(request: Request, body: ResetRequest | None = None) -> Response:
    """Drop all cached blocks of all loaded models, except blocks in use."""
    models = server_of(request).models
    # A stopped engine has no blocks left. Its model is loaded again by the next request.
    for served in models.all:
        models.loader.let_go_if_stopped(served)
    dropped = 0
    loaded = models.loaded
    with contextlib.ExitStack() as looks:
        for state in loaded:  # keeps all models loaded meanwhile
            looks.enter_context(state.looks.begin())
        for state in loaded:
            dropped += await looked_up(state, state.engine.reset_cache)
    answer: CacheResetResponse = {"object": "cache.reset", "blocks_dropped": dropped}
    return json_response(answer)


@router.get("/v1/stats", response_class=JSONResponse, responses={200: {"model": Stats}})
async def stats(request: Request, model: ModelParam = None) -> Response:
    """Return statistics of a model: queue, cache, pool, tiers, memory and throughput.

    The memory of all models is included. The model must be loaded; otherwise the status is 503.
    """
    state = loaded_model(request, model)
    figures = await looked_up(state, lambda: _stats(state))
    answer: Stats = {**figures, "models": memory_of(server_of(request).models)}
    return json_response(answer, headers=_NO_STORE)


@router.get("/v1/blocks", response_class=JSONResponse, responses={200: {"model": Blocks}})
async def blocks(request: Request, model: ModelParam = None) -> Response:
    """Return the state of each block of a model's pool, one byte per block.

    Texts and token ids are not included. The model must be loaded; otherwise the status is 503.
    """
    state = loaded_model(request, model)
    return json_response(await looked_up(state, lambda: _blocks(state)), headers=_NO_STORE)


async def _warm_alone(state: ModelState, request: Request, body: WarmRequest) -> WarmResponse:
    """Compute documents, or a text at a position offset, and store their KV.

    If the client disconnects, the request holds its place in the queue until the computation has
    stopped.
    """
    engine = state.engine
    param = str(body.alone)
    if engine.reuse_refusal is not None:
        raise bad_field(
            param,
            f"{param} needs kvboost.mode 'chunk_kv_reuse', which is refused: "
            f"{engine.reuse_refusal}",
        )
    priority = check_priority(state, body.priority)
    documents = body.documents
    texts = [body.text or ""] if documents is None else documents
    estimates = [estimate_tokens(text) if isinstance(text, str) else len(text) for text in texts]
    before = (
        engine.config.primer_tokens * len(texts) if documents is not None else body.position_offset
    )
    # The engine queues only part of the chunks at a time, so one batch of places is enough.
    places = min(_num_chunks(engine.config, body, estimates), state.admission.batch)
    async with state.admit(request, sum(estimates) + before, places) as admission:
        handles = Handles()
        whose = _whose(state, admission, body)

        def compute() -> WarmResult:
            try:
                return engine.warm(
                    body.text,
                    body.position_offset,
                    documents=documents,
                    handles=handles,
                    priority=priority,
                    deadline=admission.deadline,
                    weight=admission.weight,
                    **whose,
                )
            except RequestError as error:
                raise bad_field(param, str(error)) from error

        stored = await to_its_end(compute, sum(map(len, texts)), handles)
        results = await wait_all(admission, handles)
    return _warmed(stored, results, costs(results, 1, 0.0) if results else None)


def _whose(state: ModelState, admission: Admission, body: PromptPrefix) -> dict[str, str | None]:
    """Return the engine's arguments for the blocks of a request."""
    return {
        "tenant": admission.tenant,
        "cache_salt": body.cache_salt,
        "prefill": check_prefill(state, body.prefill),
    }


def _num_chunks(config: EngineConfig, body: WarmRequest, estimates: Sequence[int]) -> int:
    """Return the approximate number of chunks that texts of these token counts are split into."""
    options = chunk_options(config)
    if body.documents is None or options.strategy == ChunkStrategy.DOCUMENT:
        return len(estimates)
    return sum(max(1, -(-tokens // options.chunk_size)) for tokens in estimates)


def _warmed(
    stored: WarmResult,
    results: Sequence[GenerationResult],
    spent: AnswerCosts | None,
    pinned_tokens: int = 0,
) -> WarmResponse:
    return {
        "object": "warm",
        "chunks_stored": stored.chunks_stored,
        "token_count": stored.token_count,
        "chunk_size": stored.chunk_size,
        "chunk_boundary_aligned": stored.chunk_boundary_aligned,
        "partial_tail_tokens": stored.partial_tail_tokens,
        "alignment_warning": stored.alignment_warning,
        "pinned_tokens": pinned_tokens,
        "usage": usage_of(results, 1),
        "timings": None if spent is None else spent["timings"],
        "kvboost": None if spent is None else spent["kvboost"],
    }


class _RenderedWarm(EngineRequest):
    """A warm request for a text or messages."""

    slot = -1

    def __init__(self, state: ModelState, body: WarmRequest) -> None:
        super().__init__(
            size=prefix_size(state, body),
            terms=Terms(
                cache_salt=body.cache_salt,
                prefill=check_prefill(state, body.prefill),
                priority=check_priority(state, body.priority),
                pin=body.pin,
                ttl=body.ttl,
            ),
        )
        self.renders = body.messages is not None
        self._state = state
        self._body = body

    def encode(self, answers: KeptAnswers) -> list[EncodedPrompt]:
        return [EncodedPrompt(encode_prefix(self._state, self._body, answers))]

    def params(self, prompt: EncodedPrompt, choice: int) -> SamplingParams:
        param = "text" if self._body.messages is None else "messages"
        config = self._state.engine.config
        count = len(prompt.token_ids)
        shared = min(count, shareable_end(config, count, self.terms.prefill))
        if self._body.pin and shared < config.block_size:
            message = (
                f"{count} tokens cannot be pinned: they have no full block of {config.block_size} "
                "tokens that later prompts can share; pin a longer text"
            )
            raise bad_field("pin", message)
        return SamplingParams(max_new_tokens=room_for(self._state, count, param, 0, param))


def _stats(state: ModelState) -> EngineStats:
    engine = state.engine
    admission = state.admission
    return {
        "object": "stats",
        "model": state.model_name,
        "queue": {
            "running": engine.num_running(),
            "waiting": engine.num_waiting(),
            "waiting_tokens": engine.waiting_tokens(),
            "in_flight": admission.sequences,
            "max_in_flight": admission.max_sequences,
            "refused": admission.refused,
        },
        **_held(engine),
        "throughput": state.metrics.throughput(),
        "replicas": {
            name: {
                "running": one.num_running(),
                "waiting": one.num_waiting(),
                "waiting_tokens": one.waiting_tokens(),
                **_held(one),
            }
            for name, one in replicas_of(engine).items()
            if name
        },
    }


def _held(engine: StatsProvider) -> CacheStats:
    """Return the cache statistics of an engine, one replica or all replicas."""
    pool = engine.paged_stats()
    memory = {name: pool[name] for name in pool if name.endswith("_bytes")}
    return {
        "cache": engine.cache_stats(),
        "pool": {
            name: value for name, value in pool.items() if name not in memory and name != "tiers"
        },
        "tiers": pool["tiers"],
        "memory": memory,
    }


def _blocks(state: ModelState) -> Blocks:
    engine = state.engine
    pool = engine.paged_stats()
    detailed = pool["num_blocks"] <= _MOST_DETAILS
    details = engine.block_details(_MOST_DETAILS) if detailed else []
    states = bytes(detail.state for detail in details) if detailed else bytes(engine.block_map())
    recent_hits, recent_spans, recent_computed = state.metrics.recent_prompts()
    return {
        "num_blocks": pool["num_blocks"],
        "block_size": pool["block_size"],
        "states": _base64(states),
        "refs": _base64(bytes(min(detail.refs, 255) for detail in details)) if detailed else None,
        "tokens": _base64(bytes(min(detail.tokens, 255) for detail in details))
        if detailed
        else None,
        "counts": {
            "free": states.count(0),
            "cached": states.count(1),
            "used": states.count(2),
            "shared": states.count(3),
            "span": states.count(4),
        },
        "running": engine.num_running(),
        "waiting": engine.num_waiting(),
        "hit_tokens": pool["hit_tokens"],
        "span_tokens": pool["span_tokens"],
        "miss_tokens": pool["miss_tokens"],
        "hit_rate": _hit_rate(pool),
        "memory": {
            "weight_bytes": pool["weight_bytes"],
            "pool_bytes": pool["pool_bytes"],
            "draft_weight_bytes": pool["draft_weight_bytes"],
            "draft_pool_bytes": pool["draft_pool_bytes"],
            "state_bytes": pool["state_bytes"],
            "process_rss_bytes": pool["process_rss_bytes"],
            "process_peak_bytes": pool["process_peak_bytes"],
        },
        "tiers": _tier_views(pool, recent_hits),
        "recent_span_tokens": recent_spans,
        "recent_computed_tokens": recent_computed,
        "generated_tokens_total": pool["generated_tokens"],
        "evictions": pool["evictions"],
        "preemptions": pool["preemptions"],
        "state_slots": pool["state_slots"],
        "state_slots_used": pool["state_slots_used"],
        "replayed_tokens": pool["replayed_tokens"],
        "replicas": {name: _replica_pool(one) for name, one in replicas_of(engine).items() if name},
    }


def _hit_rate(pool: Mapping[str, Any]) -> float | None:
    looked_up: int = pool["hit_tokens"] + pool["span_tokens"] + pool["miss_tokens"]
    return pool["hit_tokens"] / looked_up if looked_up else None


def _replica_pool(figures: StatsProvider) -> ReplicaPool:
    pool = figures.paged_stats()
    return {
        "num_blocks": pool["num_blocks"],
        **_matchable(pool),
        "running": figures.num_running(),
        "waiting": figures.num_waiting(),
        "hit_rate": _hit_rate(pool),
    }


def _matchable(pool: Mapping[str, Any]) -> PoolBytes:
    """Return the number and bytes of matchable blocks, and the bytes of the whole pool."""
    chunks = pool["loaded_chunks"]
    return {
        "blocks": chunks,
        "bytes": chunks * pool["bytes_per_block"],
        "max_bytes": pool["pool_bytes"],
    }


def _tier_views(pool: dict[str, Any], recent_hits: Mapping[str, int]) -> dict[str, TierView]:
    """Return the statistics of the pool and the offload tiers, nearest tier first."""
    tiers = {"pool": {**_matchable(pool), "writable": True, "state": ""}, **pool["tiers"]}
    return {
        name: {
            "blocks": tier["blocks"],
            "bytes": tier["bytes"],
            "max_bytes": tier["max_bytes"],
            "writable": tier["writable"],
            "state": tier["state"],
            "recent_hit_tokens": recent_hits.get(name, 0),
        }
        for name, tier in tiers.items()
    }


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
