"""Tests of models that are unloaded while in use, of engines that stop, and of loads that outlast
the server.
"""

import asyncio
import threading
import time

import pytest

from helpers.server.model_budget import Room, until
from kvboost_edge.errors import CacheCorruption
from kvboost_edge.server.models import loader
from kvboost_edge.server.work import threads
from kvboost_edge.server.work.threads import in_thread

pytestmark = pytest.mark.usefixtures("all_of_one_size")


def held(engine, name):
    """Make a method of the engine wait.

    Returns:
        An event that is set when the method is called, and an event that lets it continue.
    """
    called = threading.Event()
    free = threading.Event()
    real = getattr(engine, name)

    def waiting(*arguments):
        called.set()
        assert free.wait(60)
        return real(*arguments)

    setattr(engine, name, waiting)
    return called, free


async def looking(room, name, method, ask):
    """Return the response to a request that reads from a model while it is unloaded."""
    model = room.model(name)
    assert model.state is not None
    called, free = held(model.state.engine, method)
    looks = asyncio.ensure_future(ask())
    await until(called.is_set)
    leaving = asyncio.ensure_future(room.kv.models.loader._unload(model, "a test"))
    await until(lambda: model.phase == "unloading")
    assert not leaving.done()
    free.set()
    answer = await looks
    await leaving
    assert model.phase == "not_loaded"
    return answer


@pytest.mark.parametrize(
    ("path", "method"),
    [("/v1/stats", "cache_stats"), ("/v1/blocks", "block_details"), ("/slots", "num_running")],
)
async def test_requests_during_an_unload_are_answered(room, path, method):
    assert (await room.ask("b")).status_code == 200
    answer = await looking(room, "b", method, lambda: room.client.get(path, params={"model": "b"}))
    assert answer.status_code == 200, answer.text
    gone = await room.client.get(path, params={"model": "b"})
    assert (gone.status_code, gone.headers["retry-after"]) == (503, "1")
    assert "is not loaded" in gone.text


async def test_a_reset_reaches_all_models_during_an_unload(room):
    """The reset of the first model is slow, and the second model is unloaded meanwhile."""
    assert (await room.ask("b")).status_code == 200
    text = {"model": "b", "prompt": "Words that stay in the pool. " * 4, "max_tokens": 1}
    assert (await room.client.post("/v1/completions", json=text)).status_code == 200
    first = room.model("a")
    second = room.model("b")
    assert first.state is not None
    called, free = held(first.state.engine, "reset_cache")
    reset = asyncio.ensure_future(room.client.post("/cache/reset"))
    await until(called.is_set)
    leaving = asyncio.ensure_future(room.kv.models.loader._unload(second, "a test"))
    await until(lambda: second.phase == "unloading")
    free.set()
    answer = await reset
    assert (answer.status_code, answer.json()["blocks_dropped"] > 4) == (200, True), answer.text
    await leaving


async def test_metrics_during_an_unload_show_a_live_engine(room):
    assert (await room.ask("b")).status_code == 200
    answer = await looking(room, "b", "paged_stats", lambda: room.client.get("/metrics"))
    assert answer.status_code == 200
    assert 'kvboost:engine_alive{model_name="b"} 0.0' not in answer.text


async def test_a_cancelled_request_does_not_block_an_unload(room):
    assert (await room.ask("b")).status_code == 200
    model = room.model("b")
    assert model.state is not None
    called, free = held(model.state.engine, "cache_stats")
    looks = asyncio.ensure_future(room.client.get("/v1/stats", params={"model": "b"}))
    await until(called.is_set)
    looks.cancel()
    with pytest.raises(asyncio.CancelledError):
        await looks
    await room.kv.models.loader._unload(model, "a test")
    assert model.phase == "not_loaded"
    free.set()


def stop(engine):
    """Make the engine's thread stop at the next request."""

    def broken(*arguments):
        raise CacheCorruption("gone")

    engine._core._take = broken


async def test_a_model_with_a_stopped_engine_is_loaded_again(room):
    """Restarting the server instead would also stop the other models."""
    body = {"model": "b", "prompt": "Hello", "max_tokens": 2, "temperature": 0}
    answer = (await room.client.post("/v1/completions", json=body)).json()["choices"]
    stop(room.made[-1])
    failed = await room.client.post("/v1/completions", json=body)
    assert (failed.status_code, failed.json()["error"]["code"]) == (500, "engine_stopped")
    for path in ("/health", "/ready"):
        assert (await room.client.get(path)).status_code == 200
    looked = await room.client.get("/v1/stats", params={"model": "b"})
    assert (looked.status_code, looked.json()["error"]["code"]) == (503, "engine_stopped")
    healed = await room.client.post("/v1/completions", json=body)
    assert (healed.status_code, healed.json()["choices"]) == (200, answer)
    assert (len(room.made), room.model("b").num_loads) == (2, 2)
    assert room.kv.models.loader.taken == 200


async def test_a_reset_reaches_other_models_if_an_engine_stopped(room):
    text = {"prompt": "Words that stay in the pool. " * 4, "max_tokens": 1}
    for name in "ab":
        assert (
            await room.client.post("/v1/completions", json={"model": name, **text})
        ).status_code == 200
    stop(room.made[-1])
    assert (
        await room.client.post("/v1/completions", json={"model": "b", **text})
    ).status_code == 500
    answer = await room.client.post("/cache/reset")
    assert (answer.status_code, answer.json()["blocks_dropped"] > 4) == (200, True), answer.text
    assert (await room.ask("b")).status_code == 200


async def test_a_model_counts_in_the_budget_until_its_unload_ends(
    room,
):
    assert (await room.ask("b")).status_code == 200
    model = room.model("b")
    called, free = held(room.made[-1], "close")
    leaving = asyncio.ensure_future(room.kv.models.loader._unload(model, "a test"))
    await until(called.is_set)
    await room.kv.models.loader.begin(model)
    assert (model.phase, model.num_bytes, model.loading) == ("unloading", 100, None)
    free.set()
    await leaving
    assert (model.phase, model.num_bytes) == ("not_loaded", 0)


async def test_cancelling_a_load_does_not_cancel_the_unload_it_waits_for(
    all_of_one_size, monkeypatch
):
    monkeypatch.setattr(loader, "_ENDING_SECONDS", 0.05)
    room = Room()
    assert (await room.ask("b")).status_code == 200
    model = room.model("b")
    engine = room.made[-1]
    called, free = held(engine, "cache_stats")
    looks = asyncio.ensure_future(room.client.get("/v1/stats", params={"model": "b"}))
    await until(called.is_set)
    leaving = asyncio.ensure_future(room.kv.models.loader._unload(model, "a test"))
    await until(lambda: model.phase == "unloading")
    waiting = asyncio.ensure_future(room.ask("b"))
    await until(lambda: model.waits_for == "it is being unloaded")
    closing = asyncio.ensure_future(room.kv.models.close())
    await until(lambda: model.loading is None)
    free.set()
    await asyncio.gather(leaving, closing)
    assert (await waiting).json()["error"]["code"] == "shutting_down"
    assert (await looks).status_code == 200
    assert not engine.is_alive(), "the engine must be closed"
    assert room.kv.models.loader.left is None, "no thread may load a model"
    await room.close()


async def test_an_engine_error_affects_its_own_model_only(room):
    body = {"prompt": "Hello", "max_tokens": 2}
    assert (await room.ask("b")).status_code == 200
    stop(room.made[-1])
    assert (
        await room.client.post("/v1/completions", json={"model": "b", **body})
    ).status_code == 500
    first = room.model("a").state
    assert first is not None

    def fails(*arguments, **options):
        raise RuntimeError("a fault that is not the engine's")

    first.engine.submit = fails
    failed = await room.client.post("/v1/completions", json={"model": "a", **body})
    assert (failed.status_code, failed.json()["error"]["code"]) == (500, "internal_error")


async def test_a_load_that_hangs_is_abandoned(all_of_one_size, monkeypatch, caplog):
    monkeypatch.setattr(loader, "_ENDING_SECONDS", 0.05)
    room = Room()
    free = room.held["b"] = threading.Event()
    waiting = [asyncio.ensure_future(room.ask(name)) for name in "bc"]
    await until(lambda: room.kv.models.num_waiting == 2)
    await room.kv.models.close()
    assert [(await one).json()["error"]["code"] for one in waiting] == ["shutting_down"] * 2
    assert room.kv.models.loader.left is room.model("b")
    assert (room.model("b").phase, room.model("b").num_bytes) == ("not_loaded", 0)
    assert any(vars(one).get("facts", {}).get("model") == "b" for one in caplog.records)
    free.set()
    await until(lambda: room.made and not room.made[0].is_alive())  # unused, so it was closed
    await room.close()


async def test_an_unclaimed_result_is_released():
    free = threading.Event()
    given = list[str]()

    def work():
        assert free.wait(60)
        return "result"

    task = asyncio.ensure_future(in_thread(work, unwanted=given.append))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    free.set()
    await until(lambda: given)
    assert given == ["result"]
    assert await in_thread(work, unwanted=given.append) == "result"
    assert given == ["result"], "a result that is awaited must not be released"


async def test_a_result_claimed_late_is_not_released(monkeypatch):
    monkeypatch.setattr(threads, "_LOOK_SECONDS", 0.001)
    given = list[str]()
    finished = threading.Event()

    def work():
        finished.set()
        return "result"

    task = asyncio.ensure_future(in_thread(work, unwanted=given.append))
    await asyncio.sleep(0)
    assert finished.wait(60)
    time.sleep(0.1)  # keeps the event loop busy for many checks
    assert await task == "result"
    assert given == []


def test_a_result_after_the_end_of_the_loop_is_released():
    free = threading.Event()
    given = threading.Event()

    async def leave():
        task = asyncio.ensure_future(
            in_thread(lambda: free.wait(60), unwanted=lambda result: given.set())
        )
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(leave())
    free.set()
    assert given.wait(60)


async def test_queue_limits_are_per_model(all_of_one_size):
    room = Room(budget=3.5, max_batch_size=1, max_queue_size=0)
    body = {"prompt": "Hello", "max_tokens": 2}

    async def ask(name):
        return await room.client.post("/v1/completions", json={"model": name, **body})

    assert [(await ask(name)).status_code for name in "abc"] == [200] * 3
    admissions = [
        model.state.admission for model in map(room.model, "abc") if model.state is not None
    ]
    for one in admissions[:2]:
        one.enter(None, 1, 1)
    assert (await ask("c")).status_code == 200
    assert [one.refused for one in admissions] == [0, 0, 0]
    refused = await ask("a")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
    assert [one.refused for one in admissions] == [1, 0, 0]
    admissions[2].enter(None, 1, 1)
    assert (await ask("c")).status_code == 503
    # The body was not read, so its model is unknown.
    assert ([one.refused for one in admissions], room.kv.models.num_refused) == ([1, 0, 0], 1)
    for one in admissions:
        one.leave(None, 1, 1)
    await room.close()
