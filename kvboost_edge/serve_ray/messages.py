"""Messages that Ray transports between the ingress and the replicas."""

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
from kvboost_edge.errors import KVBoostError, RequestError
from kvboost_edge.kvcache.hashing import narrowed_root
from kvboost_edge.runners.base import RunnerInfo
from kvboost_edge.serve_ray.routing.cache_records import EventBatch, ReplicaReport

__all__ = [
    "CallOutcome",
    "Came",
    "Description",
    "Failure",
    "ReplicaCall",
    "ReplicaFigures",
    "ReplicaUpdate",
    "Sent",
    "failure_of",
    "settings_digest",
]

_KINDS = {kind.__name__: kind for kind in vars(errors).values() if isinstance(kind, type)}


class Failure(NamedTuple):
    """An error of a replica.

    Attributes:
        kind: Name of the error's class.
        message: Message of the error; "" if its class is not of this package.
        has_died: True if the replica's engine has died, so another replica may succeed.
        option: The attribute of a RequestError.
    """

    kind: str
    message: str
    has_died: bool = False
    option: str | None = None

    def as_error(self) -> Exception:
        """Return the error; those of other packages become a RuntimeError without a message."""
        # The message of another package may quote the client's text.
        kind = _KINDS.get(self.kind)
        if kind is None:
            return RuntimeError(f"{self.kind} in a replica")
        error: Exception = kind(self.message)
        if isinstance(error, RequestError):
            error.option = self.option
        return error


def failure_of(error: Exception, is_alive: bool = True) -> Failure:
    """Convert an error to a `Failure` for the ingress."""
    return Failure(
        type(error).__name__,
        str(error) if isinstance(error, KVBoostError) else "",
        not is_alive,
        error.option if isinstance(error, RequestError) else None,
    )


class Description(NamedTuple):
    """Properties of a replica that do not change.

    Attributes:
        replica: Name of the replica.
        pid: Process id of the replica.
        model: Digest of the model's files; equal in all replicas.
        root: Digest of the model's files and everything else that determines the KV; equal in all
            replicas.
        block_size: Tokens per block.
        info: Description of the replica's runner.
        sampling_defaults: The model's default sampling parameters.
        speculates: True if requests use draft tokens unless they set `speculation`.
        reuse_refusal: Reason why the model does not support non-prefix KV reuse; None if it does.
        generates: Whether the model generates text; False for an embedding model.
        embedding_size: Length of an embedding; 0 if embeddings are not supported.
        default_reuse_refusal: Reason why non-prefix KV reuse with default options is not supported;
            None if it is.
        prefill: The engine's option `prefill`.
    """

    replica: str
    pid: int
    model: str
    root: bytes
    block_size: int
    info: RunnerInfo
    sampling_defaults: SamplingDefaults
    speculates: bool
    reuse_refusal: str | None
    generates: bool
    embedding_size: int
    default_reuse_refusal: str | None
    prefill: str = "exact"

    @property
    def settings(self) -> str:
        """Digest of everything that determines the KV and what requests may choose."""
        return settings_digest(self.root, self.prefill)


def settings_digest(root: bytes, prefill: str) -> str:
    """Return `Description.settings` for an engine's root and option `prefill`."""
    return (root if prefill == "exact" else narrowed_root(root, "prefill", prefill)).hex()


class Sent(NamedTuple):
    """A request as it is sent to a replica.

    Attributes:
        request: Unique name of the request.
        targets: Names of replicas to try in order; empty for any replica.
        tokens: Token ids of the prompt, as little-endian uint32.
        sampling: Sampling parameters.
        terms: Further options without the deadline, which depends on this machine's clock.
        prompt_text: Text of the prompt; None if the prompt was given as tokens.
        since: Seconds since the call began.
        left: Seconds until the deadline; None for no deadline.
        missing_tokens: Prompt tokens that the replica must compute, as expected by the router.
        restored_tokens: Prompt tokens in an offload tier, as expected by the router.
        hashes: Hashes of the prompt's full blocks, 32 bytes each, concatenated. The replica uses
            them to look up blocks.
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
    """A call to one particular replica.

    Attributes:
        targets: Name of the replica, as a tuple.
        method: Name of the replica's method.
        arguments: Arguments of the method.
    """

    targets: tuple[str, ...]
    method: str
    arguments: tuple[Any, ...] = ()


class Came(NamedTuple):
    """A part of an answer. The first part has only the replica's name: the request has begun.

    Attributes:
        replica: The replica's name.
        events: New tokens.
        cached_tokens: Prompt tokens found in the cache.
        prompt_logprobs: Log probabilities of the prompt, if requested.
        result: The result, in the last part.
        pinned_tokens: Tokens of pinned blocks.
        kept: Token ids of the answer's text, for reuse in the next turn.
        failure: The error that ended the request.
        progress: Progress of the prompt, before the first token.
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


class CallOutcome(NamedTuple):
    """The outcome of an engine call such as `embed`.

    Attributes:
        value: Return value of the call; None after an error.
        results: Results of the call's requests.
        failure: Error of the call, or None.
    """

    value: Any
    results: tuple[GenerationResult, ...]
    failure: Failure | None


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaFigures:
    """Statistics of one replica's engine.

    Attributes:
        replica: Name of the replica.
        paged: Result of `paged_stats`.
        cache: Result of `cache_stats`.
        num_running: Number of running sequences.
        num_waiting: Number of waiting sequences.
        waiting_tokens: Tokens of the waiting sequences.
        stores: Identity of the storage of each tier. Replicas that share it have equal identities.
        weights: Identity of the memory of weights, by the name of the figure in `paged` that gives
            its size. Memory that no other replica can share has none.
    """

    replica: str
    paged: dict[str, Any]
    cache: dict[str, float]
    num_running: int
    num_waiting: int
    waiting_tokens: int
    stores: dict[str, str]
    weights: dict[str, str]


class ReplicaUpdate(NamedTuple):
    """A replica's periodic report to the router."""

    replica: str
    is_alive: bool
    report: ReplicaReport
    batches: list[EventBatch]
