"""Tests of the requests of Ollama's command line, with the bodies of its Go client: its structs
send all fields without `omitempty`, even if they are empty (ollama/ollama, api/types.go, 2026-08).
"""

import json

import pytest

from helpers.server.changed_models import NAME, names

ASKED = "Once there was a word."
SAMPLED = {"temperature": 0, "num_predict": 5}
ALWAYS_SENT = {
    "chat": {"model": "", "messages": None, "options": None},
    "copy": {"source": "", "destination": ""},
    "create": {"model": "", "name": ""},
    "delete": {"model": "", "name": ""},
    "generate": dict.fromkeys(("model", "prompt", "suffix", "system", "template"), "")
    | {"options": None},
    "pull": dict.fromkeys(("model", "username", "password", "name"), ""),
    "show": {**dict.fromkeys(("model", "system", "template", "name"), ""), "verbose": False}
    | {"options": None},
}


class GoClient:
    """The methods of Ollama's Go client (`api.Client`) that the command line uses."""

    def __init__(self, http):
        self.http = http

    def call(self, route, /, **fields):
        """Return the lines of the answer, after checking that the request succeeded."""
        assert fields.keys() <= ALWAYS_SENT[route].keys() | {
            *("from", "keep_alive", "license", "parameters", "system", "think")
        }
        answer = self.http.request(
            "DELETE" if route == "delete" else "POST",
            f"/api/{route}",
            content=json.dumps({**ALWAYS_SENT[route], **fields}),
            headers={"content-type": "application/json", "user-agent": "ollama/0.12.0 Go/1.24"},
        )
        assert answer.status_code == 200, answer.text
        return [json.loads(line) for line in answer.text.splitlines()]


@pytest.fixture
def server(serve):
    with serve() as server:
        yield server


@pytest.fixture
def go(server):
    with server.client() as http:
        yield GoClient(http)


def test_ollama_run_pulls_an_unknown_model_and_answers(server, go):
    assert go.http.head("/").status_code == 200
    missing = go.http.post("/api/show", json={**ALWAYS_SENT["show"], "model": NAME})
    assert (missing.status_code, "not found" in missing.json()["error"]) == (404, True)
    assert go.call("pull", name=NAME)[-1] == {"status": "success"}
    (shown,) = go.call("show", model=NAME)
    assert isinstance(shown["model_info"], dict)
    lines = go.call("generate", model=NAME, prompt=ASKED, options=SAMPLED)
    plain = {"model": NAME, "prompt": ASKED, "options": SAMPLED, "stream": False}
    expected = go.http.post("/api/generate", json=plain).json()["response"]
    assert "".join(line["response"] for line in lines) == expected != ""
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]


def test_an_interactive_session_loads_chats_and_shows(go):
    (loaded,) = go.call("generate", model="a")
    assert (loaded["done"], loaded["done_reason"]) == (True, "load")
    messages = [{"role": "user", "content": ASKED}]
    for _ in range(2):
        lines = go.call("chat", model="a", messages=messages, options=SAMPLED)
        content = "".join(line["message"]["content"] for line in lines)
        assert content
        messages += [{"role": "assistant", "content": content}, messages[0]]
    shown = go.call("show", name="a")
    assert shown[0]["template"]
    changed = {"system": "Be brief.", "options": {"temperature": 0.5}, "verbose": True}
    assert go.call("show", name="a", **changed) == shown


def test_models_are_created_copied_listed_stopped_and_deleted(server, go):
    parameters = {"temperature": 0.5, "stop": ["<end>"]}
    source = {"from": "a", "license": ["MIT"], "parameters": parameters}
    assert go.call("create", model="mario", **source)[-1] == {"status": "success"}
    (shown,) = go.call("show", name="mario")
    assert (shown["license"], "0.5" in shown["parameters"]) == ("MIT", True)
    go.call("copy", source="mario", destination="luigi")
    assert names(server) == ["a", "mario", "luigi"]
    go.call("generate", model="mario")
    listed, running = (
        [one["name"] for one in go.http.get(f"/api/{path}").json()["models"]]
        for path in ("tags", "ps")
    )
    assert (listed, running) == (
        ["a:latest", "mario:latest", "luigi:latest"],
        ["a:latest", "mario:latest"],
    )
    (stopped,) = go.call("generate", model="mario", keep_alive="0s")
    assert stopped["done_reason"] == "unload"
    for name in ("mario", "luigi"):
        go.call("delete", name=name)
    assert names(server) == ["a"]


@pytest.mark.parametrize("name", ["create", "delete", "pull", "show"])
def test_a_model_without_a_name_is_refused(go, name):
    method = "DELETE" if name == "delete" else "POST"
    answer = go.http.request(method, f"/api/{name}", json=ALWAYS_SENT[name])
    assert (answer.status_code, answer.json()["error"]) == (
        400,
        "model is missing; name the model",
    )


@pytest.mark.parametrize("field", ["username", "password"])
def test_a_login_for_a_registry_is_refused(go, field):
    body = {**ALWAYS_SENT["pull"], "name": NAME, field: "x"}
    answer = go.http.post("/api/pull", json=body)
    assert (answer.status_code, "HF_TOKEN" in answer.json()["error"]) == (400, True)
