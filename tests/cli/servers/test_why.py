"""`kvboost-edge why` against a server with a fake model: what it says, and what it says where there is nothing."""

import json

import httpx
import pytest

from helpers.engine.fake_runner import fake_engine
from helpers.server.live_servers import KEYS, serving
from kvboost_edge.cli.app import run
from kvboost_edge.cli.servers.why import WORDS
from kvboost_edge.server.doctor.diagnosis import CAUSES

TEXTS = [f"Today is {day}. Answer as a helper of few words would, and in English." for day in ("Monday", "Tuesday")]


@pytest.fixture(scope="module")
def server():
    with fake_engine() as engine, serving(engine, api_keys=KEYS) as server:
        yield server


@pytest.fixture(scope="module")
def asked(server):
    """The ids of two requests that differ in a day."""
    with server.client() as client:
        bodies = [{"prompt": f"A text that comes first. {text}", "max_tokens": 1} for text in TEXTS]
        return [client.post("/v1/completions", json=body).headers["x-request-id"] for body in bodies]


def why(server, *arguments, key=KEYS[0]):
    return run(["why", *arguments, "--url", server.base_url, "--api-key", key])


def test_every_cause_has_words():
    assert tuple(WORDS) == CAUSES


def test_the_last_request_is_explained(server, asked, capsys):
    assert why(server) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for words in (
        "changed_text: another text",
        "32 pool from the cache",
        "from token 34 on, in prompt",
        "To do: put what",
    ):
        assert words in shown
    assert "»Tue" in shown
    assert "»Mon" in shown
    assert why(server, asked[0]) == 0
    assert "first_seen" in capsys.readouterr().out


def test_json_is_what_the_server_says(server, asked, capsys):
    assert why(server, asked[1], "--json") == 0
    with server.client() as client:
        assert json.loads(capsys.readouterr().out) == client.get(f"/v1/requests/{asked[1]}/cache").json()


def test_the_last_requests_are_listed(server, asked, capsys):
    assert why(server, "--list") == 0
    shown = capsys.readouterr().out
    assert shown.index("changed_text") < shown.index("first_seen")
    assert why(server, "--list", key=KEYS[1]) == 0
    assert "no request has ended yet" in capsys.readouterr().out


@pytest.mark.parametrize("request_id", ["no-such-request", "../../metrics", "a/b"])
def test_an_unknown_request_is_an_error(server, asked, request_id, capsys):
    assert why(server, request_id) == 1
    assert "404" in capsys.readouterr().err
    assert why(server, asked[0], key=KEYS[1]) == 1
    assert "--request-history" in capsys.readouterr().err


def test_errors_say_what_to_do(capsys):
    assert run(["why", "--url", "http://127.0.0.1:9"]) == 1
    assert "kvboost-edge serve" in capsys.readouterr().err
    with fake_engine() as engine, serving(engine, request_history=0) as server:
        httpx.post(f"{server.base_url}/v1/completions", json={"prompt": "Hello", "max_tokens": 1})
        for arguments in ([], ["--list"], ["--list", "--json"]):
            assert run(["why", *arguments, "--url", server.base_url]) == 1
            assert "--request-history 0" in capsys.readouterr().err


def test_help_has_examples(capsys):
    assert run(["why", "--help"]) == 0
    assert "kvboost-edge why --list" in capsys.readouterr().out
