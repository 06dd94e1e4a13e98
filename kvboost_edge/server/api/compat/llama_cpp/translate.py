"""Translation of llama.cpp request bodies, and tokenization of prompts with several pieces."""

from __future__ import annotations

from collections.abc import Sequence

from kvboost_edge.engine.request.answer_ids import KeptAnswers
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


class RenderedPieces(RenderedCompletion):
    """A completion request whose prompt consists of texts and token ids."""

    def __init__(
        self,
        state: ModelState,
        body: CompletionRequest,
        pieces: Pieces,
        *,
        with_bos: bool,
        field: str,
    ) -> None:
        super().__init__(state, body, fills=True)
        self._pieces = pieces
        self._with_bos = with_bos
        self._field = field

    def encode(self, answers: KeptAnswers) -> list[EncodedPrompt]:
        tokenizer = self.state.engine.tokenizer
        vocab_size = self.state.engine.runner_info.vocab_size
        ids = _ids(tokenizer, self._pieces, vocab_size, self._with_bos, self._field)
        return [EncodedPrompt(ids, tokenizer.decode(ids, skip_special_tokens=False))]


def completion_of(state: ModelState, body: LlamaCompletion) -> RenderedPieces:
    """Convert a /completion body to a completion request.

    Raises:
        ApiError: a field is invalid (400).
    """
    return _rendered(state, body, body.prompt, with_bos=True, field="prompt")


def infill_of(state: ModelState, body: Infill) -> RenderedPieces:
    """Convert an /infill body to a completion request.

    Raises:
        ApiError: the model has no infill tokens, or a field is invalid (400).
    """
    before, between, behind = _infill_ids(state.engine.tokenizer)
    prefix = body.input_prefix + (body.prompt or "")
    pieces: Pieces = [
        [before],
        *filter(None, (prefix,)),
        [between],
        *filter(None, (body.input_suffix,)),
        [behind],
    ]
    return _rendered(state, body, pieces, with_bos=False, field="input_prefix")


def _infill_ids(tokenizer: Tokenizer) -> list[int]:
    for names in _INFILL:
        ids = [tokenizer.codec.token_id(name) for name in names]
        if None not in ids:
            return [token_id for token_id in ids if token_id is not None]
    raise bad_field(
        "input_prefix",
        "the model has no tokens for infill (prefix, suffix and middle); use /completion",
    )


def _rendered(
    state: ModelState, body: LlamaCompletion | Infill, pieces: Pieces, *, with_bos: bool, field: str
) -> RenderedPieces:
    limit = body.n_predict
    # A placeholder text with about as many tokens stands for the prompt until it is tokenized.
    stands_in = "".join(
        piece if isinstance(piece, str) else "....." * len(piece) for piece in pieces
    )
    ours = completion_request(
        prompt=pieces[0] if len(pieces) == 1 else stands_in[: 1 << 20],
        max_tokens=None if limit is None or limit < 0 else limit,
        stop=list(body.stop) if body.stop else None,
        repetition_penalty=body.repeat_penalty,
        **{
            name: list(value) if isinstance(value, tuple) else value
            for name, value in body.sampler_options.items()
        },
        **{name: getattr(body, name) for name in _SAME},
        **{name: getattr(body, name, None) for name in _REASONING},
        **{"speculative.n_max": body.draft_n_max, "speculative.p_min": body.draft_p_min},
    )
    rendered = RenderedPieces(state, ours, pieces, with_bos=with_bos, field=field)
    rendered.slot = max(0, body.id_slot or 0)
    return rendered


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
            if max(piece) >= vocab_size:
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
