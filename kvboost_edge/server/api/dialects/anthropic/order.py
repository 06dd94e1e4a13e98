"""How a request to /v1/messages is run: as a chat, with what `cache_control` wants kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kvboost_edge.engine.request.answer_ids import KeptAnswers
from kvboost_edge.engine.request.request import SamplingParams
from kvboost_edge.server.api.chat import chat_order, encode_asked
from kvboost_edge.server.api.checks import room_for
from kvboost_edge.server.api.dialects.anthropic.schemas import MessagesRequest
from kvboost_edge.server.api.dialects.anthropic.translate import Breakpoint, breakpoints, translated
from kvboost_edge.server.api.dialects.anthropic.writer import AnthropicWriter
from kvboost_edge.server.api.generation import Order
from kvboost_edge.server.api.schemas.chat import ChatRequest
from kvboost_edge.server.errors import ApiError
from kvboost_edge.server.state import ModelState
from kvboost_edge.server.work.bridge import EncodedPrompt

__all__ = ["count_tokens", "messages_order"]


def messages_order(state: ModelState, body: MessagesRequest) -> tuple[Order, ChatRequest]:
    """How to run the request, and the chat request that it is. For worker threads: bodies may be
    long.
    """
    chat = translated(body)
    marks = breakpoints(body)
    writer = AnthropicWriter(state, body)
    order = chat_order(state, chat, writer)
    encode_chat = order.job.encode
    # Pins of half of the pool must leave room for any request; else what is marked only goes after
    # all else of its key.
    pins_fit = state.admission.pool_tokens // 2 > state.engine.runner_info.max_context

    def encode(answers: KeptAnswers) -> list[EncodedPrompt]:
        (prompt,) = encode_chat(answers)
        lengths = [_length(state, chat, mark, prompt.token_ids, answers) for mark in marks]
        writer.kept = [(length, mark.seconds) for length, mark in zip(lengths, marks, strict=True)]
        return [dataclasses.replace(prompt, pins=tuple(writer.kept))] if pins_fit else [prompt]

    def params(prompt: EncodedPrompt, choice: int) -> SamplingParams:
        """As with Anthropic `max_tokens` may be more than the context holds; then that ends the
        answer.
        """
        room = room_for(
            state, len(prompt.token_ids), "messages", None if body.max_tokens else 0, "max_tokens"
        )
        fits = None if prompt.turn is None else prompt.turn.fits
        return chat.sampling(min(room, body.max_tokens), None, choice, fits=fits)

    retention = None if pins_fit else max((mark.seconds for mark in marks), default=None)
    job = dataclasses.replace(order.job, encode=encode, params=params, retention=retention)
    return dataclasses.replace(order, job=job, pings=True), chat


def count_tokens(state: ModelState, chat: ChatRequest, answers: KeptAnswers) -> int:
    """Tokens of the prompt that the model would be given; slow for long ones."""
    return len(encode_asked(state, answers, chat.messages, chat, True, continues=chat.continues)[0])


def _length(
    state: ModelState,
    chat: ChatRequest,
    mark: Breakpoint,
    token_ids: Sequence[int],
    answers: KeptAnswers,
) -> int:
    """Tokens of the prompt up to a breakpoint; 0 where the template takes no conversation that ends
    there.
    """
    if mark.messages is None:
        return len(token_ids)
    try:
        begun, _ = encode_asked(state, answers, mark.messages, chat, False)
    except ApiError:
        return 0
    pairs = enumerate(zip(begun, token_ids, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(begun), len(token_ids)))
