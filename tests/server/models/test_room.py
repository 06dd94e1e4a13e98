"""Tests of the choice of models to unload when another one needs memory. The budget holds two of
the equally large models.
"""

import asyncio
import time

import pytest

from helpers.server.model_budget import SIZE, Room, until
from kvboost_edge.errors import CapacityError, KVBoostError
from kvboost_edge.server.models import loader

pytestmark = pytest.mark.usefixtures("all_of_one_size")


async def test_the_least_recently_used_model_is_unloaded(room):
    for name, loaded in (
        ("b", "ab"),
        ("a", "ab"),
        ("c", "ac"),
        ("b", "bc"),
        ("c", "bc"),
        ("a", "ac"),
    ):
        assert (await room.ask(name)).status_code == 200
        assert room.loaded == loaded
        assert room.kv.models.loader.taken == 2 * SIZE
    assert room.kv.models.first.unloads_at is None, (
        "without keep_alive, a model must be unloaded only for another one"
    )


async def test_keep_alive_counts_from_the_last_request(room):
    await room.ask("b")
    model = room.model("b")
    model.keep_alive = 60.0
    model.loaded_at = model.loaded_at - 1000.0
    assert model.unloads_at is not None
    assert 0 < model.unloads_at - time.monotonic() <= 60


async def test_a_failed_request_releases_its_model(room):
    both = {"model": "a", "content": "x", "messages": [{"role": "user", "content": "x"}]}
    assert (await room.client.post("/tokenize", json=both)).status_code == 400
    assert room.model("a").in_use == 0


async def test_a_model_in_use_is_not_unloaded(room):
    await room.ask("b")
    room.model("a").in_use += 1
    assert (await room.ask("c")).status_code == 200
    assert room.loaded == "ac"
    room.model("a").in_use -= 1


async def test_no_model_is_unloaded_if_that_frees_too_little(room):
    """Both models would have to be unloaded and one is in use. The idle one stays loaded until both
    can be unloaded.
    """
    await room.ask("b")
    room.model("c").planned = 2 * SIZE
    room.model("a").in_use += 1
    waiting = asyncio.ensure_future(room.ask("c"))
    await until(lambda: "in use" in room.model("c").waits_for)
    assert room.loaded == "ab"
    told = (await room.client.get("/v1/stats")).json()["models"]
    assert (told["waiting"], told["data"][0]["in_use"], told["data"][2]["state"]) == (
        1,
        1,
        "loading",
    )
    assert "are in use: a" in told["data"][2]["waits_for"]
    room.model("a").in_use -= 1
    room.kv.models.loader.released(room.model("a"))
    assert (await waiting).status_code == 200
    assert room.loaded == "c"


async def test_a_model_stays_loaded_at_least_as_long_as_its_load_took(room):
    """Otherwise two models that do not fit together would be loaded in alternation."""
    await room.ask("b")
    for name in ("a", "b"):
        room.model(name).loaded_at = asyncio.get_running_loop().time()
        room.model(name).load_seconds = 1000.0
    waiting = asyncio.ensure_future(room.ask("c"))
    await until(lambda: "loaded recently" in room.model("c").waits_for)
    assert room.loaded == "ab"
    room.model("a").load_seconds = 0.0
    room.model("b").load_seconds = 0.0
    room.kv.models.loader.released(room.model("a"))
    assert (await waiting).status_code == 200


async def test_a_failed_load_takes_no_budget(room):
    room.wrong["b"] = KVBoostError("its file is damaged")
    assert (await room.ask("b")).status_code == 503
    assert room.kv.models.loader.taken == SIZE
    assert (await room.ask("c")).status_code == 200
    assert room.loaded == "ac"


async def test_idle_models_are_unloaded_if_memory_runs_out(room):
    room.wrong["b"] = CapacityError("weights exceed memory")
    assert (await room.ask("b")).status_code == 200
    assert room.loaded == "b"
    room.model("b").in_use += 1
    room.wrong["c"] = CapacityError("weights exceed memory")
    refused = await room.ask("c")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_does_not_fit")
    assert "weights exceed memory" in refused.json()["error"]["message"]
    room.model("b").in_use -= 1


async def test_a_model_larger_than_planned_unloads_another(room, monkeypatch):
    monkeypatch.setattr(loader, "reserved_bytes", lambda engine: 2 * SIZE)
    assert (await room.ask("b")).status_code == 200
    await until(lambda: room.loaded == "b")
    assert room.model("b").planned == 2 * SIZE


async def test_an_unexpected_load_error_is_logged_and_not_shown(room, caplog):
    room.wrong["b"] = RuntimeError("the secret of a library")
    refused = await room.ask("b")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_failed")
    assert "secret" not in refused.text
    assert "RuntimeError" in [
        vars(one)["facts"].get("error") for one in caplog.records if "facts" in vars(one)
    ]
    assert (await room.ask("a")).status_code == 200


async def test_an_idle_model_stays_loaded_until_its_pins_expire(monkeypatch):
    monkeypatch.setattr(loader, "_PINNED_SECONDS", 0.02)
    room = Room(keep_alive=0.02)
    try:
        model = room.model("a")
        started = time.monotonic()
        pin = {"text": "These words stay here for a while. " * 2, "pin": True, "ttl": 0.5}
        assert (await room.client.post("/v1/warm", json=pin)).status_code == 200
        engine = model.state.engine if model.state else None
        assert engine is not None
        seen = []
        await until(
            lambda: model.state is None or seen.append(engine.paged_stats()["pinned_blocks"])
        )
        assert seen[0] > 0
        assert time.monotonic() - started >= pin["ttl"]
        await until(lambda: model.phase == "not_loaded")
    finally:
        await room.close()
