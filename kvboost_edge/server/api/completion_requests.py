"""Completion requests and their choices, with echo, best_of and prompt log probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from kvboost_edge.engine.handle import TokenEvent
from kvboost_edge.engine.request.answer_ids import KeptAnswers
from kvboost_edge.engine.request.request import SamplingParams
from kvboost_edge.engine.request.results import GenerationResult, TokenLogprobs
from kvboost_edge.server.api.checks import check_logprobs, most_with_logprobs, room_for
from kvboost_edge.server.api.logprobs import OffsetCounter, completion_logprobs
from kvboost_edge.server.api.prompt_encoding import encode_text, estimate_tokens
from kvboost_edge.server.api.rendered_request import PromptLogprobs, RenderedRequest, WireNames
from kvboost_edge.server.api.schemas.completions import CompletionRequest
from kvboost_edge.server.api.schemas.shared import check_in_vocabulary
from kvboost_edge.server.api.schemas.strict import bad_field
from kvboost_edge.server.cache_report.recent_requests import PromptField, PromptInputs
from kvboost_edge.server.response_types import (
    CompletionLogprobs,
    CompletionResponseChoice,
    FinishReason,
)
from kvboost_edge.server.state import ModelState
from kvboost_edge.server.work.bridge import EncodedPrompt, Running
from kvboost_edge.text.token_texts import TokenTexts
from kvboost_edge.text.tokenizer import Tokenizer

__all__ = ["RenderedCompletion"]

_DEFAULT_MAX_TOKENS = 16  # OpenAI's default


class RenderedCompletion(RenderedRequest):
    """A completion request that is ready to run.

    The constructor raises ApiError for fields that contradict each other.

    Attributes:
        prompt_field: field that errors about the prompt name.
        prompt_described: name of the prompt in the messages of these errors.
    """

    wire_names = WireNames("cmpl", "text_completion", "text_completion")
    prompt_field = "prompt"
    prompt_described = "the prompt"

    def __init__(self, state: ModelState, body: CompletionRequest, *, fills: bool = False) -> None:
        """Create a request.

        Args:
            state: the model.
            body: the request body.
            fills: whether the answer may fill the context if max_tokens is missing or exceeds it,
                and be empty if it is 0.
        """
        body.check_together()
        if body.max_tokens == 0 and not (body.echo or fills):
            raise bad_field("max_tokens", "max_tokens=0 is only allowed with echo=true")
        if missing := state.defaults.missing_in(body):
            body = body.model_copy(update=missing)
        body.check_vocabulary(state.engine.runner_info.vocab_size)
        self.body = body
        self._fills = fills
        self._limit = (
            _DEFAULT_MAX_TOKENS if body.max_tokens is None and not fills else body.max_tokens
        )
        limit = min(self._limit or 0, state.engine.runner_info.max_context)
        tokens = sum(estimate_tokens(p) if isinstance(p, str) else len(p) for p in body.prompt)
        super().__init__(
            state,
            body,
            size=sum(map(len, body.prompt)),
            estimate=tokens + len(body.prompt) * body.num_sequences * limit,
            num_prompts=len(body.prompt),
            per_prompt=body.num_sequences,
        )
        self._is_ranked = body.num_sequences > body.num_choices
        self._tokenizer = state.engine.tokenizer
        self._texts = None if body.logprobs is None else TokenTexts(self._tokenizer)

    def encode(self, answers: KeptAnswers) -> list[EncodedPrompt]:
        body = self.body
        vocab_size = self.state.engine.runner_info.vocab_size
        prompts = [_encode(self._tokenizer, prompt, body, vocab_size) for prompt in body.prompt]
        rows = sum(
            (len(prompt.token_ids) if body.echo else 0) + (self._limit or 0) for prompt in prompts
        )
        check_logprobs(rows * body.num_sequences, body.logprobs, "logprobs")
        return prompts

    def params(self, prompt: EncodedPrompt, choice: int) -> SamplingParams:
        body = self.body
        room = room_for(
            self.state,
            len(prompt.token_ids),
            self.prompt_field,
            self._limit,
            "max_tokens",
            fills=self._fills,
            described=self.prompt_described,
        )
        if self._limit is None and body.logprobs is not None:
            room = min(room, most_with_logprobs(body.num_sequences, body.logprobs))
        logprobs = 0 if self._is_ranked and body.logprobs is None else body.logprobs
        return body.sampling(
            self.state.sampling_defaults,
            room,
            logprobs,
            choice,
            prompt_logprobs=body.logprobs if body.echo else None,
            reasoning_budget=body.reasoning_budget,
            reasoning_budget_message=body.reasoning_budget_message,
        )

    def choice(self, index: int, run: Running) -> CompletionChoice:
        body = self.body
        prompt = run.prompts[index // body.num_choices] if body.echo else None
        with_ids = bool(body.return_token_ids)
        return CompletionChoice(index, prompt, self._tokenizer, self._texts, with_ids=with_ids)

    def chosen(self, results: Sequence[GenerationResult]) -> list[GenerationResult]:
        if not self._is_ranked:
            return list(results)
        return _best(results, self.body.num_sequences, self.body.num_choices)


def _encode(
    tokenizer: Tokenizer, prompt: str | list[int], body: CompletionRequest, vocab_size: int
) -> EncodedPrompt:
    if isinstance(prompt, str):
        ids = encode_text(tokenizer, prompt, body.add_special_tokens, "prompt")
        return EncodedPrompt(ids, prompt, asked=PromptInputs((PromptField("prompt", prompt),)))
    check_in_vocabulary("prompt", prompt, vocab_size)
    text = tokenizer.decode(prompt, skip_special_tokens=False) if body.echo else ""
    return EncodedPrompt(prompt, text, from_text=False)


def _best(
    results: Sequence[GenerationResult], per_prompt: int, keep: int
) -> list[GenerationResult]:
    """Select each prompt's `keep` sequences with the highest mean log probability, best first."""
    chosen: list[GenerationResult] = []
    for first in range(0, len(results), per_prompt):
        chosen += sorted(results[first : first + per_prompt], key=_mean_logprob, reverse=True)[
            :keep
        ]
    return chosen


def _mean_logprob(result: GenerationResult) -> float:
    logprobs = [token.logprob for token in result.logprobs or ()]
    return sum(logprobs) / len(logprobs) if logprobs else 0.0


class CompletionChoice:
    """Writer of one choice of a completion."""

    num_reasoning_tokens = 0  # Completions are plain text.

    def __init__(
        self,
        index: int,
        echo: EncodedPrompt | None,
        tokenizer: Tokenizer,
        texts: TokenTexts | None,
        *,
        with_ids: bool,
    ) -> None:
        """Create a writer.

        Args:
            index: index of the choice.
            echo: prompt to echo at the start; None without `echo`.
            tokenizer: tokenizer of the model.
            texts: cache of token texts; None unless log probabilities are requested.
            with_ids: whether the choice includes its token ids.
        """
        self._index = index
        self._echo = echo
        self._tokenizer = tokenizer
        self._texts = texts
        self._with_ids = with_ids
        self._offsets = OffsetCounter(tokenizer, len(echo.text) if echo else 0)
        self._shown = len(echo.text) if echo else 0
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprobs | None] = []
        self._starts: list[int] = []

    def whole(self, result: GenerationResult) -> CompletionResponseChoice:
        text = (self._echo.text if self._echo else "") + result.output_text
        ids = list(result.output_token_ids)
        tokens = list(result.logprobs or ())
        logprobs = None
        if self._texts is not None:
            shown, known = self._prompt_tokens(result.prompt_logprobs)
            offsets = self._prompt_offsets() + [self._offsets.add(token_id) for token_id in ids]
            offsets = [min(offset, len(text)) for offset in offsets]
            logprobs = completion_logprobs(self._texts, [*shown, *ids], [*known, *tokens], offsets)
        choice: CompletionResponseChoice = {
            "index": self._index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": cast("FinishReason", result.finish_reason),
        }
        if self._with_ids:
            choice["token_ids"] = ids
        return choice

    def waiting(self) -> dict[str, Any]:
        return self._piece("", None, [], None)

    def opening(self, prompt_logprobs: PromptLogprobs) -> dict[str, Any] | None:
        if self._echo is None:
            return None
        logprobs = None
        if self._texts is not None:
            ids, tokens = self._prompt_tokens(prompt_logprobs)
            logprobs = completion_logprobs(self._texts, ids, tokens, self._prompt_offsets())
        return self._piece(self._echo.text, logprobs, [], None)

    def push(self, event: TokenEvent) -> dict[str, Any] | None:
        self._ids.append(event.token_id)
        self._logprobs.append(event.logprobs)
        if self._texts is not None:
            self._starts.append(self._offsets.add(event.token_id))
        if not event.text:
            return None
        self._shown += len(event.text)
        # A stop string may still cut off withheld text. Tokens that begin in such text are withheld
        # too.
        count = (
            len(self._ids)
            if self._texts is None
            else sum(start < self._shown for start in self._starts)
        )
        return self._flush(event.text, count, None)

    def close(self, result: GenerationResult) -> dict[str, Any]:
        return self._flush("", len(self._ids), result.finish_reason)

    def _flush(self, text: str, count: int, reason: str | None) -> dict[str, Any]:
        """Return a piece with `text` and the first `count` pending tokens; drop those tokens."""
        ids = self._ids[:count]
        tokens = self._logprobs[:count]
        starts = self._starts[:count]
        del self._ids[:count], self._logprobs[:count], self._starts[:count]
        logprobs = None
        if self._texts is not None and ids:
            starts = [min(start, self._shown) for start in starts]
            logprobs = completion_logprobs(self._texts, ids, tokens, starts)
        return self._piece(text, logprobs, ids, reason)

    def _prompt_tokens(
        self, logprobs: PromptLogprobs
    ) -> tuple[list[int], list[TokenLogprobs | None]]:
        if self._echo is None:
            return [], []
        return self._echo.token_ids, list(logprobs or [None] * len(self._echo.token_ids))

    def _prompt_offsets(self) -> list[int]:
        if self._echo is None:
            return []
        # Special tokens that the tokenizer added, such as BOS, are not part of the echoed text.
        counter = OffsetCounter(self._tokenizer, 0, skip_special=self._echo.from_text)
        return [
            min(counter.add(token_id), len(self._echo.text)) for token_id in self._echo.token_ids
        ]

    def _piece(
        self, text: str, logprobs: CompletionLogprobs | None, ids: list[int], reason: str | None
    ) -> dict[str, Any]:
        piece = {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return {**piece, "token_ids": ids} if self._with_ids else piece
