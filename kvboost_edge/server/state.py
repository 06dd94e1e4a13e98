"""What a request works with: one loaded model, found by `state_of(request)`, and what all models of
a server share.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvboost_edge.config import GenerationMode
from kvboost_edge.server.default_mode import default_mode
from kvboost_edge.server.errors import ShuttingDown, stopped
from kvboost_edge.server.work.admission import Admission, AdmissionQueue
from kvboost_edge.server.work.remembered import ResponseStore

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import Scope

    from kvboost_edge.server.cache_report.normalization import Normaliser
    from kvboost_edge.server.cache_report.tracker import Doctor
    from kvboost_edge.server.engines import Engine
    from kvboost_edge.server.metrics import Metrics
    from kvboost_edge.server.settings import ServerSettings

__all__ = [
    "MODEL_FACT",
    "EngineLeases",
    "ModelState",
    "Shared",
    "keep_state",
    "model_of",
    "state_of",
]

MODEL_FACT = "model_state"
"""Where the facts of a request, which all of its scopes have in common, hold its model; it is taken
out in the end.
"""


@dataclasses.dataclass(slots=True)
class Shared:
    """What is one for all models of a server. `draining` is set once, when the server was told to
    end. `created` is seconds since the epoch.
    """

    settings: ServerSettings
    remembered: ResponseStore
    normaliser: Normaliser
    draining: bool = False
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))


class EngineLeases:
    """Who asks a model's engine for something beside requests. Only the event loop's thread touches
    it.
    """

    def __init__(self) -> None:
        self._count = 0
        self._over = asyncio.Event()

    @contextlib.contextmanager
    def begin(self) -> Iterator[None]:
        """The engine stays open while the block runs."""
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1
            if not self._count:
                self._over.set()

    async def over(self) -> None:
        """Until nobody looks any more."""
        while self._count:
            self._over.clear()
            await self._over.wait()


@dataclasses.dataclass(frozen=True, slots=True)
class ModelState:
    """A model from when it is loaded until it is unloaded. `model_name` is the first of its names,
    the one that answers tell. Requests hold it by a lease; who only looks holds its engine by
    `looks`.
    """

    engine: Engine
    model_name: str
    metrics: Metrics
    admission: AdmissionQueue
    doctor: Doctor
    shared: Shared
    looks: EngineLeases = dataclasses.field(default_factory=EngineLeases)

    @property
    def settings(self) -> ServerSettings:
        return self.shared.settings

    @property
    def mode(self) -> GenerationMode:
        """The mode of requests that choose none."""
        return default_mode(self.settings, self.engine)

    @property
    def remembered(self) -> ResponseStore:
        return self.shared.remembered

    @property
    def normaliser(self) -> Normaliser:
        return self.shared.normaliser

    def admit(self, request: Request, num_tokens: int, num_sequences: int = 1) -> Admission:
        """Return an admission to enter with `async with`. `num_tokens` is what the request may
        hold, prompt and output, estimated before tokenization; `num_sequences` counts prompts x
        choices. The body must have been read.

        Raises ShuttingDown, EngineStopped or NoReplica (503); entering raises for a full queue and
        for what could never fit.
        """
        if not self.engine.is_alive():
            raise stopped(self.engine)
        if self.shared.draining:
            raise ShuttingDown
        return Admission(self.admission, self.metrics, request, num_tokens, num_sequences)


def keep_state(request: Request, state: ModelState) -> None:
    """From now on this is the model of the request."""
    request.scope["kvboost"][MODEL_FACT] = state


def model_of(scope: Scope) -> ModelState | None:
    """The model that a request holds or held, None where it came to none."""
    found: ModelState | None = scope.get("kvboost", {}).get(MODEL_FACT)
    return found


def state_of(request: Request) -> ModelState:
    """The model that a request holds, see `Models.lease`."""
    state: ModelState = request.scope["kvboost"][MODEL_FACT]
    return state
