"""Tests of the statistics of several engines that serve one model: sums and values per engine."""

from prometheus_client.parser import text_string_to_metric_families

from helpers.server.live_servers import app_client
from kvboost_edge.server.app import create_app
from kvboost_edge.server.settings import ServerSettings
from kvboost_edge.server.work.admission import AdmissionQueue


class Pair:
    """One engine that appears as two replicas."""

    def __init__(self, engine):
        self.engine = engine

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def replicas(self, *, patient=False):
        return {"a": self.engine, "b": self.engine}


def without_steps(pool):
    """Return a pool's statistics without those of steps.

    The engine adds a step to them after it has delivered the step's tokens, so they may change
    after the last answer.
    """
    return {key: value for key, value in pool.items() if not key.startswith("step_")}


async def test_stats_and_blocks_list_each_replicas_pool(tiny_engine):
    app = create_app(Pair(tiny_engine), ServerSettings(model_name="tiny"))
    async with app_client(app) as client:
        await client.post(
            "/v1/completions",
            json={"prompt": "a text of more than one block " * 4, "max_tokens": 2},
        )
        stats = (await client.get("/v1/stats")).json()
        blocks = (await client.get("/v1/blocks")).json()
    pool = tiny_engine.paged_stats()
    assert list(stats["replicas"]) == list(blocks["replicas"]) == ["a", "b"]
    for name in "ab":
        one = stats["replicas"][name]
        shown = blocks["replicas"][name]
        assert (one["running"], one["waiting"], one["waiting_tokens"]) == (0, 0, 0)
        assert one["cache"] == tiny_engine.cache_stats()
        assert one["pool"]["loaded_chunks"] == shown["blocks"] == pool["loaded_chunks"] > 0
        assert one["memory"]["pool_bytes"] == shown["max_bytes"] == pool["pool_bytes"]
        assert (one["cache"], one["tiers"]) == (stats["cache"], stats["tiers"])
        assert without_steps(one["pool"]) == without_steps(stats["pool"])
        assert shown["num_blocks"] == pool["num_blocks"]
        assert shown["bytes"] == pool["loaded_chunks"] * pool["bytes_per_block"]
        assert (shown["running"], shown["waiting"], shown["hit_rate"]) == (0, 0, blocks["hit_rate"])


def test_the_queue_size_counts_replicas_that_are_not_ready_at_start(tiny_engine):
    """The bounds of the queue are set at the start and do not change later."""

    class Half(Pair):
        def replicas(self, *, patient=False):
            return super().replicas() if patient else {"a": self.engine}

    settings = ServerSettings(model_name="tiny")
    half, pair = (AdmissionQueue(kind(tiny_engine), settings) for kind in (Half, Pair))
    assert (half.max_sequences, half.batch) == (pair.max_sequences, pair.batch)
    assert half.batch == 2 * tiny_engine.paged_stats()["max_num_seqs"]


async def test_metrics_have_the_memory_of_each_process(tiny_engine, tiny_app):
    names = {"kvboost:process_resident_bytes", "kvboost:process_peak_bytes"}
    replicated = create_app(Pair(tiny_engine), ServerSettings(model_name="tiny"))
    async with app_client(replicated) as client:
        both = (await client.get("/metrics")).text
    alone = (await tiny_app.get("/metrics")).text
    for text, replicas in ((both, "ab"), (alone, "")):
        found = {
            (one.name, *sorted(one.labels.items())): one.value
            for family in text_string_to_metric_families(text)
            for one in family.samples
            if one.name in names
        }
        of_replicas = [(("model_name", "tiny"), ("replica", replica)) for replica in replicas]
        assert set(found) == {(name, *labels) for name in names for labels in [(), *of_replicas]}
        assert min(found.values()) > 1e6


async def test_a_single_engine_has_no_replicas(tiny_app):
    for path in ("/v1/stats", "/v1/blocks"):
        assert (await tiny_app.get(path)).json()["replicas"] == {}
