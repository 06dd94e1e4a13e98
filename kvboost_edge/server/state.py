"""What one running server holds; every request reaches it as `request.app.state.kv`."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

from kvboost_edge.server.errors import EngineStopped, ShuttingDown
from kvboost_edge.server.work.admission import Admission, Ticket
from kvboost_edge.server.work.remembered import Remembered

if TYPE_CHECKING:
    from starlette.requests import Request

    from kvboost_edge.server.doctor.doctor import Doctor
    from kvboost_edge.server.doctor.normalise import Normaliser
    from kvboost_edge.server.engines import Engine
    from kvboost_edge.server.metrics import Metrics
    from kvboost_edge.server.settings import ServerSettings

__all__ = ["ServerState", "state_of"]


@dataclasses.dataclass(slots=True)
class ServerState:
    """`model_name` is the name clients use. `draining` is set once, when the server was told to end. `created` is
    seconds since the epoch."""

    engine: Engine
    settings: ServerSettings
    model_name: str
    metrics: Metrics
    admission: Admission
    remembered: Remembered
    doctor: Doctor
    normaliser: Normaliser
    draining: bool = False
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def trouble(self) -> str | None:
        """Why the server cannot take requests, or None when it can."""
        if not self.engine.is_alive():
            return "the engine stopped after an error; restart the server"
        return "the server is shutting down" if self.draining else None

    def admit(self, request: Request, num_tokens: int, num_sequences: int = 1) -> Ticket:
        """A ticket to enter with `async with`. `num_tokens` is what the request may hold, prompt and output, estimated
        before tokenization; `num_sequences` counts prompts x choices. The body must have been read.

        Raises ShuttingDown or EngineStopped (503); entering raises for a full queue and for what could never fit.
        """
        if not self.engine.is_alive():
            raise EngineStopped
        if self.draining:
            raise ShuttingDown
        return Ticket(self.admission, self.metrics, request, num_tokens, num_sequences)


def state_of(request: Request) -> ServerState:
    """What the server holds."""
    state: ServerState = request.app.state.kv
    return state
