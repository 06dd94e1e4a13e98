"""Fields of the samplers that vLLM, llama.cpp and Ollama share with the engine."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, PlainValidator, WithJsonSchema

from kvboost_edge.engine.request.request import SamplingParams
from kvboost_edge.engine.request.sampler_order import (
    SAMPLER_LETTERS,
    SAMPLER_SPELLINGS,
    SAMPLERS,
    read_samplers,
)
from kvboost_edge.errors import RequestError
from kvboost_edge.options import options_of
from kvboost_edge.server.api.bounds import COUNTS, bounded
from kvboost_edge.server.api.schemas.strict import Strict, field_error

__all__ = ["LENGTH_FIELDS", "SAMPLER_FIELDS", "LengthFields", "MirostatMode", "SamplerFields"]


def _mirostat(value: int) -> int:
    if value == 1:
        raise field_error("not_built", "1 is not supported; use 2, the newer algorithm, or 0")
    return value


def _texts_of(name: str, entry: str) -> PlainValidator:
    """Return the check of a list of strings, with its bounds COUNTS[name] and COUNTS[entry]."""
    count = COUNTS[name]
    length = COUNTS[entry]

    def check(value: Any) -> tuple[str, ...]:
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise field_error(name, "must be a list of strings")
        if len(value) > count.high:
            raise field_error(name, f"must hold {count.describe()} strings, not {len(value)}")
        for one in value:
            try:
                one.encode()
            except UnicodeEncodeError:
                raise field_error(
                    name, "contains a lone surrogate, which is not valid Unicode"
                ) from None
            if not length.low <= len(one) <= length.high:
                raise field_error(
                    name, f"each string must have {length.describe()} characters, not {len(one)}"
                )
        return tuple(value)

    return PlainValidator(check)


def _texts_schema(name: str, entry: str) -> WithJsonSchema:
    length = COUNTS[entry]
    item = {"type": "string", "minLength": int(length.low), "maxLength": int(length.high)}
    return WithJsonSchema({"type": "array", "maxItems": int(COUNTS[name].high), "items": item})


def _samplers(value: Any) -> tuple[str, ...]:
    if not isinstance(value, (list, str)):
        raise field_error("samplers", "must be a list of names of samplers")
    try:
        return read_samplers(value)
    except RequestError as error:
        raise field_error("samplers", str(error)) from None


BadWords = Annotated[
    tuple[str, ...], _texts_of("bad_words", "bad_word"), _texts_schema("bad_words", "bad_word")
]
Breakers = Annotated[
    tuple[str, ...],
    _texts_of("dry_sequence_breakers", "breaker"),
    _texts_schema("dry_sequence_breakers", "breaker"),
]
_MOST = int(COUNTS["samplers"].high)
_NAMES = [*SAMPLERS, *SAMPLER_SPELLINGS]
Samplers = Annotated[
    tuple[str, ...],
    PlainValidator(_samplers),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "array", "maxItems": _MOST, "items": {"enum": _NAMES}},
                {
                    "type": "string",
                    "pattern": f"^[{''.join(SAMPLER_LETTERS)}]*$",
                    "maxLength": _MOST,
                },
            ]
        }
    ),
]
MirostatMode = Annotated[
    int,
    bounded("mirostat"),
    AfterValidator(_mirostat),
    WithJsonSchema({"enum": [0, 2]}),
]


class SamplerFields(Strict):
    """Fields of llama.cpp's samplers, with the engine's names and defaults."""

    typical_p: Annotated[float, bounded("typical_p")] | None = None
    top_n_sigma: Annotated[float, bounded("top_n_sigma")] | None = None
    dynatemp_range: Annotated[float, bounded("dynatemp_range")] | None = None
    dynatemp_exponent: Annotated[float, bounded("dynatemp_exponent")] | None = None
    xtc_probability: Annotated[float, bounded("xtc_probability")] | None = None
    xtc_threshold: Annotated[float, bounded("xtc_threshold")] | None = None
    mirostat: MirostatMode | None = None
    mirostat_tau: Annotated[float, bounded("mirostat_tau")] | None = None
    mirostat_eta: Annotated[float, bounded("mirostat_eta")] | None = None
    repeat_last_n: Annotated[int, bounded("repeat_last_n")] | None = None
    dry_multiplier: Annotated[float, bounded("dry_multiplier")] | None = None
    dry_base: Annotated[float, bounded("dry_base")] | None = None
    dry_allowed_length: Annotated[int, bounded("dry_allowed_length")] | None = None
    dry_penalty_last_n: Annotated[int, bounded("dry_penalty_last_n")] | None = None
    dry_sequence_breakers: Breakers | None = None
    min_keep: Annotated[int, bounded("min_keep")] | None = None
    samplers: Samplers | None = None

    @property
    def sampler_options(self) -> dict[str, Any]:
        """The engine's parameters for the samplers that the request names."""
        return {
            name: value
            for name in (*SAMPLER_FIELDS, *LENGTH_FIELDS)
            if (value := getattr(self, name, None)) is not None
        }


class LengthFields(Strict):
    """vLLM's fields for the length and the words of an answer."""

    min_tokens: Annotated[int, bounded("min_tokens")] | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: BadWords | None = None


SAMPLER_FIELDS = tuple(SamplerFields.model_fields)
LENGTH_FIELDS = tuple(LengthFields.model_fields)

assert set(SAMPLER_FIELDS) | set(LENGTH_FIELDS) <= options_of(SamplingParams).keys()
