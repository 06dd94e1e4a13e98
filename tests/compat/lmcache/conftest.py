"""Engines over every backend, each empty; one Redis server per file of tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from helpers.compat.lmcache_cases import BACKENDS, make_engine
from helpers.tiers.redis_servers import RedisServer, running_redis


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with running_redis() as running:
        yield running


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, tmp_path: Any) -> Any:
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
def engines(backend: Any) -> Iterator[Callable[..., Any]]:
    """`engines(**options)` makes one more engine over the same place; all are closed in the end."""
    made: list[Any] = []

    def make(**options: Any) -> Any:
        made.append(make_engine(options.pop("backend", backend), **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def engine(engines: Callable[..., Any]) -> Any:
    """One engine of chunks of 4 tokens in vLLM's format."""
    return engines()
