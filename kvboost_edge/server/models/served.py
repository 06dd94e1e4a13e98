"""A model that the server serves, loaded or not."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from kvboost_edge.errors import KVBoostError
from kvboost_edge.server.api_errors import ApiError
from kvboost_edge.server.model_defaults import NO_DEFAULTS, ModelDefaults, created_defaults
from kvboost_edge.server.response_types import Phase

if TYPE_CHECKING:
    from kvboost_edge.config import GenerationMode
    from kvboost_edge.engine.request.sampling_defaults import SamplingDefaults
    from kvboost_edge.models.locate.managed import ManagedModel
    from kvboost_edge.server.cache_report.recent_requests import History
    from kvboost_edge.server.engines import Engine
    from kvboost_edge.server.metrics import Metrics
    from kvboost_edge.server.settings import ServerSettings
    from kvboost_edge.server.state import ModelState

__all__ = ["KnownProperties", "ModelSource", "Refusal", "ServedModel", "abilities_of"]


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSource:
    """Functions that plan and load a model. Both run in a thread and raise KVBoostError.

    Attributes:
        plan: function that returns the bytes that weights and pool will take.
        load: function that returns an engine that is ready for requests. It raises an error soon
            after the given event is set.
    """

    plan: Callable[[], int]
    load: Callable[[threading.Event], Engine]


class KnownProperties(NamedTuple):
    """Properties of a model that remain known after it is unloaded.

    Attributes:
        max_context: number of tokens of its context that fit into its block pool.
        num_params: number of parameters, or 0 if unknown.
    """

    runner: str
    architecture: str
    dtype: str
    vocab_size: int
    max_context: int
    weight_bytes: int
    num_params: int
    hidden_size: int
    chat_template: str
    sampling: SamplingDefaults
    mode: GenerationMode
    approximations: tuple[str, ...]

    @classmethod
    def of(cls, state: ModelState) -> KnownProperties:
        engine = state.engine
        info = engine.runner_info
        fields = (
            info.architecture,
            info.dtype,
            info.vocab_size,
            state.usable_context,
            info.weight_bytes,
            info.num_params,
            info.hidden_size,
        )
        template = engine.tokenizer.chat_template or ""
        approximations = engine.config.approximations
        return cls(
            info.name, *fields, template, state.sampling_defaults, state.mode, approximations
        )


class Refusal(NamedTuple):
    """Reason why a model was not loaded.

    Attributes:
        message: the reason.
        code: error code.
        again: time from which loading may be retried, on the monotonic clock.
    """

    message: str
    code: str
    again: float

    def as_error(self) -> ApiError:
        """Return a 503 error with the reason and a Retry-After header."""
        seconds = max(1, round(self.again - time.monotonic()))
        return ApiError(503, self.message, code=self.code, headers={"Retry-After": str(seconds)})


@dataclasses.dataclass(slots=True, eq=False)
class ServedModel:
    """A served model and its state, used only by the event loop's thread.

    Attributes:
        names: names for requests; responses contain the first one.
        source: source for loading the model; None for a permanent model.
        default_keep_alive: default of `keep_alive`.
        record: record of a pulled or created model, which clients may remove; None for a model of
            the command line.
        history: recent requests for cache-miss reports, kept when the model is unloaded.
        keep_alive: seconds that the model stays loaded while idle, as set by the last request. With
            infinity, it stays until another model needs the memory.
        state: state for requests; None while the model is not loaded.
        known: properties that remain known after unloading.
        abilities: capabilities by Ollama's names; () until they are requested.
        planned: bytes that the model will take, once they are known.
        num_bytes: bytes of the budget that the model takes, or will take once loaded.
        overhead: further bytes that the model takes in the process, measured at loading; 0 without
            --max-memory.
        last_overhead: overhead measured at the last load.
        in_use: number of requests that use the model or wait for it.
        idle_since: end of the last request, on the monotonic clock.
        loaded_at: time of the last load, on the monotonic clock.
        load_seconds: duration of the last load.
        waits_for: human-readable reason why loading has not finished.
        refusal: reason why the last load failed.
        clock: timer that unloads the model.
    """

    names: tuple[str, ...]
    source: ModelSource | None
    default_keep_alive: float
    history: History
    record: ManagedModel | None = None
    keep_alive: float = dataclasses.field(init=False)
    state: ModelState | None = None
    phase: Phase = "not_loaded"
    metrics: Metrics | None = None
    known: KnownProperties | None = None
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
        """True if the model can be unloaded now."""
        return self.source is not None and self.phase == "loaded" and not self.in_use

    @property
    def rested_at(self) -> float:
        """Earliest time at which the model may be unloaded to make room for another."""
        # The model stays at least as long as loading took. Two alternating models then spend at
        # most half of the time on loading.
        return self.loaded_at + self.load_seconds

    @property
    def unloads_at(self) -> float | None:
        """Time at which the model is unloaded if it stays idle, or None without a time limit."""
        return (
            self.idle_since + self.keep_alive
            if self.may_leave and self.keep_alive < math.inf
            else None
        )

    def defaults(self, settings: ServerSettings) -> ModelDefaults:
        """Return the system message and the sampling parameters for requests that set none.

        A model created from one of the command line inherits the values that it does not set.

        Raises:
            ConfigError: the record has an invalid parameter.
        """
        record = self.record
        if record is None:
            return settings.defaults_of(self.name)
        base = settings.defaults_of(record.served) if record.served else NO_DEFAULTS
        own = created_defaults(self.name, record.system, record.sampling)
        return ModelDefaults(own.system or base.system, {**base.sampling, **own.sampling})

    def stop_clock(self) -> None:
        if self.clock is not None:
            self.clock.cancel()
            self.clock = None


def abilities_of(engine: Engine) -> tuple[str, ...]:
    """Return the capabilities of a model by Ollama's names.

    Reads the chat template, which may take a while the first time.
    """
    if not engine.generates:
        return ("embedding",)
    if not engine.tokenizer.chat_template:
        return ("completion",)
    try:
        format = engine.tokenizer.turn_format
    except KVBoostError:  # the template's format is unknown
        return ("completion",)
    calls = not format.shows_tools or format.calls is not None
    return (
        "completion",
        *(["tools"] if calls else []),
        *(["thinking"] if format.reasoning else []),
    )
