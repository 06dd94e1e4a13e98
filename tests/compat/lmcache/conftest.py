"""Engines over every backend, each empty; one Redis server per file of tests."""

import pytest

from helpers.compat.lmcache_cases import BACKENDS, make_engine
from helpers.tiers.redis_servers import running_redis


@pytest.fixture(scope="module")
def redis_server():
    with running_redis() as running:
        yield running


@pytest.fixture(params=BACKENDS)
def backend(request, tmp_path):
    """A configuration's `backend`; its disk and its server are empty."""
    if request.param == "redis":
        server = request.getfixturevalue("redis_server")
        with server.client() as client:
            client.flushall()
        return server.url
    places = {"memory": "memory", "disk": f"file://{tmp_path}"}
    found = tuple(places[name] for name in request.param.split(" over "))
    return found[0] if len(found) == 1 else found


@pytest.fixture
def engines(backend):
    """`engines(**options)` makes one more engine over the same place; all are closed in the end."""
    made = []

    def make(**options):
        made.append(make_engine(options.pop("backend", backend), **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def engine(engines):
    """One engine of chunks of 4 tokens in vLLM's format."""
    return engines()
