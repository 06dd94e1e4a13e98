"""What one running server holds; every request reaches it as `request.app.state.kv`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from kvboost_edge.server.errors import ApiError, QueueFull, stopped
from kvboost_edge.server.models.exposition import ServerMetrics
from kvboost_edge.server.models.registry import Models
from kvboost_edge.server.state import ModelState, Shared
from kvboost_edge.server.work.admission import Bodies, Ticket

if TYPE_CHECKING:
    from starlette.requests import Request

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
    def tickets(self) -> set[Ticket]:
        """All requests in flight."""
        return {ticket for state in self.models.loaded for ticket in state.admission.tickets}

    @property
    def sequences(self) -> int:
        """Sequences in flight."""
        return sum(state.admission.sequences for state in self.models.loaded)

    def engines_alive(self) -> bool:
        """Whether the engine of each loaded model computes requests."""
        return all(state.engine.is_alive() for state in self.models.loaded)

    def stopped(self) -> ApiError | None:
        """What is told of the first engine that is not alive, or None while all are."""
        dead = (state.engine for state in self.models.loaded if not state.engine.is_alive())
        return next(map(stopped, dead), None)

    def trouble(self) -> str | None:
        """Why the server cannot take requests, or None when it can."""
        error = self.stopped()
        if error is not None:
            return error.message
        return "the server is shutting down" if self.draining else None

    def check_queue(self, tenant: str | None) -> None:
        """QueueFull where no model has room for a request; which one it is for is not known yet."""
        full: QueueFull | None = None
        for one in self.models.all:
            if one.state is None:
                return
            try:
                one.state.admission.check(tenant)
            except QueueFull as error:
                full = error
            else:
                return
        if full is not None:
            raise full

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
