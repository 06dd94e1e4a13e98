"""What ingress and replicas tell each other. Ray carries these records between processes of one
cluster.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from kvboost_edge import errors
from kvboost_edge.engine.handle import TokenEvent
from kvboost_edge.engine.request.progress import Progress
from kvboost_edge.engine.request.request import SamplingParams
from kvboost_edge.engine.request.results import GenerationResult, TokenLogprobs
from kvboost_edge.engine.request.sampling_defaults import SamplingDefaults
from kvboost_edge.engine.request.terms import Terms
from kvboost_edge.errors import KVBoostError
from kvboost_edge.runners.base import RunnerInfo
from kvboost_edge.serve_ray.routing.cache_records import EventBatch, ReplicaReport

__all__ = [
    "Came",
    "Computed",
    "Description",
    "Failure",
    "ReplicaCall",
    "ReplicaFigures",
    "ReplicaUpdate",
    "Sent",
    "failure_of",
]

_KINDS = {kind.__name__: kind for kind in vars(errors).values() if isinstance(kind, type)}


class Failure(NamedTuple):
    """An error of a replica: the name of its class, and its message where that is one of ours.
    has_died: the replica's engine has, so another replica may do what this one could not.
    """

    kind: str
    message: str
    has_died: bool = False

    def as_error(self) -> Exception:
        """The same error here; whatever is not ours stays without its message, which may quote a
        client.
        """
        kind = _KINDS.get(self.kind)
        return RuntimeError(f"{self.kind} in a replica") if kind is None else kind(self.message)


def failure_of(error: Exception, is_alive: bool = True) -> Failure:
    """What the ingress is told of an error."""
    return Failure(
        type(error).__name__, str(error) if isinstance(error, KVBoostError) else "", not is_alive
    )


class Description(NamedTuple):
    """What a replica is. `model` and `root` must be those of every other: they are digests of the
    model's files, and of these with all that shapes keys and values.
    """

    replica: str
    pid: int
    model: str
    root: bytes
    block_size: int
    info: RunnerInfo
    sampling_defaults: SamplingDefaults
    reuse_refusal: str | None
    embedding_size: int
    default_reuse_refusal: str | None


class Sent(NamedTuple):
    """A request on its way.

    Attributes:
        request: its name, no two requests of an ingress have the same.
        targets: replicas in the order in which they are to be tried; empty: any.
        tokens: of the prompt, little-endian u32.
        terms: without the deadline, which no other machine's clock knows.
        since: seconds since the call began.
        left: seconds until the deadline.
        missing_tokens: of the prompt, that the router thinks must be computed.
        restored_tokens: that it thinks a tier has.
        hashes: of the prompt's full blocks, 32 bytes each in one piece: the replica looks up what
            it has by them.
    """

    request: str
    targets: tuple[str, ...]
    tokens: bytes
    sampling: SamplingParams
    terms: Terms
    prompt_text: str | None
    since: float
    left: float | None
    missing_tokens: int
    restored_tokens: int = 0
    hashes: bytes = b""


class ReplicaCall(NamedTuple):
    """A question to one replica, which no other may answer: the name of one of its methods, and the
    arguments.
    """

    targets: tuple[str, ...]
    method: str
    arguments: tuple[Any, ...] = ()


class Came(NamedTuple):
    """Something of an answer: tokens; at the end the result, or the error. The first of them holds
    the replica's name alone: the request has begun. Until there are tokens `progress` says now and
    then how far the prompt is. `kept`: the ids that its text was written with, to be found by the
    next turn.
    """

    replica: str
    events: tuple[TokenEvent, ...] = ()
    cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    result: GenerationResult | None = None
    pinned_tokens: int = 0
    kept: list[int] | None = None
    failure: Failure | None = None
    progress: Progress | None = None


class Computed(NamedTuple):
    """What became of a call that gives a value of its own: that or an error, and the results of its
    requests.
    """

    value: Any
    results: tuple[GenerationResult, ...]
    failure: Failure | None


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaFigures:
    """All figures of one replica, as its engine gives them."""

    replica: str
    paged: dict[str, Any]
    cache: dict[str, float]
    num_running: int
    num_waiting: int
    waiting_tokens: int


class ReplicaUpdate(NamedTuple):
    """What a replica tells the router now and then."""

    replica: str
    is_alive: bool
    report: ReplicaReport
    batches: list[EventBatch]
