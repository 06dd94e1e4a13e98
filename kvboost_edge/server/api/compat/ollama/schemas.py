"""Request bodies of /api/chat, /api/generate and /api/show, and of any route that names a model."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, WithJsonSchema

from kvboost_edge.server.api.bounds import BOUNDS, COUNTS, bounded, counted
from kvboost_edge.server.api.compat.ollama.durations import KeepAlive
from kvboost_edge.server.api.schemas.reasoning_effort import FRACTIONS
from kvboost_edge.server.api.schemas.samplers import MirostatMode
from kvboost_edge.server.api.schemas.shared import (
    BoundedText,
    ModelName,
    Stop,
    check_text,
    number_schema,
    or_null,
)
from kvboost_edge.server.api.schemas.strict import Strict, bad_field, field_error
from kvboost_edge.server.api.schemas.tools import Tools
from kvboost_edge.server.api.schemas.unsupported_fields import NO_IMAGES, UnsupportedField

__all__ = [
    "ModelNameFields",
    "ModelRequest",
    "OllamaChat",
    "OllamaGenerate",
    "OllamaMessage",
    "OllamaShow",
    "Options",
]

_IGNORED = UnsupportedField("", ignored=True)
_LOADING = (
    *(
        "numa",
        "num_batch",
        "num_gpu",
        "main_gpu",
        "low_vram",
        "f16_kv",
        "logits_all",
        "vocab_only",
        "use_mmap",
        "draft_num_predict",
    ),
    *("use_mlock", "embedding_only", "num_thread", "num_keep"),
)
_OPTIONS = {
    **dict.fromkeys(_LOADING, _IGNORED),  # The model is already loaded with a fixed context.
    "tfs_z": UnsupportedField("this sampler is not supported; use min_p or typical_p", (1,)),
    "penalize_newline": UnsupportedField("repeat_penalty always includes line ends", (True,)),
}
_TEMPLATE = "the model's own chat template is used; set raw: true to send a prompt without it"
_UNSUPPORTED = {
    "logprobs": UnsupportedField("use /v1/chat/completions", (False,)),
    "top_logprobs": UnsupportedField("use /v1/chat/completions", (0,)),
    "images": UnsupportedField(NO_IMAGES, ([],)),
    "template": UnsupportedField(_TEMPLATE, ("",)),
    "context": UnsupportedField(
        "send the whole conversation to /api/chat; cached tokens are not recomputed", ([],)
    ),
    "suffix": UnsupportedField("use /infill with a model that has infill tokens", ("",)),
    "width": UnsupportedField(NO_IMAGES, (0,)),
    "height": UnsupportedField(NO_IMAGES, (0,)),
    "steps": UnsupportedField(NO_IMAGES, (0,)),
}
_ANY_OBJECT = {"type": "object"}
_MOST_MESSAGES = int(COUNTS["messages"].high)


def _format(value: Any) -> dict[str, Any] | None:
    """Return the JSON schema of the answer, or None for any text."""
    if value is None or value == "":
        return None
    if value == "json":
        return dict(_ANY_OBJECT)
    if not isinstance(value, dict):
        raise field_error("format", "must be 'json' or a JSON schema object")
    return value


Format = Annotated[
    dict[str, Any] | None,
    PlainValidator(_format),
    WithJsonSchema({"anyOf": [{"enum": ["", "json"]}, _ANY_OBJECT, {"type": "null"}]}),
]
_LEVELS = tuple(level for level in FRACTIONS if level != "none")


def _think(value: Any) -> bool | str | int | None:
    """Return whether to think, the effort, or a reasoning budget in tokens."""
    bound = BOUNDS["reasoning_budget"]
    if value is None or isinstance(value, bool) or value in _LEVELS:
        return value  # type: ignore[no-any-return]
    if type(value) is not int or not bound.low <= value <= bound.high:
        raise field_error(
            "think",
            f"think must be true, false, one of {', '.join(_LEVELS)}, or a number of tokens in "
            f"{bound.describe()}",
        )
    return value


Think = Annotated[
    bool | str | int | None,
    PlainValidator(_think),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "boolean"},
                {"enum": list(_LEVELS)},
                number_schema("reasoning_budget"),
                {"type": "null"},
            ]
        }
    ),
]


class Options(Strict):
    """Ollama's sampling options.

    `num_predict` 0, -1 and -2, and values that exceed the context, let the answer fill the context.
    A `num_ctx` above the model's context is reduced to it.
    """

    unsupported = _OPTIONS

    num_predict: Annotated[int, bounded("num_predict")] | None = None
    num_ctx: Annotated[int, bounded("num_ctx")] | None = None
    temperature: Annotated[float, bounded("temperature")] | None = None
    top_k: Annotated[int, bounded("top_k")] | None = None
    top_p: Annotated[float, bounded("top_p")] | None = None
    min_p: Annotated[float, bounded("min_p")] | None = None
    typical_p: Annotated[float, bounded("typical_p")] | None = None
    mirostat: MirostatMode | None = None
    mirostat_tau: Annotated[float, bounded("mirostat_tau")] | None = None
    mirostat_eta: Annotated[float, bounded("mirostat_eta")] | None = None
    seed: Annotated[int, bounded("seed")] | None = None
    stop: Stop | None = None
    repeat_penalty: Annotated[float, bounded("repetition_penalty")] | None = None
    repeat_last_n: Annotated[int, bounded("repeat_last_n")] | None = None
    presence_penalty: Annotated[float, bounded("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, bounded("frequency_penalty")] | None = None


class CallFunction(Strict):
    """Name and arguments of a called function."""

    name: Annotated[str, AfterValidator(check_text), counted("tool_name")]
    arguments: dict[str, Any]
    index: Annotated[int, bounded("call_index")] | None = None


class Call(Strict):
    """A tool call in an earlier message. Its id is optional."""

    function: CallFunction
    id: Annotated[str, AfterValidator(check_text), counted("tool_call_id")] | None = None
    type: Literal["function"] | None = None


def _no_images(value: Any) -> None:
    if value is not None and value != []:
        raise field_error("images", NO_IMAGES)


_NoImages = Annotated[None, PlainValidator(_no_images), or_null({"type": "array", "maxItems": 0})]


class OllamaMessage(Strict):
    """A chat message in Ollama's format."""

    role: Literal["system", "user", "assistant", "tool"]
    content: BoundedText | None = None
    thinking: BoundedText | None = None
    images: _NoImages = None
    tool_calls: Annotated[list[Call], Field(fail_fast=True), counted("tool_calls")] | None = None
    tool_name: Annotated[str, AfterValidator(check_text), counted("tool_call_id")] | None = None
    tool_call_id: Annotated[str, AfterValidator(check_text), counted("tool_call_id")] | None = None


class ModelRequest(Strict):
    """A body of a request that a model computes."""

    model: ModelName
    options: Options | None = None
    keep_alive: KeepAlive = Field(
        None,
        description=(
            "Time that the model stays loaded after the answer: seconds, or a duration "
            'such as "5m". 0 unloads it, -1 keeps it.'
        ),
    )

    @property
    def chosen(self) -> Options:
        return self.options or Options()


class _Generating(ModelRequest):
    unsupported = _UNSUPPORTED

    stream: bool | None = Field(
        None, description="Send the answer as a stream of JSON lines; true by default."
    )
    format: Format = None
    think: Think = None
    truncate: bool | None = Field(
        None,
        description=(
            "Handling of a chat that exceeds the context, in place of the server's "
            "`--context-overflow`. true: leave out the oldest turns. false: return an error."
        ),
    )
    shift: bool | None = Field(
        None,
        description=(
            "No effect. The context is never shifted; an answer that fills it has the done_reason "
            '"length".'
        ),
    )

    @property
    def streams(self) -> bool:
        return self.stream is not False


class OllamaChat(_Generating):
    """Body of /api/chat. Without messages, the model is only loaded or unloaded."""

    messages: (
        Annotated[list[OllamaMessage], Field(fail_fast=True, max_length=_MOST_MESSAGES)] | None
    ) = None
    tools: Tools | None = None


class OllamaGenerate(_Generating):
    """Body of /api/generate. With `raw`, the prompt bypasses the chat template."""

    prompt: BoundedText | None = None
    system: BoundedText | None = None
    raw: bool | None = Field(None, description="Continue the prompt without the chat template.")


# Ollama's Go client always sends all of its fields. Those that are not set are "".
_Name = Annotated[
    ModelName | None,
    BeforeValidator(lambda value: None if value == "" else value),
    or_null({"type": "string", "maxLength": int(COUNTS["model"].high)}),
]


class ModelNameFields(Strict):
    """A body that names a model, which must be given in one of two fields. "" counts as missing."""

    model: _Name = None
    name: _Name = Field(None, description="Older name of the field `model`.")

    @property
    def given(self) -> str:
        """The name of the model. Raises ApiError if it is missing."""
        found = self.model or self.name
        if found is None:
            raise bad_field("model", "model is missing; name the model")
        return found


class OllamaShow(ModelNameFields):
    """Body of /api/show."""

    unsupported = dict.fromkeys(("system", "template", "options"), _IGNORED)

    verbose: bool | None = Field(
        None, description="No effect. Tokens and tensors of the model are never listed."
    )
