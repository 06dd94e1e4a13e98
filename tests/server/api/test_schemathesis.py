"""Property tests generated from the server's OpenAPI document, with valid and invalid requests.

Each response matches the document, none is a 5xx, and a canary completion never changes.
"""

import functools
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

# Schemathesis gives all its tests the same name, and workers run each name once.
pytestmark = pytest.mark.alone

# About 8,000 cases of all bounds and types, in addition to random ones. Generating them is slow,
# even if none runs.
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


@functools.cache
def document():
    """Return the OpenAPI document of the API's routes, which does not need a model."""
    app = FastAPI()
    for router in ROUTERS:
        app.include_router(router)
    return app.openapi()


def loaded():
    """Return Schemathesis's schema of the document."""
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
    """The only routes outside the document are the page's and those for monitoring. Schemathesis
    does not test these.
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
    }  # they have no parameters
    named = {(path.replace(":path}", "}"), method) for path, method in READ}
    assert named | {(path, "POST") for path in PATHS} == documented | page
    assert tried == documented


@schema.parametrize()
# No deadline: on a busy machine generating an example and answering it may both be slow.
@settings(
    max_examples=200 if LONG else 4, deadline=None, suppress_health_check=[HealthCheck.too_slow]
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
        # Fields that exclude each other, or that this model lacks, have another code. The engine
        # checks schemas, regular expressions and grammars. No schema covers the text of a call or
        # duplicate tools.
        given = case.body if isinstance(case.body, dict) else {}
        judged = (
            is_not_exact(case.body)
            or any(given.get(name) for name in ANSWER_FORMATS)
            or calls_tools(given)
        )
        # Errors of other APIs have no code. These texts are the errors that Anthropic's schema
        # cannot express.
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
    """The test runs after the generated cases and repeats the canary completion, which also ran
    between them.
    """
    sing(live_server)
    assert statuses[200] > 30
    assert statuses[400] > 30


@pytest.mark.full
def test_answers_at_every_bound_are_as_documented():
    """The tests of this file run in a separate process, because their cases are generated at
    collection.
    """
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
    """Bound the work of a request through its limits, without setting other fields."""
    for name in ("max_tokens", "max_completion_tokens"):
        if type(body.get(name)) is int and MOST_TOKENS < body[name] < 10_000:
            body[name] = MOST_TOKENS
    for name in ("n", "best_of"):
        if type(body.get(name)) is int and MOST_SEQUENCES < body[name] <= 128:
            body[name] = MOST_SEQUENCES
    if path == "/v1/responses" and type(limit := body.get("max_output_tokens", 1)) is int:
        body["max_output_tokens"] = MOST_TOKENS if 0 < limit < 10_000 else limit
    if path in ("/completion", "/infill") and type(limit := body.get("n_predict", -1)) is int:
        body["n_predict"] = MOST_TOKENS if -3 < limit <= 2**24 else limit
    options = body.setdefault("options", {}) if path in ("/api/chat", "/api/generate") else None
    if isinstance(options, dict) and type(options.get("num_predict", -1)) is int:
        limit = options.get("num_predict", -1)
        options["num_predict"] = MOST_TOKENS if -3 < limit <= 2**24 else limit
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
    """Return whether a value is one that JSON Schema accepts and the server rejects.

    JSON Schema accepts 1.0 as an integer. Bounds are floats in the document, so the bound of `seed`
    is one too high there.
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
