"""Chat requests in the format of /v1/chat/completions, and the choices of their answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, cast

from kvboost_edge.engine.handle import TokenEvent
from kvboost_edge.engine.request.answer_ids import KeptAnswers
from kvboost_edge.engine.request.request import SamplingParams
from kvboost_edge.engine.request.results import GenerationResult, TokenLogprobs
from kvboost_edge.server.api.checks import (
    check_logprobs,
    max_length,
    most_with_logprobs,
    room_for,
)
from kvboost_edge.server.api.logprobs import OffsetCounter, chat_logprobs
from kvboost_edge.server.api.prompt_encoding import (
    encode_asked,
    encode_plain,
    estimate_messages,
    size_of,
    with_defaults,
)
from kvboost_edge.server.api.reasoning_budget import reasoning_options
from kvboost_edge.server.api.rendered_request import PromptLogprobs, RenderedRequest, WireNames
from kvboost_edge.server.api.schemas.chat import ChatMessage, ChatRequest
from kvboost_edge.server.api.turns import turn_of
from kvboost_edge.server.response_types import (
    ChatLogprobs,
    ChatResponseChoice,
    ChatResponseMessage,
    FinishReason,
)
from kvboost_edge.server.state import ModelState
from kvboost_edge.server.work.bridge import EncodedPrompt, Running
from kvboost_edge.text.token_texts import TokenTexts
from kvboost_edge.text.tokenizer import Tokenizer
from kvboost_edge.text.turns.answer_reader import TurnReader

__all__ = ["RenderedChat", "ranges_to_drop"]

# If old turns are dropped and the answer has no limit, or one that may exceed the context, it gets
# an eighth of the context.
_ANSWER_SHARE = 8


def ranges_to_drop(
    roles: Sequence[str], sizes: Sequence[int], num_tokens: int, limit: int
) -> list[range]:
    """List the ranges of old messages that may be dropped from a long prompt, shortest first.

    Leading system messages and the last turn, which begins with the last user message, are always
    kept. The number of tokens to drop is rounded up to a multiple of half the limit.

    Args:
        roles: role of each message.
        sizes: approximate number of tokens of each message.
        num_tokens: number of tokens of the whole prompt.
        limit: number of tokens that fit.
    """
    head = next((at for at, role in enumerate(roles) if role not in ("system", "developer")), 0)
    begins = [at for at in range(head, len(roles)) if roles[at] == "user"]
    ends = begins[1:]  # candidates for the first kept message
    if not ends:
        return []
    before = [0, *accumulate(sizes)]
    gone = {end: before[end] - before[head] for end in ends}
    # Large steps keep the prefix stable. The same turns are dropped in each request until the
    # conversation has grown by a whole step.
    step = max(1, limit // 2)
    least = -(-(num_tokens - limit) // step) * step
    most = gone[ends[-1]] + step
    found = [
        next((end for end in ends if gone[end] >= goal), ends[-1])
        for goal in range(least, most, step)
    ]
    return [range(head, end) for end in dict.fromkeys([*found, ends[-1]])]


class RenderedChat(RenderedRequest):
    """A chat request that is ready to run.

    The constructor raises ApiError for fields that contradict each other.
    """

    wire_names = WireNames("chatcmpl", "chat.completion", "chat.completion.chunk")
    renders = True

    def __init__(self, state: ModelState, body: ChatRequest, *, fills: bool = False) -> None:
        """Create a request.

        Args:
            state: the model.
            body: the request body.
            fills: whether max_tokens may exceed the context, so that the answer may fill it.
        """
        body.check_together()
        body = with_defaults(state, body)
        body.check_vocabulary(state.engine.runner_info.vocab_size)
        check_logprobs(
            (body.token_limit or 0) * body.num_choices, body.num_logprobs, "top_logprobs"
        )
        limit = min(body.token_limit or 0, state.engine.runner_info.max_context)
        super().__init__(
            state,
            body,
            size=size_of(body.messages, body.tools),
            estimate=estimate_messages(body.messages, body.tools) + body.num_choices * limit,
            per_prompt=body.num_choices,
        )
        self.body = body
        self._fills = fills
        self._tokenizer = state.engine.tokenizer
        self._texts = TokenTexts(self._tokenizer) if body.logprobs else None

    def encode(self, answers: KeptAnswers) -> list[EncodedPrompt]:
        prompt = self._encoded(self.body.messages, answers)
        overflow = self.body.context_overflow or self.state.settings.context_overflow
        if overflow == "drop_oldest":
            prompt = self._fitting(prompt, answers)
        turn = turn_of(self._tokenizer, self.body, prompt.token_ids)
        return [dataclasses.replace(prompt, turn=turn)]

    def params(self, prompt: EncodedPrompt, choice: int) -> SamplingParams:
        return self._sampling(prompt, choice)

    def _sampling(
        self, prompt: EncodedPrompt, choice: int, *, budget: int | None = None
    ) -> SamplingParams:
        """Return the sampling parameters of one choice.

        Args:
            prompt: the prompt.
            choice: index of the choice.
            budget: reasoning budget for models that have one, see `reasoning_options`.
        """
        body = self.body
        room = self._room(len(prompt.token_ids))
        fits = body.answer_format if prompt.turn is None else prompt.turn.fits
        limits = reasoning_options(
            self.state, body, room, fits, effort=body.reasoning_effort, wanted=budget
        )
        defaults = self.state.sampling_defaults
        return body.sampling(defaults, room, body.num_logprobs, choice, fits=fits, **limits)

    def _room(self, num_prompt_tokens: int) -> int:
        """Return the maximum number of new tokens."""
        body = self.body
        wanted = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        room = room_for(
            self.state,
            num_prompt_tokens,
            "messages",
            body.token_limit,
            wanted,
            fills=self._fills,
        )
        if body.token_limit is None and body.num_logprobs is not None:
            room = min(room, most_with_logprobs(body.num_choices, body.num_logprobs))
        return room

    def choice(self, index: int, run: Running) -> ChatChoice:
        turn = run.prompts[0].turn
        stop = self.body.stop or ()
        reader = None
        if turn is not None:
            reader = TurnReader(
                turn,
                self._tokenizer,
                stop,
                run.answers.keep,
                min_tokens=self.body.min_tokens or 0,
                stop_included=bool(self.body.include_stop_str_in_output),
            )
        with_ids = bool(self.body.return_token_ids)
        return ChatChoice(index, self._tokenizer, self._texts, reader, with_ids=with_ids)

    def _encoded(self, messages: Sequence[ChatMessage], answers: KeptAnswers) -> EncodedPrompt:
        body = self.body
        generates = body.add_generation_prompt is not False
        ids, asked = encode_asked(
            self.state, answers, messages, body, generates, continues=body.continues
        )
        return EncodedPrompt(ids, asked=asked, dropped=len(body.messages) - len(messages))

    def _fitting(self, prompt: EncodedPrompt, answers: KeptAnswers) -> EncodedPrompt:
        """Drop the oldest turns until the prompt leaves room for an answer.

        If no prompt is short enough, the shortest one is returned.
        """
        longest = max_length(self.state)
        share = longest // _ANSWER_SHARE
        reserved = self.body.token_limit or share
        limit = longest - (min(reserved, share) if self._fills else reserved)
        if len(prompt.token_ids) <= limit or limit < 1:
            return prompt
        messages = self.body.messages
        around = _tokens_around(self._tokenizer)
        sizes = [len(self._tokenizer.encode(message.text, False)) + around for message in messages]
        for gone in ranges_to_drop(
            [message.role for message in messages], sizes, len(prompt.token_ids), limit
        ):
            prompt = self._encoded([*messages[: gone.start], *messages[gone.stop :]], answers)
            if len(prompt.token_ids) <= limit:
                break
        return prompt


def _tokens_around(tokenizer: Tokenizer) -> int:
    """Return the approximate number of tokens that the chat template adds to a message."""
    one = [{"role": "user", "content": "x"}]
    both = [*one, {"role": "assistant", "content": "x"}, *one]
    short, long = (len(encode_plain(tokenizer, chat, None)) for chat in (one, both))
    return max(1, (long - short) // 2 - 1)


class ChatChoice:
    """Writer of one choice of a chat answer."""

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        texts: TokenTexts | None,
        reader: TurnReader | None,
        *,
        with_ids: bool,
    ) -> None:
        """Create a writer.

        Args:
            index: index of the choice.
            tokenizer: tokenizer of the model.
            texts: cache of token texts; None unless log probabilities are requested.
            reader: parser of reasoning and tool calls; None for plain text.
            with_ids: whether the choice includes its token ids.
        """
        self._index = index
        self._codec = tokenizer.codec
        self._texts = texts
        self._with_ids = with_ids
        self._reader = reader
        self._offsets = OffsetCounter(tokenizer, 0)
        self._shown = 0
        self._num_reasoning: int | None = None  # as counted by the engine
        self._ids: list[int] = []
        self._logprobs: list[tuple[int, TokenLogprobs]] = []  # with text offsets

    def whole(self, result: GenerationResult) -> ChatResponseChoice:
        self._num_reasoning = result.reasoning_tokens
        message: ChatResponseMessage = {
            "role": "assistant",
            "content": result.output_text,
            "refusal": None,
        }
        reason = result.finish_reason
        if self._reader is not None:
            for token_id in result.output_token_ids:
                self._reader.push(token_id)
            self._reader.close()
            message = cast("ChatResponseMessage", self._reader.message.as_sent())
            reason = self._reader.reason(result.finish_reason)
        self._shown = len(result.output_text)
        for token in result.logprobs or ():
            self._add(token)
        choice: ChatResponseChoice = {
            "index": self._index,
            "message": message,
            "logprobs": None
            if self._texts is None
            else chat_logprobs(self._texts, self._tokens_of_text()),
            "finish_reason": cast("FinishReason", reason),
        }
        if self._with_ids:
            choice["token_ids"] = list(result.output_token_ids)
        return choice

    def waiting(self) -> dict[str, Any]:
        return self._piece({"role": "assistant", "content": None}, None, [], None)

    def opening(self, prompt_logprobs: PromptLogprobs) -> dict[str, Any]:
        return self._piece({"role": "assistant", "content": "", "refusal": None}, None, [], None)

    def push(self, event: TokenEvent) -> dict[str, Any] | None:
        self._ids.append(event.token_id)
        self._shown += len(event.text)
        if event.logprobs is not None:
            self._add(event.logprobs)
        if self._reader is None:
            return self._flush({"content": event.text}, None) if event.text else None
        parts = self._reader.push(event.token_id)
        return self._flush(self._reader.message.delta(parts), None) if parts else None

    def close(self, result: GenerationResult) -> dict[str, Any]:
        self._num_reasoning = result.reasoning_tokens
        if self._reader is None:
            return self._flush({}, result.finish_reason)
        parts = self._reader.close()
        return self._flush(
            self._reader.message.delta(parts), self._reader.reason(result.finish_reason)
        )

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of reasoning tokens; complete once the choice is closed."""
        if self._num_reasoning is not None:
            return self._num_reasoning
        return 0 if self._reader is None else self._reader.num_reasoning_tokens

    def _add(self, token: TokenLogprobs) -> None:
        """Store the log probabilities of a token, except for tokens without text such as EOS."""
        if self._texts is not None and self._codec.has_text(token.token_id, True):
            self._logprobs.append((self._offsets.add(token.token_id), token))

    def _tokens_of_text(self) -> list[TokenLogprobs]:
        """Remove and return the log probabilities of tokens whose text has been sent.

        The other tokens are still pending, or belong to a stop string that was cut off.
        """
        tokens = [token for start, token in self._logprobs if start < self._shown]
        del self._logprobs[: len(tokens)]
        return tokens

    def _flush(self, delta: dict[str, Any], reason: str | None) -> dict[str, Any]:
        tokens = self._tokens_of_text()
        ids = self._ids
        self._ids = []
        logprobs = (
            chat_logprobs(self._texts, tokens) if self._texts is not None and tokens else None
        )
        return self._piece(delta, logprobs, ids, reason)

    def _piece(
        self,
        delta: dict[str, Any],
        logprobs: ChatLogprobs | None,
        ids: list[int],
        reason: str | None,
    ) -> dict[str, Any]:
        piece = {
            "index": self._index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": reason,
        }
        return {**piece, "token_ids": ids} if self._with_ids else piece
