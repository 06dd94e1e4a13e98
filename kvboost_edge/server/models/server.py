"""What one running server holds; every request reaches it as `request.app.state.kv`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from kvboost_edge.server.errors import ApiError, QueueFull, stopped
from kvboost_edge.server.models.exposition import ServerMetrics
from kvboost_edge.server.models.registry import Models
from kvboost_edge.server.state import ModelState, Shared, model_of
from kvboost_edge.server.work.admission import Admission, Bodies

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import Scope

    from kvboost_edge.server.settings import ServerSettings

__all__ = ["ServerState", "server_of"]


@dataclasses.dataclass(frozen=True, slots=True)
class ServerState:
    """shared: what the models have in common; bodies: bytes of requests that are held."""

    shared: Shared
    models: Models
    bodies: Bodies
    metrics: ServerMetrics

    @property
    def settings(self) -> ServerSettings:
        return self.shared.settings

    @property
    def draining(self) -> bool:
        """Whether the server was told to end."""
        return self.shared.draining

    @property
    def first(self) -> ModelState:
        """The first model, which is loaded."""
        state = self.models.first.state
        assert state is not None
        return state

    @property
    def admitted(self) -> set[Admission]:
        """All requests in flight."""
        return {admission for state in self.models.loaded for admission in state.admission.admitted}

    @property
    def sequences(self) -> int:
        """Sequences in flight."""
        return sum(state.admission.sequences for state in self.models.loaded)

    @staticmethod
    def engine_alive(scope: Scope) -> bool:
        """Whether the engine of a request's model computes requests; True of a request that has
        none.
        """
        state = model_of(scope)
        return state is None or state.engine.is_alive()

    def stopped(self) -> ApiError | None:
        """What is told of the first engine that has stopped for good, or None: a model that can be
        loaded again is, by the next request for it.
        """
        lasting = (
            one.state.engine
            for one in self.models.all
            if one.state is not None and one.source is None
        )
        return next((stopped(engine) for engine in lasting if not engine.is_alive()), None)

    def trouble(self) -> str | None:
        """Why the server cannot take requests, or None when it can."""
        error = self.stopped()
        if error is not None:
            return error.message
        return "the server is shutting down" if self.draining else None

    def check_queue(self, tenant: str | None) -> None:
        """QueueFull where no model has room for a request; which one it is for is not known yet. Of
        several full models none counts it as its own.
        """
        refusals: list[QueueFull] = []
        for one in self.models.all:
            refusal = None if one.state is None else one.state.admission.refusal(tenant)
            if refusal is None:
                return
            refusals.append(refusal)
        if len(refusals) > 1:
            self.models.num_refused += 1
        else:
            self.first.admission.refused += 1
        raise refusals[0]

    def retry_after(self) -> int:
        """Seconds until a place is likely free."""
        return max((state.admission.retry_after() for state in self.models.loaded), default=1)

    def drain(self) -> None:
        """Nothing new from now on. Safe to call from any thread."""
        self.shared.draining = True

    def cancel_all(self) -> None:
        """End every request in flight, and those that wait for a model."""
        self.models.refuse_waiting()
        for state in self.models.loaded:
            state.admission.cancel_all()


def server_of(request: Request) -> ServerState:
    """What the server holds."""
    state: ServerState = request.app.state.kv
    return state
