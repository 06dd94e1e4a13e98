"""Tests of isolation between API keys: no route reveals another key's requests, and each API has
its own 401.
"""

import itertools
import json
import re

import pytest

from helpers.server.api_bodies import ASKED, READ, asked, error_text
from helpers.server.live_servers import ADMIN_KEY, KEYS
from kvboost_edge.server.http.middleware import ADMIN_PATHS

SECRET = "The first tenant's secret is the word marmalade"
OPEN = ("/", "/health", "/ready", "/version")
# The batch API is tested in tests/server/batches/test_service.py, where it is enabled.
OTHER = ("/static/", "/v1/files", "/v1/batches")
SHOWING = [
    (path, method)
    for path, method in READ
    if path not in ADMIN_PATHS | set(OPEN) and not path.startswith(OTHER)
]


@pytest.fixture
def keys(keyed_server):
    """HTTP clients of the two tenants."""
    clients = [keyed_server.client(headers={"x-api-key": key}) for key in KEYS]
    yield clients
    for client in clients:
        client.close()


def named(path, name):
    return re.sub(r"\{.*?\}", name, path)


def without_ids(answer, name):
    """Return the comparable parts of a response: status, text without the requested id, and
    headers.
    """
    passing = ("x-request-id", "request-id", "date", "content-length")
    headers = sorted(
        f"{key}: {value}" for key, value in answer.headers.items() if key not in passing
    )
    return answer.status_code, answer.text.replace(name, "ID"), headers


def test_requests_and_responses_of_other_keys_are_invisible(keys):
    mine, other = keys
    asked_of = mine.post(
        "/v1/responses", json={"input": SECRET, "max_output_tokens": 2, "user": "marmalade"}
    )
    assert asked_of.status_code == 200
    names = {"response": asked_of.json()["id"], "request": asked_of.headers["x-request-id"]}
    for path, method in SHOWING:
        kind = "response" if "response_id" in path else "request"
        if "{" not in path or "{name" in path:
            answer = other.request(method, path)
            assert not {"marmalade", *names.values()} & set(re.findall(r"[\w-]+", answer.text)), (
                path
            )
            continue
        name = names[kind]
        unknown = name[:-8] + "00000000"
        theirs, nobodys = (other.request(method, named(path, one)) for one in (name, unknown))
        assert theirs.status_code == 404, path
        assert without_ids(theirs, name) == without_ids(nobodys, unknown), path
    body = {"input": "x", "max_output_tokens": 1}
    theirs, nobodys = (
        other.post("/v1/responses", json={**body, "previous_response_id": one})
        for one in (names["response"], names["response"][:-8] + "00000000")
    )
    assert theirs.status_code == nobodys.status_code == 404
    for path, method in SHOWING:
        if "{" in path and "{name" not in path and method == "GET":
            kind = "response" if "response_id" in path else "request"
            assert mine.get(named(path, names[kind])).status_code == 200, path


@pytest.mark.parametrize(
    "path", [path for path in ASKED if "hello" in json.dumps(ASKED[path]("hello"))]
)
@pytest.mark.some(2)
def test_answers_reveal_nothing_of_other_keys_requests(keys, path):
    """For a prompt of the first tenant, the second one gets the same counts and cause as for an
    unused prompt.
    """
    mine, other = keys

    def told(client, color):
        text = f"{color} is the color of {path}. {SECRET}. " * 3
        more = {"stream": False} if path in ("/api/chat", "/api/generate") else {}
        answer = client.post(path, json=asked(path, text, tokens=1, **more))
        assert answer.status_code in (200, 400), answer.text
        last = client.get("/v1/requests/last/cache")
        return answer.status_code, cached_in(answer.json()), last.json().get("cause")

    for color in ("Red", "Red"):
        told(mine, color)
    told(other, "Tan")  # caches the common start of all prompts, such as the template's text
    assert told(other, "Red") == told(other, "Sky")


def cached_in(answer, place=""):
    """Return the counts in a response that concern the cache, by their place."""
    if isinstance(answer, dict):
        return {
            name: count
            for key, one in answer.items()
            for name, count in cached_in(one, f"{place}.{key}").items()
        }
    is_count = type(answer) is int and re.search(r"cache|hit|reused|block|computed|pin", place)
    return {place: answer} if is_count else {}


@pytest.mark.parametrize(
    "path", [*ASKED, *(path for path, _ in READ if path not in OPEN and "/static/" not in path)]
)
@pytest.mark.some(3)
def test_a_wrong_key_is_refused_in_each_apis_format(keyed_server, path):
    """The key is checked before the body and before the method."""
    wrong = ({}, {"x-api-key": "wrong"}, {"authorization": "Basic x"}, {"x-api-key": ""})
    with keyed_server.client(headers={}) as client:
        for method, headers in itertools.product(("POST", "GET", "DELETE"), wrong):
            content = b"{" if method == "POST" else None
            answer = client.request(method, named(path, "x"), content=content, headers=headers)
            assert answer.status_code == 401, (method, answer.text)
            assert error_text(path, answer.content)
            if path.startswith("/v1/messages"):
                assert answer.json()["error"]["type"] == "authentication_error"
            assert answer.headers["www-authenticate"] == "Bearer"


def test_counters_by_cause_need_the_admin_key(keyed_server, keys):
    for client in keys:
        answer = client.get("/metrics")
        assert answer.status_code == 403
        assert "prompt_causes" not in answer.text
    with keyed_server.client(headers={"x-api-key": ADMIN_KEY}) as admin:
        text = admin.get("/metrics").text
    assert "kvboost:prompt_causes_total" in text
    # Nothing in the text identifies the tenant of a request.
    assert not any(key in text for key in (*KEYS, ADMIN_KEY))
    assert "tenant" not in text
