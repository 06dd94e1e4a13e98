"""The replicas of a deployment as seen by the ingress: membership, load and calls.

One thread with an event loop does all the work, so the router needs no lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from kvboost_edge import __version__
from kvboost_edge.errors import BackendUnavailable, ConfigError, KVBoostError
from kvboost_edge.serve_ray.in_flight import Stream, is_loss
from kvboost_edge.serve_ray.messages import (
    CallOutcome,
    Description,
    Failure,
    ReplicaCall,
    ReplicaUpdate,
    Sent,
)
from kvboost_edge.serve_ray.routing.cache_records import RoutingDecision
from kvboost_edge.serve_ray.routing.prompt_chain import PromptChain
from kvboost_edge.serve_ray.routing.router import PrefixRouter
from kvboost_edge.serve_ray.watch.health_checks import HealthChecks
from kvboost_edge.server.api_errors import NoReplica
from kvboost_edge.server.logs import log_facts

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

__all__ = ["Replicas"]

T = TypeVar("T")

_BUSY_SECONDS = 0.1  # polling interval while requests are in flight
_IDLE_SECONDS = 1.0  # polling interval otherwise
_TELLING_SECONDS = 2.0  # A replica that takes longer to answer is not chosen.
_WATCHED_SECONDS = 1.0  # Polling stays fast for this time after a request.
_TRIES = 3
_CANCEL_SECONDS = 0.1  # before unfinished work is cancelled again


class Replicas:
    """The replicas of a deployment.

    Args:
        handle: Ray's handle of the deployment.
        model: Digest of the model files from which the ingress reads the tokenizer.

    Attributes:
        about: Description of a replica that is or was usable; set by `open`.
        router: Chooses the replica of a request.
        usable: Names of replicas that have the ingress's version and model, and the same settings.
        is_open: False after `close`.
    """

    about: Description

    def __init__(self, handle: DeploymentHandle[Any], model: str) -> None:
        self.router = PrefixRouter()
        self.usable: frozenset[str] = frozenset()
        self.is_open = True
        self._handle = handle
        self._model = model
        self._generate = handle.options(method_name="generate", stream=True)
        self._computing = handle.options(method_name="compute", stream=True)
        self._asking = handle.options(method_name="ask")
        self._lock = threading.Lock()
        self._root: str | None = None
        self._refused: dict[str, str] = {}
        self._silent: set[str] = set()
        self._looks = HealthChecks(self._look_at)
        self._busy_until = 0.0
        self._changed = asyncio.Event()  # set to poll soon: new members, or work after idling
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="kvboost-replicas", daemon=True)
        self._thread.start()

    def open(self, seconds: float, is_settled: Callable[[], bool] = lambda: True) -> None:
        """Wait for the first replica, and start polling all replicas.

        Args:
            seconds: Longest time to wait.
            is_settled: Function that returns False while more replicas may start, such as those of
                a newer version.

        Raises:
            ConfigError: The replicas have another model or other settings.
            BackendUnavailable: No replica was ready in time.
        """
        end = time.monotonic() + seconds
        pause = 0.05
        while True:
            found = [
                one
                for one in self.ask("describe", seconds=_TELLING_SECONDS)
                if isinstance(one, Description)
            ]
            if found:
                self.about = found[0]
                # Poll first, to know the cached blocks before the first request.
                self.start(self._look_at_all()).result()
                self.start(self._look_after())
                return
            if self._refused and not self.usable and is_settled() and not self.usable:
                raise ConfigError(next(iter(self._refused.values())))
            if time.monotonic() > end:
                raise BackendUnavailable(
                    f"no replica was ready within {seconds:g} seconds; see Ray's log"
                )
            time.sleep(pause)
            pause = min(1.2 * pause, 1.0)

    def members_changed(self, members: Mapping[str, Mapping[str, Any]]) -> frozenset[str]:
        """Update Ray's list of replicas with metadata; return the usable ones. Thread-safe."""
        with self._lock:
            if self._root not in {
                str(one.get("root")) for one in members.values() if one.get("model") == self._model
            }:
                self._root = (
                    None  # All replicas of this version are gone, so a newer version may follow.
                )
            accepted = set()
            for name in sorted(members):
                refusal = self._refusal(name, members[name])
                if refusal is None:
                    accepted.add(name)
                elif name not in self._refused:
                    self._refused[name] = refusal
                    log_facts(logging.ERROR, "replica refused", replica=name, reason=refusal)
            self._refused = {
                name: why
                for name, why in self._refused.items()
                if name in members and name not in accepted
            }
            self.usable = frozenset(accepted)
        self.call_soon(self._set_members)
        return self.usable

    @property
    def talking(self) -> frozenset[str]:
        """Usable replicas that answer, or all usable replicas if none answers."""
        return self.usable - self._silent or self.usable

    def _refusal(self, name: str, about: Mapping[str, Any]) -> str | None:
        """Return why a replica cannot join the others, or None."""
        version = about.get("version")
        if version != __version__:  # Messages of another version may have other fields.
            return (
                f"replica {name} runs kvboost-edge {version}, but the server runs {__version__}; "
                "install the same version on all machines"
            )
        # The first accepted replica determines the settings.
        model = str(about.get("model"))
        root = str(about.get("root"))
        if model != self._model:
            return (
                f"replica {name} serves another model: its files have the digest {model[:12]}, "
                f"but the server's files have {self._model[:12]}; give both the same files"
            )
        if self._root is None:
            self._root = root
        if root != self._root:
            return (
                f"replica {name} has other settings or another processor: its KV format is "
                f"{root[:12]}, but that of the other replicas is {self._root[:12]}; start all "
                "with the same options, on machines with the same instruction set"
            )
        return None

    def _set_members(self) -> None:
        self._silent &= self.usable
        self.router.set_members(self.usable)
        self._changed.set()

    def choices(self, chain: PromptChain, count: int) -> list[RoutingDecision]:
        """Return replicas for a request, best first. Silent ones only serve if all are silent."""
        # The router keeps its knowledge of silent replicas, because they may just be busy.
        return self.router.choose(chain, time.monotonic(), among=self.talking or None, count=count)

    # Calls to replicas.

    def generate(self, sent: Sent) -> Stream:
        """Send a request and return the stream of its answer."""
        self._expect_load()
        stream: Stream = self._generate.remote(sent)
        return stream

    def _expect_load(self) -> None:
        """Poll often for some time, because a request is about to start."""
        now = time.monotonic()
        if now >= self._busy_until:
            self._changed.set()
        self._busy_until = now + _WATCHED_SECONDS

    async def cancel(self, sent: Sent) -> None:
        """Ask the replicas to cancel a request."""
        await self._gather("cancel", (sent.request,), self.usable, _TELLING_SECONDS)

    async def compute(
        self,
        sent: Sent,
        call: str,
        arguments: tuple[Any, ...],
        options: Mapping[str, Any],
        everywhere: bool,
    ) -> CallOutcome:
        """Call an engine method in one replica, or in all replicas for the largest result.

        If it fails in one of all replicas, the outcome has this failure. Replicas that end
        meanwhile are left out.
        """
        if everywhere:
            return await self._compute_everywhere(sent, call, arguments, options)
        # The texts are separate prompts, so they do not need their blocks at the same time.
        size = max(1, sent.missing_tokens)
        chain = PromptChain((), size, block_size=size)
        lost: set[str] = set()
        for _ in range(_TRIES):
            choices = [
                choice
                for choice in self.choices(chain, _TRIES + len(lost))
                if choice.replica_id not in lost
            ]
            if choices:
                self.router.note_routed(choices[0], chain, time.monotonic())
            try:
                targets = tuple(choice.replica_id for choice in choices)
                done = await self._compute_at(sent, targets, call, arguments, options)
            finally:
                if choices:
                    self.router.note_not_started(choices[0])
            if done is not None:
                return done
            lost.update(targets[:1])
        raise NoReplica

    async def _compute_everywhere(
        self, sent: Sent, call: str, arguments: tuple[Any, ...], options: Mapping[str, Any]
    ) -> CallOutcome:
        names = sorted(self.usable)
        each = [self._compute_at(sent, (name,), call, arguments, options) for name in names]
        found: list[CallOutcome] = []
        failed: list[CallOutcome] = []
        for name, one in zip(names, await asyncio.gather(*each), strict=True):
            if one is not None and one.failure is not None:
                why = one.failure.kind
                log_facts(logging.WARNING, f"{call} failed in a replica", replica=name, error=why)
                failed.append(one)
            elif one is not None:
                found.append(one)
        if failed:
            return failed[0]
        if not found:
            raise NoReplica
        return max(found, key=lambda one: int(one.value))

    async def _compute_at(
        self,
        sent: Sent,
        targets: tuple[str, ...],
        call: str,
        arguments: tuple[Any, ...],
        options: Mapping[str, Any],
    ) -> CallOutcome | None:
        """Call an engine method in one of the targets; return None if the replica has ended."""
        self._expect_load()
        stream = self._computing.remote(
            sent._replace(targets=targets), call, arguments, dict(options)
        )
        try:
            async for computed in stream:
                if computed is not None:
                    stream = None
                    lost = computed.failure is not None and computed.failure.has_died
                    return None if lost else computed
        except Exception as error:
            if not is_loss(error):
                raise
        finally:
            if stream is not None:
                stream.cancel()
        return None

    def ask(
        self, method: str, *arguments: Any, seconds: float, among: Iterable[str] | None = None
    ) -> list[Any]:
        """Call a method of usable replicas, and return the answers in the order of their names.

        This method blocks, so do not call it on the event loop. A replica's KVBoostError is raised.

        Args:
            method: Name of the replica's method.
            *arguments: Arguments of the method.
            seconds: Time after which a replica without an answer is left out.
            among: Names of replicas to ask; None for all usable ones.
        """
        if not self.is_open:
            raise KVBoostError("the pool of replicas is closed; start the server again")
        names = self.usable if among is None else self.usable & frozenset(among)
        found = self.start(self._gather(method, arguments, sorted(names), seconds)).result()
        for one in found:
            if isinstance(one, Failure) and not one.has_died:
                raise one.as_error()
        return [one for one in found if not isinstance(one, Failure)]

    async def _gather(
        self, method: str, arguments: tuple[Any, ...], names: Iterable[str], seconds: float
    ) -> list[Any]:
        answers = await asyncio.gather(
            *(self._ask_one(ReplicaCall((name,), method, arguments), seconds) for name in names)
        )
        return [answer for answer in answers if answer is not None]

    async def _ask_one(self, asked: ReplicaCall, seconds: float) -> Any:
        """Call a method of one replica; return None if it does not answer in time."""
        response = self._asking.remote(asked)
        try:
            return await asyncio.wait_for(_answer(response), seconds)
        except TimeoutError:
            response.cancel()
            return None
        except Exception as error:
            if not is_loss(error):
                raise
            return None

    # Polling.

    async def _look_after(self) -> None:
        """Poll the load and cache events of all replicas until cancelled."""
        try:
            while True:
                self._looks.begin(self._looked_at())
                busy = time.monotonic() < self._busy_until or len(self._tasks) > 1
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(
                        self._changed.wait(), _BUSY_SECONDS if busy else _IDLE_SECONDS
                    )
                self._changed.clear()
        finally:
            await self._looks.end()

    async def _look_at_all(self) -> None:
        """Poll all replicas once, and wait until they have answered or timed out."""
        self._looks.begin(self._looked_at())
        await self._looks.settle()

    def _looked_at(self) -> frozenset[str]:
        return self.usable & frozenset(self.router.members())

    async def _look_at(self, name: str) -> None:
        if name not in self.router.members():  # The replica has left.
            return
        told = await self._ask_quietly(name, "tell", self.router.cursor(name))
        if not isinstance(told, ReplicaUpdate):
            self._silent |= {name} & self.usable
            return
        self._silent.discard(name)
        now = time.monotonic()
        self.router.take_events(name, told.batches, now)
        self.router.take_report(name, told.report, now)
        if self._is_about_gone():
            await self._learn_from(name)

    def _is_about_gone(self) -> bool:
        """Return whether the replica that `about` describes is gone."""
        # If so, `about` will describe another replica, possibly one of a newer version.
        return self.about.replica not in self.usable

    async def _learn_from(self, name: str) -> None:
        found = await self._ask_quietly(name, "describe")
        if (
            isinstance(found, Description)
            and found.settings == self._root
            and self._is_about_gone()
        ):
            self.about = found

    async def _ask_quietly(self, name: str, method: str, *arguments: Any) -> Any:
        """Call a method of one replica; return None and log a warning if it fails or times out."""
        # A failure of one replica must not stop the polling of the others.
        try:
            return await self._ask_one(ReplicaCall((name,), method, arguments), _TELLING_SECONDS)
        except Exception as error:
            log_facts(
                logging.WARNING, "replica did not answer", replica=name, error=type(error).__name__
            )
            return None

    # Event loop.

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the event loop, outside of any Ray request."""
        # Inside a request, all calls would have the same id, by which Ray's router distinguishes
        # them.
        with self._lock:  # nothing may start after the loop has ended
            if not self.is_open:
                work.close()
                raise KVBoostError("the pool of replicas is closed; start the server again")
            return contextvars.Context().run(
                asyncio.run_coroutine_threadsafe, self._tracked(work), self._loop
            )

    def call_soon(self, work: Callable[[], object]) -> None:
        """Call a function on the event loop. Do nothing after `close`."""
        try:
            self._loop.call_soon_threadsafe(work, context=contextvars.Context())
        except RuntimeError:
            if self.is_open:
                raise

    def close(self) -> None:
        """Cancel all work, and end the thread."""
        with self._lock:
            if not self.is_open:
                return
            self.is_open = False
            ending = asyncio.run_coroutine_threadsafe(self._end_all(), self._loop)
        ending.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _tracked(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            return await work
        finally:
            self._tasks.discard(task)

    async def _end_all(self) -> None:
        """Cancel all tasks repeatedly, until every task has ended."""
        # Ray may answer a cancelled call with its own error. A polling loop would then continue.
        while tasks := list(self._tasks):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=_CANCEL_SECONDS)

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()


async def _answer(response: Any) -> Any:
    return await response
