"""A generation request of any API, converted to engine terms."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from kvboost_edge.engine.handle import TokenEvent
from kvboost_edge.engine.request.results import GenerationResult, TokenLogprobs
from kvboost_edge.engine.request.terms import Terms
from kvboost_edge.server.api.checks import check_mode, check_priority
from kvboost_edge.server.api.schemas.shared import SamplingFields
from kvboost_edge.server.state import ModelState
from kvboost_edge.server.work.bridge import EngineRequest, Running

__all__ = ["ChoiceWriter", "PromptLogprobs", "RenderedRequest", "WireNames"]

Json = dict[str, Any]
PromptLogprobs = Sequence[TokenLogprobs | None] | None


class ChoiceWriter(Protocol):
    """Writer of one choice of an answer, as a whole or in pieces."""

    def whole(self, result: GenerationResult) -> Mapping[str, Any]: ...

    def waiting(self) -> Json:
        """Return a piece without content."""
        ...

    def opening(self, prompt_logprobs: PromptLogprobs) -> Json | None:
        """Return the first piece of a stream, sent before the first token, or None."""
        ...

    def push(self, event: TokenEvent) -> Json | None:
        """Return the next piece, or None if there is no text to show yet.

        The ids and log probabilities of withheld tokens are withheld too.
        """
        ...

    def close(self, result: GenerationResult) -> Json:
        """Return the last piece, which has the finish reason."""
        ...

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of reasoning tokens; complete once the choice is written or closed."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class WireNames:
    """Names that identify the object types in an OpenAI answer.

    Attributes:
        id_prefix: prefix of the answer's id.
        kind: value of `object` in a whole answer.
        chunk_kind: value of `object` in a chunk.
    """

    id_prefix: str
    kind: str
    chunk_kind: str


class RenderedRequest(EngineRequest):
    """A generation request of any API that is ready to run.

    Subclasses create the writers of choices for OpenAI's APIs. The other APIs have their own
    writers.

    Attributes:
        estimate: number of prompt and output tokens, estimated before tokenization.
        streams: whether the answer is streamed.
        include_usage: whether the stream ends with a usage chunk.
        continuous_usage: whether every chunk contains the usage of its choice.
        explains: whether the answer contains a cache-miss report on the first prompt.
        reports_progress: whether the stream reports the progress of its prompts, twice a second.
    """

    wire_names: ClassVar[WireNames]

    def __init__(
        self,
        state: ModelState,
        body: SamplingFields,
        *,
        size: int,
        estimate: int,
        num_prompts: int = 1,
        per_prompt: int,
    ) -> None:
        super().__init__(
            size=size,
            per_prompt=per_prompt,
            terms=Terms(
                mode=check_mode(state, body),
                prefill=body.prefill,
                cache_salt=body.cache_salt,
                priority=check_priority(state, body.priority),
                cache_key=body.cache_key,
                retention=body.retention,
                **body.engine_options,
            ),
            is_default_mode=body.mode is None,
        )
        self.state = state
        self.estimate = estimate
        self.num_sequences = num_prompts * per_prompt
        self.streams = bool(body.stream)
        self.include_usage = body.include_usage
        self.continuous_usage = body.continuous_usage
        self.explains = body.explain
        self.reports_progress = bool(body.return_progress)

    @abstractmethod
    def choice(self, index: int, run: Running) -> ChoiceWriter:
        """Create the writer of one choice."""

    def chosen(self, results: Sequence[GenerationResult]) -> list[GenerationResult]:
        """Return the results that the answer contains, in order."""
        return list(results)
