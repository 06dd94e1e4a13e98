"""Tests of `kvboost-edge why` with a fake model's server: its report, and its message if no request
is known.
"""

import json

import httpx
import pytest

from helpers.engine.fake_runner import fake_engine
from helpers.server.live_servers import KEYS, serving
from kvboost_edge.cli.servers.why import WORDS
from kvboost_edge.server.cache_report.diagnosis import CAUSES

TEXTS = [
    f"Today is {day}. Answer as a helper of few words would, and in English."
    for day in ("Monday", "Tuesday")
]


@pytest.fixture(scope="module")
def server():
    with fake_engine() as engine, serving(engine, api_keys=KEYS) as server:
        yield server


@pytest.fixture(scope="module")
def asked(server):
    """Ids of two requests whose prompts differ in the day."""
    with server.client() as client:
        bodies = [{"prompt": f"A text that comes first. {text}", "max_tokens": 1} for text in TEXTS]
        return [
            client.post("/v1/completions", json=body).headers["x-request-id"] for body in bodies
        ]


@pytest.fixture
def why(server, printed):
    """Function `why(*arguments, key=..., code=0)` that runs the command against the server."""

    def call(*arguments, key=KEYS[0], code=0):
        return printed("why", *arguments, "--url", server.base_url, "--api-key", key, code=code)

    return call


def test_every_miss_cause_has_a_description():
    assert tuple(WORDS) == CAUSES


def test_the_last_request_is_explained(asked, why):
    shown = " ".join(why().out.split())
    for words in (
        "changed_text: the text changed",
        "32 pool from the cache",
        "from token 34 on, in prompt",
        "Remedy: put changing",
    ):
        assert words in shown
    assert "»Tue" in shown
    assert "»Mon" in shown
    first = why(asked[0]).out
    assert "first_seen" in first
    assert "from token" not in first


def test_json_equals_the_servers_answer(server, asked, why):
    said = json.loads(why(asked[1], "--json").out)
    with server.client() as client:
        assert said == client.get(f"/v1/requests/{asked[1]}/cache").json()


def test_a_narrow_list_shows_complete_ids(asked, why, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    shown = why("--list").out
    parts = [line.split("│")[2].strip() for line in shown.splitlines() if line.startswith("│")]
    assert "".join(parts) == "".join(reversed(asked))


def test_the_beginning_of_an_id_is_enough(asked, why):
    assert asked[0] in why(asked[0][:20]).out
    assert "no finished request 'req-'" in why("req-", code=1).err


def test_the_last_requests_are_listed(asked, why):
    shown = why("--list").out
    assert shown.index("changed_text") < shown.index("first_seen")
    assert "no request has finished yet" in why("--list", key=KEYS[1]).out


@pytest.mark.parametrize("request_id", ["no-such-request", "../../metrics", "a/b"])
def test_an_unknown_request_is_an_error(asked, request_id, why):
    assert "404" in why(request_id, code=1).err
    assert "--request-history" in why(asked[0], key=KEYS[1], code=1).err


def test_errors_name_a_remedy(printed):
    assert "kvboost-edge serve" in printed("why", "--url", "http://127.0.0.1:9", code=1).err
    with fake_engine() as engine, serving(engine, request_history=0) as server:
        httpx.post(f"{server.base_url}/v1/completions", json={"prompt": "Hello", "max_tokens": 1})
        for arguments in ([], ["--list"], ["--list", "--json"]):
            err = printed("why", *arguments, "--url", server.base_url, code=1).err
            assert "--request-history 0" in err


def test_help_has_examples(printed):
    assert "kvboost-edge why --list" in printed("why", "--help").out
