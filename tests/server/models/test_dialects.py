"""Tests of the model field in each API: the named model is loaded on demand. Ollama's API also sets
how long it stays loaded.
"""

import json

import pytest
from safetensors.numpy import load_file

from helpers.server.api_bodies import ASKED, GENERATING, asked
from helpers.server.live_servers import serving, wait_until
from helpers.server.model_budget import Room
from helpers.server.served_models import CountedSource

# Reranking needs a special model, and the fake model has no embeddings.
EMBEDDING = ("/v1/embeddings", "/v1/rerank", "/api/embed", "/api/embeddings")
PATHS = [path for path in ASKED if path not in ("/cache/reset", *EMBEDDING, "/infill", "/api/show")]


@pytest.fixture
async def room(all_of_one_size):
    """Server of two models, the second of which is not loaded."""
    found = Room(budget=3.5)
    yield found
    await found.close()


@pytest.mark.parametrize(
    ("path", "streams"), [*((path, False) for path in PATHS), *((p, True) for p in GENERATING)]
)
@pytest.mark.some(2)
async def test_every_api_loads_the_requested_model(room, path, streams):
    more = {"stream": streams} if path in GENERATING else {}
    answer = await room.client.post(
        path, json={**asked(path, "Hello, hello, hello.", **more), "model": "b"}
    )
    assert answer.status_code == 200, answer.text
    assert room.model("b").phase == "loaded"
    if streams:
        assert len(answer.text.splitlines()) > 1
    else:
        assert answer.json().get("model", "b") == "b"


@pytest.mark.parametrize("path", ["/v1/stats", "/v1/blocks", "/props", "/slots"])
async def test_read_only_requests_do_not_load_a_model(room, path):
    answer = await room.client.get(path, params={"model": "b"})
    assert answer.status_code == 503, answer.text
    assert "not loaded" in answer.text
    assert answer.headers["retry-after"]
    assert (await room.client.get(path)).status_code == 200
    assert (await room.client.get(path, params={"model": "nobody"})).status_code == 404
    assert room.model("b").phase == "not_loaded"


@pytest.fixture(scope="module")
def sources(tiny_model_dir, second_model_dir):
    return CountedSource(tiny_model_dir), CountedSource(second_model_dir)


@pytest.fixture(scope="module")
def server(sources):
    first, second = sources
    with (
        first.open() as engine,
        serving(
            engine, source=first.source, others=[(("b",), second.source)], model_name="a"
        ) as server,
    ):
        yield server


@pytest.fixture
def unloaded(server):
    """Server whose second model is not loaded."""
    with server.client() as client:
        client.post("/api/generate", json={"model": "b", "keep_alive": 0})
    wait_until(lambda: server.kv.models.find("b").phase == "not_loaded", "the model to be unloaded")
    return server


def test_ollama_shows_the_number_of_parameters_in_the_files(unloaded, second_model_dir):
    num_params = sum(one.size for one in load_file(second_model_dir / "model.safetensors").values())
    assert 1000 < num_params < 10**6
    with unloaded.client() as client:
        assert client.post("/api/chat", json={"model": "b"}).json()["done"]
        shown = client.post("/api/show", json={"model": "b"}).json()
        listed = client.get("/api/tags").json()["models"]
    assert shown["model_info"]["general.parameter_count"] == num_params
    assert shown["details"]["parameter_size"] == f"{round(num_params / 1000)}K"
    assert shown["details"] in [one["details"] for one in listed]


def test_ollama_tags_lists_all_models_and_ps_the_loaded_ones(unloaded):
    with unloaded.client() as client:

        def names(path):
            return [one["name"] for one in client.get(path).json()["models"]]

        assert (names("/api/tags"), names("/api/ps")) == (["a:latest", "b:latest"], ["a:latest"])
        loaded = client.post("/api/chat", json={"model": "b:latest", "keep_alive": "10m"}).json()
        assert (loaded["model"], loaded["done_reason"]) == ("b:latest", "load")
        assert names("/api/ps") == ["a:latest", "b:latest"]
        shown = client.post("/api/show", json={"model": "b"}).json()
        assert shown["details"]["family"] == "qwen3"
        gone = client.post("/api/chat", json={"model": "b", "keep_alive": 0}).json()
        assert gone["done_reason"] == "unload"
        wait_until(lambda: names("/api/ps") == ["a:latest"], "the model to be unloaded")
        wait_until(lambda: unloaded.kv.models.find("b").phase == "not_loaded", "the unload to end")
        assert client.post("/api/show", json={"model": "b"}).json() == shown
        again = client.post("/api/generate", json={"model": "b", "keep_alive": 0}).json()
        assert again["done_reason"] == "unload"
    assert unloaded.kv.models.find("b").phase == "not_loaded", (
        "the model must not be loaded in order to unload it"
    )


@pytest.mark.parametrize(
    ("path", "stream"),
    [("/api/chat", {"stream": False}), ("/api/generate", {"stream": True}), ("/api/embed", {})],
)
def test_ollamas_durations_include_the_wait_for_the_model(unloaded, path, stream):
    body = asked(path, "Hello", model="b", **stream)
    with unloaded.client() as client:
        first, second = [
            json.loads(client.post(path, json=body).text.splitlines()[-1]) for _ in range(2)
        ]
    nanoseconds = unloaded.kv.models.find("b").load_seconds * 1e9
    assert first["load_duration"] >= nanoseconds - 1e6 > 0
    assert second["load_duration"] == 0
    for one in (first, second):
        parts = [one.get(f"{name}_duration", 0) for name in ("load", "prompt_eval", "eval")]
        assert one["total_duration"] >= sum(parts)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ("1h30m", 5400),
        ("5m", 300),
        (90, 90),
        ("90", 90),
        ("90.5s", 90.5),
        (-1, None),
        ("-1m", None),
    ],
)
def test_keep_alive_of_the_last_request_applies(server, given, seconds):
    with server.client() as client:
        assert (
            client.post("/api/generate", json={"model": "b", "keep_alive": given}).status_code
            == 200
        )
        served = server.kv.models.find("b")
        left = client.get("/v1/stats").json()["models"]["data"][1]["unloads_in_seconds"]
        assert left is None if seconds is None else 0 <= seconds - left < seconds
        (running,) = [
            one for one in client.get("/api/ps").json()["models"] if one["name"] == "b:latest"
        ]
        assert running["expires_at"].startswith("9999") == (seconds is None)
        assert (
            client.post(
                "/v1/completions", json=asked("/v1/completions", "Hello", model="b")
            ).status_code
            == 200
        )
        assert served.keep_alive == 300, (
            "a request without keep_alive must restore the server's setting"
        )


@pytest.mark.parametrize("given", ["soon", "5 m", "m5", True, [], "9" * 13, 1e12, "1e3"])
def test_an_invalid_keep_alive_is_refused_by_name(server, given):
    with server.client() as client:
        answer = client.post("/api/generate", json={"model": "b", "keep_alive": given})
    assert answer.status_code == 400, answer.text
    assert "keep_alive" in answer.json()["error"]


def test_keep_alive_of_one_key_does_not_unload_another_keys_model(tiny_model_dir):
    first = CountedSource(tiny_model_dir)
    with (
        first.open() as engine,
        serving(
            engine, source=first.source, model_name="a", api_keys=("one", "two"), keep_alive=300.0
        ) as server,
        server.client(headers={"x-api-key": "one"}) as client,
    ):
        answer = client.post("/api/generate", json={"model": "a", "keep_alive": 0}).json()
        assert answer["done_reason"] == "load"
        assert server.kv.models.first.phase == "loaded"
        (running,) = client.get("/api/ps").json()["models"]
        assert running["expires_at"].startswith("9999"), (
            "the expiry must not reveal another key's last request"
        )


def test_a_conversation_continues_with_another_model(server):
    """Stored responses belong to the API key, not to the model."""
    with server.client() as client:
        first = client.post(
            "/v1/responses", json={"model": "a", **asked("/v1/responses", "Hello")}
        ).json()
        body = {
            "model": "b",
            "previous_response_id": first["id"],
            **asked("/v1/responses", "Hello"),
        }
        second = client.post("/v1/responses", json=body)
        assert (second.status_code, second.json()["model"]) == (200, "b")
        assert (
            client.post("/v1/embeddings", json={"model": "b", "input": "Hello"}).status_code == 200
        )


def test_the_request_history_covers_all_models(server):
    text = "The doctor reads this whole text again. " * 4
    with server.client() as client:
        ids = {}
        for name in ("a", "b"):
            answer = client.post(
                "/v1/completions", json={"model": name, "prompt": text, "max_tokens": 1}
            )
            ids[name] = answer.headers["x-request-id"]
        known = [one["request_id"] for one in client.get("/v1/requests").json()["data"]]
        assert known[:2] == [ids["b"], ids["a"]]
        assert client.get("/v1/requests/last/cache").json()["request_id"] == ids["b"]
        client.post("/api/generate", json={"model": "b", "keep_alive": 0})
        wait_until(
            lambda: server.kv.models.find("b").phase == "not_loaded", "the model to be unloaded"
        )
        found = client.get(f"/v1/requests/{ids['b']}/cache").json()
        assert (found["request_id"], found["prompt_tokens"] > 10) == (ids["b"], True)
