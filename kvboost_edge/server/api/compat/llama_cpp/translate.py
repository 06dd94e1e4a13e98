"""Translation of llama.cpp request bodies, and tokenization of prompts with several pieces."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, TypeVar

from kvboost_edge.engine.request.answer_ids import KeptAnswers
from kvboost_edge.engine.request.request import SamplingParams
from kvboost_edge.errors import RequestError
from kvboost_edge.server.api.compat.llama_cpp.schemas import Infill, LlamaCompletion, Pieces
from kvboost_edge.server.api.compat.translated import SAMPLING_FIELDS, completion_request
from kvboost_edge.server.api.completion_requests import RenderedCompletion
from kvboost_edge.server.api.schemas.completions import CompletionRequest
from kvboost_edge.server.api.schemas.strict import bad_field
from kvboost_edge.server.state import ModelState
from kvboost_edge.server.work.bridge import EncodedPrompt
from kvboost_edge.text.tokenizer import Tokenizer

__all__ = ["FIELDS", "RenderedPieces", "completion_of", "infill_of"]

FIELDS = {
    "max_tokens": "n_predict",
    "repetition_penalty": "repeat_penalty",
    "reasoning_budget": "reasoning_budget_tokens",
}
"""llama.cpp's names of OpenAI fields."""

_SAME = (
    *SAMPLING_FIELDS,
    "ignore_eos",
    "cache_prompt",
    "grammar",
    "json_schema",
    "cache_salt",
    "stream",
    "return_progress",
)
_REASONING = ("reasoning_budget", "reasoning_budget_message")  # not for infill
# Infill tokens of several model families: prefix, suffix and middle.
_INFILL = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)
# Other tokens of these families, by llama.cpp's table: before the name of a repository, before
# that of a file, and for padding.
_REPOSITORY = ("<|fim_repo|>", "<|repo_name|>", "<reponame>")
_FILE = ("<|file_sep|>",)
_PADDING = ("<|fim_pad|>", "<fim_pad>")
_SNIPPET = "\n\n--- snippet ---\n\n"  # before a text where the model has no token for files
_LOCAL = 2048  # tokens of prefix and suffix for which extra texts leave room


class RenderedPieces(RenderedCompletion):
    """A completion request whose prompts consist of texts and token ids.

    Attributes:
        min_indent: minimum indentation of the answer's lines.
        max_decode_ms: time after which the answer ends with its line.
    """

    def __init__(
        self,
        state: ModelState,
        body: CompletionRequest,
        prompts: Sequence[Pieces],
        *,
        with_bos: bool,
        field: str,
    ) -> None:
        super().__init__(state, body, fills=True)
        self.min_indent = 0
        self.max_decode_ms: int | None = None
        self._prompts = prompts
        self._with_bos = with_bos
        self._field = field

    def encode(self, answers: KeptAnswers) -> list[EncodedPrompt]:
        return [self._encoded(pieces) for pieces in self._prompts]

    def _encoded(self, pieces: Pieces) -> EncodedPrompt:
        tokenizer = self.state.engine.tokenizer
        vocab_size = self.state.engine.runner_info.vocab_size
        ids = _ids(tokenizer, pieces, vocab_size, self._with_bos, self._field)
        return EncodedPrompt(ids, tokenizer.decode(ids, skip_special_tokens=False))

    def params(self, prompt: EncodedPrompt, choice: int) -> SamplingParams:
        params = super().params(prompt, choice)
        return dataclasses.replace(
            params, min_indent=self.min_indent, max_decode_ms=self.max_decode_ms
        )


class RenderedInfill(RenderedPieces):
    """An infill request. Texts of other files that do not fit the context are left out."""

    prompt_field = "input_prefix"
    prompt_described = "the prompt (input_prefix, prompt and input_suffix)"

    def __init__(
        self,
        state: ModelState,
        body: CompletionRequest,
        pieces: Pieces,
        *,
        extra: Sequence[Pieces],
        head: Pieces,
    ) -> None:
        """Create a request.

        Args:
            state: the model.
            body: the request body.
            pieces: prefix and suffix with their tokens.
            extra: texts before them. The first ones are left out first.
            head: pieces before all texts.
        """
        super().__init__(state, body, [pieces], with_bos=False, field="input_prefix")
        self._local = pieces
        self._extra = extra
        self._head = head

    def encode(self, answers: KeptAnswers) -> list[EncodedPrompt]:
        tokenizer = self.state.engine.tokenizer
        head = _plain_ids(tokenizer, self._head, "input_extra")
        local = _plain_ids(tokenizer, self._local, self._field)
        context = self.state.usable_context
        # The room is the same while the user types, because otherwise the cached prefix changes.
        taken = len(head) + max(len(local), min(_LOCAL, context // 2))
        room = context - taken - max(1, self.body.max_tokens or 0)
        kept: list[list[int]] = []
        for pieces in reversed(self._extra):
            ids = _plain_ids(tokenizer, pieces, "input_extra")
            room -= len(ids)
            if room < 0:
                break
            kept.append(ids)
        ids = list(itertools.chain(head, *reversed(kept), local))
        text = tokenizer.decode(ids, skip_special_tokens=False)
        return [EncodedPrompt(ids, text, dropped=len(self._extra) - len(kept))]


def completion_of(state: ModelState, body: LlamaCompletion) -> RenderedPieces:
    """Convert a /completion body to a completion request.

    Raises:
        ApiError: a field is invalid (400).
    """
    body.check_together()
    ours = _completion_body(body, body.prompt)
    pieces = RenderedPieces(state, ours, body.prompt, with_bos=True, field="prompt")
    return _with_limits(pieces, body)


def infill_of(state: ModelState, body: Infill) -> RenderedInfill:
    """Convert an /infill body to a completion request. Its prompt has llama.cpp's layout.

    Raises:
        ApiError: the model has no infill tokens, or a field is invalid (400).
    """
    body.check_together()
    tokenizer = state.engine.tokenizer
    before, between, behind = _infill_ids(tokenizer)
    of_repository = _first_id(tokenizer, _REPOSITORY)
    of_file = _first_id(tokenizer, _FILE)
    head: Pieces = [] if of_repository is None else [[of_repository], "myproject\n"]
    pieces: Pieces = [] if of_file is None else [[of_file], "filename\n"]
    pieces += [[before], body.input_prefix + (body.prompt or ""), [between], body.input_suffix]
    pieces.append([behind])
    extra: list[Pieces] = [
        [_SNIPPET, each.text]
        if of_file is None
        else [[of_file], f"{'tmp' if each.filename is None else each.filename}\n", each.text]
        for each in body.input_extra or ()
    ]
    ends = [_first_id(tokenizer, names) for names in (_REPOSITORY, _FILE, _PADDING)]
    vocab_size = state.engine.runner_info.vocab_size
    stop_ids = [token for token in ends if token is not None and token < vocab_size]
    ours = _completion_body(
        body,
        [list(itertools.chain(head, *extra, pieces))],
        stop_token_ids=None if body.ignore_eos else stop_ids,
    )
    return _with_limits(RenderedInfill(state, ours, pieces, extra=extra, head=head), body)


def _first_id(tokenizer: Tokenizer, names: Sequence[str]) -> int | None:
    """Return the id of the first of these tokens that the model has."""
    found = (tokenizer.codec.token_id(name) for name in names)
    return next((token_id for token_id in found if token_id is not None), None)


def _infill_ids(tokenizer: Tokenizer) -> list[int]:
    for names in _INFILL:
        ids = [tokenizer.codec.token_id(name) for name in names]
        if None not in ids:
            return [token_id for token_id in ids if token_id is not None]
    raise bad_field(
        "input_prefix",
        "the model has no tokens for infill (prefix, suffix and middle); use /completion",
    )


def _completion_body(
    body: LlamaCompletion | Infill, prompts: Sequence[Pieces], **more: Any
) -> CompletionRequest:
    """Convert the fields of a body other than the limits of lines."""
    limit = body.n_predict
    return completion_request(
        prompt=prompts[0][0]
        if len(prompts) == len(prompts[0]) == 1
        else [_stand_in(pieces) for pieces in prompts],
        n=body.n_cmpl,
        max_tokens=None if limit is None or limit < 0 else limit,
        stop=list(body.stop) if body.stop else None,
        repetition_penalty=body.repeat_penalty,
        **{
            name: list(value) if isinstance(value, tuple) else value
            for name, value in body.sampler_options.items()
        },
        **{name: getattr(body, name) for name in _SAME},
        **{name: getattr(body, name, None) for name in _REASONING},
        **{
            "speculative.n_max": body.draft_n_max,
            "speculative.n_min": body.draft_n_min,
            "speculative.p_min": body.draft_p_min,
        },
        **more,
    )


def _stand_in(pieces: Pieces) -> str:
    """Return a text with about as many tokens as a prompt that is not tokenized yet."""
    text = "".join(piece if isinstance(piece, str) else "....." * len(piece) for piece in pieces)
    return text[: 1 << 20]


_Rendered = TypeVar("_Rendered", bound=RenderedPieces)


def _with_limits(rendered: _Rendered, body: LlamaCompletion | Infill) -> _Rendered:
    """Set the slot and the limits of lines, which OpenAI's API does not have."""
    rendered.slot = max(0, body.id_slot or 0)
    rendered.min_indent = body.n_indent or 0
    rendered.max_decode_ms = max(0, body.t_max_predict_ms or 0) or None
    return rendered


def _plain_ids(tokenizer: Tokenizer, pieces: Pieces, field: str) -> list[int]:
    """Return the token ids of pieces. Special tokens written in their texts are plain text."""
    ids: list[int] = []
    for piece in pieces:
        try:
            ids += tokenizer.encode_framed("", piece, "") if isinstance(piece, str) else piece
        except RequestError as error:
            raise bad_field(field, str(error)) from error
    return ids


def _ids(
    tokenizer: Tokenizer,
    pieces: Sequence[str | list[int]],
    vocab_size: int,
    with_bos: bool,
    field: str,
) -> list[int]:
    ids: list[int] = []
    for number, piece in enumerate(pieces):
        if isinstance(piece, list):
            if max(piece) >= vocab_size:  # llama.cpp's errors name the field in the text alone
                wrong = (
                    f"token id {max(piece)} is outside the model's vocabulary 0..{vocab_size - 1}"
                )
                raise bad_field(field, f"{field}: {wrong}")
            ids += piece
            continue
        try:
            ids += tokenizer.encode(piece, with_bos and number == 0)
        except RequestError as error:
            raise bad_field(field, str(error)) from error
    if not ids:
        raise bad_field(field, "the tokenizer returns no tokens for this text")
    return ids
