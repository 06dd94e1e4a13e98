"""State of a running server, available to requests as `request.app.state.kv`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from kvboost_edge.server.api_errors import ApiError, QueueFull, stopped
from kvboost_edge.server.models.exposition import ServerMetrics
from kvboost_edge.server.models.registry import Models
from kvboost_edge.server.state import ModelState, Shared, model_of
from kvboost_edge.server.work.admission import Admission, Bodies

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import Scope

    from kvboost_edge.server.batches.service import BatchService
    from kvboost_edge.server.batches.tenant_space import TenantSpace
    from kvboost_edge.server.models.changes import ModelChanges
    from kvboost_edge.server.settings import ServerSettings

__all__ = ["ServerState", "batches_of", "server_of", "space_of"]


@dataclasses.dataclass(frozen=True, slots=True)
class ServerState:
    """Everything that the routes of a server share.

    Attributes:
        shared: objects shared by all models.
        models: the served models, loaded or not.
        bodies: request bodies held in memory.
        metrics: metrics of the server.
        batches: service of the batch API; None if it is off.
        changes: service that adds and removes models; None if models cannot be changed.
    """

    shared: Shared
    models: Models
    bodies: Bodies
    metrics: ServerMetrics
    batches: BatchService | None = None
    changes: ModelChanges | None = None

    @property
    def settings(self) -> ServerSettings:
        return self.shared.settings

    @property
    def draining(self) -> bool:
        """True once the server is shutting down."""
        return self.shared.draining

    @property
    def first(self) -> ModelState:
        """The first model, which must be loaded."""
        state = self.models.first.state
        assert state is not None
        return state

    @property
    def admitted(self) -> set[Admission]:
        """All requests in flight, including lines of batches."""
        return {admission for state in self.models.loaded for admission in state.admission.admitted}

    @property
    def sequences(self) -> int:
        """Number of sequences in flight."""
        return sum(state.admission.sequences for state in self.models.loaded)

    @staticmethod
    def engine_alive(scope: Scope) -> bool:
        """Return whether the engine of a request's model runs. True if the request has no model
        yet.
        """
        state = model_of(scope)
        return state is None or state.engine.is_alive()

    def stopped(self) -> ApiError | None:
        """Return the error of the first engine that stopped for good, or None.

        An engine whose model can be loaded again does not count, because the next request loads it.
        """
        lasting = (
            one.state.engine
            for one in self.models.all
            if one.state is not None and one.source is None
        )
        return next((stopped(engine) for engine in lasting if not engine.is_alive()), None)

    def trouble(self) -> str | None:
        """Return the reason why the server cannot accept requests, or None."""
        error = self.stopped()
        if error is not None:
            return error.message
        return "the server is shutting down" if self.draining else None

    def allowed_changes(self) -> ModelChanges:
        """Return what changes the models.

        Raises:
            ApiError: the models cannot be changed (403).
        """
        if self.changes is None:
            raise ApiError(
                403,
                "the models of this server are fixed, because it runs replicas or was given loaded "
                "engines; start `kvboost-edge serve` without --workers and --ray-address",
                code="model_changes_off",
            )
        self.changes.check_allowed()
        return self.changes

    def check_queue(self, tenant: str | None) -> None:
        """Raise QueueFull if no model has room for a request.

        The request's model is not known yet. If several models are full, the server counts the
        rejected request and none of the models does.
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
        """Return the estimated seconds until the queue has room."""
        return max((state.admission.retry_after() for state in self.models.loaded), default=1)

    def drain(self) -> None:
        """Reject new requests from now on. Safe to call from any thread."""
        self.shared.draining = True

    def cancel_all(self) -> None:
        """Cancel all requests in flight and all requests that wait for a model."""
        self.models.refuse_waiting()
        if self.changes is not None:
            self.changes.stop()
        for state in self.models.loaded:
            state.admission.cancel_all()


def batches_of(request: Request) -> BatchService:
    """Return the service of the batch API.

    Raises:
        ApiError: the batch API is off (404).
    """
    service = server_of(request).batches
    if service is None:
        raise ApiError(
            404,
            "the batch API is off; start the server with --batch-dir DIR",
            code="batch_api_off",
        )
    return service


def space_of(request: Request) -> TenantSpace:
    """Return the files and batches of the request's tenant.

    Raises:
        ApiError: the batch API is off (404).
    """
    return batches_of(request).store.space(request.scope["kvboost"].get("tenant"))


def server_of(request: Request) -> ServerState:
    """Return the state of the server that handles a request."""
    state: ServerState = request.app.state.kv
    return state
