"""Tests of offload tiers as clients see them: the source of cached tokens and the contents of each
tier.
"""

import pytest

from helpers.server.live_servers import ENGINE_OPTIONS, serving
from kvboost_edge import CPUPagedEngine

BODY = {
    "model": "kvboost-edge/demo",
    "prompt": "The mine of North Romin is nickel. " * 12,
    "max_tokens": 2,
}


@pytest.fixture
def restarted(tmp_path):
    """Server whose engine starts with the disk cache of an earlier engine."""
    options = {**ENGINE_OPTIONS, "disk_cache_dir": tmp_path}
    with CPUPagedEngine.from_pretrained("kvboost-edge/demo", **options) as engine:
        engine.warm(BODY["prompt"])
    with (
        CPUPagedEngine.from_pretrained("kvboost-edge/demo", **options) as engine,
        serving(engine) as server,
    ):
        yield server


def test_an_answer_reports_tokens_restored_from_disk_and_the_time(restarted):
    with restarted.client() as client:
        first, second = (client.post("/v1/completions", json=BODY).json() for _ in range(2))
        cached = first["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert first["kvboost"]["hit_tokens"] == {"pool": 0, "disk": cached}
        assert cached > 64
        assert first["kvboost"]["load_ms"] > 0
        assert second["kvboost"]["hit_tokens"] == {"pool": cached}
        assert second["kvboost"]["load_ms"] == 0
        blocks = client.get("/v1/blocks").json()
        stats = client.get("/v1/stats").json()
    assert {name: tier["recent_hit_tokens"] for name, tier in blocks["tiers"].items()} == {
        "pool": cached,
        "disk": cached,
    }
    assert blocks["recent_computed_tokens"] == 2 * (first["usage"]["prompt_tokens"] - cached)
    disk = restarted.engine.paged_stats()["tiers"]["disk"]
    assert stats["tiers"] == {"disk": disk}
    shown = {name: value for name, value in blocks["tiers"]["disk"].items() if name in disk}
    assert shown == {name: disk[name] for name in shown}
    assert (shown["writable"], shown["state"], shown["blocks"] > 4) == (True, "", True)
