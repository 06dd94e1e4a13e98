"""Empty engines over every backend, and one Redis server per test module."""

import pytest

from helpers.compat.lmcache_cases import BACKENDS, make_engine
from helpers.tiers.redis_servers import running_redis


@pytest.fixture(scope="module")
def redis_server():
    with running_redis() as running:
        yield running


@pytest.fixture(params=BACKENDS)
def backend(request, tmp_path):
    """The `backend` of a configuration, with an empty disk and server."""
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
    """`engines(**options)` creates another engine over the same storage. All are closed at the end."""
    made = []

    def make(**options):
        made.append(make_engine(options.pop("backend", backend), **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def engine(engines):
    """Engine with chunks of 4 tokens in vLLM's format."""
    return engines()
