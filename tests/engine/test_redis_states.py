"""Engines of hybrid models that share blocks and states through a real server: what one computed another restores up to
the deepest state there, equal to the bit; what the server lost, or has damaged, costs time alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import redis

from helpers.models.tiny_models import save_tiny_model
from helpers.server.live_servers import wait_until
from helpers.tiers.redis_servers import RedisServer, running_redis
from kvboost_edge import CPUPagedEngine
from kvboost_edge.kvcache.hashing import prefix_hashes, state_hash

TOKENS: list[int] = np.random.default_rng(5).integers(10, 250, 150).tolist()  # nine full blocks and six tokens
HINTS = (70,)  # states behind four blocks and, at the prompt's end, nine
DAY_S = 86_400


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with running_redis() as running:
        yield running


@pytest.fixture(scope="module", params=("lfm2", "qwen3_5_text"))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBOOST_EDGE_REDIS_SECRET", "a secret of the test suite")
    monkeypatch.delenv("KVBOOST_EDGE_REDIS_PASSWORD", raising=False)


@pytest.fixture
def client(server: RedisServer) -> Iterator[redis.Redis]:
    """The server, emptied, by a connection of the test's own."""
    with server.client() as plain:
        plain.flushall()
        yield plain


def engine(model: Path, server: RedisServer | None, **options: Any) -> CPUPagedEngine:
    url = None if server is None else server.url
    return CPUPagedEngine.from_pretrained(model, num_blocks=64, redis_url=url, debug_checks=True, **options)


Truth = tuple[npt.NDArray[np.float32], tuple[int, ...]]


@pytest.fixture(scope="module")
def cold(model: Path) -> Truth:
    """Logits of the prompt's last tokens, and an answer, of an engine that keeps nothing anywhere."""
    with engine(model, None) as alone:
        answer = alone.generate(TOKENS, max_new_tokens=12, temperature=0.0, mode="baseline")
        return alone.logits(TOKENS, start=144), tuple(answer.output_token_ids)


def fill(model: Path, server: RedisServer) -> dict[int, str]:
    """An engine computes the prompt and goes; keys of its blocks, by number, and below zero of the states behind."""
    with engine(model, server) as one:
        one.generate(TOKENS, max_new_tokens=1, snapshot_hints=HINTS)
        hashes = prefix_hashes(TOKENS, one.cache_root, 16)
        wait_until(lambda: redis_of(one)["written_blocks"] == 11, "nine blocks and two states to be on the server")
        assert redis_of(one)["errors"] == redis_of(one)["refused"] == 0
    names = dict(enumerate(hashes, 1)) | {-n: state_hash(hashes[n - 1]) for n in (4, 9)}
    with server.client() as client:
        keys = {key.decode().rpartition(":")[2]: key.decode() for key in client.keys("*")}
        assert all(0 < client.ttl(key) <= DAY_S for key in keys.values())
    assert set(keys) == {name.hex() for name in names.values()}
    return {number: keys[name.hex()] for number, name in names.items()}


def redis_of(one: CPUPagedEngine) -> dict[str, Any]:
    stats: dict[str, Any] = one.paged_stats()["tiers"]["redis"]
    return stats


def test_what_one_engine_computed_a_fresh_one_restores_with_its_state(model, server, client, cold):
    logits, answer = cold
    fill(model, server)
    with engine(model, server) as two:
        np.testing.assert_array_equal(two.logits(TOKENS, start=144), logits)
        assert (redis_of(two)["read_blocks"], redis_of(two)["refused"]) == (10, 0)
        result = two.generate(TOKENS, max_new_tokens=12, temperature=0.0)
        assert (result.hit_tokens, tuple(result.output_token_ids)) == ({"pool": 144}, answer)
        # Another tenant's blocks and states have names of their own.
        assert two.generate(TOKENS, max_new_tokens=1, tenant="another").cached_tokens == 0
    with engine(model, server) as three:
        result = three.generate(TOKENS, max_new_tokens=12, temperature=0.0)
        assert (result.hit_tokens, tuple(result.output_token_ids)) == ({"pool": 0, "redis": 144}, answer)


def test_a_prompt_that_branches_off_is_restored_up_to_the_state_before(model, server, client):
    fill(model, server)
    branch = [*TOKENS[:90], *TOKENS[:50]]
    with engine(model, None) as alone, engine(model, server) as two:
        expected = alone.logits(branch, start=80)
        np.testing.assert_array_equal(two.logits(branch, start=80), expected)
        assert redis_of(two)["read_blocks"] == 5, "four blocks and the state behind them, of five that are there"


def test_the_next_turn_goes_on_elsewhere_from_the_end_of_the_answer(model, server, client):
    with engine(model, server) as one:
        first = one.generate(TOKENS, max_new_tokens=45, temperature=0.0, ignore_eos=True)
    turn = [*TOKENS, *first.output_token_ids, *TOKENS[:9]]
    with engine(model, None) as alone, engine(model, server) as two:
        result = two.generate(turn, max_new_tokens=9, temperature=0.0)
        assert result.hit_tokens == {"pool": 0, "redis": 192}  # 194 tokens were computed
        expected = alone.generate(turn, max_new_tokens=9, temperature=0.0)
        assert result.output_token_ids == expected.output_token_ids


def test_what_is_used_gets_its_time_to_live_again_and_so_does_its_state(model, server, client):
    keys = fill(model, server)
    for key in keys.values():
        client.expire(key, 1000)
    with engine(model, server) as two:
        two.generate(TOKENS, max_new_tokens=1)
    assert {number for number, key in keys.items() if client.ttl(key) > 1000} == {*range(1, 10), -9}


def flip(client: redis.Redis, key: str) -> None:
    client.setrange(key, 300, bytes([client.getrange(key, 300, 300)[0] ^ 1]))


@pytest.mark.parametrize(
    ("what", "numbers", "cached", "refused"),
    [
        ("lost", (-9,), 64, 0),
        ("lost", (-9, -4), 0, 0),
        ("lost", (7,), 64, 0),
        ("lost", (1,), 0, 0),
        ("lost", tuple(range(1, 10)), 0, 0),
        ("damaged", (-9,), 64, 1),
        ("damaged", (-9, -4), 0, 2),
        ("damaged", (7,), 64, 1),
        ("damaged", (1,), 0, 1),
    ],
)
def test_what_the_server_lost_or_got_wrong_costs_time_alone(
    model, server, client, cold, what, numbers, cached, refused
):
    keys = fill(model, server)
    for number in numbers:
        if what == "lost":
            assert client.delete(keys[number]) == 1
        else:
            flip(client, keys[number])
    with engine(model, server) as two:
        result = two.generate(TOKENS, max_new_tokens=12, temperature=0.0, snapshot_hints=HINTS)
        assert (result.cached_tokens, tuple(result.output_token_ids)) == (cached, cold[1])
        assert redis_of(two)["refused"] == refused
    with engine(model, server) as three:
        np.testing.assert_array_equal(three.logits(TOKENS, start=144), cold[0])
        assert (redis_of(three)["read_blocks"], redis_of(three)["refused"]) == (10, 0), "it was kept again"


def test_a_state_under_another_secret_is_not_believed(model, server, client, cold, monkeypatch):
    keys = fill(model, server)
    client.delete(*(key for number, key in keys.items() if number > 0))
    monkeypatch.setenv("KVBOOST_EDGE_REDIS_SECRET", "some other secret of somebody")
    with engine(model, server) as two:  # puts the blocks beside states of the first secret, which it never reads
        two.generate(TOKENS, max_new_tokens=1)
    assert set(client.keys("*")) == {key.encode() for key in keys.values()}
    with engine(model, server) as three:
        result = three.generate(TOKENS, max_new_tokens=12, temperature=0.0)
        assert (result.cached_tokens, result.matched_tokens, redis_of(three)["refused"]) == (0, 144, 2)
        assert tuple(result.output_token_ids) == cold[1]


@pytest.mark.parametrize("when", ["before", "between the blocks and their state"])
def test_a_server_that_dies_costs_no_request(model, cold, when, monkeypatch):
    with running_redis() as mortal:
        fill(model, mortal)
        with engine(model, mortal) as two:
            if when == "before":
                mortal.kill()
            else:
                tier = next(tier for tier in two._parts.tiers if tier.name == "redis")
                read = tier.read

                def read_and_kill(blocks, into):
                    count = read(blocks, into)
                    mortal.kill()
                    return count

                monkeypatch.setattr(tier, "read", read_and_kill)
            result = two.generate(TOKENS, max_new_tokens=12, temperature=0.0)
            assert (result.cached_tokens, tuple(result.output_token_ids)) == (0, cold[1])
            assert result.matched_tokens == (0 if when == "before" else 144)
            np.testing.assert_array_equal(two.logits(TOKENS, start=144), cold[0])
            assert "unix://" in redis_of(two)["state"]
