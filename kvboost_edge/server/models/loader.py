"""Loading and unloading of models within a memory budget.

If a model does not fit, the least recently used idle models are unloaded, provided that this frees
enough memory. A model in use is never unloaded. Models are loaded one at a time, in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import threading
import time
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvboost_edge.engine.memory.pool_size import gb, mb_up
from kvboost_edge.errors import CapacityError, ConfigError, KVBoostError
from kvboost_edge.host.memory import give_back, process_rss
from kvboost_edge.server.cache_report.tracker import Doctor
from kvboost_edge.server.logs import failure_place, log_facts
from kvboost_edge.server.metrics import Metrics
from kvboost_edge.server.models.served import KnownProperties, Refusal, ServedModel, abilities_of
from kvboost_edge.server.state import ModelState, Shared
from kvboost_edge.server.work.admission import AdmissionQueue
from kvboost_edge.server.work.engine_warmup import learn_template
from kvboost_edge.server.work.threads import in_thread

if TYPE_CHECKING:
    from kvboost_edge.server.engines import Engine

__all__ = ["Loader", "ProcessMemory", "reserved_bytes", "without_folders"]

_PINNED_SECONDS = 1.0  # minimum interval between checks of an idle model with pinned blocks
_SOON = 0.01  # tolerance for timers that fire early
_FAILED_SECONDS = 15.0  # time before a failed load may be retried
# Time that models may take to finish loading at shutdown. Packing can be stopped, but a download
# may not stop.
_ENDING_SECONDS = 5.0

_RESERVED = (
    *("weight_bytes", "pool_bytes", "state_bytes"),
    *("draft_weight_bytes", "draft_pool_bytes"),
)
_FOLDERS = re.compile(r"(?:/[^\s/:'\"]+)+/(?=[^\s/:'\"])")


class ProcessMemory(NamedTuple):
    """Memory limit of the process.

    Attributes:
        bound: maximum resident memory in bytes.
        base: resident memory in bytes before the first model was loaded.
    """

    bound: int
    base: int

    @property
    def for_models(self) -> int:
        """Bytes available to all models, including their overhead."""
        return self.bound - self.base


class _NobodyWaits(Exception):
    """Raised when no request waits for the model any more, or when the server is shutting down."""


class Loader:
    """Loader of the models, used only by the event loop's thread.

    Attributes:
        left: model that was still loading when the server ended; its threads keep running.
    """

    def __init__(
        self,
        served: Sequence[ServedModel],
        shared: Shared,
        budget: int,
        process: ProcessMemory | None = None,
    ) -> None:
        """Create a loader.

        Args:
            served: all models of the server.
            shared: objects shared by all models.
            budget: maximum bytes of weights, pools and recurrent state of all loaded models.
            process: memory limit of the process, which may lower `budget`; None without a limit.
        """
        self._budget = budget
        self._process = process
        self._all = served
        self._shared = shared
        self._turn = asyncio.Lock()
        self._changed = asyncio.Event()
        self._ended = threading.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._under_way: ServedModel | None = None
        self.left: ServedModel | None = None

    @property
    def budget(self) -> int:
        """Maximum bytes of weights, pools and recurrent state of all loaded models."""
        return self._allowed(sum(one.overhead for one in self._all))

    def _allowed(self, overhead: int) -> int:
        """Return the bytes available to all models if their overhead is `overhead` bytes."""
        if self._process is None:
            return self._budget
        return max(0, min(self._budget, self._process.for_models - overhead))

    @property
    def taken(self) -> int:
        """Bytes of the budget that are in use."""
        return sum(one.num_bytes for one in self._all)

    @property
    def ended(self) -> bool:
        """True after shutdown began and no more models will be loaded."""
        return self._ended.is_set()

    def prepared(self, served: ServedModel, engine: Engine) -> ModelState:
        """Return the `ModelState` for a loaded engine. May wait for the engine."""
        admission = AdmissionQueue(engine, self._shared.settings)
        metrics = served.metrics or Metrics(engine, served.name, admission)
        metrics.follow(engine, admission)
        doctor = Doctor(engine, served.name, served.history, metrics.observe_cause)
        settings = self._shared.settings
        defaults = served.defaults(settings)
        if served.record is not None and served.record.template:
            engine.tokenizer.replace_template(served.record.template)
            learn_template(engine.tokenizer)
        state = ModelState(engine, served.name, metrics, admission, doctor, self._shared, defaults)
        served.known = KnownProperties.of(state)
        if state.usable_context < engine.runner_info.max_context:
            self._log(
                "the pool is smaller than the context",
                served,
                level=logging.WARNING,
                context=engine.runner_info.max_context,
                pool_tokens=state.usable_context,
                hint="raise --max-cache-bytes, or lower --ctx-size",
            )
        served.num_bytes = reserved_bytes(engine)
        if self._process is not None:
            served.overhead = served.last_overhead = self._measured_overhead(served, engine)
            if engine.config.max_memory is not None:
                # The engine fits by its own measure, which may be smaller, and fits again later.
                most = max(0, self._process.for_models - served.num_bytes)
                served.overhead = served.last_overhead = min(served.overhead, most)
                served.planned = served.num_bytes
        served.metrics = metrics
        return state

    def _measured_overhead(self, served: ServedModel, engine: Engine) -> int:
        """Return the memory overhead in bytes of a model that was just loaded.

        The overhead is the growth of the process apart from weights, pools and recurrent state,
        plus the buffers that the model will need to run.
        """
        assert self._process is not None
        if engine.runner_info.name != "native":
            raise ConfigError(
                f"--max-memory needs the native runner, and {served.name!r} runs on the "
                f"{engine.runner_info.name} runner, whose buffers are not known; leave it out"
            )
        loaded = [one for one in self._all if one is not served and one.state is not None]
        engines = [engine, *(one.state.engine for one in loaded if one.state is not None)]
        stats = [one.paged_stats() for one in engines]
        resident: int = sum(one["process_rss_bytes"] - one["other_bytes"] for one in stats)
        others = self._process.base + sum(one.overhead for one in loaded)
        return max(0, process_rss() - resident - others) + int(stats[0]["buffer_bytes"])

    @staticmethod
    def adopt(served: ServedModel, state: ModelState) -> None:
        """Mark the model as loaded."""
        served.state = state
        served.phase = "loaded"
        served.refusal = None
        served.waits_for = ""
        served.loaded_at = served.idle_since = time.monotonic()

    def begin(self, served: ServedModel) -> asyncio.Task[None]:
        """Return the task that loads a model. Starts the task if necessary.

        The task never raises an error. When it ends, the model has a state or a refusal, or no
        request waits for the model any more.
        """
        if served.loading is not None:
            return served.loading
        served.phase = "loading" if served.phase == "not_loaded" else served.phase
        served.refusal = None
        served.waits_for = "other models are loaded first"
        served.loading = task = self._spawn(self._load(served))
        return task

    def released(self, served: ServedModel) -> None:
        """Note that the last request of a model has ended."""
        served.idle_since = time.monotonic()
        self._changed.set()
        self.watch_idle(served)

    def watch_idle(self, served: ServedModel) -> None:
        """Start the timer that unloads a model if it is idle."""
        served.stop_clock()
        if (end := served.unloads_at) is not None and not self._ended.is_set():
            loop = asyncio.get_running_loop()
            served.clock = loop.call_later(max(0.0, end - time.monotonic()), self._expire, served)

    async def close(self) -> None:
        """Unload the models that were loaded on demand.

        Models that are still loading get a few seconds to finish and are then abandoned.
        """
        self._ended.set()
        self._changed.set()
        for served in self._all:
            served.stop_clock()
        loadings = [one.loading for one in self._all if one.loading is not None]
        if loadings:
            _, running = await asyncio.wait(loadings, timeout=_ENDING_SECONDS)
            self.left = self._under_way if running else None
            for task in running:
                task.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks)
        if self.left is not None:
            self._log("a loading was abandoned", self.left, level=logging.WARNING)
        for served in self._all:
            if served.num_loads and served.state is not None:
                await self._unload(served, "shutdown")

    async def _load(self, served: ServedModel) -> None:
        try:
            async with self._turn:
                if self._ended.is_set() or not served.in_use:
                    raise _NobodyWaits
                if served.unloading is not None:
                    served.waits_for = "it is being unloaded"
                    # If this task is cancelled, the closing continues.
                    await asyncio.shield(served.unloading)
                served.phase = "loading"
                self._under_way = served
                await self._adopt_new(served, await self._loaded(served))
            served.num_loads += 1
            self._log(
                "model loaded",
                served,
                seconds=round(served.load_seconds, 1),
                bytes=served.num_bytes,
            )
            await self._keep_within(served)
        except _NobodyWaits:
            pass
        except Exception as error:
            self._refuse(served, error)
        finally:
            served.loading = None
            served.waits_for = ""
            if self._under_way is served:
                self._under_way = None
            # A model that is being unloaded still occupies memory.
            if served.state is None and served.unloading is None:
                served.phase = "not_loaded"
                served.num_bytes = served.overhead = 0
            self._changed.set()
            if not served.in_use:
                self.watch_idle(served)

    async def _adopt_new(self, served: ServedModel, engine: Engine) -> None:
        try:
            state = await in_thread(lambda: self.prepared(served, engine))
        except BaseException:
            if served.metrics is not None:
                served.metrics.follow(None, None)
            await in_thread(engine.close)
            raise
        self.adopt(served, state)

    async def _loaded(self, served: ServedModel) -> Engine:
        """Make room for a model, load it and return its engine."""
        source = served.source
        assert source is not None
        if served.planned is None:
            served.waits_for = "its files are being inspected"
            served.planned = await in_thread(source.plan, unwanted=lambda planned: None)
        while True:
            each = served.last_overhead or max(one.last_overhead for one in self._all)
            await self._make_room(served, served.planned, each)
            served.num_bytes = served.planned
            served.overhead = each
            served.waits_for = "its weights are being loaded"
            self._log("model loading", served, bytes=served.planned)
            started = time.monotonic()
            try:
                return await in_thread(
                    lambda: source.load(self._ended), unwanted=lambda engine: engine.close()
                )
            except CapacityError:
                # The machine has less free memory than the budget. Unloading an idle model may free
                # enough.
                served.num_bytes = served.overhead = 0
                leaving = self._idle(besides=served)
                if not leaving or self._ended.is_set():
                    raise
                await self._unload(leaving[0], "memory for another model")
            finally:
                served.load_seconds = time.monotonic() - started

    async def _make_room(self, served: ServedModel, needed: int, overhead: int) -> None:
        """Wait until a model fits in memory. Unloads idle models if that frees enough.

        Args:
            served: the model.
            needed: bytes of its weights, pool and recurrent state.
            overhead: further bytes that it takes in the process.

        Raises:
            CapacityError: the model exceeds the budget.
        """
        problem = (
            f"the model {served.name!r} does not fit: weights, pool and recurrent state take "
            f"{gb(needed)}, but"
        )
        if needed > self._allowed(overhead):
            raise CapacityError(
                f"{problem} {self._limit_of_one(needed, overhead)}, make its pool smaller "
                "(--max-cache-bytes, --num-blocks), or use smaller weights (--weights int4)"
            )
        kept = [one for one in self._all if one.source is None]
        taken = sum(one.num_bytes for one in kept)
        left = self._allowed(overhead + sum(one.overhead for one in kept)) - taken
        if needed > left:
            raise CapacityError(
                f"{problem} {kept[0].name!r} stays loaded and leaves {gb(max(0, left))} for "
                f"others ({self._option}); raise the limit, let {kept[0].name!r} be unloaded "
                "(--keep-alive), make the pools smaller (--max-cache-bytes, --num-blocks), or use "
                "smaller weights (--weights int4)"
            )
        while (missing := self._missing(needed, overhead)) > 0:
            if self._ended.is_set() or not served.in_use:
                raise _NobodyWaits
            leaving: list[ServedModel] = []
            for one in self._idle(besides=served):
                if sum(_cost(other) for other in leaving) < missing:
                    leaving.append(one)
            now = time.monotonic()
            self._changed.clear()
            if sum(_cost(one) for one in leaving) < missing:
                served.waits_for = self._shortage(needed, "they are in use")
                await self._change(None)
            elif (rested := max(one.rested_at for one in leaving)) > now:
                served.waits_for = self._shortage(needed, "they were loaded recently")
                await self._change(rested - now)
            else:
                for one in leaving:
                    # A request may have arrived for it while another model was unloaded.
                    if one.may_leave:
                        await self._unload(one, "memory for another model")

    def _limit_of_one(self, needed: int, overhead: int) -> str:
        """Say what a model may take at most, and how much would be enough."""
        allowed = self._allowed(overhead)
        if self._process is None or allowed == self._budget:
            return (
                f"all models together may take only {gb(allowed)} ({self._option}); give at least "
                f"{mb_up(needed)}"
            )
        bound = self._process.bound
        taken = self._process.base + overhead
        return (
            f"only {gb(allowed)} of the {gb(bound)} in --max-memory remain after {gb(taken)} of "
            f"overhead; give at least {mb_up(needed + taken)}"
        )

    def _missing(self, needed: int, overhead: int) -> int:
        """Return how many bytes must be freed before a model can be loaded."""
        others = sum(one.overhead for one in self._all)
        return self.taken + needed - self._allowed(others + overhead)

    @property
    def _option(self) -> str:
        """The option that limits the memory of all models."""
        return "--max-model-bytes" if self._process is None else "--max-memory"

    async def _keep_within(self, served: ServedModel) -> None:
        """Unload idle models if a new model takes more memory than planned."""
        served.planned = served.num_bytes
        for one in self._idle(besides=served):
            if self.taken <= self.budget:
                return
            if one.may_leave:  # a request may have arrived for it while another was unloaded
                await self._unload(one, "memory for another model")
        if self.taken > self.budget:
            log_facts(logging.WARNING, "models over budget", bytes=self.taken, budget=self.budget)

    async def _change(self, seconds: float | None) -> None:
        """Wait at most `seconds` until a model is released, loaded or unloaded."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)

    def _idle(self, besides: ServedModel) -> list[ServedModel]:
        """Return the models that may be unloaded, least recently used first."""
        idle = [one for one in self._all if one is not besides and one.may_leave]
        return sorted(idle, key=lambda one: one.idle_since)

    def _shortage(self, needed: int, why: str) -> str:
        """Describe the memory in use, and the reason why no model can be unloaded."""
        others = ", ".join(f"{one.name} {gb(one.num_bytes)}" for one in self._all if one.num_bytes)
        return (
            f"it needs {gb(needed)}, but {gb(self.taken)} of {gb(self.budget)} for all models "
            f"({self._option}) are in use: {others}; {why}"
        )

    def _refuse(self, served: ServedModel, error: Exception) -> None:
        served.num_failures += 1
        ours = isinstance(error, KVBoostError)
        fits = not isinstance(error, CapacityError)
        # The log may contain paths of this machine, but a response must contain only file names.
        reason = without_folders(str(error)) if ours else "an internal error; see the log"
        message = f"the model {served.name!r} could not be loaded: {reason}" if fits else reason
        code = "model_failed" if fits else "model_does_not_fit"
        served.refusal = Refusal(message[:2000], code, time.monotonic() + _FAILED_SECONDS)
        facts = {"error": type(error).__name__, "place": failure_place(error)}
        self._log(
            "model not loaded",
            served,
            level=logging.ERROR,
            reason=str(error) if ours else None,
            **facts,
        )

    def _expire(self, served: ServedModel) -> None:
        served.clock = None
        if not self._ended.is_set():
            self._spawn(self._leave(served))

    async def _leave(self, served: ServedModel) -> None:
        if served.state is None or not served.may_leave:
            return
        engine = served.state.engine
        pinned = 0
        # A stopped engine has no pinned blocks.
        with served.state.looks.begin(), contextlib.suppress(KVBoostError):
            pinned = (await in_thread(engine.paged_stats))["pinned_blocks"]
        if self._ended.is_set() or not served.may_leave or served.state.engine is not engine:
            return
        if served.unloads_at is None or served.unloads_at - _SOON > time.monotonic():
            self.watch_idle(served)  # a request used the model meanwhile
            return
        if pinned:  # keep the model, because its pinned blocks must stay in memory
            loop = asyncio.get_running_loop()
            served.clock = loop.call_later(
                max(_PINNED_SECONDS, served.keep_alive), self._expire, served
            )
        else:
            await self._unload(served, "idle")

    async def unload(self, served: ServedModel, why: str) -> None:
        """Unload an unused model if it is loaded, and wait until its memory is free."""
        served.stop_clock()
        if served.state is not None:
            await self._unload(served, why)
        elif served.unloading is not None:
            await asyncio.shield(served.unloading)

    async def _unload(self, served: ServedModel, why: str) -> None:
        """Unload a model and wait until its memory is free."""
        await asyncio.shield(self._begin_unloading(served, why))

    def let_go_if_stopped(self, served: ServedModel) -> None:
        """Unload a model whose engine stopped after an error, if the model can be loaded again.

        The next request loads it.
        """
        if (
            served.source is not None
            and served.state is not None
            and not served.state.engine.is_alive()
        ):
            self._begin_unloading(served, "its engine stopped")

    def _begin_unloading(self, served: ServedModel, why: str) -> asyncio.Task[None]:
        state = served.state
        assert state is not None
        assert served.metrics is not None
        state.doctor.settle()
        served.state = None
        served.phase = "unloading"
        served.stop_clock()
        served.metrics.follow(None, None)
        served.unloading = self._spawn(self._close(served, state, why))
        return served.unloading

    async def _close(self, served: ServedModel, state: ModelState, why: str) -> None:
        started = time.monotonic()
        engine = state.engine
        await state.looks.over()
        kept = engine.config.disk_cache_dir is not None or engine.config.redis_url is not None
        try:
            served.abilities = await in_thread(lambda: _closed(engine, served.abilities))
        except Exception as error:
            facts = {"error": type(error).__name__, "place": failure_place(error)}
            self._log("model not closed", served, level=logging.ERROR, **facts)
        finally:
            served.num_bytes = served.overhead = 0
            served.num_unloads = served.num_unloads + 1
            served.unloading = None
            served.phase = "loading" if served.loading is not None else "not_loaded"
            cache = "kept in its tiers" if kept else "lost: there is no tier (--disk-cache-dir)"
            seconds = round(time.monotonic() - started, 1)
            self._log("model unloaded", served, why=why, seconds=seconds, cache=cache)
            self._changed.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @staticmethod
    def _log(event: str, served: ServedModel, *, level: int = logging.INFO, **facts: Any) -> None:
        log_facts(level, event, model=served.name, **facts)


def without_folders(text: str) -> str:
    """Return a text for clients, in which paths of this machine are only file names."""
    return _FOLDERS.sub("", text)


def reserved_bytes(engine: Engine) -> int:
    """Return the bytes of a model's weights, pool and recurrent state, and of its draft model."""
    # This includes memory that is reserved but not resident yet.
    stats = engine.paged_stats()
    return sum(int(stats[name]) for name in _RESERVED)


def _cost(served: ServedModel) -> int:
    """Return the bytes that unloading a model frees in the process."""
    return served.num_bytes + served.overhead


def _closed(engine: Engine, abilities: tuple[str, ...]) -> tuple[str, ...]:
    """Close an engine and return the model's capabilities."""
    try:
        return abilities or (abilities_of(engine) if engine.is_alive() else ())
    finally:
        engine.close()
        give_back()
