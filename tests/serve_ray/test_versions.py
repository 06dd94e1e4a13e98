"""Rolling updates of the replicas while requests run, and the use of the old replicas' blocks by
the new ones.
"""

import threading

import pytest

from helpers.serve_ray.replica_cases import options_of, running_replicas
from helpers.serve_ray.router_beliefs import beliefs
from helpers.server.live_servers import wait_until
from helpers.tiers.redis_servers import running_redis
from kvboost_edge.serve_ray.in_flight import ReplicaLost

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

LONG = {"max_new_tokens": 600, "temperature": 0.0, "ignore_eos": True}
PREFIX = [number % 200 + 20 for number in range(7 * 48)]


@pytest.fixture(scope="module")
def redis_server():
    with running_redis() as server:
        yield server


@pytest.fixture(scope="module")
def versions(ray_cluster, redis_server):
    with running_replicas(options_of("--redis-url", redis_server.url), "versions") as found:
        yield found


def told(pool, keys):
    """Return whether a replica has reported to the pool's router that it holds all blocks of a
    prompt.
    """

    async def look():
        router = pool._replicas.router
        return any(all(beliefs(router, name).get(key) for key in keys) for name in router.members())

    return pool._replicas.start(look()).result(timeout=60)


def started(pool, count, **sampling):
    """Submit requests and return them after their first tokens."""
    handles = [
        pool.submit([number, *range(200, 240)], **sampling) for number in range(20, 20 + count)
    ]
    for handle in handles:
        next(iter(handle.events()))
    return handles


def test_a_rolling_update_finishes_running_answers(versions, monkeypatch):
    """The new version has other options. They become those of the pool, whose router then finds the
    blocks of the new replicas.
    """
    pool = versions.pool
    before = versions.pids()
    root = versions.pool._about.root
    handles = started(pool, 6, **LONG)
    monkeypatch.setattr("kvboost_edge.serve_ray.deployment._LAST_SECONDS", 0.0)
    redis = ("--redis-url", versions.options.engine["redis_url"])
    new = options_of("--kv-cache-bits", "8", "--block-size", "48", *redis, "--drain-seconds", "0")
    updating = threading.Thread(target=versions.deploy, args=(2, new))
    updating.start()
    count = 0
    while updating.is_alive():
        asked = pool.submit(
            [count % 50 + 10, 11, 12, 13], max_new_tokens=24, temperature=0.0, ignore_eos=True
        )
        assert asked.result(timeout=120).generated_tokens == 24
        count += 1
    updating.join()
    assert count
    assert [handle.result(timeout=120).generated_tokens for handle in handles] == [600] * 6
    after = versions.pids()
    assert len(after) == 2
    assert not before.keys() & after.keys()
    wait_until(lambda: pool._about.root != root, "the pool to know the new settings")
    assert pool._about.replica in after
    chains = []
    real = pool._replicas.choices
    monkeypatch.setattr(
        pool._replicas, "choices", lambda chain, count: chains.append(chain) or real(chain, count)
    )
    pool.submit(PREFIX, max_new_tokens=1).result(timeout=60)
    assert len(chains[0].keys) == 7
    wait_until(lambda: told(pool, chains[0].keys), "a replica to tell of the prompt")


def test_answers_beyond_the_drain_time_end_with_an_error(versions, monkeypatch):
    """New replicas read the blocks that the old ones stored in Redis, with the same answer."""
    pool = versions.pool
    monkeypatch.setattr("kvboost_edge.serve_ray.deployment._LAST_SECONDS", 0.0)
    if versions.options.settings.drain_seconds:  # the running replicas determine the drain time
        versions.deploy(
            2,
            options_of("--redis-url", versions.options.engine["redis_url"], "--drain-seconds", "0"),
        )
    sampling = {"max_new_tokens": 8, "temperature": 0.0, "logprobs": 0}
    cold = pool.submit(PREFIX, **sampling).result(timeout=60)

    def written():
        stats = [view.paged_stats()["tiers"]["redis"] for view in pool.replicas().values()]
        return sum(one["written_blocks"] for one in stats)

    wait_until(
        lambda: written() >= len(PREFIX) // pool._about.block_size, "the prompt to be in Redis", 60
    )
    handles = started(pool, 8, **{**LONG, "max_new_tokens": 1900})
    versions.deploy(2)
    lost = 0
    for handle in handles:
        try:
            assert len(list(handle.events())) == 1900 - 1
        except ReplicaLost:
            lost += 1
    assert lost
    assert all(view.cache_stats()["cache_hits"] == 0 for view in pool.replicas().values())
    again = pool.submit(PREFIX, **sampling).result(timeout=60)
    assert again.hit_tokens["pool"] == 0
    assert (
        again.hit_tokens["redis"] >= len(PREFIX) - pool._about.block_size
    )  # the last block may have arrived too late
    assert (again.output_token_ids, again.logprobs) == (cold.output_token_ids, cold.logprobs)
    wait_until(versions.idle, "the blocks to be free", 60)
