"""Tests of pulling, copying and deleting models in a running server, with its permissions and
limits.
"""

import contextlib
import json
import threading

import httpx
import ollama
import pytest

from helpers.server.changed_models import NAME, closing_client, names
from helpers.server.live_servers import ADMIN_KEY, KEYS, wait_until
from helpers.server.served_models import ASKED
from kvboost_edge.errors import ConfigError
from kvboost_edge.models.locate.managed import managed_models
from kvboost_edge.models.pull import download
from kvboost_edge.server.api_errors import ApiError
from kvboost_edge.server.models.changes import ManagedModels, ModelChanges
from kvboost_edge.server.settings import ServerSettings


def test_ollamas_client_pulls_copies_and_deletes(serve, hub):
    with serve() as server, closing_client(server) as client:
        events = list(client.pull(NAME, stream=True))
        assert (events[0].status, events[-1].status) == ("pulling manifest", "success")
        size = len(hub.files["Tiny-Q8_0.gguf"])
        (told, *_) = [event for event in events if event.completed == size]
        assert told.total == size
        assert told.digest.startswith("sha256:")
        assert names(server) == ["a", NAME]
        assert client.pull(NAME).status == "success"
        client.copy(NAME, "second")
        assert names(server) == ["a", NAME, "second"]
        with server.client() as http:
            answers = [
                http.post("/v1/completions", json={"model": name, **ASKED}).json()["choices"]
                for name in (NAME, "second")
            ]
        assert answers[0] == answers[1]
        assert client.delete(NAME).status == "success"
        assert names(server) == ["a", "second"]
        with server.client() as http:
            again = http.post("/v1/completions", json={"model": "second", **ASKED}).json()
        assert again["choices"] == answers[0]
        client.delete("second:latest")
        assert not [path for path in managed_models().root.rglob("*") if path.is_file()]
        with pytest.raises(ollama.ResponseError, match="not found"):
            client.delete("second")


def test_pulled_models_are_served_after_a_restart(serve):
    with serve() as server, closing_client(server) as client:
        client.pull(NAME)
        client.copy("a", "alias")
    with serve() as server:
        assert names(server) == ["a", "alias", NAME]
    with serve(model_name=NAME) as server:
        assert names(server) == [NAME]
    with serve(model_changes=False) as server:
        assert names(server) == ["a"]


INVALID = [
    ("POST", "/api/pull", {"model": "../x"}, 400, "is invalid"),
    ("POST", "/api/pull", {}, 400, "model is missing"),
    ("POST", "/api/pull", {"model": NAME, "insecure": True}, 400, "insecure"),
    ("POST", "/api/pull", {"model": "10.0.0.1/a/b"}, 400, "is not configured"),
    ("POST", "/api/pull", {"model": "a"}, 400, "given on the command line"),
    ("POST", "/api/copy", {"source": "x", "destination": "y"}, 404, "not found"),
    ("POST", "/api/copy", {"source": "a", "destination": "/y"}, 400, "is invalid"),
    ("POST", "/api/copy", {"source": "a", "destination": "a"}, 400, "command line"),
    ("DELETE", "/api/delete", {"model": "a"}, 400, "given on the command line"),
    ("DELETE", "/api/delete", {"name": "x"}, 404, "not found"),
]


def test_invalid_changes_are_refused(serve):
    with serve() as server, server.client() as client:
        for method, path, body, status, problem in INVALID:
            answer = client.request(method, path, json=body)
            assert (answer.status_code, problem in answer.json()["error"]) == (status, True), (
                answer.text
            )
            assert names(server) == ["a"]


def test_max_pull_bytes_limits_downloads(serve, hub):
    with serve(max_pull_bytes=1000) as server, server.client() as client:
        for stream in (True, False):
            answer = client.post("/api/pull", json={"model": NAME, "stream": stream})
            last = json.loads(answer.text.strip().splitlines()[-1])
            assert "over the limit of 1000 (--max-pull-bytes)" in last["error"]
        assert not hub.downloads()


def test_errors_do_not_show_local_paths(serve, hub, tmp_path):
    root = managed_models().root
    root.parent.mkdir(parents=True)
    (root.parent / "elsewhere").mkdir()
    with serve() as server, server.client() as client:
        managed_models().made("files")
        (root / "records").symlink_to(root.parent / "elsewhere")
        answer = client.post("/api/pull", json={"model": NAME, "stream": False})
        assert "is a symbolic link" in answer.json()["error"]
        assert str(tmp_path) not in answer.text


CHANGES = [
    ("POST", "/api/pull", {"model": NAME, "stream": False}),
    ("POST", "/api/copy", {"source": "a", "destination": "b"}),
    ("POST", "/api/create", {"model": "c", "from": "b", "system": "x", "stream": False}),
    ("DELETE", "/api/delete", {"model": "b"}),
]


@pytest.mark.parametrize(("keys", "admins"), [(KEYS, (ADMIN_KEY,)), (KEYS[:1], ())])
def test_only_an_admin_changes_models_if_there_are_several_keys(serve, keys, admins):
    with serve(api_keys=keys, admin_api_keys=admins) as server:
        for method, path, body in CHANGES:
            for key, status in ((keys[0], 403 if admins else 200), *((one, 200) for one in admins)):
                answer = httpx.request(
                    method, server.base_url + path, json=body, headers={"x-api-key": key}
                )
                assert answer.status_code == status, answer.text


def test_the_model_list_says_whether_changes_are_allowed(serve):
    with serve(api_keys=KEYS, admin_api_keys=(ADMIN_KEY,)) as server:
        for key in (KEYS[0], ADMIN_KEY):
            with server.client(headers={"x-api-key": key}) as client:
                answer = client.get("/v1/models").json()
            is_admin = key == ADMIN_KEY
            assert answer["changes"]["allowed"] is is_admin
            assert (answer["changes"]["reason"] is None) is is_admin
            assert (answer["memory"] is not None) is is_admin
    with serve(model_changes=False) as server, server.client() as client:
        answer = client.get("/v1/models").json()
        assert "--no-model-changes" in answer["changes"]["reason"]
        assert answer["memory"]["taken_bytes"] > 0


def test_the_model_list_describes_pulled_models(serve, hub):
    with serve() as server, closing_client(server) as ours:
        ours.pull(NAME)
        ours.copy("a", "alias")
        with server.client() as client:
            rows = {one["id"]: one for one in client.get("/v1/models").json()["data"]}
            assert client.get("/v1/models/a").json() == rows["a"]
    told = {
        name: (one["managed"], one["file_bytes"], one["unloadable"]) for name, one in rows.items()
    }
    assert told == {
        "a": (False, None, False),
        NAME: (True, len(hub.files["Tiny-Q8_0.gguf"]), True),
        "alias": (True, None, True),
    }


def test_only_an_admin_unloads_models_if_there_are_several_keys(serve):
    with serve(api_keys=KEYS, admin_api_keys=(ADMIN_KEY,)) as server:
        with server.client(headers={"x-api-key": ADMIN_KEY}) as admin:
            assert admin.post("/api/pull", json={"model": NAME, "stream": False}).is_success
        served = server.kv.models.find(NAME)
        for key, phase, reason in (
            (KEYS[0], "loaded", "load"),
            (ADMIN_KEY, "not_loaded", "unload"),
        ):
            with server.client(headers={"x-api-key": key}) as client:
                client.post("/api/generate", json={"model": NAME})
                body = {"model": NAME, "keep_alive": 0, "stream": False}
                answer = client.post("/api/generate", json=body).json()
                listed = client.get(f"/v1/models/{NAME}").json()
            assert (answer["done_reason"], listed["unloadable"]) == (reason, key == ADMIN_KEY)
            wait_until(lambda wanted=phase: served.phase == wanted, f"the model to be {phase}")


def test_model_changes_false_refuses_all_changes(serve, hub):
    with serve(model_changes=False) as server, server.client() as client:
        for method, path, body in CHANGES:
            answer = client.request(method, path, json=body)
            assert (answer.status_code, "no-model-changes" in answer.json()["error"]) == (403, True)
    managed = ManagedModels(managed_models(), None)
    for host, keys, is_open in (
        ("0.0.0.0", (), False),
        ("0.0.0.0", KEYS[:1], True),
        ("127.0.0.1", (), True),
    ):
        settings = ServerSettings(host=host, api_keys=keys, insecure=True)
        with contextlib.nullcontext() if is_open else pytest.raises(ApiError, match="403"):
            ModelChanges(None, settings, managed).check_allowed()


def test_one_change_at_a_time_and_a_disconnect_stops_it(serve, hub, monkeypatch):
    held = threading.Event()
    real = download.Registry.files

    def files(self, repo):
        assert held.wait(30)
        return real(self, repo)

    monkeypatch.setattr(download.Registry, "files", files)
    with serve() as server, server.client() as client:
        sock = server.connect()
        sock.sendall(server.request_bytes("/api/pull", {"model": NAME}))
        wait_until(lambda: server.kv.changes._busy, "the pull to begin")
        for path, body in (
            ("/api/copy", {"source": "a", "destination": "b"}),
            ("/api/create", {"model": "b", "from": "a"}),
        ):
            answer = client.post(path, json=body)
            assert (answer.status_code, "another change" in answer.json()["error"]) == (503, True)
        sock.close()
        wait_until(lambda: server.kv.metrics.render().count(b"/api/pull") > 0, "the disconnect")
        held.set()
        wait_until(lambda: not server.kv.changes._busy, "the pull to end")
        assert names(server) == ["a"]
        assert not hub.downloads()


def test_a_model_in_use_is_not_deleted(serve):
    with serve() as server, server.client() as client:
        with closing_client(server) as ours:
            ours.pull(NAME)
        served = server.kv.models.find(NAME)
        served.in_use += 1
        for method, path, body in (
            ("DELETE", "/api/delete", {"model": NAME}),
            ("POST", "/api/pull", {"model": NAME, "stream": False}),
            ("POST", "/api/copy", {"source": "a", "destination": NAME}),
            ("POST", "/api/create", {"model": NAME, "from": "a", "stream": False}),
        ):
            answer = client.request(method, path, json=body)
            assert (answer.status_code, "is in use" in answer.json()["error"]) == (409, True)
        served.in_use -= 1
        assert names(server) == ["a", NAME]


def test_invalid_registries_are_refused():
    with pytest.raises(ConfigError, match="model_registries holds"):
        ServerSettings(model_registries=("models.example.org",))
