"""Tests of the bounds of all numbers in all routes, which are defined in one table.

A value out of bounds is rejected with an error in the format of the API that names the field.
"""

import json
from typing import get_args, get_type_hints

import pytest
from fastapi.routing import APIRoute
from pydantic import ValidationError

from helpers.server.api_bodies import ASKED, GENERATING, MODEL, error_text, said
from helpers.server.live_servers import app_client
from kvboost_edge.server.api.bounds import BOUNDS
from kvboost_edge.server.app import ROUTERS, create_app
from kvboost_edge.server.settings import ServerSettings

_SAMPLING = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "seed")}
_PENALTIES = {name: name for name in ("presence_penalty", "frequency_penalty")}
_OF_OLLAMA = {name: name for name in ("typical_p", "mirostat_tau", "mirostat_eta", "repeat_last_n")}
_SAMPLERS = {
    **_OF_OLLAMA,
    **{name: name for name in ("top_n_sigma", "dynatemp_range", "dynatemp_exponent", "min_keep")},
    **{name: name for name in ("xtc_probability", "xtc_threshold")},
    **{
        f"dry_{name}": f"dry_{name}"
        for name in ("multiplier", "base", "allowed_length", "penalty_last_n")
    },
}
_CACHE = {
    f"kvboost.{name}": name for name in ("recompute_overlap", "recompute_ratio", "max_draft_tokens")
}
_DRAFTS = {f"speculative.{name}": f"draft_{name}" for name in ("n_max", "n_min", "p_min")}
_TEMPLATE = {"chat_template_kwargs.{}": "template_number"}
_COMPLETING = {
    **_SAMPLING,
    **_PENALTIES,
    **_CACHE,
    **_DRAFTS,
    **_SAMPLERS,
    "n": "n",
    "min_tokens": "min_tokens",
    "repetition_penalty": "repetition_penalty",
} | {
    "max_tokens": "max_tokens",
    "priority": "priority",
    "reasoning_budget": "reasoning_budget",
    "logit_bias.{}": "logit_bias",
    "stop_token_ids.*": "token_id",
}
_LLAMA = {
    **_SAMPLING,
    **_DRAFTS,
    **_PENALTIES,
    **_SAMPLERS,
    "n_predict": "num_predict",
    "repeat_penalty": "repetition_penalty",
    "id_slot": "slot",
    "n_cmpl": "n",
    "n_indent": "n_indent",
    "t_max_predict_ms": "time_limit_ms",
}
_OLLAMA = {
    **_SAMPLING,
    **_PENALTIES,
    **_OF_OLLAMA,
    "num_predict": "num_predict",
    "num_ctx": "num_ctx",
} | {"repeat_penalty": "repetition_penalty"}
_OPTIONS = {f"options.{field}": bound for field, bound in _OLLAMA.items()}
_OPTIONS |= {"keep_alive": "keep_alive", "think": "reasoning_budget"}
_EMBED = {name: bound for name, bound in _OPTIONS.items() if name != "think"}
_THINKING = {"thinking.budget_tokens": "budget_tokens"}
NUMBERS = {
    "/v1/completions": {
        **_COMPLETING,
        **{name: name for name in ("best_of", "logprobs")},
        "prompt.*": "token_id",
        "prompt.*.*": "token_id",
    },
    "/v1/chat/completions": {
        **_COMPLETING,
        **_TEMPLATE,
        **{name: name for name in ("max_completion_tokens", "top_logprobs")},
    },
    "/v1/messages": {
        **_THINKING,
        "max_tokens": "max_tokens",
        "temperature": "anthropic_temperature",
        "top_p": "top_p",
        "top_k": "top_k",
    },
    "/v1/messages/count_tokens": _THINKING,
    "/v1/responses": {
        **_SAMPLING,
        **_CACHE,
        **_TEMPLATE,
        "max_output_tokens": "max_completion_tokens",
        "repetition_penalty": "repetition_penalty",
        "priority": "priority",
        "reasoning_budget": "reasoning_budget",
    },
    "/api/chat": {**_OPTIONS, "messages.*.tool_calls.*.function.index": "call_index"},
    "/api/generate": _OPTIONS,
    "/api/embed": {**_EMBED, "dimensions": "ollama_dimensions"},
    "/api/embeddings": _EMBED,
    "/completion": {
        **_LLAMA,
        "prompt.*": "token_id",
        "prompt.*.*": "token_id",
        "reasoning_budget": "reasoning_budget",
    },
    "/infill": _LLAMA,
    "/apply-template": _TEMPLATE,
    "/v1/embeddings": {
        "input.*": "token_id",
        "input.*.*": "token_id",
        "dimensions": "dimensions",
        "priority": "priority",
    },
    "/v1/rerank": {"top_n": "top_n", "priority": "priority"},
    "/tokenize": _TEMPLATE,
    "/detokenize": {"tokens.*": "token_id"},
    "/v1/warm": {
        **_TEMPLATE,
        "documents.*.*": "token_id",
        "position_offset": "position_offset",
        "priority": "priority",
        "ttl": "ttl",
    },
    "/v1/unpin": _TEMPLATE,
    "/v1/sessions": {
        **_TEMPLATE,
        "tokens.*": "token_id",
        "priority": "priority",
        "ttl": "ttl",
    },
}
"""Of each path its numbers, "*" an entry of a list and "{}" of a map, and their names in the table
of bounds.
"""

# Values other than numbers that a place accepts: prompts as strings, booleans, and strings for
# templates.
TAKEN = {
    **dict.fromkeys(("prompt.*", "input.*"), ("string", "list")),
    **dict.fromkeys(("chat_template_kwargs.{}",), ("string", "true")),
    "keep_alive": ("string",),
    "think": ("true",),
}
_CALL = {"function": {"name": "clock", "arguments": {}}}


# Fields that are bounded by bytes and depth instead: schemas and arguments of calls.
UNBOUNDED = (
    "json_schema",
    "guided_json",
    "format",
    "tools",
    "messages",
    "input",
    "output_config",
    "response_format",
)
_ROUTES = [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]
TOLD = (
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "n",
    "top_k",
    "min_p",
)
TOLD += (
    "repetition_penalty",
    "priority",
    "max_tokens",
    "best_of",
    "logprobs",
    "max_completion_tokens",
    "top_logprobs",
)
BODIES = {
    route.path: get_type_hints(route.endpoint)["body"]
    for route in _ROUTES
    if route.path in ASKED and "POST" in route.methods and route.path != "/cache/reset"
}
"""The model of the body of each path."""


@pytest.fixture
async def app(tiny_engine):
    app = create_app(tiny_engine, ServerSettings(model_name=MODEL, max_queue_tokens=1 << 22))
    async with app_client(app) as client:
        client.served = app
        yield client


def numbers_of(schema, all_of_them, place=()):
    """Yield (place, schema) for each number that a value of this schema may contain."""
    if "$ref" in schema:
        schema = all_of_them[schema["$ref"].rpartition("/")[2]]
    if schema.get("type") in ("integer", "number"):
        yield ".".join(place), schema
    for kind in ("anyOf", "oneOf", "allOf"):
        for one in schema.get(kind, ()):
            yield from numbers_of(one, all_of_them, place)
    inner = [((*place, name), one) for name, one in schema.get("properties", {}).items()]
    inner += [((*place, "*"), schema["items"])] if isinstance(schema.get("items"), dict) else []
    values = schema.get("additionalProperties")
    inner += [((*place, "{}"), values)] if isinstance(values, dict) else []
    for at, one in inner:
        yield from numbers_of(one, all_of_them, at)


# Bodies that need a file, a session or a store of models. Their bad values are sent in
# test_session_saving.py, batches/ and models/.
NAMED = {
    "/api/create": {f"parameters.{field}": bound for field, bound in _OLLAMA.items()},
    "/v1/batches": {"output_expires_after.seconds": "expires_seconds"},
    "/v1/sessions/{name}/restore": {"priority": "priority", "ttl": "ttl"},
}
PARAMETERS = {("/v1/files", "limit"): (1, 10_000), ("/slots/{id_slot}", "id_slot"): (0, 4095)}
"""Bounds of path and query parameters, where they are not those of a list's length."""


async def test_the_table_lists_every_number_of_every_body(app):
    document = app.served.openapi()
    schemas = document["components"]["schemas"]
    numbers = {**NUMBERS, **NAMED}
    found = {}
    for path, methods in document["paths"].items():
        for operation in methods.values():
            body = operation.get("requestBody", {"content": {}})["content"].get(
                "application/json", {"schema": {}}
            )
            for place, schema in numbers_of(body["schema"], schemas):
                bound = BOUNDS[numbers[path][place]]
                low = schema.get("exclusiveMinimum" if bound.open_low else "minimum")
                assert (low, schema["maximum"]) == (float(bound.low), float(bound.high)), (
                    path,
                    place,
                )  # bounds are floats there
                assert (schema["type"] == "integer") == bound.integer, (path, place)
                found.setdefault(path, {})[place] = numbers[path][place]
            for parameter in operation.get("parameters", ()):
                for _, schema in numbers_of(parameter["schema"], schemas):
                    name = parameter["name"]
                    bounds = PARAMETERS.get((path, name), BOUNDS["listed"][:2])
                    assert (schema["minimum"], schema["maximum"]) == bounds, (path, name)
    assert found == numbers


def bad_values(bound, place):
    """Return bad values as JSON texts, which can express NaN, 1e400 and integers beyond 64 bits."""
    low, high, integer, _ = BOUNDS[bound]
    values = {
        "below": json.dumps(int(low) - 1),
        "above": json.dumps(int(high) + 1),
        "least": json.dumps(-(2**63) - (low == -(2**63))),
        "nan": "NaN",
        "infinity": "1e400",
        "huge": "1" * 400,
        "string": '"1"',
        "list": "[]",
        "object": "{}",
        "true": "true",
        **({"fraction": "1.5"} if integer else {}),
    }
    return {kind: value for kind, value in values.items() if kind not in TAKEN.get(place, ())}


def with_value(path, place, value):
    """Return the body of a path as JSON, with a value at a place."""
    body = ASKED[path]("hello")
    mark = "THE VALUE"
    if place.startswith("messages."):
        body["messages"] += [
            {"role": "assistant", "content": "x", "tool_calls": [json.loads(json.dumps(_CALL))]}
        ]
        body["messages"][-1]["tool_calls"][0]["function"]["index"] = mark
        body["messages"] += [{"role": "tool", "content": "ten"}, *said("hello")]
        return json.dumps(body).replace(f'"{mark}"', value).encode()
    first, *rest = [place] if place in _DRAFTS else place.split(".")
    held = mark
    for name in reversed(rest):
        held = (
            [held]
            if name == "*"
            else {"5" if first == "logit_bias" else "a" if name == "{}" else name: held}
        )
    if first in ("thinking", "options"):
        held |= {"type": "enabled"} if first == "thinking" else {**body.get("options", {}), **held}
    return json.dumps({**body, first: held}).replace(f'"{mark}"', value).encode()


def name_of(place):
    """Return the field name that an error for this place must contain."""
    return [name for name in place.split(".") if name not in ("*", "{}")][-1]


@pytest.mark.parametrize("path", NUMBERS)
async def test_a_number_out_of_bounds_is_refused_by_name(app, path, scale):
    step = scale(3, 1)  # in `make test` every third bad value, another third for each place
    for number, (place, bound) in enumerate(NUMBERS[path].items()):
        for kind, value in [*bad_values(bound, place).items()][number % step :: step]:
            answer = await app.post(path, content=with_value(path, place, value))
            assert answer.status_code in (400, 422), (place, kind, answer.text)
            message = error_text(path, answer.content)
            error = answer.json()["error"]
            assert name_of(place) in message, (place, kind, message)
            assert len(message) < 500, (place, kind)
            if "param" in error:
                assert error["param"].partition(".")[0] == place.partition(".")[0], (
                    place,
                    kind,
                    error,
                )
            if kind in ("below", "above") and place in TOLD:
                assert message.endswith(f", not {value}"), "the message must end with the value"


@pytest.mark.parametrize("path", NUMBERS)
async def test_numbers_at_the_bounds_are_accepted(path):
    for place, bound in NUMBERS[path].items():
        low, high, integer, open_low = BOUNDS[bound]
        for value in [high] if open_low else [low, high]:
            text = json.dumps(int(value) if integer else value)
            BODIES[path].model_validate_json(with_value(path, place, text))


@pytest.mark.parametrize("path", NUMBERS)
async def test_null_equals_a_missing_field(app, path):
    """A required number must not be null and is named in the error. The field of the token limit is
    left out, since without it a response would fill the context.
    """
    plain = (await app.post(path, json=ASKED[path]("hello"))).status_code
    required = {"/v1/messages": "max_tokens", "/v1/warm": "position_offset"}
    for place in NUMBERS[path]:
        if place == GENERATING.get(path) != required.get(path):
            continue
        answer = await app.post(path, content=with_value(path, place, "null"))
        if place.endswith(("*", "{}")) or required.get(path) == place:
            assert answer.status_code == 400, (place, answer.text)
            assert name_of(place) in error_text(path, answer.content)
        else:
            assert answer.status_code == plain, (place, answer.text)


@pytest.mark.parametrize("path", BODIES)
def test_every_optional_field_accepts_null_and_has_bounds(path):
    """A field that accepts 10^30 has no bound."""
    model = BODIES[path]
    base = ASKED[path]("hello")
    for own_name, field in model.model_fields.items():
        name = field.alias or own_name
        if type(None) in get_args(field.annotation) and name not in base:
            body = model.model_validate({**base, name: None})
            getattr(body, "check_together", bool)()
        for huge in (10**30, 1e300, [10**30], {"1": 10**30}, {"1": 1e300}):
            if name not in UNBOUNDED:
                with pytest.raises(ValidationError):
                    model.model_validate({**base, name: huge})
