"""Page of the HTTP API, docs/reference/http-api.md, from the server's OpenAPI document."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple

from fastapi import APIRouter, FastAPI

from docs_site.reference.field_meanings import FIELDS
from docs_site.reference.stats import attributes, attributes_of, described_keys
from docs_site.reference.tables import paragraph, table
from kvboost_edge.engine import stats
from kvboost_edge.engine.request.request import SamplingParams
from kvboost_edge.engine.request.terms import Terms
from kvboost_edge.options import options_of
from kvboost_edge.server.api.routes import (
    anthropic,
    batches,
    cache,
    embeddings,
    files,
    health,
    llama_cpp,
    models_and_tokens,
    ollama,
    openai,
    requests,
    responses,
    sessions,
)
from kvboost_edge.server.app import ROUTERS
from kvboost_edge.server.http.middleware import ADMIN_PATHS
from kvboost_edge.tiers.base import TierStats

__all__ = ["api_document", "http_page", "undescribed"]

_HEAD = """# HTTP API

Every route of `kvboost-edge serve`, with its fields. `GET /openapi.json` returns the same as an
OpenAPI document. The web page is at `/`. [Compatibility APIs](../apis.md) compares the APIs and
shows how to connect clients.

- Bodies are JSON. An unknown field is refused with status 400 and an error that names it.
- If keys are set, send `Authorization: Bearer KEY` or `x-api-key: KEY`. Routes marked *admin* need
  an admin key if there is more than one key.
- A request field may be `null`, which means that it is not given. *Required* fields must be given.
- Every answer has the header `x-request-id`. With `stream`, answers are server-sent events, except
  in Ollama's API, which streams lines of JSON.
"""


class _Group(NamedTuple):
    title: str
    module: ModuleType
    text: str = ""


_VENDOR = "Meanings of the fields: {}'s documentation. Differences: [{}](../apis.md)."
_GROUPS = (
    _Group("Completions and chat", openai),
    _Group("Embeddings and reranking", embeddings),
    _Group("Models and tokens", models_and_tokens),
    _Group("Files", files),
    _Group("Batches", batches),
    _Group("Cache", cache),
    _Group("Named sessions", sessions),
    _Group("Cache-miss reports", requests),
    _Group("Health and metrics", health),
    _Group("OpenAI's Responses API", responses, _VENDOR.format("OpenAI", "Responses")),
    _Group("Anthropic's Messages API", anthropic, _VENDOR.format("Anthropic", "Anthropic")),
    _Group("Ollama's API", ollama, _VENDOR.format("Ollama", "Ollama")),
    _Group("llama.cpp's API", llama_cpp, _VENDOR.format("llama.cpp", "llama.cpp")),
)
_DOCUMENTED_ELSEWHERE = {"anthropic", "llama_cpp", "ollama", "responses"}


@functools.cache
def api_document() -> dict[str, Any]:
    """Return the OpenAPI document of all routes."""
    app = FastAPI(title="kvboost-edge")
    for router in ROUTERS:
        app.include_router(router)
    return app.openapi()


def http_page() -> str:
    """Return the page: the routes of each group, then the types of requests and responses."""
    document = api_document()
    rows = [
        (f"[`{_name(one)}`](#{_anchor(_name(one))})", group.title, _sentence(one))
        for group in _GROUPS
        for one in _routes(group.module.router)
    ]
    parts = [_HEAD, "\n## Routes\n\n", table(("route", "group", "purpose"), rows)]
    for group in _GROUPS:
        parts.append(f"\n## {group.title}\n")
        if group.text:
            parts.append(f"\n{paragraph(group.text)}")
        parts += [_route(one, document) for one in _routes(group.module.router)]
    parts.append("\n## Types\n")
    parts += [_type(name, schema) for name, schema in _types(document)]
    return "".join(parts)


def undescribed() -> list[str]:
    """Return the fields of our own and OpenAI's routes that have no meaning on the page."""
    document = api_document()
    found = []
    for name, schema in _types(document):
        if name in _own_types():
            meanings = attributes_of(schema.get("description", ""))
            for field, one in schema.get("properties", {}).items():
                if not _is_refused(one) and not _meaning(name, field, one, meanings):
                    found.append(f"{name}.{field}")
    return found


def _routes(router: APIRouter) -> list[Any]:
    return [one for one in router.routes if hasattr(one, "methods")]


def _name(route: Any) -> str:
    return f"{min(route.methods, key='GET POST DELETE HEAD'.split().index)} {route.path_format}"


def _description(route: Any) -> str:
    return inspect.cleandoc(route.endpoint.__doc__ or "").partition("\nArgs:")[0].strip()


def _sentence(route: Any) -> str:
    return re.split(r"(?<=\.) ", " ".join(_description(route).split()))[0]


def _route(route: Any, document: dict[str, Any]) -> str:
    parts = [f"\n### `{_name(route)}`\n\n"]
    marks = " *Admin.*" if route.path in ADMIN_PATHS else ""
    paragraphs = _description(route).split("\n\n")
    paragraphs[-1] += marks
    parts.append("\n".join(paragraph(" ".join(one.split())) for one in paragraphs))
    operation = (
        document["paths"].get(route.path_format, {}).get(_name(route).split()[0].lower(), {})
    )
    rows = [
        (
            f"`{one['name']}`",
            one["in"],
            _kind(one["schema"])[0],
            one.get("description") or FIELDS.get(f"parameter.{one['name']}", ""),
        )
        for one in operation.get("parameters", ())
    ]
    if rows:
        parts.append("\n" + table(("parameter", "in", "type", "meaning"), rows))
    lines = []
    if "requestBody" in operation:
        lines.append(f"- Body: {_content(operation['requestBody'])}")
    answer = _content(operation.get("responses", {}).get("200", {}))
    if answer:
        lines.append(f"- Answer: {answer}")
    return "".join(parts) + ("\n" + "\n".join(lines) + "\n" if lines else "")


def _content(body: dict[str, Any]) -> str:
    shown = []
    for media, content in body.get("content", {}).items():
        schema = content.get("schema", {})
        if media == "text/event-stream":
            shown.append("with `stream` server-sent events")
        elif schema and (kind := _kind(schema)[0]) not in ("any", "object"):
            shown.append(kind)
    return ", ".join(shown)


def _types(document: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return sorted(document["components"]["schemas"].items(), key=lambda one: _title(one[0]))


def _title(name: str) -> str:
    """Return the name of a type without the module that FastAPI adds to duplicate names."""
    *path, title = name.split("__")
    return title if not path else f"{title} ({path[-2] if path[-1] == 'schemas' else 'chat'})"


def _type(name: str, schema: dict[str, Any]) -> str:
    parts = [f"\n### {_title(name)}\n"]
    text = inspect.cleandoc(schema.get("description", "")).partition("Attributes:")[0].strip()
    parts += [f"\n{paragraph(' '.join(one.split()))}" for one in text.split("\n\n") if one]
    properties = schema.get("properties", {})
    if not properties:
        return "".join(parts) + f"\n{_kind(schema)[0]}\n"
    meanings = attributes_of(schema.get("description", ""))
    required = schema.get("required", ())
    rows = []
    refused = []
    for field, one in properties.items():
        if _is_refused(one):
            refused.append(f"`{field}`")
            continue
        kind, is_nullable = _kind(one)
        is_answer = "additionalProperties" in schema and _is_answer(name)
        kind += " or null" if is_nullable and is_answer else ""
        kind += ", *required*" if field in required and not is_answer else ""
        kind += ", optional" if field not in required and is_answer else ""
        rows.append((f"`{field}`", kind, _meaning(name, field, one, meanings)))
    if any(meaning for _, _, meaning in rows):
        parts.append(f"\n{table(('field', 'type', 'meaning'), rows)}")
    elif rows:
        parts.append(f"\n{table(('field', 'type'), [row[:2] for row in rows])}")
    if refused:
        parts.append("\n" + paragraph(f"Not supported, only `null`: {', '.join(refused)}."))
    return "".join(parts)


def _meaning(name: str, field: str, schema: dict[str, Any], meanings: dict[str, str]) -> str:
    """Return the meaning of a field.

    It comes from the field, its class, an option, or the table of shared meanings.
    """
    is_answer = _is_answer(name)
    sources: list[Mapping[str, str]] = [{field: schema.get("description", "")}, meanings]
    if name in _own_types():
        sources += [
            {field: FIELDS.get(f"{name}.{field}", "")},
            {field: FIELDS.get(f"answer.{field}", "")} if is_answer else _option_meanings(),
            attributes(TierStats) if name.startswith("Tier") else {},
            FIELDS,
            described_keys(stats.paged_stats),
            _option_meanings(),
        ]
    found = next((one[field] for one in sources if one.get(field)), "")
    return _as_sentence(" ".join(found.split()))


def _as_sentence(text: str) -> str:
    """Return a text with a capital letter and a period.

    Field values and the name vLLM keep their case.
    """
    if not re.match(r"\w+:|vLLM", text):
        text = text[:1].upper() + text[1:]
    return text if not text or text[-1] in ".!?" else f"{text}."


@functools.cache
def _option_meanings() -> dict[str, str]:
    classes = (SamplingParams, Terms)
    return {name: one.help for cls in classes for name, one in options_of(cls).items()}


def _is_refused(schema: dict[str, Any]) -> bool:
    return schema.get("type") == "null"


@functools.cache
def _answers() -> frozenset[str]:
    """Return the types that occur only in responses."""
    document = api_document()
    bodies: set[str] = set()
    answers: set[str] = set()
    for operations in document["paths"].values():
        for one in operations.values():
            bodies |= _reached(one.get("requestBody", {}), document)
            answers |= _reached(one["responses"], document)
    return frozenset(answers - bodies)


def _is_answer(name: str) -> bool:
    return name in _answers()


@functools.cache
def _own_types() -> frozenset[str]:
    """Return the types of all routes except those of other projects' APIs."""
    document = api_document()
    found: set[str] = set()
    for group in _GROUPS:
        if group.module.__name__.rpartition(".")[2] not in _DOCUMENTED_ELSEWHERE:
            for route in _routes(group.module.router):
                found |= _reached(document["paths"].get(route.path_format, {}), document)
    return frozenset(found)


def _reached(part: Any, document: dict[str, Any]) -> set[str]:
    """Return the names of all types that a part of the document refers to, also indirectly."""
    found: set[str] = set()
    waiting = [part]
    while waiting:
        for name in _references(waiting.pop()):
            if name not in found:
                found.add(name)
                waiting.append(document["components"]["schemas"][name])
    return found


def _references(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        if "$ref" in part:
            yield part["$ref"].rpartition("/")[2]
        for value in part.values():
            yield from _references(value)
    elif isinstance(part, list):
        for value in part:
            yield from _references(value)


def _kind(schema: dict[str, Any]) -> tuple[str, bool]:
    """Describe a type in words, and return whether null is allowed as well."""
    choices = schema.get("anyOf") or schema.get("oneOf")
    if choices:
        rest = [one for one in choices if one.get("type") != "null"]
        kinds = list(dict.fromkeys(_kind(one)[0] for one in rest))
        return " or ".join(kinds) or "null", len(rest) < len(choices)
    return _one_kind(schema), False


def _one_kind(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        title = _title(schema["$ref"].rpartition("/")[2])
        return f"[{title}](#{_anchor(title)})"
    if "const" in schema:
        return f"`{_json(schema['const'])}`"
    if "enum" in schema:
        return " or ".join(f"`{_json(one)}`" for one in schema["enum"])
    kind = schema.get("type", "any")
    if kind == "array":
        if schema.get("maxItems") == 0:
            return "empty array"
        items = _grouped(_kind(schema.get("items", {}))[0])
        kind = _bounded(kind, schema, "Items", "entries")
        return kind if items == "any" else f"{kind} of {items}"
    if kind == "object":
        return _object(schema)
    if kind == "string":
        return _bounded(kind, schema, "Length", "characters")
    low, high = schema.get("minimum"), schema.get("maximum")
    if (above := schema.get("exclusiveMinimum")) is not None:
        return f"{kind} (above {above:g}" + (f", at most {high:g})" if high is not None else ")")
    is_unbounded = (low is None and high is None) or (high is not None and high >= 2**53)
    return str(kind) if is_unbounded else f"{kind} ({_range(low, high)})"


def _grouped(kind: str) -> str:
    return f"({kind})" if " or " in kind else kind


def _object(schema: dict[str, Any]) -> str:
    if schema.get("properties"):
        names = [f"`{name}`" for name in schema["properties"]]
        return f"object with {', '.join(names)}"
    values = schema.get("additionalProperties")
    if isinstance(values, dict) and values:
        kind = _bounded("object", schema, "Properties", "entries")
        return f"{kind} of {_grouped(_kind(values)[0])}"
    return "object"


def _bounded(kind: str, schema: dict[str, Any], what: str, unit: str) -> str:
    low, high = schema.get(f"min{what}") or None, schema.get(f"max{what}")
    return kind if low is None and high is None else f"{kind} ({_range(low, high)} {unit})"


def _range(low: float | None, high: float | None) -> str:
    if high is None:
        return f"at least {_number(low)}"
    if low is None:
        return f"at most {_number(high)}"
    return _number(low) if low == high else f"{_number(low)} to {_number(high)}"


def _number(value: float | None) -> str:
    return f"{int(value):,}" if value is not None and value == int(value) else f"{value:g}"


def _json(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


def _anchor(heading: str) -> str:
    """Return the anchor that GitHub and the site give to a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
