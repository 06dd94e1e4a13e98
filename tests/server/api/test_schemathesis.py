"""Requests made from the server's own OpenAPI document, right ones and wrong ones: each answer is
what the document says, none is a 5xx, and a canary completion stays the same.
"""

import os
import subprocess
import sys
from collections import Counter

import httpx
import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, settings
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi import checks

from conftest import LONG
from helpers.server.api_bodies import PATHS, READ
from kvboost_edge.server.app import ROUTERS

# Schemathesis gives all its tests one name, of which workers would run one.
pytestmark = pytest.mark.alone

# Besides what is drawn, some 8,000 cases of every bound and kind; making them takes long, also
# where none runs.
AT_EVERY_BOUND = os.environ.get("KVBOOST_EDGE_TEST_BOUNDS") == "1"
MODEL = "kvboost-edge/demo"
CANARY = {"prompt": "the canary sings", "max_tokens": 8, "temperature": 0, "logprobs": 3}
GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/messages")
MOST_TOKENS = 6
MOST_SEQUENCES = 4
CHECKS = [
    schemathesis.checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
    checks.unsupported_method,
]


def document():
    """The OpenAPI document of the API's routes; a model is not needed for it."""
    app = FastAPI()
    for router in ROUTERS:
        app.include_router(router)
    return app.openapi()


def loaded():
    """The document's schema."""
    generation = {"deterministic": True, "database": "none"}
    phases = {"coverage": {"enabled": AT_EVERY_BOUND}}
    config = SchemathesisConfig.from_dict({"seed": 1, "generation": generation, "phases": phases})
    return schemathesis.openapi.from_dict(document(), config=config)


schema = loaded()
statuses = Counter()
first_canary = []


def test_the_tested_document_is_the_served_one(live_server):
    with live_server.client() as client:
        served = client.get("/openapi.json").json()
    assert served["paths"] == document()["paths"]
    assert served["components"] == document()["components"]


def test_every_documented_route_is_tested():
    """Each operation of the document is, so a route that is not in there would have no test here:
    the page's, and those that machines watch the server by.
    """
    documented = {
        (path, method.upper())
        for path, methods in document()["paths"].items()
        for method in methods
    }
    tried = {
        (operation.ok().path, operation.ok().method.upper())
        for operation in schema.get_all_operations()
    }
    page = {("/", "GET"), *((path, "GET") for path, _ in READ if path.startswith("/static/"))}
    page |= {
        (path, "GET") for path in ("/health", "/ready", "/version", "/metrics")
    }  # they take nothing at all
    named = {(path.replace(":path}", "}"), method) for path, method in READ}
    assert named | {(path, "POST") for path in PATHS} == documented | page
    assert tried == documented


@schema.parametrize()
# No clock: on a busy machine both making an example and answering it may take long.
@settings(
    max_examples=200 if LONG else 6, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
def test_answers_are_as_documented(case, live_server):
    positive = case.meta.generation.mode.is_positive
    if isinstance(case.body, dict):
        shorten(case.body, case.path)
        if positive and isinstance(case.body.get("model"), str):
            case.body["model"] = MODEL  # 404 has its own tests
    response = case.call(base_url=live_server.base_url, timeout=60)
    case.validate_response(response, checks=CHECKS)
    if response.status_code == 400:
        error = response.json()["error"]
        # Fields that do not go together, or not with this model, have another code. What a schema,
        # an expression or a grammar holds is judged by the engine; what a call's text or two tools
        # hold, by no schema.
        given = case.body if isinstance(case.body, dict) else {}
        judged = (
            is_not_exact(case.body)
            or any(given.get(name) for name in ANSWER_FORMATS)
            or calls_tools(given)
        )
        # Errors of other APIs have no code; what Anthropic's schema cannot say is said in these
        # words.
        said = error["message"] if isinstance(error, dict) else error
        told = any(
            words in said
            for words in (
                "put tool results first",
                "at most 4 are allowed",
                "surrogate",
                "match pattern",
            )
        )
        coded = isinstance(error, dict) and (
            "code" in error or case.path.startswith("/v1/messages")
        )
        invalid = coded and error.get("code", "invalid_request") == "invalid_request" and not told
        assert not positive or not invalid or judged, error
    statuses[response.status_code] += 1
    if statuses.total() % 50 == 1:
        sing(live_server)


def test_the_server_still_answers_after_all_cases(live_server):
    """Runs after the cases, which sang it before."""
    sing(live_server)
    assert statuses[200] > 30
    assert statuses[400] > 30


@pytest.mark.full
def test_answers_at_every_bound_are_as_documented():
    """The tests above in a process of their own: their cases are made as they are collected."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "not full",
        "-p",
        "no:cacheprovider",
        __file__,
    ]
    environment = {**os.environ, "KVBOOST_EDGE_TEST_BOUNDS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-5000:]


def shorten(body, path):
    """Bound the work of a request, by no other fields than the limits it may have anyway."""
    for name in ("max_tokens", "max_completion_tokens"):
        if type(body.get(name)) is int and MOST_TOKENS < body[name] < 10_000:
            body[name] = MOST_TOKENS
    for name in ("n", "best_of"):
        if type(body.get(name)) is int and MOST_SEQUENCES < body[name] <= 128:
            body[name] = MOST_SEQUENCES
    if path == "/v1/responses" and type(limit := body.get("max_output_tokens", 1)) is int:
        body["max_output_tokens"] = MOST_TOKENS if 0 < limit < 10_000 else limit
    if path in ("/completion", "/infill") and type(limit := body.get("n_predict", -1)) is int:
        body["n_predict"] = MOST_TOKENS if -3 < limit < 10_000 else limit
    options = body.setdefault("options", {}) if path in ("/api/chat", "/api/generate") else None
    if isinstance(options, dict) and type(options.get("num_predict", -1)) is int:
        limit = options.get("num_predict", -1)
        options["num_predict"] = MOST_TOKENS if -3 < limit < 10_000 else limit
    if (
        path in GENERATING
        and body.get("max_tokens") is None
        and body.get("max_completion_tokens") is None
    ):
        body["max_tokens"] = MOST_TOKENS


ANSWER_FORMATS = (
    *("response_format", "json_schema", "grammar", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "output_config"),
)


def calls_tools(body):
    given = [
        one
        for name in ("messages", "input")
        if isinstance(body.get(name), list)
        for one in body[name]
    ]
    called = [
        one
        for one in given
        if isinstance(one, dict) and (one.get("tool_calls") or "arguments" in one)
    ]
    return bool(body.get("tools") or called)


def is_not_exact(value):
    """JSON Schema takes 1.0 for an integer, which the server does not; and bounds are floats in the
    document, so that of `seed` is one too high there.
    """
    if isinstance(value, dict):
        return any(map(is_not_exact, value.values()))
    if isinstance(value, list):
        return any(map(is_not_exact, value))
    return (isinstance(value, float) and value.is_integer()) or (
        type(value) is int and value >= 2**63
    )


def sing(server):
    answer = httpx.post(f"{server.base_url}/v1/completions", json=CANARY, timeout=60)
    assert answer.status_code == 200
    first_canary[:] = first_canary or [answer.json()["choices"]]
    assert answer.json()["choices"] == first_canary[0]
