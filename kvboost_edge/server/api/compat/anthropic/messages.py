"""Requests to /v1/messages that are ready to run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kvboost_edge.engine.request.answer_ids import KeptAnswers
from kvboost_edge.engine.request.request import SamplingParams
from kvboost_edge.server.api.chat_requests import RenderedChat
from kvboost_edge.server.api.checks import max_length
from kvboost_edge.server.api.compat.anthropic.schemas import MessagesRequest
from kvboost_edge.server.api.compat.anthropic.translate import Breakpoint, breakpoints, translated
from kvboost_edge.server.api.prompt_encoding import encode_asked
from kvboost_edge.server.api.schemas.chat import ChatRequest
from kvboost_edge.server.api_errors import ApiError
from kvboost_edge.server.state import ModelState
from kvboost_edge.server.work.bridge import EncodedPrompt
from kvboost_edge.shareable import shareable_end

__all__ = ["RenderedMessages"]


class RenderedMessages(RenderedChat):
    """A chat request to /v1/messages whose marked prefixes stay cached.

    Create it in a worker thread, because bodies may be long.

    Attributes:
        kept: (number of tokens that stay cached, seconds) of each breakpoint; filled by `encode`.
    """

    def __init__(self, state: ModelState, body: MessagesRequest) -> None:
        if body.system is None and state.defaults.system:
            body = body.model_copy(update={"system": state.defaults.system})
        chat = translated(body)
        self._marks = breakpoints(body)
        self._budget = body.thinking_budget
        self.kept: list[tuple[int, float]] = []
        # As in Anthropic's API, max_tokens may exceed the context, and the answer then ends there.
        super().__init__(state, chat, fills=True)
        # Pins may take at most half of the pool, and the other half must hold any request. In a
        # smaller pool the prefix is not pinned, but evicted after all other blocks of its API key.
        self._pins_fit = state.admission.pool_tokens // 2 > state.engine.runner_info.max_context
        seconds = max((mark.seconds for mark in self._marks), default=None)
        self.terms = dataclasses.replace(self.terms, retention=None if self._pins_fit else seconds)

    def encode(self, answers: KeptAnswers) -> list[EncodedPrompt]:
        (prompt,) = super().encode(answers)
        config = self.state.engine.config
        end = shareable_end(config, len(prompt.token_ids), self.terms.prefill)
        self.kept += [
            (
                min(_length(self.state, self.body, mark, prompt.token_ids, answers), end),
                mark.seconds,
            )
            for mark in self._marks
        ]
        pins = tuple(self.kept) if self._pins_fit else ()
        return [dataclasses.replace(prompt, pins=pins)]

    def params(self, prompt: EncodedPrompt, choice: int) -> SamplingParams:
        return self._sampling(prompt, choice, budget=self._budget)

    def _room(self, num_prompt_tokens: int) -> int:
        try:
            return super()._room(num_prompt_tokens)
        except ApiError as error:
            # Clients recognize this beginning and shorten the conversation.
            maximum = max_length(self.state) - bool(self.body.max_tokens)
            error.message = (
                f"prompt is too long: {num_prompt_tokens} tokens > {maximum} maximum: "
                f"{error.message}"
            )
            raise


def _length(
    state: ModelState,
    chat: ChatRequest,
    mark: Breakpoint,
    token_ids: Sequence[int],
    answers: KeptAnswers,
) -> int:
    """Return the number of prompt tokens up to a breakpoint.

    Returns 0 if the chat template rejects a conversation that ends there.
    """
    if mark.messages is None:
        return len(token_ids)
    try:
        begun, _ = encode_asked(state, answers, mark.messages, chat, False)
    except ApiError:
        return 0
    pairs = enumerate(zip(begun, token_ids, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(begun), len(token_ids)))
