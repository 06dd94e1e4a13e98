"""A replica: a Ray Serve deployment of one engine. Ray starts it, checks its health and ends it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from kvboost_edge import __version__
from kvboost_edge.config import EngineConfig, GenerationMode
from kvboost_edge.engine.engine import CPUPagedEngine
from kvboost_edge.engine.handle import Handles, RequestHandle
from kvboost_edge.engine.request.request import RequestArrival
from kvboost_edge.engine.request.results import GenerationResult, WarmResult
from kvboost_edge.errors import CapacityError, KVBoostError
from kvboost_edge.host.memory import Region, available_bytes, mapped_file
from kvboost_edge.kvcache.hashing import HASH_BYTES, decode_tokens
from kvboost_edge.serve_ray.machine import directory_id, machine_id
from kvboost_edge.serve_ray.messages import (
    CallOutcome,
    Came,
    Description,
    Failure,
    ReplicaCall,
    ReplicaFigures,
    ReplicaUpdate,
    Sent,
    failure_of,
    settings_digest,
)
from kvboost_edge.serve_ray.model_files import model_digest
from kvboost_edge.serve_ray.routing.cache_records import Cursor, Place
from kvboost_edge.serve_ray.routing.event_journal import Journal
from kvboost_edge.serve_ray.routing.load_meter import Meter
from kvboost_edge.serve_ray.watch.stall_detection import Stillness, major_faults

__all__ = ["EngineReplica", "EngineStuck", "ReplicaOptions", "own_options"]

_PROGRESS_SECONDS = 0.5  # interval between progress reports
_COMPUTING_THREADS = 32  # each runs one `embed`, `rerank` or `warm`
_MEASURED_TOKENS = 64  # prompt length for measuring a new replica's speed
# Every engine step changes at least one of these statistics.
_MOVING = (
    "num_running",
    "num_waiting",
    "tokens_held",
    "free_blocks",
    "hit_tokens",
    "miss_tokens",
    "generated_tokens",
)
_PLACES = {"disk": Place.DISK, "redis": Place.SHARED}
# Bytes per second, assumed before the first read.
_GUESSED_SPEEDS = {"disk": 500e6, "redis": 200e6}


class ReplicaOptions(NamedTuple):
    """Parameters of each replica.

    Attributes:
        model: Path or id of the model.
        engine: Engine options.
        warm: Prompts to compute before requests are accepted.
        warm_documents: Documents to compute before requests are accepted.
        tenants: Tenants whose caches each get these prompts, messages and documents.
        mode: Cache mode of requests that do not set one.
        warm_systems: System messages to compute before requests are accepted.
    """

    model: str
    engine: dict[str, Any]
    warm: tuple[str, ...] = ()
    warm_documents: tuple[str, ...] = ()
    tenants: tuple[str | None, ...] = (None,)
    mode: GenerationMode = GenerationMode.PREFIX_CACHE
    warm_systems: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Return a text without the engine options, which may contain a password."""
        # Ray logs the arguments of a deployment.
        return f"ReplicaOptions({self.model!r})"


def own_options(engine: Mapping[str, Any], cpus: float, memory: int) -> dict[str, Any]:
    """Return a replica's engine options for its reserved CPUs and memory.

    Args:
        engine: Engine options of every replica.
        cpus: Number of reserved CPUs, which is the default number of threads.
        memory: Reserved bytes; 0 if no memory is reserved.

    Raises:
        CapacityError: More memory is reserved than is available.
    """
    options = dict(engine)
    if cpus >= 1:
        options.setdefault("num_threads", int(cpus))
    if memory > available_bytes():
        raise CapacityError(
            f"memory={memory} bytes are reserved for the replica, but only {available_bytes()} "
            "are available; reserve less"
        )
    return options


class EngineStuck(KVBoostError):
    """The engine makes no progress, so its requests will never end."""


class EngineReplica:
    """The owner of one engine. Its methods run on one event loop, and blocking calls in threads.

    Args:
        options: Parameters of each replica.
        name: Name of the replica for the router; "" outside of Ray.
        prepare: Function that is called with the engine before requests are accepted.
    """

    still_seconds = 120.0  # A busy engine counts as stuck after this time without progress.

    def __init__(
        self,
        options: ReplicaOptions,
        name: str = "",
        prepare: Callable[[CPUPagedEngine], None] | None = None,
    ) -> None:
        config = EngineConfig.from_options(**options.engine)
        self.name = name
        self._model = model_digest(options.model, config)
        self._engine = CPUPagedEngine.from_pretrained(options.model, **options.engine)
        self._handles: dict[str, RequestHandle] = {}
        self._stillness = Stillness()
        self._learning: asyncio.Task[None] | None = None
        # A separate thread pool. Long calls in the event loop's threads would delay health checks
        # and new requests.
        self._computing = ThreadPoolExecutor(
            _COMPUTING_THREADS, thread_name_prefix="kvboost-compute"
        )
        try:
            if prepare is not None:
                prepare(self._engine)
            stats = self._engine.paged_stats()
            token_bytes = stats["bytes_per_block"] / config.block_size
            self._journal = Journal()
            self._meter = Meter(
                seconds_per_token=_measured_speed(self._engine),
                step_tokens=config.max_batch_tokens,
                max_running=int(stats["max_num_seqs"]),
                tiers={
                    _PLACES[name]: token_bytes / _GUESSED_SPEEDS[name] for name in stats["tiers"]
                },
            )
        except BaseException:
            self._engine.close()
            raise

    # Methods called by Ray.

    async def check_health(self) -> None:
        """Check the engine's health. After an error, Ray replaces this process.

        Raises:
            KVBoostError: The engine's thread has died.
            EngineStuck: The engine has had requests but made no progress for `still_seconds`.
        """
        engine = self._engine
        if not engine.is_alive():
            raise KVBoostError(f"the engine of replica {self.name!r} stopped after an error")
        stats = await asyncio.to_thread(engine.paged_stats)
        has_work = bool(stats["num_running"] or engine.num_waiting())
        figures = (*(stats[name] for name in _MOVING), major_faults())
        still = self._stillness.look(figures, has_work, time.process_time(), time.monotonic())
        if still > self.still_seconds:
            raise EngineStuck(
                f"the engine of replica {self.name!r} has made no progress for {still:.0f} s, "
                "although it has requests"
            )

    def record_replica_metadata(self) -> dict[str, Any]:
        """Return the metadata that all ingresses receive when this replica starts."""
        return {
            "version": __version__,
            "model": self._model,
            "root": settings_digest(self._engine.cache_root, self._engine.config.prefill),
        }

    def close(self) -> None:
        """Store pending blocks in the tiers, and close the engine."""
        self._engine.close()
        self._computing.shutdown(wait=False)

    # Requests from the ingress.

    async def generate(self, sent: Sent) -> AsyncIterator[Came]:
        """Compute a request, and yield the parts of its answer, see `Came`.

        Closing the stream cancels the request. Ray does this to cancel a call.
        """
        now = time.monotonic()
        deadline = None if sent.left is None else now + sent.left
        terms = dataclasses.replace(sent.terms, deadline=deadline)
        try:
            ids = decode_tokens(sent.tokens)
            # The ingress does not know the latest blocks of this replica. Without hashes, nothing
            # is found in the cache.
            full = len(ids) // self._engine.config.block_size
            hashes = sent.hashes if len(sent.hashes) == full * HASH_BYTES else b""
            entry = RequestArrival(time.perf_counter() - sent.since, sent.prompt_text, hashes)
            submitting = asyncio.ensure_future(
                asyncio.to_thread(
                    lambda: self._engine.submit(
                        ids, sampling=sent.sampling, terms=terms, entry=entry
                    )
                )
            )
            try:
                handle = await asyncio.shield(submitting)
            except asyncio.CancelledError:
                submitting.add_done_callback(_cancel_submitted)  # The thread continues.
                raise
        except Exception as error:
            yield Came(self.name, failure=self._failure(error))
            return
        self._handles[sent.request] = handle
        self._meter.begin(sent.request, sent.missing_tokens, now, sent.restored_tokens)
        num_tokens = 0
        try:
            yield Came(self.name)
            while not await handle.astarted(_PROGRESS_SECONDS):
                yield Came(
                    self.name, cached_tokens=handle.cached_tokens, progress=handle.progress()
                )
            async for batch in handle.abatches():
                result = batch.pop() if isinstance(batch[-1], GenerationResult) else None
                if batch:
                    num_tokens += len(batch)
                    self._meter.first_token(sent.request, time.monotonic())
                if isinstance(result, GenerationResult):
                    self._note_restored(result)
                yield self._came(sent, handle, tuple(batch), result)
        except Exception as error:
            yield Came(self.name, failure=self._failure(error))
        finally:
            handle.cancel()
            # A retry may have sent the same request to this replica again.
            if self._handles.get(sent.request) is handle:
                del self._handles[sent.request]
            self._meter.end(sent.request, time.monotonic(), num_tokens)

    def _came(self, sent: Sent, handle: RequestHandle, events: Any, result: Any) -> Came:
        kept = None
        if result is not None and result.finish_reason in ("stop", "length"):
            terms = sent.terms
            answers = self._engine.kept_answers(
                tenant=terms.tenant, cache_salt=terms.cache_salt, prefill=terms.prefill
            )
            kept = answers.find(result.output_text)
        return Came(
            self.name,
            events,
            handle.cached_tokens,
            handle.prompt_logprobs,
            result,
            handle.pinned_tokens,
            kept,
        )

    def _note_restored(self, result: GenerationResult) -> None:
        """Record the read speed of a tier if all restored tokens came from that tier."""
        read = [
            (name, tokens)
            for name, tokens in result.hit_tokens.items()
            if name in _PLACES and tokens
        ]
        if len(read) == 1:
            self._meter.restored(_PLACES[read[0][0]], read[0][1], result.load_ms / 1e3)

    def _failure(self, error: Exception) -> Failure:
        return failure_of(error, self._engine.is_alive())

    async def compute(
        self, sent: Sent, call: str, arguments: tuple[Any, ...], options: Mapping[str, Any]
    ) -> AsyncIterator[CallOutcome | None]:
        """Run the engine's `embed`, `rerank` or `warm`. Yield None at the start, then the outcome.

        Closing the stream cancels the work.
        """
        handles = Handles()
        deadline = None if sent.left is None else time.monotonic() + sent.left
        calls: dict[str, Callable[..., Any]]
        calls = {
            "embed": self._engine.embed,
            "rerank": self._engine.rerank,
            "warm": self._engine.warm,
        }
        work = calls[call]
        self._meter.begin(sent.request, sent.missing_tokens, time.monotonic())

        def run() -> Any:
            return work(*arguments, handles=handles, deadline=deadline, **options)

        async def computed() -> (
            Any
        ):  # errors belong to the call, including those of a closed replica
            return await asyncio.get_running_loop().run_in_executor(self._computing, run)

        task = asyncio.ensure_future(computed())
        try:
            yield None
            try:
                value = await asyncio.shield(task)
                failure = None
            except Exception as error:
                value = None
                failure = self._failure(error)
            yield CallOutcome(value, _results_of(handles), failure)
        finally:
            handles.stop()
            await asyncio.wait([task])
            task.exception()
            self._meter.end(sent.request, time.monotonic())

    # Calls from the ingress to this replica.

    async def ask(self, asked: ReplicaCall) -> Any:
        """Call one of the methods listed in `_QUESTIONS`.

        Returns a `Failure` for an error of this package, and None if the call is meant for another
        replica.
        """
        if self.name not in asked.targets:
            return None
        try:
            return await _QUESTIONS[asked.method](self, *asked.arguments)
        except KVBoostError as error:
            return self._failure(error)

    async def _cancel(self, request: str) -> bool:
        """Cancel a request; return False if it is unknown or has ended."""
        handle = self._handles.get(request)
        if handle is not None:
            handle.cancel()
        return handle is not None

    async def _describe(self) -> Description:
        engine = self._engine
        return Description(
            replica=self.name,
            pid=os.getpid(),
            model=self._model,
            root=engine.cache_root,
            block_size=engine.config.block_size,
            # Memory addresses are meaningless in another process.
            info=dataclasses.replace(engine.runner_info, weight_region=Region(0, 0)),
            sampling_defaults=engine.sampling_defaults,
            speculates=engine.speculates,
            reuse_refusal=engine.reuse_refusal,
            generates=engine.generates,
            embedding_size=engine.embedding_size,
            default_reuse_refusal=engine.default_reuse_refusal,
            prefill=engine.config.prefill,
        )

    async def _tell(self, cursor: Cursor) -> ReplicaUpdate:
        """Return this replica's load, and the cache events after the ingress's cursor."""
        alive = self._engine.is_alive()
        if alive:
            # The engine reports each event once. A separate task receives it even if the caller
            # stops waiting.
            if self._learning is None or self._learning.done():
                self._learning = asyncio.ensure_future(self._learn())
            await asyncio.shield(self._learning)
        free = await self._free_blocks()
        report = self._meter.report(time.monotonic(), free_blocks=free, is_draining=not alive)
        return ReplicaUpdate(self.name, alive, report, self._journal.since(cursor))

    async def _learn(self) -> None:
        """Record which blocks were added to the engine's cache and evicted from it."""
        engine = self._engine
        with contextlib.suppress(KVBoostError):  # The engine may stop meanwhile.
            pool, tiers = await asyncio.to_thread(
                lambda: (engine.take_cache_events(), engine.take_tier_events())
            )
            self._journal.add(pool)
            for name, events in tiers.items():
                self._journal.add(events, _PLACES[name])

    async def _figures(self) -> ReplicaFigures:
        engine = self._engine
        paged, cache, stores, weights = await asyncio.to_thread(
            lambda: (
                engine.paged_stats(),
                engine.cache_stats(),
                _stores_of(engine.config),
                _weights_of(engine),
            )
        )
        return ReplicaFigures(
            self.name,
            paged,
            cache,
            engine.num_running(),
            engine.num_waiting(),
            engine.waiting_tokens(),
            stores,
            weights,
        )

    async def _block_states(self, limit: int) -> tuple[list[int], list[tuple[int, ...]]]:
        engine = self._engine
        states, details = await asyncio.to_thread(
            lambda: (engine.block_map(), engine.block_details(limit))
        )
        return states, [tuple(detail) for detail in details]

    async def _reset_cache(self) -> int:
        return await asyncio.to_thread(self._engine.reset_cache)

    async def _unpin(
        self, tokens: bytes, whose: Mapping[str, str | None], holder: str | None
    ) -> int:
        ids = decode_tokens(tokens)
        return await asyncio.to_thread(lambda: self._engine.unpin(ids, **whose, holder=holder))

    async def _warm_result(self, tokens: bytes, whose: Mapping[str, str | None]) -> WarmResult:
        ids = decode_tokens(tokens)
        return await asyncio.to_thread(lambda: self._engine.warm_result(ids, **whose))

    async def _free_blocks(self) -> int:
        try:
            return int((await asyncio.to_thread(self._engine.paged_stats))["free_blocks"])
        except KVBoostError:
            return 0


_QUESTIONS: dict[str, Callable[..., Awaitable[Any]]] = {
    "block_states": EngineReplica._block_states,
    "cancel": EngineReplica._cancel,
    "describe": EngineReplica._describe,
    "figures": EngineReplica._figures,
    "reset_cache": EngineReplica._reset_cache,
    "tell": EngineReplica._tell,
    "unpin": EngineReplica._unpin,
    "warm_result": EngineReplica._warm_result,
}


def _stores_of(config: EngineConfig) -> dict[str, str]:
    """Return the identity of each tier's storage, see `ReplicaFigures`."""
    stores = {"redis": ""}  # All replicas use the same server.
    if config.disk_cache_dir is not None:
        stores["disk"] = directory_id(config.disk_cache_dir)
    return stores


def _weights_of(engine: CPUPagedEngine) -> dict[str, str]:
    """Return the identity of the memory of each kind of weights, see `ReplicaFigures`."""
    names = ("weight_bytes", "draft_weight_bytes")
    found = {
        name: mapped_file(region.address)
        for name, region in zip(names, engine.weight_regions, strict=True)
        if region.nbytes
    }
    return {name: f"{machine_id()}:{file}" for name, file in found.items() if file}


def _measured_speed(engine: CPUPagedEngine) -> float:
    """Measure the seconds per prompt token with one uncached prompt."""
    # The router then knows the speeds of unequal machines from the first request on.
    capacity = int(engine.paged_stats()["num_blocks"]) * engine.config.block_size
    prompt = [0] * max(1, min(_MEASURED_TOKENS, engine.runner_info.max_context - 1, capacity - 1))
    began = time.perf_counter()
    if engine.pooling.source:
        engine.embed([prompt])
    else:
        engine.generate(prompt, max_new_tokens=1, mode="baseline")
    return max((time.perf_counter() - began) / len(prompt), 1e-9)


def _cancel_submitted(submitting: asyncio.Future[RequestHandle]) -> None:
    """Cancel a submitted request that no client waits for any more."""
    if not submitting.cancelled() and submitting.exception() is None:
        submitting.result().cancel()


def _results_of(handles: Sequence[RequestHandle]) -> tuple[GenerationResult, ...]:
    """Return the results of requests that have succeeded so far."""
    found = []
    for handle in handles:
        with contextlib.suppress(Exception):
            found.append(handle.result(timeout=0))
    return tuple(found)
