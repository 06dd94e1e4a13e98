"""State for handling a request, with the loaded model and objects shared by all models."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvboost_edge.config import GenerationMode
from kvboost_edge.server.api_errors import ShuttingDown, stopped
from kvboost_edge.server.default_mode import default_mode
from kvboost_edge.server.work.admission import Admission, AdmissionQueue
from kvboost_edge.server.work.stored_responses import ResponseStore

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import Scope

    from kvboost_edge.engine.request.sampling_defaults import SamplingDefaults
    from kvboost_edge.server.cache_report.normalization import Normalizer
    from kvboost_edge.server.cache_report.tracker import Doctor
    from kvboost_edge.server.engines import Engine
    from kvboost_edge.server.metrics import Metrics
    from kvboost_edge.server.model_defaults import ModelDefaults
    from kvboost_edge.server.settings import ServerSettings
    from kvboost_edge.server.traces import Traces
    from kvboost_edge.tiers.disk.session_records import SessionStore

__all__ = [
    "MODEL_FACT",
    "EngineLeases",
    "ModelState",
    "Shared",
    "keep_state",
    "load_seconds_of",
    "model_of",
    "state_of",
    "tenant_of",
]

MODEL_FACT = "model_state"
"""Key of the request's model in its facts, which all of its scopes share. Removed when the request
ends.
"""


@dataclasses.dataclass(slots=True)
class Shared:
    """Objects shared by all models of a server.

    Attributes:
        settings: settings of the server.
        remembered: stored responses.
        normalizer: request normalization.
        sessions: named sessions.
        traces: traces of requests; None if they are off.
        draining: True once the server is shutting down.
        created: start of the server, in seconds since the epoch.
    """

    settings: ServerSettings
    remembered: ResponseStore
    normalizer: Normalizer
    sessions: SessionStore
    traces: Traces | None = None
    draining: bool = False
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))


class EngineLeases:
    """Count of the current users of a model's engine other than requests.

    Only the event loop's thread uses it.
    """

    def __init__(self) -> None:
        self._count = 0
        self._over = asyncio.Event()

    @contextlib.contextmanager
    def begin(self) -> Iterator[None]:
        """Keep the engine open while the block runs."""
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1
            if not self._count:
                self._over.set()

    async def over(self) -> None:
        """Wait until no block of `begin` runs."""
        while self._count:
            self._over.clear()
            await self._over.wait()


@dataclasses.dataclass(frozen=True, slots=True)
class ModelState:
    """A loaded model, until it is unloaded.

    Requests hold a lease on the model. Other users of its engine, such as metrics, register in
    `looks`.

    Attributes:
        engine: the engine.
        model_name: first name of the model, which responses contain.
        metrics: metrics of the model.
        admission: queue of the model.
        doctor: cache-miss tracking.
        shared: objects shared by all models.
        defaults: system message and sampling parameters for requests that do not set them.
        looks: users of the engine other than requests.
    """

    engine: Engine
    model_name: str
    metrics: Metrics
    admission: AdmissionQueue
    doctor: Doctor
    shared: Shared
    defaults: ModelDefaults
    looks: EngineLeases = dataclasses.field(default_factory=EngineLeases)

    @property
    def settings(self) -> ServerSettings:
        return self.shared.settings

    @property
    def mode(self) -> GenerationMode:
        """Default mode of requests."""
        return default_mode(self.settings, self.engine)

    @property
    def usable_context(self) -> int:
        """Number of tokens of the model's context that fit into the block pool."""
        return min(self.engine.runner_info.max_context, self.admission.pool_tokens)

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """Default sampling values: those of `defaults`, otherwise the engine's."""
        return self.defaults.over(self.engine.sampling_defaults)

    @property
    def remembered(self) -> ResponseStore:
        return self.shared.remembered

    @property
    def normalizer(self) -> Normalizer:
        return self.shared.normalizer

    @property
    def sessions(self) -> SessionStore:
        return self.shared.sessions

    def admit(
        self,
        request: Request,
        num_tokens: int,
        num_sequences: int = 1,
        *,
        streams: bool = False,
    ) -> Admission:
        """Return an admission to enter with `async with`. The request's body must have been read
        before.

        Args:
            request: the HTTP request.
            num_tokens: estimated tokens of prompt and output, before tokenization.
            num_sequences: number of prompts times choices.
            streams: whether the answer is streamed.

        Raises:
            ShuttingDown, EngineStopped, NoReplica: the server accepts no new request (503).
            Entering the admission raises further errors, see `Admission`.
        """
        if not self.engine.is_alive():
            raise stopped(self.engine)
        if self.shared.draining:
            raise ShuttingDown
        return Admission(
            self.admission, self.metrics, request, num_tokens, num_sequences, streams=streams
        )


def keep_state(request: Request, state: ModelState) -> None:
    """Store the model that a request uses."""
    request.scope["kvboost"][MODEL_FACT] = state


def model_of(scope: Scope) -> ModelState | None:
    """Return the model that a request uses or used, or None."""
    found: ModelState | None = scope.get("kvboost", {}).get(MODEL_FACT)
    return found


def state_of(request: Request) -> ModelState:
    """Return the state of the model that a request uses, see `Models.lease`."""
    state: ModelState = request.scope["kvboost"][MODEL_FACT]
    return state


def load_seconds_of(request: Request) -> float:
    """Return the seconds that a request waited until its model was loaded."""
    seconds: float = request.scope["kvboost"].get("load_wait_seconds", 0.0)
    return seconds


def tenant_of(request: Request) -> str | None:
    """Return the tenant of a request, or None without API keys."""
    tenant: str | None = request.scope["kvboost"].get("tenant")
    return tenant
