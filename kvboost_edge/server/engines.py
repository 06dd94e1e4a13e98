"""Protocol of the engines that the server can use.

`CPUPagedEngine` implements it in this process. Other implementations work too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kvboost_edge.config import EngineConfig
    from kvboost_edge.engine.handle import RequestHandle
    from kvboost_edge.engine.request.answer_ids import KeptAnswers
    from kvboost_edge.engine.request.prompts import Document, Prompt
    from kvboost_edge.engine.request.request import RequestArrival, SamplingParams
    from kvboost_edge.engine.request.results import WarmResult
    from kvboost_edge.engine.request.sampling_defaults import SamplingDefaults
    from kvboost_edge.engine.request.terms import Terms
    from kvboost_edge.engine.stats import BlockDetail
    from kvboost_edge.runners.base import RunnerInfo
    from kvboost_edge.text.tokenizer import Tokenizer

__all__ = ["Engine", "StatsProvider", "SupportsReplicas", "replicas_of"]


class StatsProvider(Protocol):
    """Object that provides current statistics of an engine."""

    def cache_stats(self) -> dict[str, float]: ...

    def paged_stats(self) -> dict[str, Any]: ...

    def block_map(self) -> list[int]: ...

    def block_details(self, limit: int = 4096) -> list[BlockDetail]: ...

    def num_running(self) -> int: ...

    def num_waiting(self) -> int: ...

    def waiting_tokens(self) -> int: ...


class Engine(StatsProvider, Protocol):
    """Interface of an engine that the server uses. `CPUPagedEngine` describes the members.

    Safe to use from any thread. The server calls `submit`, `kept_answers`, `is_alive` and the
    properties on the event loop, so they must not block. It calls all other methods in worker
    threads, where they may block.
    """

    @property
    def config(self) -> EngineConfig: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def runner_info(self) -> RunnerInfo: ...

    @property
    def sampling_defaults(self) -> SamplingDefaults: ...

    @property
    def speculates(self) -> bool: ...

    @property
    def reuse_refusal(self) -> str | None: ...

    @property
    def default_reuse_refusal(self) -> str | None: ...

    @property
    def generates(self) -> bool: ...

    @property
    def embedding_size(self) -> int: ...

    # Requests.

    def submit(
        self,
        prompt: Prompt,
        *,
        sampling: SamplingParams | None = None,
        terms: Terms | None = None,
        entry: RequestArrival | None = None,
    ) -> RequestHandle: ...

    def embed(
        self, texts: Sequence[Document], dimensions: int | None = None, **options: Any
    ) -> npt.NDArray[np.float32]: ...

    def rerank(self, query: str, documents: Sequence[str], **options: Any) -> list[float]: ...

    # The cache.

    def warm(
        self,
        text: Prompt | None = None,
        position_offset: int = 0,
        *,
        documents: Sequence[Document] | None = None,
        handles: list[RequestHandle] | None = None,
        **options: Any,
    ) -> WarmResult: ...

    def warm_result(
        self,
        token_ids: Sequence[int],
        *,
        tenant: str | None = None,
        cache_salt: str | None = None,
        prefill: str | None = None,
    ) -> WarmResult: ...

    def unpin(
        self,
        prompt: Prompt,
        *,
        tenant: str | None = None,
        cache_salt: str | None = None,
        prefill: str | None = None,
        holder: str | None = None,
    ) -> int: ...

    def kept_answers(
        self,
        *,
        tenant: str | None = None,
        cache_salt: str | None = None,
        prefill: str | None = None,
    ) -> KeptAnswers: ...

    def reset_cache(self) -> int: ...

    def is_alive(self) -> bool: ...

    def read_ahead(self) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class SupportsReplicas(Protocol):
    """An engine that consists of several replicas."""

    def replicas(self, *, patient: bool = False) -> Mapping[str, StatsProvider]:
        """Return the statistics of each replica by name. Blocks, so do not call it on the event
        loop.

        Args:
            patient: also wait for replicas that did not respond recently.
        """
        ...


def replicas_of(engine: Engine, *, patient: bool = False) -> Mapping[str, StatsProvider]:
    """Return the statistics of each replica by name. A single engine has the name "".

    Args:
        engine: an engine, replicated or not.
        patient: see `SupportsReplicas.replicas`.
    """
    return (
        engine.replicas(patient=patient) if isinstance(engine, SupportsReplicas) else {"": engine}
    )
