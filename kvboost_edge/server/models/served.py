"""One model of a server, whether it is loaded or not."""

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
    """How a model is loaded; both run in a thread and raise KVBoostError.

    Attributes:
        plan: bytes that its weights and its pool will take.
        load: the engine, ready for requests; it gives up with any error soon after the event is
            set.
    """

    plan: Callable[[], int]
    load: Callable[[threading.Event], Engine]


class Known(NamedTuple):
    """What stays known of a model that was loaded once."""

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
    """Why a model was not loaded; until `again`, of the monotonic clock, nobody tries it again."""

    message: str
    code: str
    again: float

    def as_error(self) -> ApiError:
        """503 with the reason, and when to come back."""
        seconds = max(1, round(self.again - time.monotonic()))
        return ApiError(503, self.message, code=self.code, headers={"Retry-After": str(seconds)})


@dataclasses.dataclass(slots=True, eq=False)
class ServedModel:
    """Only the event loop's thread touches it.

    Attributes:
        names: requests may use each; answers tell the first.
        source: loads it; None: it was given loaded, and stays.
        keep_alive: seconds that it stays loaded while nobody uses it, as the last request wanted
            it, else the default; infinite: until another one needs the room.
        history: what was asked of it, which outlives its being loaded.
        state: what requests work with; None while it is not loaded.
        known, abilities: what stays known of it; abilities are Ollama's words, () before they were
            asked for.
        planned: bytes that it will take, once that was looked up.
        num_bytes: what it takes of the server's memory, or will once it is loaded.
        overhead: bytes of the process in addition to those, measured when it was loaded;
            last_overhead: the same when it was loaded last. 0 without --max-memory.
        in_use: requests that hold it or wait for it.
        idle_since: when the last one went; loaded_at, load_seconds: when it was loaded last, and
            how long that took.
        waits_for: what its loading waits for, for people.
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
        """Whether it can be unloaded now."""
        return self.source is not None and self.phase == "loaded" and not self.in_use

    @property
    def rested_at(self) -> float:
        """When it may make room for another one: it stays for as long as its loading took, so that
        of two models that take turns at most half of the time is spent on that.
        """
        return self.loaded_at + self.load_seconds

    @property
    def unloads_at(self) -> float | None:
        """When it will be unloaded unless somebody comes; None: no time is set."""
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
    """What a model can do, in Ollama's words. Reads its chat template, which may take a while the
    first time.
    """
    if not engine.tokenizer.chat_template:
        return ("completion",)
    try:
        format = engine.tokenizer.turn_format
    except KVBoostError:  # a template that is not understood
        return ("completion",)
    calls = not format.shows_tools or format.calls is not None
    return (
        "completion",
        *(["tools"] if calls else []),
        *(["thinking"] if format.reasoning else []),
    )
