"""Tests of several models in one server, loaded on demand and unloaded when idle."""

import concurrent.futures
import gc
import shutil
import threading
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import psutil
import pytest

from helpers.server.live_servers import serving, wait_until
from helpers.server.served_models import ASKED, CountedSource
from kvboost_edge.errors import CapacityError, ConfigError
from kvboost_edge.host.file_memo import cache_directory
from kvboost_edge.server.models import loader


@contextmanager
def both(first, second, **settings):
    """Serve "a", which is loaded, and "b" (or "bee"), which is not."""
    with (
        first.open() as engine,
        serving(
            engine,
            source=first.source,
            others=[(("b", "bee"), second.source)],
            **{"model_name": "a", **settings},
        ) as server,
    ):
        yield server


def ask(server, name, **more):
    with server.client() as client:
        return client.post(
            "/v1/completions", json={**ASKED, **({"model": name} if name else {}), **more}
        )


def states(server):
    with server.client() as client:
        return {one["id"]: one["state"] for one in client.get("/v1/models").json()["data"]}


def test_a_model_is_loaded_on_its_first_request(first, second, alone):
    with both(first, second) as server:
        assert states(server) == {"a": "loaded", "b": "not_loaded", "bee": "not_loaded"}
        assert ask(server, None).json()["choices"][0] == alone["a"]
        assert (second.loads, first.loads) == (0, 0)
        answer = ask(server, "bee").json()
        assert (answer["model"], answer["choices"][0]) == ("b", alone["b"])
        assert states(server) == {"a": "loaded", "b": "loaded", "bee": "loaded"}
        assert ask(server, "b").json()["choices"][0] == alone["b"]
        assert ask(server, "a").json()["choices"][0] == alone["a"]
        assert (second.loads, first.loads) == (1, 0)
        unknown = ask(server, "c")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        assert "'a', 'b'" in unknown.json()["error"]["message"]


def test_concurrent_requests_to_two_models_equal_single_ones(first, second, alone):
    """Twelve clients use a loaded model and one that is not loaded yet, which is loaded only once."""
    with both(first, second) as server, concurrent.futures.ThreadPoolExecutor(12) as pool:
        names = ["a", "b", "bee"] * 8
        answers = list(pool.map(lambda name: ask(server, name), names))
        assert {answer.status_code for answer in answers} == {200}
        for name, answer in zip(names, answers, strict=True):
            assert answer.json()["choices"][0] == alone[name[0]]
        assert second.loads == 1


def test_an_idle_model_is_unloaded_and_its_prompts_are_restored_from_disk(
    first, second, alone, tmp_path
):
    second.options["disk_cache_dir"] = tmp_path / "blocks"
    with both(first, second, keep_alive=0.2) as server:
        with serving_threads() as started:
            assert ask(server, "b").json()["kvboost"]["hit_tokens"].get("disk", 0) == 0
            served = server.kv.models.find("b")
            wait_until(lambda: served.phase == "not_loaded", "the idle model to be unloaded")
            wait_until(lambda: not started(), "its threads to end")
        assert served.num_bytes == 0
        assert states(server)["b"] == "not_loaded"
        again = ask(server, "b").json()
        assert again["kvboost"]["hit_tokens"]["disk"] > 64
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 64
        assert again["choices"][0]["text"] == alone["b"]["text"]
        assert again["choices"][0]["logprobs"] == alone["b"]["logprobs"]
        # The first model is unloaded too if a duration was set.
        wait_until(
            lambda: server.kv.models.first.phase == "not_loaded", "the first one to be unloaded"
        )
        assert ask(server, None).json()["choices"][0] == alone["a"]
        assert (first.loads, second.loads) == (1, 2)


@contextmanager
def serving_threads():
    """Yield a function that returns the running threads of engines and loads that started in the
    block.
    """
    before = set(threading.enumerate())
    yield lambda: [
        one
        for one in threading.enumerate()
        if one not in before and one.name.startswith("kvboost") and one.is_alive()
    ]


def test_waiting_for_memory_times_out_with_a_reason(first, second):
    budget = int(1.5 * max(first.plan(), second.plan()))
    with both(first, second, budget=budget, request_timeout=1) as server:
        served = server.kv.models.first
        server.kv.models.find("b").planned = second.plan()
        served.in_use += 1  # simulates a request that outlasts this one's deadline
        refused = ask(server, "b")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_loading")
        assert "MB for all models (--max-model-bytes)" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) > 0
        assert second.loads == 0
        wait_until(lambda: states(server)["b"] == "not_loaded", "the loading to be given up")
        served.in_use -= 1
        wait_until(lambda: ask(server, "b").status_code == 200, "the model to be loaded")


@pytest.mark.parametrize(("spare", "left"), [(10, "loaded"), (-10, "not_loaded")])
def test_measured_overhead_counts_in_the_memory_budget(first, second, monkeypatch, spare, left):
    """Each model has an overhead of 50 MB. With 10 MB less than both need, the first model is
    unloaded, although the weights and pools of both would fit.
    """
    monkeypatch.setattr(loader.Loader, "_measured_overhead", lambda *_: 50_000_000)
    with first.open() as engine:
        taken = loader.reserved_bytes(engine) + second.plan()
    bound = 1_000_000 + taken + (100 + spare) * 1_000_000
    with both(
        first, second, process=loader.ProcessMemory(bound, 1_000_000), keep_alive=60
    ) as server:
        served = server.kv.models.first
        assert server.kv.models.loader.budget == taken + (50 + spare) * 1_000_000
        served.loaded_at -= 1000  # loaded long enough to be unloaded
        assert ask(server, "b").status_code == 200
        assert states(server) == {"a": left, "b": "loaded", "bee": "loaded"}
        assert served.overhead == (50_000_000 if left == "loaded" else 0)


def test_overhead_is_measured_growth_plus_reserved_buffers(first, second, monkeypatch):
    engine = SimpleNamespace(
        runner_info=SimpleNamespace(name="native"),
        paged_stats=lambda: {"process_rss_bytes": 900, "other_bytes": 500, "buffer_bytes": 30},
    )
    other = SimpleNamespace(
        overhead=70,
        state=SimpleNamespace(
            engine=SimpleNamespace(
                paged_stats=lambda: {
                    "process_rss_bytes": 900,
                    "other_bytes": 700,
                    "buffer_bytes": 30,
                }
            )
        ),
    )
    monkeypatch.setattr(loader, "process_rss", lambda: 900)
    served = SimpleNamespace(name="b", overhead=0, state=None)
    found = loader.Loader([served, other], None, 10_000, loader.ProcessMemory(5000, 100))
    assert found._measured_overhead(served, engine) == 900 - 400 - 200 - 100 - 70 + 30
    assert found.budget == 5000 - 100 - 70
    engine.runner_info.name = "torch"
    with pytest.raises(ConfigError, match="--max-memory needs the native runner"):
        found._measured_overhead(served, engine)


def test_a_model_that_does_not_fit_beside_a_permanent_one_is_refused(first, second, monkeypatch):
    """The first engine checks its own limit, and the loader keeps others within it."""
    monkeypatch.setattr(loader.Loader, "_measured_overhead", lambda *_: 50_000_000)
    first.options["max_memory"] = 1 << 40
    second.options["num_blocks"] = 8
    with first.open() as engine:
        taken = loader.reserved_bytes(engine)
        process = loader.ProcessMemory(1_000_000 + taken, 1_000_000)
        assert second.plan() < taken
        with serving(
            engine, others=[(("b",), second.source)], process=process, model_name="a"
        ) as server:
            assert ask(server, "a").status_code == 200
            refused = ask(server, "b")
            assert (refused.status_code, second.loads) == (503, 0)
            error = refused.json()["error"]
            assert error["code"] == "model_does_not_fit"
            assert (
                "'a' stays loaded and leaves 0.00 MB for others (--max-memory)"
                in (error["message"])
            )


def test_an_engine_that_checks_max_memory_itself_is_loaded_again(first, monkeypatch):
    """It fits by its own measure, although the server's is larger."""
    monkeypatch.setattr(loader.Loader, "_measured_overhead", lambda *_: 50_000_000)
    first.options["max_memory"] = 1 << 40
    with first.open() as engine:
        process = loader.ProcessMemory(1_000_000 + loader.reserved_bytes(engine), 1_000_000)
        with serving(
            engine, source=first.source, process=process, model_name="a", keep_alive=0.2
        ) as server:
            served = server.kv.models.first
            wait_until(lambda: served.phase == "not_loaded", "the idle model to be unloaded")
            assert ask(server, "a").status_code == 200
            assert first.loads == 1


async def test_a_model_larger_than_the_process_may_be_is_refused_with_the_calculation():
    process = loader.ProcessMemory(1_500_000_000, 400_000_000)
    found = loader.Loader([], None, 1_100_000_000, process)
    served = SimpleNamespace(name="b", overhead=0, state=None)
    with pytest.raises(CapacityError) as caught:
        await found._make_room(served, 1_200_000_000, 120_000_000)
    assert (
        "take 1.20 GB, but only 0.98 GB of the 1.50 GB in --max-memory remain after 0.52 GB of "
        "overhead; give at least 1720MB"
    ) in str(caught.value)


def test_a_model_that_never_fits_is_refused_with_the_calculation(first, second):
    with first.open() as probe:
        budget = loader.reserved_bytes(probe) + 1
    second.options["num_blocks"] = 1000
    with both(first, second, budget=budget) as server:
        for _ in range(2):
            refused = ask(server, "b")
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (503, "model_does_not_fit")
            assert f"{second.plan() / 1e6:.2f} MB" in error["message"]
            assert f"{budget / 1e6:.2f} MB" in error["message"]
            assert int(refused.headers["retry-after"]) > 0
        assert (second.loads, ask(server, "a").status_code) == (0, 200)


def test_a_damaged_model_returns_503_with_a_reason_until_repaired(
    first, second, tmp_path, monkeypatch
):
    broken = CountedSource(shutil.copytree(second.path, tmp_path / "broken"))
    weights = broken.path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with both(first, broken) as server:
        refused = ask(server, "b")
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (503, "model_failed")
        assert "model.safetensors" in error["message"]
        assert str(tmp_path) not in refused.text
        assert int(refused.headers["retry-after"]) > 0
        shutil.copy(second.path / "model.safetensors", weights)
        assert ask(server, "b").json()["error"]["message"] == error["message"], (
            "the model must not be loaded again before the retry time"
        )
        with server.client() as client:
            listed = client.get("/v1/models/b").json()
        assert (listed["state"], listed["failure"]) == ("not_loaded", error["message"])
        assert ask(server, "a").status_code == 200
        monkeypatch.setattr(loader, "_FAILED_SECONDS", 0.0)
        server.kv.models.find("b").refusal = None
        assert ask(server, "b").status_code == 200


def test_the_queue_for_a_loading_model_is_bounded(first, second):
    second.hold()
    with (
        both(first, second, max_queue_size=2) as server,
        concurrent.futures.ThreadPoolExecutor(2) as pool,
    ):
        waiting = [pool.submit(ask, server, "b") for _ in range(2)]
        wait_until(lambda: server.kv.models.num_waiting == 2, "both to wait")
        refused = ask(server, "b")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
        assert ask(server, "a").status_code == 200, "the other model must still answer"
        second.release()
        assert [one.result().status_code for one in waiting] == [200, 200]
        assert second.loads == 1


def test_a_disconnect_leaves_the_load_queue(first, second):
    second.hold()
    with both(first, second) as server:
        sock = server.connect()
        sock.sendall(server.request_bytes("/v1/completions", {"model": "b", **ASKED}))
        wait_until(lambda: server.kv.models.num_waiting == 1, "the request to wait")
        sock.close()
        wait_until(lambda: server.kv.models.num_waiting == 0, "the end of the wait")
        wait_until(lambda: not server.kv.models.find("b").in_use, "the lease to end")
        second.release()
        assert ask(server, "b").status_code == 200
        assert second.loads == 1


def test_a_shutdown_ends_loads_and_their_queue(first, second):
    second.hold()
    with (
        serving_threads() as started,
        both(first, second, drain_seconds=20) as server,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        waiting = pool.submit(ask, server, "b")
        wait_until(lambda: second.loads == 1, "the loading to begin")
        server.server.drain()
        refused = waiting.result()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        second.release()
    wait_until(lambda: not started(), "the threads to end")


@pytest.mark.parametrize("name", ["a", "b"])
def test_stats_of_several_models_report_one_process_memory(first, second, name):
    with both(first, second) as server:
        assert ask(server, "b").status_code == 200
        with server.client() as client:
            stats = client.get("/v1/stats", params={"model": name}).json()
            assert stats["model"] == name
            assert stats["pool"]["num_blocks"] == 64
            told = stats["models"]
            assert [one["id"] for one in told["data"]] == ["a", "b"]
            assert (
                told["taken_bytes"]
                == sum(one["bytes"] for one in told["data"])
                <= told["max_bytes"]
            )
            assert client.get("/v1/blocks", params={"model": name}).status_code == 200
            assert client.get("/props", params={"model": name}).json()["model_alias"] == name
            assert client.get("/slots", params={"model": name}).status_code == 200
            metrics = client.get("/metrics").text
        assert f'kvboost:model_loaded{{model_name="{name}"}} 1.0' in metrics
        assert f'vllm:prompt_tokens_total{{model_name="{name}"}}' in metrics
        assert metrics.count("# TYPE vllm:prompt_tokens_total ") == 1


def test_an_unload_frees_objects_files_and_mappings(first, second, tmp_path):
    second.options |= {"disk_cache_dir": tmp_path / "blocks", "dtype": "auto", "runner": "native"}
    process = psutil.Process()

    def held():
        paths = {one.path for one in (*process.open_files(), *process.memory_maps())}
        return {
            path
            for path in paths
            if path.startswith((str(tmp_path), str(cache_directory() / "packed")))
        }

    with both(first, second, request_history=60) as server:
        before = held()
        assert ask(server, "b").status_code == 200
        served = server.kv.models.find("b")
        engine = weakref.ref(served.state.engine)
        assert held() > before
        with server.client() as client:
            client.post("/api/generate", json={"model": "b", "keep_alive": 0})
        wait_until(lambda: served.phase == "not_loaded", "the model to be unloaded")
        wait_until(lambda: held() == before, "its files to be closed")
        wait_until(lambda: gc.collect() >= 0 and engine() is None, "its engine to be freed")
        assert served.known.architecture == "qwen3"
