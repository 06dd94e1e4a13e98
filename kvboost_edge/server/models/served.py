"""A model of a server, loaded or not."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from kvboost_edge.errors import KVBoostError
from kvboost_edge.server.errors import ApiError
from kvboost_edge.server.response_types import Phase

if TYPE_CHECKING:
    from kvboost_edge.config import GenerationMode
    from kvboost_edge.engine.request.sampling_defaults import SamplingDefaults
    from kvboost_edge.server.cache_report.records import History
    from kvboost_edge.server.engines import Engine
    from kvboost_edge.server.metrics import Metrics
    from kvboost_edge.server.state import ModelState

__all__ = ["Known", "ModelSource", "Refusal", "ServedModel", "abilities_of"]


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSource:
    """Source of a model; both functions run in a thread and raise KVBoostError.

    Attributes:
        plan: returns the bytes that weights and pool will take.
        load: returns an engine that is ready for requests. Raises an error soon after the event is
            set.
    """

    plan: Callable[[], int]
    load: Callable[[threading.Event], Engine]


class Known(NamedTuple):
    """Properties of a model that are kept after it is unloaded."""

    runner: str
    architecture: str
    dtype: str
    vocab_size: int
    max_context: int
    weight_bytes: int
    hidden_size: int
    chat_template: str
    sampling: SamplingDefaults
    mode: GenerationMode

    @classmethod
    def of(cls, engine: Engine, mode: GenerationMode) -> Known:
        info = engine.runner_info
        fields = (
            info.architecture,
            info.dtype,
            info.vocab_size,
            info.max_context,
            info.weight_bytes,
            info.hidden_size,
        )
        template = engine.tokenizer.chat_template or ""
        return cls(info.name, *fields, template, engine.sampling_defaults, mode)


class Refusal(NamedTuple):
    """Reason why a model was not loaded.

    Attributes:
        message: the reason.
        code: error code.
        again: time of the monotonic clock from which loading may be retried.
    """

    message: str
    code: str
    again: float

    def as_error(self) -> ApiError:
        """Return a 503 with the reason and a Retry-After header."""
        seconds = max(1, round(self.again - time.monotonic()))
        return ApiError(503, self.message, code=self.code, headers={"Retry-After": str(seconds)})


@dataclasses.dataclass(slots=True, eq=False)
class ServedModel:
    """A model and its state, used by the event loop's thread only.

    Attributes:
        names: names in requests; answers show the first.
        source: source for loading it; None for a model that always stays loaded.
        default_keep_alive: default of `keep_alive`.
        history: requests for cache-miss reports, kept when the model is unloaded.
        keep_alive: seconds that it stays loaded while idle, as set by the last request; infinite
            until another model needs the memory.
        state: state for requests; None while it is not loaded.
        known: properties that are kept after unloading.
        abilities: Ollama's names of its capabilities; () until they are requested.
        planned: bytes that it will take, once known.
        num_bytes: bytes of the budget that it takes, or will take once loaded.
        overhead: further bytes that it takes in the process, measured when it was loaded; 0 without
            --max-memory.
        last_overhead: overhead when it was loaded last.
        in_use: requests that use it or wait for it.
        idle_since: end of the last request, by the monotonic clock.
        loaded_at: time of the last loading, by the monotonic clock.
        load_seconds: duration of the last loading.
        waits_for: reason, for people, why loading is not done yet.
        refusal: reason why the last loading failed.
        clock: timer that unloads it.
    """

    names: tuple[str, ...]
    source: ModelSource | None
    default_keep_alive: float
    history: History
    keep_alive: float = dataclasses.field(init=False)
    state: ModelState | None = None
    phase: Phase = "not_loaded"
    metrics: Metrics | None = None
    known: Known | None = None
    abilities: tuple[str, ...] = ()
    planned: int | None = None
    num_bytes: int = 0
    overhead: int = 0
    last_overhead: int = 0
    in_use: int = 0
    idle_since: float = 0.0
    loaded_at: float = 0.0
    load_seconds: float = 0.0
    waits_for: str = ""
    refusal: Refusal | None = None
    num_loads: int = 0
    num_failures: int = 0
    num_unloads: int = 0
    clock: asyncio.TimerHandle | None = None
    loading: asyncio.Task[None] | None = None
    unloading: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.keep_alive = self.default_keep_alive

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def may_leave(self) -> bool:
        """True if it can be unloaded now."""
        return self.source is not None and self.phase == "loaded" and not self.in_use

    @property
    def rested_at(self) -> float:
        """Time from which it may be unloaded to make room for another model."""
        # It stays at least as long as loading took, so that two alternating models spend at most
        # half of the time on loading.
        return self.loaded_at + self.load_seconds

    @property
    def unloads_at(self) -> float | None:
        """Time at which it will be unloaded if no request arrives; None without a time limit."""
        return (
            self.idle_since + self.keep_alive
            if self.may_leave and self.keep_alive < math.inf
            else None
        )

    def stop_clock(self) -> None:
        if self.clock is not None:
            self.clock.cancel()
            self.clock = None


def abilities_of(engine: Engine) -> tuple[str, ...]:
    """Return the capabilities of a model by Ollama's names.

    Reads the chat template, which may take a while the first time.
    """
    if not engine.tokenizer.chat_template:
        return ("completion",)
    try:
        format = engine.tokenizer.turn_format
    except KVBoostError:  # a template in an unknown format
        return ("completion",)
    calls = not format.shows_tools or format.calls is not None
    return (
        "completion",
        *(["tools"] if calls else []),
        *(["thinking"] if format.reasoning else []),
    )
