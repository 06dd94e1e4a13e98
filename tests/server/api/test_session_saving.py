"""Tests of named sessions over HTTP.

Saved prefixes survive eviction and a restart, each API key has its own names and limits, and
llama.cpp's slot actions save and restore sessions too.
"""

import asyncio
import threading
import time
from contextlib import contextmanager

import pytest

from helpers.models.tiny_models import save_tiny_model
from helpers.random_ids import random_ids
from helpers.server.live_servers import ENGINE_OPTIONS, KEYS, app_client, serving
from kvboost_edge import CPUPagedEngine
from kvboost_edge.server.app import create_app
from kvboost_edge.server.settings import ServerSettings
from kvboost_edge.tiers.disk.file_names import is_space

DEMO = "kvboost-edge/demo"
TEXT = "The mine of North Romin is nickel. " * 12
MESSAGES = [
    {"role": "user", "content": TEXT},
    {"role": "assistant", "content": "I have read it."},
]
MORE = [*MESSAGES, {"role": "user", "content": "What does it mine?"}]


def of_key(engine, key="", **settings):
    chosen = ServerSettings(model_name="tiny", max_queue_tokens=1 << 22, **settings)
    return app_client(create_app(engine, chosen), key)


async def cached(client, prompt, **more):
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, **more}
    answer = (await client.post("/v1/completions", json=body)).json()
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def flood(client, engine):
    """Compute other prompts until the pool has evicted every block that is not pinned."""
    size = engine.config.block_size
    blocks = engine.paged_stats()["num_blocks"]
    for number in range(4):
        ids = [(number * 7 + place) % 250 + 3 for place in range(blocks * size // 3)]
        assert (
            await client.post("/v1/completions", json={"prompt": ids, "max_tokens": 1})
        ).is_success


@pytest.mark.parametrize(
    ("field", "value"),
    [("ttl", 0), ("ttl", -1), ("ttl", "60"), ("priority", 10**7), ("priority", 0.5)],
)
async def test_invalid_numbers_in_a_restore_are_refused(tiny_app, field, value):
    session = {"name": "notes", "tokens": [5] * 40}
    assert (await tiny_app.post("/v1/sessions", json=session)).is_success
    answer = await tiny_app.post("/v1/sessions/notes/restore", json={field: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field, answer.text
    assert (await tiny_app.delete("/v1/sessions/notes")).is_success


async def test_a_session_is_saved_listed_restored_and_deleted(tiny_app, tiny_engine):
    size = tiny_engine.config.block_size
    ids = list(range(5, 5 + 5 * size + 3))
    saved = (await tiny_app.post("/v1/sessions", json={"name": "notes", "tokens": ids})).json()
    block = tiny_engine.runner_info.kv_spec.bytes_per_block
    assert (saved["object"], saved["name"], saved["model"]) == ("session", "notes", "tiny")
    assert (saved["tokens"], saved["pinned"]) == (len(ids), True)
    assert saved["stored"] == "pool"  # without a disk cache
    assert 5 * block + 4 * len(ids) < saved["bytes"] < 5 * block + 4 * len(ids) + 1000
    assert saved["usage"]["prompt_tokens"] == len(ids)
    assert saved["expires"] - saved["created"] == 24 * 3600
    listed = (await tiny_app.get("/v1/sessions")).json()
    assert listed["data"] == [{name: saved[name] for name in listed["data"][0]}]
    assert (listed["sessions"], listed["bytes"]) == (1, saved["bytes"])
    assert (listed["max_sessions"], listed["max_bytes"]) == (64, 4 << 30)
    await flood(tiny_app, tiny_engine)
    assert await cached(tiny_app, [*ids, 7, 8]) == 5 * size
    again = (await tiny_app.post("/v1/sessions/notes/restore", json={"ttl": 60})).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 5 * size
    assert again["expires"] - again["created"] <= 62
    deleted = await tiny_app.delete("/v1/sessions/notes")
    assert deleted.json() == {
        "object": "session.deleted",
        "name": "notes",
        "deleted": True,
        "blocks_unpinned": 5,
    }
    assert tiny_engine.paged_stats()["pinned_blocks"] == 0
    assert (await tiny_app.get("/v1/sessions")).json()["data"] == []
    for method, path in (
        ("GET", "/v1/sessions/notes"),
        ("DELETE", "/v1/sessions/notes"),
        ("POST", "/v1/sessions/notes/restore"),
    ):
        gone = await tiny_app.request(method, path)
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "session_not_found")
        assert "GET /v1/sessions lists the sessions" in gone.json()["error"]["message"]


async def test_saved_messages_are_restored_and_hit_by_the_next_turn(app):
    body = {"name": "chat", "messages": MESSAGES, "ttl": 100}
    saved = (await app.post("/v1/sessions", json=body)).json()
    found = (await app.get("/v1/sessions/chat")).json()
    assert (found["messages"], found["tools"]) == (MESSAGES, None)
    assert found["tokens"] == saved["tokens"]
    answer = await app.post("/v1/chat/completions", json={"messages": MORE, "max_tokens": 2})
    size = app.engine.config.block_size
    hit = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert hit >= saved["tokens"] // size * size > 0


async def test_saving_a_longer_session_replaces_its_pin(tiny_app, tiny_engine):
    size = tiny_engine.config.block_size
    ids = list(range(3, 3 + 6 * size))
    for blocks in (2, 4, 4, 6):
        body = {"name": "grows", "tokens": ids[: blocks * size]}
        assert (await tiny_app.post("/v1/sessions", json=body)).is_success
        assert tiny_engine.paged_stats()["pinned_blocks"] == blocks
    other = {"name": "the same", "tokens": ids}
    assert (await tiny_app.post("/v1/sessions", json=other)).is_success
    first = await tiny_app.delete("/v1/sessions/grows")
    assert first.json()["blocks_unpinned"] == 0  # the other session has the same prefix
    assert tiny_engine.paged_stats()["pinned_blocks"] == 6
    assert (await tiny_app.delete("/v1/sessions/the%20same")).json()["blocks_unpinned"] == 6


async def test_a_session_neither_shortens_nor_ends_other_pins_of_its_text(tiny_app, tiny_engine):
    text = "A document that has to stay, whatever else comes. " * 3
    ids = tiny_engine.tokenizer.encode(text)
    blocks = len(ids) // tiny_engine.config.block_size

    async def delete(name):
        return (await tiny_app.delete(f"/v1/sessions/{name}")).json()["blocks_unpinned"]

    def expire(seconds):
        with tiny_engine._core.reading():
            tiny_engine._parts.manager.pins.expire(time.monotonic() + seconds)
        return tiny_engine.paged_stats()["pinned_blocks"]

    assert (await tiny_app.post("/v1/warm", json={"text": text, "pin": True})).is_success
    for body in ({"name": "long"}, {"name": "short", "ttl": 60}):
        assert (await tiny_app.post("/v1/sessions", json={**body, "tokens": ids})).is_success
    assert await delete("short") == await delete("long") == 0
    assert expire(1e6) == blocks, "the pin of the text has no ttl"
    assert (await tiny_app.post("/v1/unpin", json={"text": text})).is_success
    for body in ({"name": "long"}, {"name": "short", "ttl": 60}):
        assert (await tiny_app.post("/v1/sessions", json={**body, "tokens": ids})).is_success
    assert expire(61) == blocks, "the longer session still pins the text"
    assert (await delete("short"), await delete("long")) == (0, blocks)


@pytest.fixture
def held_app(tiny_engine, monkeypatch):
    """Client of a server whose first save waits for `go` before it stores the record."""
    app = create_app(tiny_engine, ServerSettings(model_name="tiny"))
    store = app.state.kv.shared.sessions
    client = app_client(app)
    client.reached, client.go = threading.Event(), threading.Event()
    calls = []

    def put(*args):
        calls.append(args)
        if len(calls) == 1:
            client.reached.set()
            assert client.go.wait(60)
        return stored(*args)

    stored = store.put
    monkeypatch.setattr(store, "put", put)
    return client


async def pinned_blocks(engine, expected):
    end = time.monotonic() + 60
    while engine.paged_stats()["pinned_blocks"] != expected:
        assert time.monotonic() < end, engine.paged_stats()["pinned_blocks"]
        await asyncio.sleep(0)


def saving(client, blocks, size, name="mine"):
    body = {"name": name, "tokens": [blocks] * (blocks * size)}
    return asyncio.create_task(client.post("/v1/sessions", json=body))


async def test_overlapping_saves_of_a_session_leave_one_pin(held_app, tiny_engine):
    size = tiny_engine.config.block_size
    async with held_app as client:
        first = saving(client, 3, size)
        await asyncio.to_thread(client.reached.wait, 60)
        assert (await saving(client, 4, size)).is_success
        assert tiny_engine.paged_stats()["pinned_blocks"] == 3 + 4
        client.go.set()
        assert (await first).is_success
        assert tiny_engine.paged_stats()["pinned_blocks"] == 3
        deleted = await client.delete("/v1/sessions/mine")
        assert deleted.json()["blocks_unpinned"] == 3


async def test_a_client_that_disconnects_while_its_session_is_stored(held_app, tiny_engine):
    size = tiny_engine.config.block_size
    async with held_app as client:
        first = saving(client, 3, size)
        await asyncio.to_thread(client.reached.wait, 60)
        assert (await saving(client, 4, size)).is_success
        first.cancel()
        await asyncio.wait([first])
        client.go.set()
        await pinned_blocks(tiny_engine, 3)
        assert (await client.get("/v1/sessions/mine")).json()["tokens"] == 3 * size
        assert (await client.delete("/v1/sessions/mine")).json()["blocks_unpinned"] == 3


@pytest.mark.parametrize("limit", ["max_sessions", "max_session_bytes"])
async def test_session_names_and_limits_are_per_key(tiny_engine, limit):
    ids = list(range(5, 90))
    size = len(ids) // tiny_engine.config.block_size
    size *= tiny_engine.runner_info.kv_spec.bytes_per_block
    value = {"max_sessions": 1, "max_session_bytes": 2 * size - 1}[limit]
    options = {"api_keys": KEYS, limit: value}
    app = create_app(tiny_engine, ServerSettings(model_name="tiny", **options))
    async with app_client(app, KEYS[0]) as first, app_client(app, KEYS[1]) as second:
        assert (await first.post("/v1/sessions", json={"name": "a", "tokens": ids})).is_success
        refused = await first.post("/v1/sessions", json={"name": "b", "tokens": ids})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "capacity_exceeded")
        assert f"{limit}={value}; delete" in refused.text
        assert f"raise --{limit.replace('_', '-')}" in refused.text
        salted = {"name": "b", "tokens": ids, "cache_salt": "s"}
        assert (await first.post("/v1/sessions", json=salted)).status_code == 400
        assert (await second.get("/v1/sessions")).json()["sessions"] == 0
        assert (await second.get("/v1/sessions/a")).status_code == 404
        assert (await second.delete("/v1/sessions/a")).status_code == 404
        assert (
            await second.post("/v1/sessions", json={"name": "a", "tokens": ids[::-1]})
        ).is_success
        assert (await first.get("/v1/sessions/a")).is_success
        for client in (first, second):
            assert (await client.delete("/v1/sessions/a")).is_success
    assert tiny_engine.paged_stats()["pinned_blocks"] == 0


async def test_max_session_bytes_is_checked_before_prefill(tiny_engine):
    block = tiny_engine.runner_info.kv_spec.bytes_per_block
    size = tiny_engine.config.block_size
    async with of_key(tiny_engine, max_session_bytes=4 * block) as client:
        taken = {"name": "a", "tokens": list(range(5, 5 + 2 * size))}
        assert (await client.post("/v1/sessions", json=taken)).is_success
        before = tiny_engine.paged_stats()["miss_tokens"]
        wanted = {"name": "b", "tokens": list(range(50, 50 + 3 * size))}
        refused = await client.post("/v1/sessions", json=wanted)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "capacity_exceeded")
        assert f"max_session_bytes={4 * block}" in refused.json()["error"]["message"]
        assert tiny_engine.paged_stats()["miss_tokens"] == before
        assert (await client.delete("/v1/sessions/a")).is_success
        assert (await client.post("/v1/sessions", json=wanted)).is_success
        await client.delete("/v1/sessions/b")


async def test_cache_salts_separate_sessions(tiny_app):
    ids = list(range(5, 90))
    body = {"name": "a", "tokens": ids, "cache_salt": "one"}
    assert (await tiny_app.post("/v1/sessions", json=body)).is_success
    assert (await tiny_app.get("/v1/sessions")).json()["data"] == []
    assert (await tiny_app.get("/v1/sessions/a")).status_code == 404
    with_salt = {"params": {"cache_salt": "one"}}
    assert len((await tiny_app.get("/v1/sessions", **with_salt)).json()["data"]) == 1
    restored = await tiny_app.post("/v1/sessions/a/restore", json={"cache_salt": "one"})
    assert restored.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert (await tiny_app.delete("/v1/sessions/a", **with_salt)).json()["blocks_unpinned"] > 0


async def test_a_session_is_refused_without_pin_capacity_and_disk(tiny_app, tiny_engine):
    size = tiny_engine.config.block_size
    blocks = tiny_engine.paged_stats()["num_blocks"] // 4 + 1  # half of the pool can be pinned
    first, second = ([place] * blocks * size for place in (5, 6))
    assert (await tiny_app.post("/v1/sessions", json={"name": "a", "tokens": first})).is_success
    refused = await tiny_app.post("/v1/sessions", json={"name": "b", "tokens": second})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "capacity_exceeded")
    assert "set --disk-cache-dir" in refused.json()["error"]["message"]
    assert (await tiny_app.get("/v1/sessions")).json()["sessions"] == 1
    assert tiny_engine.paged_stats()["pinned_blocks"] == blocks
    await tiny_app.delete("/v1/sessions/a")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tokens": [5] * 40}, "name"),
        ({"name": "", "tokens": [5] * 40}, "name"),
        ({"name": "../a", "tokens": [5] * 40}, "name"),
        ({"name": "a/b", "tokens": [5] * 40}, "name"),
        ({"name": "a\n", "tokens": [5] * 40}, "name"),
        ({"name": "x" * 129, "tokens": [5] * 40}, "name"),
        ({"name": "a"}, "messages"),
        ({"name": "a", "tokens": [5] * 40, "text": "x"}, "tokens"),
        ({"name": "a", "tokens": [5]}, "tokens"),
        ({"name": "a", "text": "x"}, "messages"),
        ({"name": "a", "tokens": [10**6] * 40}, "tokens"),
        ({"name": "a", "tokens": [5] * 40, "ttl": 0}, "ttl"),
        ({"name": "a", "tokens": [5] * 40, "pin": False}, "pin"),
        ({"name": "a", "tokens": [5] * 40, "tools": []}, "tools"),
        ({"name": "a", "tokens": [5] * 40, "temperature": 1}, "temperature"),
    ],
)
async def test_invalid_bodies_are_refused_by_name(tiny_app, body, param):
    answer = await tiny_app.post("/v1/sessions", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert (await tiny_app.get("/v1/sessions")).json()["sessions"] == 0


async def test_max_sessions_0_refuses_sessions(tiny_engine):
    async with of_key(tiny_engine, max_sessions=0) as client:
        refused = await client.post("/v1/sessions", json={"name": "a", "tokens": [5] * 40})
        assert "max_sessions=0" in refused.json()["error"]["message"]


@contextmanager
def _served(options, model=DEMO):
    """Start a new engine and a server; yield the engine and a client."""
    with (
        CPUPagedEngine.from_pretrained(model, **options) as engine,
        serving(engine) as server,
        server.client() as client,
    ):
        yield engine, client


@pytest.fixture
def directory(tmp_path):
    return {**ENGINE_OPTIONS, "disk_cache_dir": tmp_path / "blocks"}


def test_a_session_survives_a_restart(directory):
    with _served(directory) as (engine, client):
        body = {"name": "mine", "messages": MESSAGES}
        saved = client.post("/v1/sessions", json=body).json()
        assert saved["stored"] == "disk"
        expected = client.post(
            "/v1/chat/completions", json={"messages": MORE, "max_tokens": 8, "temperature": 0}
        ).json()["choices"][0]["message"]
    with _served(directory) as (engine, client):
        [listed] = client.get("/v1/sessions").json()["data"]
        assert listed == {name: saved[name] for name in listed}
        assert client.get("/v1/sessions/mine").json()["messages"] == MESSAGES
        restored = client.post("/v1/sessions/mine/restore").json()
        size = engine.config.block_size
        assert restored["kvboost"]["hit_tokens"]["disk"] >= saved["tokens"] // size * size - size
        assert restored["pinned"]
        assert engine.paged_stats()["pinned_blocks"] == saved["tokens"] // size
        answer = client.post(
            "/v1/chat/completions", json={"messages": MORE, "max_tokens": 8, "temperature": 0}
        ).json()
        assert answer["choices"][0]["message"] == expected
        hits = answer["kvboost"]["hit_tokens"]
        assert hits["pool"] >= saved["tokens"] // size * size - 1


def test_blocks_and_sessions_share_a_directory_below_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home").mkdir()
    with _served({**ENGINE_OPTIONS, "disk_cache_dir": "~/kv"}) as (_, client):
        saved = client.post("/v1/sessions", json={"name": "mine", "messages": MESSAGES})
        assert saved.json()["stored"] == "disk"
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    names = {path.name for path in (tmp_path / "home" / "kv").iterdir()}
    assert "sessions" in names
    assert any(map(is_space, names))


def test_a_session_that_cannot_be_pinned_is_saved_on_disk(directory):
    options = {**directory, "max_pinned_blocks": 0}
    with _served(options) as (_, client):
        for more in ({}, {"pin": False}):
            body = {"name": "mine", "messages": MESSAGES, **more}
            saved = client.post("/v1/sessions", json=body).json()
            assert (saved["stored"], saved["pinned"]) == ("disk", False)
        assert client.get("/v1/sessions").json()["sessions"] == 1


async def test_llama_cpp_slot_save_restore_and_erase(tiny_app, tiny_engine):
    """The scenario is that of llama.cpp's own server test: save slot 1, restore into slot 0, erase."""
    ids = list(range(5, 90))
    size = tiny_engine.config.block_size

    async def completed(slot, prompt=ids):
        body = {"prompt": prompt, "n_predict": 4, "temperature": 0, "id_slot": slot}
        return (await tiny_app.post("/completion", json=body)).json()

    async def act(slot, action, **body):
        return await tiny_app.post(f"/slots/{slot}?action={action}", json=body)

    answer = await completed(1)
    assert (await act(0, "erase")).json() == {"id_slot": 0, "n_erased": 0}
    saved = (await act(1, "save", filename="slot.bin")).json()
    assert saved.keys() == {"id_slot", "filename", "n_saved", "n_written", "timings"}
    assert (saved["id_slot"], saved["filename"]) == (1, "slot.bin")
    assert saved["n_saved"] == len(ids) + 3  # the KV of the last token was not computed
    listed = (await tiny_app.get("/v1/sessions")).json()["data"]
    assert [(one["name"], one["bytes"]) for one in listed] == [("slot.bin", saved["n_written"])]
    await flood(tiny_app, tiny_engine)
    restored = (await act(0, "restore", filename="slot.bin")).json()
    assert restored.keys() == {"id_slot", "filename", "n_restored", "n_read", "timings"}
    assert (restored["n_restored"], restored["n_read"]) == (saved["n_saved"], saved["n_written"])
    again = await completed(0)
    assert again["content"] == answer["content"]
    assert again["tokens_cached"] >= (len(ids) - 1) // size * size
    assert (await act(0, "erase")).json() == {"id_slot": 0, "n_erased": len(ids) + 3}
    assert (await act(0, "erase")).json() == {"id_slot": 0, "n_erased": 0}
    await tiny_app.delete("/v1/sessions/slot.bin")


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/slots/0?action=save", {}, "filename is missing"),
        ("/slots/0?action=restore", {"filename": "none"}, "there is no session 'none'"),
        ("/slots/1?action=save", {"filename": "a"}, "slot 1 holds no conversation"),
        ("/slots/4000?action=save", {"filename": "a"}, "id_slot=4000 does not exist"),
        ("/slots/0?action=save", {"filename": "../a"}, "filename"),
        ("/slots/0?action=burn", {}, "action"),
        ("/slots/0", {}, "action"),
        ("/slots/-1?action=save", {"filename": "a"}, "id_slot"),
    ],
)
async def test_invalid_slot_actions_are_refused_in_llama_cpps_format(tiny_app, path, body, said):
    answer = await tiny_app.post(path, json=body)
    assert answer.status_code == (404 if "none" in said else 400), answer.text
    error = answer.json()["error"]
    assert error.keys() == {"code", "message", "type"}
    assert said in error["message"]


async def test_slots_need_the_request_history(tiny_engine):
    async with of_key(tiny_engine, request_history=0) as client:
        answer = await client.post("/slots/0?action=save", json={"filename": "a"})
        assert (
            "--request-history 0; save messages or token ids" in answer.json()["error"]["message"]
        )


@pytest.mark.parametrize("family", ["lfm2", pytest.param("qwen3_5_text", marks=pytest.mark.full)])
def test_a_hybrid_models_session_survives_eviction_and_a_restart(family, tmp_path):
    """The recurrent state is found with its blocks, and the output equals that of an empty cache."""
    model = save_tiny_model(family, tmp_path / "model")
    options = {"num_blocks": 64, "num_threads": 1, "dtype": "float32"}
    ids = random_ids(100, 3, 3, 250)
    longer = [*ids, *random_ids(20, 4, 3, 250)]
    body = {"prompt": longer, "max_tokens": 8, "temperature": 0, "ignore_eos": True}

    def told(client):
        answer = client.post("/v1/completions", json={**body, "return_token_ids": True}).json()
        hits = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return answer["choices"][0]["token_ids"], hits

    with _served(options, model) as (engine, client):
        expected, none = told(client)
        assert none == 0
    with _served(options, model) as (engine, client):
        saved = client.post("/v1/sessions", json={"name": "mine", "tokens": ids}).json()
        spec = engine.runner_info.kv_spec
        size = engine.config.block_size
        assert saved["bytes"] > 6 * spec.bytes_per_block + spec.bytes_per_state
        for number in range(4):
            other = {"prompt": random_ids(400, 10 + number, 3, 250), "max_tokens": 1}
            assert client.post("/v1/completions", json=other).is_success
        found, hits = told(client)
        assert (found, hits) == (expected, len(ids) // size * size)
    stored = {**options, "disk_cache_dir": tmp_path / "blocks"}
    with _served(stored, model) as (engine, client):
        assert client.post("/v1/sessions", json={"name": "mine", "tokens": ids}).is_success
    with _served(stored, model) as (engine, client):
        restored = client.post("/v1/sessions/mine/restore").json()
        assert restored["kvboost"]["hit_tokens"]["disk"] > 0
        found, hits = told(client)
        assert (found, hits) == (expected, len(ids) // size * size)
