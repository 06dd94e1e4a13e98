"""Fields and checks that several request bodies share.

A field is used, ignored (it has no effect on the answer), rejected (`NotBuilt`) or unknown.
Rejected and unknown fields cause an error (400) that names the field. For an optional field, null
means that it is not given.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sized
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainValidator,
    WithJsonSchema,
)

from kvboost_edge.config import GenerationMode
from kvboost_edge.engine.request.request import SamplingParams
from kvboost_edge.engine.request.sampling_defaults import SamplingDefaults
from kvboost_edge.server.api.bounds import BOUNDS, COUNTS, bounded, counted
from kvboost_edge.server.api.schemas.answer_format import (
    ResponseFormat,
    Schema,
    Structured,
    Text,
    Texts,
    merged,
)
from kvboost_edge.server.api.schemas.cache_use import CacheUse
from kvboost_edge.server.api.schemas.samplers import LengthFields, SamplerFields
from kvboost_edge.server.api.schemas.speculative import SpeculativeFields
from kvboost_edge.server.api.schemas.strict import Strict, bad_field, field_error
from kvboost_edge.server.api.schemas.unsupported_fields import GENERATING

__all__ = [
    "BoundedText",
    "CacheSalt",
    "FewTokenIds",
    "Label",
    "Metadata",
    "ModelName",
    "NotBuilt",
    "OnlyEmpty",
    "OnlyFalse",
    "OnlyMedium",
    "OnlyNone",
    "OnlyOne",
    "PromptCacheOptions",
    "ReasoningBudgetField",
    "ReasoningMessage",
    "SamplingFields",
    "StreamOptions",
    "TokenIds",
    "check_count",
    "check_in_vocabulary",
    "check_text",
    "check_token_ids",
    "is_text",
    "map_schema",
    "number_schema",
    "object_schema",
    "or_null",
]


_DAY_SECONDS = 24 * 3600.0


def _refuse(value: Any) -> None:
    if value is not None:
        raise field_error("not_built", "not supported; leave it out")


def _only_false(value: bool) -> bool:
    if value:
        raise field_error("not_built", "true is not supported; leave it out")
    return value


def _only_empty(value: Any) -> None:
    if value is not None and value != []:
        raise field_error("not_built", "only an empty list is supported; leave it out")


def _only_none(value: Any) -> None:
    if value is not None and value != "none":
        raise field_error("not_built", "only 'none' is supported; leave it out")


def _only_one(value: Any) -> None:
    if value is not None and (type(value) is not int or value != 1):
        raise field_error("not_built", "only 1 is supported; leave it out")


def _only_medium(value: Any) -> None:
    if value is not None and value != "medium":
        raise field_error("not_built", "only 'medium' is supported; ask for it in the prompt")


def or_null(schema: dict[str, Any]) -> WithJsonSchema:
    """Return the JSON Schema of a field that accepts `schema` or null."""
    return WithJsonSchema({"anyOf": [schema, {"type": "null"}]})


OnlyEmpty = Annotated[None, PlainValidator(_only_empty), or_null({"type": "array", "maxItems": 0})]
OnlyNone = Annotated[None, PlainValidator(_only_none), or_null({"const": "none"})]
OnlyOne = Annotated[None, PlainValidator(_only_one), or_null({"const": 1})]
OnlyMedium = Annotated[None, PlainValidator(_only_medium), or_null({"const": "medium"})]
"""Fields that accept only the value that has no effect. Some clients always send it."""

NotBuilt = Annotated[None, BeforeValidator(_refuse)]
"""A field of OpenAI's API that is not supported. It must be null or absent."""

OnlyFalse = Annotated[bool, AfterValidator(_only_false), WithJsonSchema({"const": False})] | None
"""A boolean that is not supported. It must be false, null or absent."""


def is_text(value: Any) -> bool:
    """Return whether a value is a string of valid Unicode. JSON allows lone surrogates."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_text(value: str) -> str:
    """Return the string, or raise an error if it is not valid Unicode."""
    if not is_text(value):
        raise field_error("text", "contains a lone surrogate, which is not valid Unicode")
    return value


def check_count(kind: str, name: str, value: Sized, what: str = "entries") -> None:
    """Raise an error for a value that has more than COUNTS[name] entries."""
    if len(value) > COUNTS[name].high:
        raise field_error(
            kind, f"holds {len(value)} {what}; at most {COUNTS[name].high} are allowed"
        )


def map_schema(name: str, names: dict[str, Any], values: dict[str, Any]) -> WithJsonSchema:
    """Return the JSON Schema of an object with at most COUNTS[name] entries."""
    limit = COUNTS[name].high
    return WithJsonSchema(
        {
            "type": "object",
            "maxProperties": limit,
            "propertyNames": names,
            "additionalProperties": values,
        }
    )


def object_schema(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    """Return the JSON Schema of an object that has no other members than these."""
    return {
        "type": "object",
        "properties": {**required, **optional},
        "required": [*required],
        "additionalProperties": False,
    }


def number_schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema of a number in the range BOUNDS[name]."""
    bound = BOUNDS[name]
    return {
        "type": "integer" if bound.integer else "number",
        "minimum": bound.low,
        "maximum": bound.high,
    }


def _metadata(value: Any) -> dict[str, str]:
    name = COUNTS["metadata_name"]
    text = COUNTS["metadata_value"]
    if not isinstance(value, dict):
        raise field_error("metadata", "must map strings to strings")
    check_count("metadata", "metadata", value)
    if not all(map(is_text, (*value, *value.values()))):
        raise field_error("metadata", "must map strings to strings")
    if not all(
        name.low <= len(key) <= name.high and len(item) <= text.high for key, item in value.items()
    ):
        raise field_error(
            "metadata",
            f"names must have {name.describe()} characters, and values {text.describe()}",
        )
    return value


def check_token_ids(value: Any) -> list[int]:
    """Check that a value is a list of token ids, and return it."""
    # These builtins are fast enough for prompts of a million ids.
    if not isinstance(value, list) or set(map(type, value)) - {int}:
        raise field_error("token_ids", "must be a list of token ids (integers)")
    bound = BOUNDS["token_id"]
    if value and not (bound.low <= min(value) and max(value) <= bound.high):
        wrong = min(value) if min(value) < bound.low else max(value)
        raise field_error("token_ids", f"token ids must be in {bound.describe()}, not {wrong}")
    return value


def check_in_vocabulary(field: str, ids: Collection[int], vocab_size: int) -> None:
    """Raise ApiError if a token id, none of which is negative, is outside of the vocabulary."""
    if ids and max(ids) >= vocab_size:
        raise bad_field(
            field, f"token id {max(ids)} is outside the model's vocabulary 0..{vocab_size - 1}"
        )


def _stop_token_ids(value: Any) -> list[int]:
    ids = check_token_ids(value)
    check_count("too_long", "stop_token_ids", ids, "token ids")
    return ids


TokenIds = Annotated[
    list[int],
    PlainValidator(check_token_ids),
    WithJsonSchema({"type": "array", "items": number_schema("token_id")}),
]


def _few_tokens(ids: list[int]) -> list[int]:
    check_count("too_long", "tokens", ids, "token ids")
    return ids


FewTokenIds = Annotated[TokenIds, AfterValidator(_few_tokens)]


def _stop(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    count = COUNTS["stop"]
    length = COUNTS["stop_length"]
    if not isinstance(stops, list):
        raise field_error("stop", "must be a string or a list of strings")
    if not count.low <= len(stops) <= count.high:
        raise field_error("stop", f"must hold {count.describe()} strings, not {len(stops)}")
    if not all(map(is_text, stops)):
        raise field_error("stop", "must be a string or a list of strings")
    for stop in stops:
        if not length.low <= len(stop) <= length.high:
            raise field_error(
                "stop",
                f"each stop string must have {length.describe()} characters, not {len(stop)}",
            )
    return tuple(stops)


def _logit_bias(value: Any) -> dict[int, float]:
    bound = BOUNDS["logit_bias"]
    if not isinstance(value, dict):
        raise field_error("logit_bias", "must map token ids to numbers")
    check_count("logit_bias", "logit_bias", value)
    checked: dict[int, float] = {}
    for key, number in value.items():
        if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10):
            raise field_error("logit_bias", f"each key must be a token id, not {str(key)[:64]!r}")
        if type(number) not in (int, float) or not bound.low <= number <= bound.high:
            raise field_error("logit_bias", f"each value must be a number in {bound.describe()}")
        checked[int(key)] = float(number)
    return checked


_STOP_SCHEMA = {"type": "string", "minLength": 1, "maxLength": COUNTS["stop_length"].high}
Stop = Annotated[
    tuple[str, ...],
    PlainValidator(_stop),
    WithJsonSchema(
        {
            "anyOf": [
                _STOP_SCHEMA,
                {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": COUNTS["stop"].high,
                    "items": _STOP_SCHEMA,
                },
            ]
        }
    ),
]
LogitBias = Annotated[
    dict[int, float],
    PlainValidator(_logit_bias),
    map_schema("logit_bias", {"pattern": "^[0-9]{1,10}$"}, number_schema("logit_bias")),
]


Metadata = Annotated[
    dict[str, str],
    PlainValidator(_metadata),
    map_schema(
        "metadata",
        {"minLength": 1, "maxLength": COUNTS["metadata_name"].high},
        {"type": "string", "maxLength": COUNTS["metadata_value"].high},
    ),
]
BoundedText = Annotated[str, AfterValidator(check_text), counted("text")]
ModelName = Annotated[str, AfterValidator(check_text), counted("model")]
CacheSalt = Annotated[str, AfterValidator(check_text), counted("cache_salt")]
Label = Annotated[str, AfterValidator(check_text), counted("label")]
ReasoningBudgetField = Annotated[
    Annotated[int, bounded("reasoning_budget")] | None,
    Field(
        description=(
            "Maximum number of tokens of the reasoning, after which its end is forced. 0 ends it "
            "at once, -1 sets no limit."
        )
    ),
]
ReasoningMessage = Annotated[
    Annotated[str, AfterValidator(check_text), counted("reasoning_budget_message")] | None,
    Field(description="Text before the end of a reasoning that was cut by its budget."),
]


class PromptCacheOptions(Strict):
    """Cache options of OpenAI's API, which have no effect. This cache needs no breakpoints."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Label | None = None


class StreamOptions(Strict):
    """Stream options, as in OpenAI's API."""

    include_usage: bool | None = Field(None, description="End the stream with a usage chunk.")
    continuous_usage_stats: bool | None = Field(
        None,
        description="Add usage to every chunk, with the choice's tokens so far (vLLM).",
    )
    include_obfuscation: OnlyFalse = Field(
        None, description="Padding of chunks, which is not supported."
    )


class SamplingFields(SpeculativeFields, SamplerFields, LengthFields):
    """Fields of both generation endpoints: OpenAI's first, then those of vLLM and llama.cpp."""

    unsupported = GENERATING

    model: ModelName | None = None
    temperature: Annotated[float, bounded("temperature")] | None = None
    top_p: Annotated[float, bounded("top_p")] | None = None
    presence_penalty: Annotated[float, bounded("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, bounded("frequency_penalty")] | None = None
    logit_bias: LogitBias | None = None
    seed: Annotated[int, bounded("seed")] | None = None
    n: Annotated[int, bounded("n")] | None = None
    stop: Stop | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    top_k: Annotated[int, bounded("top_k")] | None = None
    min_p: Annotated[float, bounded("min_p")] | None = None
    repetition_penalty: Annotated[float, bounded("repetition_penalty")] | None = None
    ignore_eos: bool | None = Field(None, description="Do not stop at the end-of-sequence token.")
    stop_token_ids: Annotated[TokenIds, AfterValidator(_stop_token_ids)] | None = None
    return_token_ids: bool | None = Field(None, description="Add the token ids to the answer.")
    return_progress: bool | None = Field(
        None, description="Report the progress of the prompt; only for streams."
    )
    cache_salt: CacheSalt | None = Field(
        None, description="Requests share cached prefixes only with requests of the same salt."
    )
    priority: Annotated[int, bounded("priority")] | None = Field(
        None, description="Lower values run earlier. With several API keys it must be 0 or more."
    )
    cache_prompt: bool | None = Field(None, description="If false, the prefix cache is not read.")
    kvboost: CacheUse | None = None
    response_format: ResponseFormat = Field(default_factory=dict)
    json_schema: Schema | None = None
    grammar: Text | None = Field(
        None, description="A grammar in Lark or GBNF that the output must match."
    )
    guided_json: Schema | None = Field(None, description="vLLM's older name of json_schema.")
    guided_regex: Text | None = Field(
        None, description="A regular expression that the output must match."
    )
    guided_choice: Texts | None = Field(None, description="Texts, one of which must be the output.")
    guided_grammar: Text | None = Field(None, description="vLLM's older name of grammar.")
    structured_outputs: Structured | None = Field(
        None, description="vLLM's object with one of json, regex, choice and grammar."
    )
    reasoning_budget: ReasoningBudgetField = None
    reasoning_budget_message: ReasoningMessage = None
    prompt_cache_key: Label | None = Field(
        None,
        description=(
            "Name of a group of prompts with a common prefix. A prefix that two of its "
            "requests share is evicted after all other blocks of this API key, for an "
            "hour."
        ),
    )
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = Field(
        None,
        description=(
            "24h: the prompt is evicted after all other blocks of this API key, for 24 hours."
        ),
    )

    # Accepted and ignored.
    user: Label | None = None
    metadata: Metadata | None = None
    store: OnlyFalse = None
    service_tier: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_options: PromptCacheOptions | None = None

    def check_together(self) -> None:
        """Raise ApiError for fields that contradict each other."""
        if self.stream_options is not None and not self.stream:
            raise bad_field("stream_options", "stream_options is only allowed when stream is true")
        if self.kvboost is not None:
            self.kvboost.check_together(self.cache_prompt)
            if self.draft_n_max is not None and self.kvboost.drafts:
                named = f"kvboost.{next(iter(self.kvboost.drafts))}"
                raise bad_field(
                    "speculative.n_max",
                    f"speculative.n_max and {named} are both given; give one of them",
                )
        if isinstance(found := self._answer_formats(), tuple):
            raise bad_field(found[1], f"{found[0]} and {found[1]} are both given; give one of them")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ApiError for token ids outside of the vocabulary."""
        check_in_vocabulary("stop_token_ids", self.stop_token_ids or (), vocab_size)
        check_in_vocabulary("logit_bias", self.logit_bias or (), vocab_size)

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        options = self.stream_options
        return options is not None and bool(options.continuous_usage_stats)

    @property
    def explain(self) -> bool:
        """True if the answer contains a cache-miss report."""
        return self.kvboost is not None and bool(self.kvboost.explain)

    @property
    def mode(self) -> GenerationMode | None:
        """Cache mode of the request; None for the server's default."""
        if self.kvboost is not None and self.kvboost.mode is not None:
            return GenerationMode(self.kvboost.mode)
        return GenerationMode.BASELINE if self.cache_prompt is False else None

    @property
    def engine_options(self) -> dict[str, Any]:
        """Arguments of the engine's `submit` for non-prefix KV reuse and speculative decoding."""
        ours = {} if self.kvboost is None else {**self.kvboost.repair, **self.kvboost.drafts}
        return {**ours, **self.draft_options}

    @property
    def prefill(self) -> str | None:
        """Prefill that the request chooses; None for the server's default."""
        return None if self.kvboost is None else self.kvboost.prefill

    @property
    def cache_key(self) -> str | None:
        """The `prompt_cache_key`, or None if it is empty or missing."""
        return self.prompt_cache_key or None

    @property
    def retention(self) -> float | None:
        """Seconds to retain the prompt's blocks, or None."""
        return _DAY_SECONDS if self.prompt_cache_retention == "24h" else None

    def _answer_formats(self) -> dict[str, Any] | tuple[str, str]:
        spelled = {
            "response_format": self.response_format,
            "json_schema": {"json_schema": self.json_schema},
            "grammar": {"grammar": self.grammar or None},
            "guided_json": {"json_schema": self.guided_json},
            "guided_regex": {"regex": self.guided_regex},
            "guided_choice": {"choice": self.guided_choice},
            "guided_grammar": {"grammar": self.guided_grammar},
            "structured_outputs": self.structured_outputs or {},
        }
        return merged(
            {name: {k: v for k, v in one.items() if v is not None} for name, one in spelled.items()}
        )

    @property
    def answer_format(self) -> dict[str, Any]:
        """Sampling parameters for structured output."""
        found = self._answer_formats()
        return {} if isinstance(found, tuple) else found

    def sampling(
        self,
        defaults: SamplingDefaults,
        max_new_tokens: int,
        logprobs: int | None,
        choice: int,
        *,
        fits: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> SamplingParams:
        """Return the sampling parameters of one choice.

        Choice i of a request with a seed uses seed + i, modulo 2^64. As in llama.cpp, -1 selects a
        random seed.

        Args:
            defaults: values for fields that the request leaves out.
            max_new_tokens: limit of new tokens.
            logprobs: number of alternatives per token; None for no log probabilities.
            choice: index of the choice.
            fits: parameters for structured output; None for `answer_format`.
            more: further parameters.

        Raises:
            ApiError: min_tokens exceeds the limit of new tokens (400).
        """
        if (self.min_tokens or 0) > max_new_tokens:
            raise bad_field(
                "min_tokens",
                f"min_tokens={self.min_tokens} is more than the answer may have; use at most "
                f"{max_new_tokens}, or raise max_tokens",
            )
        seed = None if self.seed in (None, -1) else (self.seed + choice) % 2**64
        params = SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=None if self.top_k is None else max(0, self.top_k),
            min_p=self.min_p,
            seed=seed,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=self.logit_bias or None,
            logprobs=logprobs,
            stop=self.stop or (),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            max_new_tokens=max_new_tokens,
            **self.sampler_options,
            **(self.answer_format if fits is None else fits),
            **more,
        )
        return defaults.fill(params)
