"""Engines that share blocks, and recurrent states of hybrids, through a real Redis server.

Blocks that one engine computed are restored by another, equal to the bit. Records that the server
lost or damaged cost only time.
"""

from __future__ import annotations

import logging
import socket
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from helpers.models.tiny_models import save_tiny_model
from helpers.random_ids import random_ids
from helpers.server.live_servers import wait_until
from helpers.tiers.redis_servers import running_redis
from kvboost_edge import CPUPagedEngine
from kvboost_edge.engine.offload.tiering import tier_places
from kvboost_edge.errors import ConfigError
from kvboost_edge.kvcache.hashing import prefix_hashes, state_hash

DEMO = "kvboost-edge/demo"
TOKENS = random_ids(150, 5, 10, 250)  # nine full blocks and six tokens
HINTS = (70,)  # recurrent states after four blocks and, at the prompt's end, nine
DAY_S = 86_400


class Model(NamedTuple):
    """Model with the last logits of the prompt, and an answer, from an engine without tiers."""

    path: str | Path
    bits: Any
    states: tuple[int, ...]
    logits: npt.NDArray[np.float32]
    answer: tuple[int, ...]

    def engine(self, server, **options):
        url = None if server is None else server.url
        options = {"num_blocks": 64, "kv_cache_bits": self.bits, "debug_checks": True, **options}
        return CPUPagedEngine.from_pretrained(self.path, redis_url=url, **options)

    def fill(self, server):
        """Store the prompt's records with one engine and return their keys: n for block n, -n for
        the state after it.
        """
        num_records = 9 + len(self.states)
        with self.engine(server) as one:
            one.generate(TOKENS, max_new_tokens=1, snapshot_hints=HINTS)
            hashes = prefix_hashes(TOKENS, one.cache_root, 16)
            wait_until(
                lambda: redis_of(one)["written_blocks"] == num_records,
                "all of it to be on the server",
            )
            assert redis_of(one)["errors"] == redis_of(one)["refused"] == 0
        names = dict(enumerate(hashes, 1)) | {-n: state_hash(hashes[n - 1]) for n in self.states}
        with server.client() as client:
            keys = {key.decode().rpartition(":")[2]: key.decode() for key in client.keys("*")}
            assert all(0 < client.ttl(key) <= DAY_S for key in keys.values())
        assert set(keys) == {name.hex() for name in names.values()}
        return {number: keys[name.hex()] for number, name in names.items()}

    @property
    def num_read(self):
        """Number of records that the whole prompt reads: its blocks and at most one state."""
        return 9 + bool(self.states)


def redis_of(one):
    return one.paged_stats()["tiers"]["redis"]


@pytest.fixture(scope="module")
def server():
    with running_redis() as running:
        yield running


MODELS = (("demo", (8, 4)), ("qwen3_5_text", 16), ("demo", 16), ("lfm2", 16))


def case(model, *values):
    """Return the parameters of one model, marked `full` for the second cache width and the second
    kind of recurrent state.
    """
    return pytest.param(model, *values, marks=pytest.mark.full if model in MODELS[2:] else ())


@pytest.fixture(scope="module", params=map(case, MODELS), ids=str)
def model(request, tmp_path_factory):
    name, bits = request.param
    path = DEMO if name == "demo" else save_tiny_model(name, tmp_path_factory.mktemp(name))
    with CPUPagedEngine.from_pretrained(path, num_blocks=64, kv_cache_bits=bits) as alone:
        answer = alone.generate(
            TOKENS, max_new_tokens=12, temperature=0.0, mode="baseline"
        ).output_token_ids
        return Model(
            path,
            bits,
            () if name == "demo" else (4, 9),
            alone.logits(TOKENS, start=144),
            tuple(answer),
        )


@pytest.fixture(autouse=True)
def client(monkeypatch, server):
    """The test's own connection to the emptied server."""
    monkeypatch.setenv("KVBOOST_EDGE_REDIS_SECRET", "a secret of the test suite")
    monkeypatch.delenv("KVBOOST_EDGE_REDIS_PASSWORD", raising=False)
    with server.client() as plain:
        plain.flushall()
        yield plain


def test_a_new_engine_restores_another_engines_blocks(model, server):
    model.fill(server)
    with model.engine(server) as two:
        np.testing.assert_array_equal(two.logits(TOKENS, start=144), model.logits)
        assert (redis_of(two)["read_blocks"], redis_of(two)["refused"]) == (model.num_read, 0)
        result = two.generate(TOKENS, max_new_tokens=12, temperature=0.0)
        assert (result.hit_tokens, tuple(result.output_token_ids)) == ({"pool": 144}, model.answer)
        # Another tenant's blocks and states have other names.
        assert two.generate(TOKENS, max_new_tokens=1, tenant="another").cached_tokens == 0
    with model.engine(server) as three:
        result = three.generate(TOKENS, max_new_tokens=12, temperature=0.0)
        assert (result.hit_tokens, tuple(result.output_token_ids)) == (
            {"pool": 0, "redis": 144},
            model.answer,
        )
        assert result.load_ms > 0


def test_a_branching_prompt_is_restored_up_to_the_branch(model, server):
    model.fill(server)
    branch = [*TOKENS[:90], *TOKENS[:50]]
    with model.engine(None) as alone, model.engine(server) as two:
        np.testing.assert_array_equal(two.logits(branch, start=80), alone.logits(branch, start=80))
        assert redis_of(two)["read_blocks"] == 5, (
            "five blocks, or four blocks and their state, must be read"
        )


def test_another_engine_restores_the_whole_previous_turn(model, server):
    with model.engine(server) as one:
        first = one.generate(TOKENS, max_new_tokens=45, temperature=0.0, ignore_eos=True)
    turn = [*TOKENS, *first.output_token_ids, *TOKENS[:9]]
    with model.engine(None) as alone, model.engine(server) as two:
        result = two.generate(turn, max_new_tokens=9, temperature=0.0)
        assert result.hit_tokens == {"pool": 0, "redis": 192}  # 194 tokens were computed
        assert (
            result.output_token_ids
            == alone.generate(turn, max_new_tokens=9, temperature=0.0).output_token_ids
        )


def test_use_renews_the_ttl_of_blocks_and_states(model, server, client):
    keys = model.fill(server)
    for key in keys.values():
        client.expire(key, 1000)
    with model.engine(server) as two:
        two.generate(TOKENS, max_new_tokens=1)
    used = {*range(1, 10), *(-number for number in model.states if number == 9)}
    assert {number for number, key in keys.items() if client.ttl(key) > 1000} == used


# Numbers of lost blocks (negative: of states), and the tokens that are served without them.
COSTS = {
    "plain": [
        ("lost", (7,), 96),
        ("lost", (1,), 0),
        ("lost", range(1, 10), 0),
        ("damaged", (7,), 96),
        ("damaged", (1,), 0),
    ],
    "hybrid": [
        *[
            ("lost", (7,), 64),
            ("lost", (1,), 0),
            ("lost", range(1, 10), 0),
            ("damaged", (7,), 64),
            ("damaged", (1,), 0),
        ],
        *[
            ("lost", (-9,), 64),
            ("lost", (-9, -4), 0),
            ("damaged", (-9,), 64),
            ("damaged", (-9, -4), 0),
        ],
    ],
}


@pytest.mark.parametrize(
    ("model", "what", "numbers", "cached"),
    [
        case(one, *cost)
        for one in MODELS
        for cost in COSTS["plain" if one[0] == "demo" else "hybrid"]
    ],
    indirect=["model"],
)
@pytest.mark.some(2)
def test_lost_or_damaged_records_only_cost_time(model, server, client, what, numbers, cached):
    keys = model.fill(server)
    for key in map(keys.get, numbers):
        if what == "lost":
            assert client.delete(key) == 1
        else:
            client.setrange(key, 300, bytes([client.getrange(key, 300, 300)[0] ^ 1]))
    with model.engine(server) as two:
        result = two.generate(TOKENS, max_new_tokens=12, temperature=0.0, snapshot_hints=HINTS)
        assert (result.cached_tokens, tuple(result.output_token_ids)) == (cached, model.answer)
        assert redis_of(two)["refused"] == (what == "damaged") * len(numbers)
    with model.engine(server) as three:
        np.testing.assert_array_equal(three.logits(TOKENS, start=144), model.logits)
        assert (redis_of(three)["read_blocks"], redis_of(three)["refused"]) == (
            model.num_read,
            0,
        ), "the missing records must be stored again"


def test_records_under_another_secret_are_neither_found_nor_changed(
    model, server, client, monkeypatch
):
    keys = model.fill(server)
    monkeypatch.setenv("KVBOOST_EDGE_REDIS_SECRET", "some other secret of somebody")
    with model.engine(server) as two:
        assert two.generate(TOKENS, max_new_tokens=1, snapshot_hints=HINTS).cached_tokens == 0
        assert redis_of(two)["refused"] == 0
    assert {key.encode() for key in keys.values()} < set(client.keys("*"))
    assert len(client.keys("*")) == 2 * len(keys)
    monkeypatch.setenv("KVBOOST_EDGE_REDIS_SECRET", "a secret of the test suite")
    with model.engine(server) as three:
        result = three.generate(TOKENS, max_new_tokens=12, temperature=0.0)
        assert (result.hit_tokens, redis_of(three)["refused"]) == ({"pool": 0, "redis": 144}, 0)
        assert tuple(result.output_token_ids) == model.answer


@pytest.mark.parametrize("when", ["before", "once the blocks are read"])
def test_a_dying_redis_server_fails_no_request(model, when, monkeypatch):
    """A hybrid cannot use blocks without the state that was to follow them."""
    with running_redis() as mortal:
        model.fill(mortal)
        with model.engine(mortal) as two:
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
            matched = 0 if when == "before" else 144
            assert (result.matched_tokens, tuple(result.output_token_ids)) == (
                matched,
                model.answer,
            )
            assert result.cached_tokens == (0 if model.states else matched)
            np.testing.assert_array_equal(two.logits(TOKENS, start=144), model.logits)
            two.reset_cache()
            assert two.generate(TOKENS, max_new_tokens=1).cached_tokens == 0
            assert "unix://" in redis_of(two)["state"]


# the server and other tiers


def engine(server, **options):
    return CPUPagedEngine.from_pretrained(DEMO, num_blocks=64, redis_url=server.url, **options)


def test_restored_blocks_are_not_sent_again(server, client):
    with engine(server) as one:
        one.warm(TOKENS)
    assert client.dbsize() == 9
    client.config_resetstat()
    with engine(server) as two:
        two.warm([*TOKENS[:144], *TOKENS[:16]])  # one more block
        wait_until(
            lambda: redis_of(two)["written_blocks"] == 1, "the new block to be on the server"
        )
        for _ in range(3):
            two.reset_cache()
            two.warm(TOKENS)
        assert redis_of(two)["read_blocks"] == 4 * 9
    assert client.dbsize() == 10
    assert (
        client.info("commandstats")["cmdstat_strlen"]["calls"] == 1
    )  # the server is asked for a block before it is sent


def test_a_prefix_is_restored_from_pool_disk_and_redis(server, tmp_path):
    with engine(server) as one:
        one.warm(TOKENS)
    with CPUPagedEngine.from_pretrained(DEMO, num_blocks=64, disk_cache_dir=tmp_path) as two:
        two.warm(TOKENS[:96])
    with engine(server, disk_cache_dir=tmp_path) as three:
        three.warm(TOKENS[:32])
        result = three.generate(TOKENS, max_new_tokens=1)
        assert result.hit_tokens == {"pool": 32, "disk": 64, "redis": 48}
        assert three.cache_stats()["redis_hits"] == 3
        # Blocks from the server are stored on disk as well.
        wait_until(
            lambda: three.paged_stats()["tiers"]["disk"]["blocks"] == 9, "the blocks to be on disk"
        )
        three.reset_cache()
        assert three.generate(TOKENS, max_new_tokens=1).hit_tokens == {"pool": 0, "disk": 144}


def test_without_a_secret_redis_trust_is_required(server, client, monkeypatch):
    monkeypatch.delenv("KVBOOST_EDGE_REDIS_SECRET")
    with pytest.raises(ConfigError, match="KVBOOST_EDGE_REDIS_SECRET"):
        engine(server)
    with engine(server, redis_trust=True) as one:
        one.warm(TOKENS)
    assert client.dbsize() == 9


def test_an_unreachable_redis_server_is_logged_and_the_engine_runs(server, caplog):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"redis://user:hidden@127.0.0.1:{free.getsockname()[1]}/3"
        with (
            caplog.at_level(logging.WARNING),
            CPUPagedEngine.from_pretrained(DEMO, num_blocks=64, redis_url=url) as one,
        ):
            place = tier_places(one.config)["redis"]
            wait_until(
                lambda: one.paged_stats()["tiers"]["redis"]["state"], "the server to be asked"
            )
            result = one.generate(TOKENS, max_new_tokens=1)
            assert (result.cached_tokens, result.generated_tokens) == (0, 1)
            state = one.paged_stats()["tiers"]["redis"]["state"]
    assert place == url.replace("user:hidden@", "")
    assert state.startswith(f"{place}: ")
    assert state in [record.getMessage() for record in caplog.records]
    assert not any("hidden" in record.getMessage() for record in caplog.records)


def test_a_redis_server_that_dies_at_runtime_fails_no_request(tmp_path):
    with running_redis() as mortal, engine(mortal, disk_cache_dir=tmp_path) as one:
        one.warm(TOKENS)
        wait_until(
            lambda: one.paged_stats()["tiers"]["disk"]["blocks"] == 9, "the blocks to be on disk"
        )
        mortal.kill()
        one.reset_cache()
        for number in range(4):
            assert one.generate([*TOKENS, number], max_new_tokens=1).cached_tokens == 144
            assert one.generate([number, *TOKENS], max_new_tokens=2).generated_tokens == 2
        assert one.paged_stats()["tiers"]["redis"]["state"]


@pytest.mark.parametrize(
    ("url", "named"),
    [("http://host", "redis_url must begin"), ("redis://:hidden@", "redis_url cannot be read")],
)
def test_an_invalid_redis_url_is_refused_before_loading(url, named):
    with pytest.raises(ConfigError, match=named) as caught:
        CPUPagedEngine.from_pretrained("/no/such/model", redis_url=url)
    assert "hidden" not in str(caught.value)
