"""Request bodies of /completion, /infill and /apply-template."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field, PlainValidator, WithJsonSchema

from kvboost_edge.server.api.bounds import COUNTS, bounded, counted
from kvboost_edge.server.api.schemas.answer_format import Schema
from kvboost_edge.server.api.schemas.answer_format import Text as Grammar
from kvboost_edge.server.api.schemas.chat import (
    ContinueFinal,
    GenerationPrompt,
    Messages,
    TemplateVariables,
)
from kvboost_edge.server.api.schemas.samplers import SamplerFields
from kvboost_edge.server.api.schemas.shared import (
    BoundedText,
    CacheSalt,
    ModelName,
    ReasoningBudgetField,
    ReasoningMessage,
    Stop,
    check_text,
    check_token_ids,
    is_text,
    number_schema,
)
from kvboost_edge.server.api.schemas.speculative import SpeculativeFields
from kvboost_edge.server.api.schemas.strict import Strict, bad_field, field_error
from kvboost_edge.server.api.schemas.tools import Tools
from kvboost_edge.server.api.schemas.unsupported_fields import (
    GENERATING,
    NO_IMAGES,
    UnsupportedField,
)

__all__ = ["ApplyTemplate", "ExtraText", "Infill", "LlamaCompletion", "Pieces"]

Pieces = list[str | list[int]]
"""A prompt: texts and runs of token ids, in order."""

_HERE = (
    *("penalize_nl", "post_sampling_probs", "n_keep", "n_discard", "tfs_z", "lora"),
    *("n_cache_reuse", "t_max_prompt_ms", "timings_per_token", "image_data"),
)
_UNSUPPORTED = {
    **{name: GENERATING[name] for name in _HERE},
    "n_probs": UnsupportedField("use /v1/completions with logprobs", (0,)),
    "logit_bias": UnsupportedField("use /v1/completions", ([],)),
    "multimodal_data": UnsupportedField(NO_IMAGES, ([],)),
}

_UNSUPPORTED_TO_INFILL = {
    **_UNSUPPORTED,
    "chunks": UnsupportedField("use input_extra", ([],)),
}
_UNSUPPORTED_TO_EXTRA = {"time": UnsupportedField("", ignored=True)}


def _prompts(value: Any) -> list[Pieces]:
    """Convert one or more prompts to a list.

    As in llama.cpp, a list that contains token ids is one prompt, and any other list contains
    several prompts.
    """
    is_list = isinstance(value, list) and not any(type(one) is int for one in value)
    prompts = value if is_list else [value]
    count = COUNTS["prompts"]
    if not count.low <= len(prompts) <= count.high:
        raise field_error("prompt", f"must hold {count.describe()} prompts, not {len(prompts)}")
    return [_pieces(prompt) for prompt in prompts]


def _pieces(value: Any) -> Pieces:
    """Convert a prompt to a list of texts and runs of token ids.

    The prompt is a text, token ids, or a list of both.
    """
    if isinstance(value, str):
        parts: list[Any] = [value]
    elif isinstance(value, list) and any(type(part) is int for part in value):
        parts = value
    else:
        raise field_error(
            "prompt",
            "must be a string, a list of token ids and strings, or a list of such prompts; a list "
            "of strings only is several prompts, and must not be nested",
        )
    found: Pieces = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, str) and part and is_text(part):
            found.append(part)
        elif type(part) is int and isinstance(last, list):
            last.append(part)
        elif type(part) is int:
            found.append([part])
        else:
            raise field_error("prompt", "must hold only token ids and non-empty strings")
    size = sum(map(len, found))
    if size > COUNTS["text"].high:
        raise field_error(
            "prompt", f"has {size} characters and ids; at most {COUNTS['text'].high} are allowed"
        )
    for run in found:
        if isinstance(run, list):
            check_token_ids(run)
    if len(found) > COUNTS["parts"].high:
        raise field_error(
            "prompt",
            f"has {len(found)} texts and runs of ids; at most {COUNTS['parts'].high} are allowed",
        )
    return found


_TEXT = {"type": "string", "minLength": 1, "maxLength": COUNTS["text"].high}
_MIXED = {
    "type": "array",
    "minItems": 1,
    "items": {"anyOf": [_TEXT, number_schema("token_id")]},
}
Prompts = Annotated[
    list[Pieces],
    PlainValidator(_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                _TEXT,
                _MIXED,
                {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": COUNTS["prompts"].high,
                    "items": {"anyOf": [_TEXT, _MIXED]},
                },
            ]
        }
    ),
]


ResponseFields = Annotated[
    list[Annotated[str, AfterValidator(check_text), counted("response_field")]],
    counted("response_fields"),
]


class _Sampling(SpeculativeFields, SamplerFields):
    """llama.cpp's sampling fields.

    `n_predict` -1 and -2, and values that exceed the context, let the answer fill the context.
    """

    unsupported = _UNSUPPORTED

    model: ModelName | None = None
    n_predict: Annotated[int, bounded("num_predict")] | None = None
    stream: bool | None = None
    temperature: Annotated[float, bounded("temperature")] | None = None
    top_k: Annotated[int, bounded("top_k")] | None = None
    top_p: Annotated[float, bounded("top_p")] | None = None
    min_p: Annotated[float, bounded("min_p")] | None = None
    seed: Annotated[int, bounded("seed")] | None = None
    repeat_penalty: Annotated[float, bounded("repetition_penalty")] | None = None
    presence_penalty: Annotated[float, bounded("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, bounded("frequency_penalty")] | None = None
    stop: Stop | None = None
    ignore_eos: bool | None = None
    cache_prompt: bool | None = None
    return_tokens: bool | None = None
    return_progress: bool | None = None
    grammar: Grammar | None = None
    json_schema: Schema | None = None
    cache_salt: CacheSalt | None = None
    id_slot: Annotated[int, bounded("slot")] | None = None
    n_cmpl: Annotated[int, bounded("n")] | None = Field(
        None, description="Number of answers. If it is above 1, the answer is a list of them."
    )
    n_indent: Annotated[int, bounded("n_indent")] | None = Field(
        None,
        description=(
            "Minimum number of spaces and tabs at the start of each line but the first. The answer "
            "ends before a line with fewer."
        ),
    )
    t_max_predict_ms: Annotated[int, bounded("time_limit_ms")] | None = Field(
        None,
        description=(
            "Milliseconds from the first token after which the next line break ends the answer. -1 "
            "and 0 set no limit."
        ),
    )
    response_fields: ResponseFields | None = Field(
        None,
        description=(
            "Fields of the answer, such as content or timings/prompt_n. All others are left out."
        ),
    )

    def check_together(self) -> None:
        """Check fields that exclude each other.

        Raises:
            ApiError: several answers are to be streamed (400).
        """
        if self.stream and (self.n_cmpl or 1) > 1:
            raise bad_field(
                "n_cmpl",
                f"n_cmpl={self.n_cmpl} answers cannot be streamed; leave stream out, or use "
                "/v1/completions",
            )


class LlamaCompletion(_Sampling):
    """Body of /completion: a prompt to continue, in llama.cpp's format.

    `n_predict` -1 and -2, and values that exceed the context, let the answer fill the context.
    """

    prompt: Prompts = Field(
        description=(
            "A text, a list of token ids and texts, or a list of such prompts. A list of texts "
            "only is several prompts. The answer to several prompts is a list."
        )
    )
    reasoning_budget: ReasoningBudgetField = None
    reasoning_budget_message: ReasoningMessage = None

    def check_together(self) -> None:
        super().check_together()
        if self.stream and len(self.prompt) > 1:
            raise bad_field(
                "prompt",
                f"the answers to {len(self.prompt)} prompts cannot be streamed; leave stream out, "
                "or send a request for each prompt",
            )


class ExtraText(Strict):
    """A piece of another file, as context of an infill."""

    unsupported = _UNSUPPORTED_TO_EXTRA

    text: BoundedText
    filename: Annotated[str, AfterValidator(check_text), counted("filename")] | None = None


class Infill(_Sampling):
    """Body of /infill: generate text between a prefix and a suffix.

    `prompt` is appended to the prefix. `input_extra` is put before it.
    """

    unsupported = _UNSUPPORTED_TO_INFILL

    input_prefix: BoundedText
    input_suffix: BoundedText
    input_extra: Annotated[list[ExtraText], counted("input_extra")] | None = Field(
        None, description="Pieces of other files, put before the prefix. The last one is nearest."
    )
    prompt: BoundedText | None = None

    def check_together(self) -> None:
        super().check_together()
        size = sum(len(extra.text) for extra in self.input_extra or ())
        if size > COUNTS["text"].high:
            raise bad_field(
                "input_extra",
                f"input_extra has {size} characters; at most {COUNTS['text'].high} are allowed",
            )


class ApplyTemplate(Strict):
    """Body of /apply-template: messages to render as the prompt of a chat."""

    messages: Messages
    tools: Tools | None = None
    chat_template_kwargs: TemplateVariables | None = None
    add_generation_prompt: GenerationPrompt = None
    continue_final_message: ContinueFinal = None
    model: ModelName | None = None
