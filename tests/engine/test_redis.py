"""Engines that share blocks through a real server: what one computed others do not, and what they must not share."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.server.live_servers import wait_until
from helpers.tiers.redis_servers import RedisServer, running_redis
from kvboost_edge import CPUPagedEngine
from kvboost_edge.engine.tiering import tier_places
from kvboost_edge.errors import ConfigError

MODEL = "kvboost-edge/demo"
TOKENS = np.random.default_rng(5).integers(10, 250, 230).tolist()  # 14 full blocks and six tokens
SECRET = "a secret of the test suite"


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with running_redis() as running:
        yield running


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch, server: RedisServer) -> None:
    monkeypatch.setenv("KVBOOST_EDGE_REDIS_SECRET", SECRET)
    monkeypatch.delenv("KVBOOST_EDGE_REDIS_PASSWORD", raising=False)
    with server.client() as client:
        client.flushall()


def engine(server: RedisServer, **options: Any) -> CPUPagedEngine:
    return CPUPagedEngine.from_pretrained(MODEL, num_blocks=64, redis_url=server.url, **options)


def num_stored(server: RedisServer) -> int:
    with server.client() as client:
        return int(client.dbsize())


def is_saved(one: CPUPagedEngine, count: int) -> bool:
    return one.paged_stats()["tiers"]["redis"]["written_blocks"] == count


@pytest.mark.parametrize("bits", [16, (8, 4)], ids=str)
def test_what_one_engine_computed_another_does_not(server, tmp_path, bits):
    with engine(server, kv_cache_bits=bits, disk_cache_dir=tmp_path) as one:
        cold = one.logits(TOKENS, start=200)
        one.warm(TOKENS)
        wait_until(lambda: is_saved(one, 14), "the blocks to be on the server")
        with engine(server, kv_cache_bits=bits, debug_checks=True) as two:  # no disk
            result = two.generate(TOKENS, max_new_tokens=1)
            assert result.hit_tokens == {"pool": 0, "redis": 224}
            assert result.load_ms > 0
            two.reset_cache()
            np.testing.assert_array_equal(two.logits(TOKENS, start=200), cold)
            # Another tenant's blocks have names of their own.
            assert two.generate(TOKENS, max_new_tokens=1, tenant="another").cached_tokens == 0


def test_what_came_from_the_server_is_not_offered_to_it_again(server):
    with engine(server) as one:
        one.warm(TOKENS)
    assert num_stored(server) == 14
    with server.client() as client:
        client.config_resetstat()
    with engine(server) as two:
        two.warm([*TOKENS[:224], *TOKENS[:16]])  # one block more
        wait_until(lambda: is_saved(two, 1), "the new block to be on the server")
        for _ in range(3):
            two.reset_cache()
            two.warm(TOKENS)
        assert two.paged_stats()["tiers"]["redis"]["read_blocks"] == 4 * 14
    assert num_stored(server) == 15
    with server.client() as client:
        assert client.info("commandstats")["cmdstat_strlen"]["calls"] == 1  # asked before a block is sent


def test_a_prefix_comes_from_pool_disk_and_server(server, tmp_path):
    with engine(server) as one:
        one.warm(TOKENS)
    with CPUPagedEngine.from_pretrained(MODEL, num_blocks=64, disk_cache_dir=tmp_path) as two:
        two.warm(TOKENS[:96])
    with engine(server, disk_cache_dir=tmp_path) as three:
        three.warm(TOKENS[:32])
        result = three.generate(TOKENS, max_new_tokens=1)
        assert result.hit_tokens == {"pool": 32, "disk": 64, "redis": 128}
        assert three.cache_stats()["redis_hits"] == 8
        # What came from the server goes to the disk, too.
        wait_until(lambda: three.paged_stats()["tiers"]["disk"]["blocks"] == 14, "the blocks to be on disk")
        three.reset_cache()
        assert three.generate(TOKENS, max_new_tokens=1).hit_tokens == {"pool": 0, "disk": 224}


def test_another_secret_is_another_cache(server, monkeypatch):
    with engine(server) as one:
        one.warm(TOKENS)
    monkeypatch.setenv("KVBOOST_EDGE_REDIS_SECRET", "some other secret of somebody")
    with engine(server) as two:
        assert two.generate(TOKENS, max_new_tokens=1).cached_tokens == 0
        assert two.paged_stats()["tiers"]["redis"]["refused"] == 1


def test_without_a_secret_the_server_has_to_be_trusted(server, monkeypatch):
    monkeypatch.delenv("KVBOOST_EDGE_REDIS_SECRET")
    with pytest.raises(ConfigError, match="KVBOOST_EDGE_REDIS_SECRET"):
        engine(server)
    with engine(server, redis_trust=True) as one:
        one.warm(TOKENS)
    assert num_stored(server) == 14


def test_a_server_that_is_down_is_a_line_and_the_engine_serves_on(server, caplog):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"redis://user:hidden@127.0.0.1:{free.getsockname()[1]}/3"
        with (
            caplog.at_level(logging.WARNING),
            CPUPagedEngine.from_pretrained(MODEL, num_blocks=64, redis_url=url) as one,
        ):
            place = tier_places(one.config)["redis"]
            wait_until(lambda: one.paged_stats()["tiers"]["redis"]["state"], "the server to be asked")
            result = one.generate(TOKENS, max_new_tokens=1)
            assert (result.cached_tokens, result.generated_tokens) == (0, 1)
            state = one.paged_stats()["tiers"]["redis"]["state"]
    assert place == url.replace("user:hidden@", "")
    assert state.startswith(f"{place}: ")
    assert state in [record.getMessage() for record in caplog.records]
    assert not any("hidden" in record.getMessage() for record in caplog.records)


def test_a_server_that_dies_meanwhile_costs_no_request(tmp_path: Path):
    with running_redis() as mortal, engine(mortal, disk_cache_dir=tmp_path) as one:
        one.warm(TOKENS)
        wait_until(lambda: one.paged_stats()["tiers"]["disk"]["blocks"] == 14, "the blocks to be on disk")
        mortal.kill()
        one.reset_cache()
        for number in range(4):
            assert one.generate([*TOKENS, number], max_new_tokens=1).cached_tokens == 224
            assert one.generate([number, *TOKENS], max_new_tokens=2).generated_tokens == 2
        assert one.paged_stats()["tiers"]["redis"]["state"]


@pytest.mark.parametrize(
    ("url", "named"),
    [("http://host", "redis_url must begin"), ("redis://:hidden@", "redis_url cannot be read")],
)
def test_a_wrong_url_is_refused_before_anything_is_loaded(url, named):
    with pytest.raises(ConfigError, match=named) as caught:
        CPUPagedEngine.from_pretrained("/no/such/model", redis_url=url)
    assert "hidden" not in str(caught.value)
