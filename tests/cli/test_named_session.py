"""Tests of `kvboost-edge chat --session`: a conversation continues in another process, locally or
on a server.
"""

import re
from pathlib import Path

import pytest

from helpers.server.live_servers import ENGINE_OPTIONS, KEYS, serving
from kvboost_edge import CPUPagedEngine
from kvboost_edge.errors import ConfigError
from kvboost_edge.server.serve_options import options_from
from kvboost_edge.tiers.disk.session_records import SessionStore

SMALL = ("-n", "6", "--temperature", "0", "-o", "num_blocks=64", "-o", "dtype=float32")


def cached(out):
    return [int(count) for count in re.findall(r"(\d+) from the cache", out)]


def test_a_local_session_continues_with_its_cache_after_a_restart(
    tiny_model_dir, tmp_path, printed, typed
):
    chat = ("chat", "-m", tiny_model_dir, *SMALL, "-o", f"disk_cache_dir={tmp_path}")
    chat += ("--session", "travel plans")
    typed("Hello there, how are you today?\nAnd now?\n")
    first = printed(*chat, "--system", "Hi").out
    assert "session travel plans: 0 turns" in first
    saved = re.findall(r"session travel plans: saved, (\d+) tokens, [\d.]+ MB", first)
    assert len(saved) == 2
    found = SessionStore(tmp_path).find(None, None, "travel plans")
    roles = [message["role"] for message in found.content["messages"]]
    assert roles == ["system", *["user", "assistant"] * 2]
    assert found.info.num_tokens == int(saved[-1])
    typed("Go on.\n")
    second = printed(*chat).out
    assert "session travel plans: 2 turns" in second
    assert cached(second)[0] >= 32
    refused = printed(*chat, "--system", "Another", code=2).err
    assert "--system differs from the system message of the session" in refused


def test_a_server_restores_a_local_session(tiny_model_dir, tmp_path, printed, typed):
    chat = ("chat", "-m", tiny_model_dir, *SMALL, "-o", f"disk_cache_dir={tmp_path / 'kv'}")
    typed("Hello there, how are you today?\n")
    assert "session travel: saved, " in printed(*chat, "--session", "travel").out
    served = options_from({"model": [str(tiny_model_dir)], "disk_cache_dir": tmp_path / "kv"})
    options = {**ENGINE_OPTIONS, **served.engine, "dtype": "float32"}
    with (
        CPUPagedEngine.from_pretrained(tiny_model_dir, **options) as engine,
        serving(engine, model_name=served.settings.model_name) as live,
    ):
        with live.client() as client:
            [listed] = client.get("/v1/sessions").json()["data"]
            [model] = client.get("/v1/models").json()["data"]
        assert listed["model"] == model["id"] == Path(tiny_model_dir).name
        typed("And now?\n")
        out = printed("chat", "--url", live.base_url, "-n", "6", "--session", "travel").out
        assert "session travel: 1 turn" in out
        assert cached(out)[0] >= 16


def test_a_named_session_on_a_server(typed, printed):
    with (
        CPUPagedEngine.from_pretrained("kvboost-edge/demo", **ENGINE_OPTIONS) as engine,
        serving(engine, api_keys=KEYS, max_sessions=1) as live,
    ):
        chat = ["chat", "--url", live.base_url, "-n", "6", "--api-key"]
        typed("Hello there, how are you today?\n")
        assert "session a b: saved, " in printed(*chat, KEYS[0], "--session", "a b").out
        typed("And now?\n")
        out = printed(*chat, KEYS[0], "--session", "a b").out
        assert "session a b: 1 turn" in out
        assert cached(out)[0] >= 16
        typed("Hi, and again hi to all of you\n")
        out, err = printed(*chat, KEYS[0], "--session", "c", code=1)
        assert "the session was not saved" in err
        assert "max_sessions=1" in err
        assert len(cached(out)) == 1  # the conversation continues
        typed("Hello there, how are you today?\n")
        assert "session a b: 0 turns" in printed(*chat, KEYS[1], "--session", "a b").out


def test_a_later_save_makes_up_for_a_failed_one(
    tiny_model_dir, tmp_path, printed, typed, monkeypatch
):
    put = SessionStore.put
    failures = iter((ConfigError("no space"),))

    def put_second(*arguments):
        if (failure := next(failures, None)) is not None:
            raise failure
        return put(*arguments)

    monkeypatch.setattr(SessionStore, "put", put_second)
    typed("Hello there, how are you today?\nAnd now?\n")
    chat = ("chat", "-m", tiny_model_dir, *SMALL, "-o", f"disk_cache_dir={tmp_path}")
    assert "the session was not saved: no space" in printed(*chat, "--session", "a").err
    assert len(SessionStore(tmp_path).find(None, None, "a").content["messages"]) == 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--session", "a/b"), "--session 'a/b' must be 1 to 128 printable characters"),
        (("--session", ".."), "not begin with a dot"),
        (("--session", ""), "must be 1 to 128"),
        (("--session", "a", "-o", "disk_cache_dir=off"), "--session needs the disk cache"),
        (("--session", "a", "--no-pack-cache"), "--session needs the disk cache"),
    ],
)
def test_a_session_that_cannot_be_saved_is_refused_before_loading(options, said, refused):
    assert said in refused("chat", "-m", "no-such-model", *options)
