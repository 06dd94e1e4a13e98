"""A Redis server per test module, and blocks to store on it."""

import pytest

from helpers.tiers.redis_cases import OPENED
from helpers.tiers.redis_servers import running_redis


@pytest.fixture(scope="module")
def server():
    with running_redis() as running:
        yield running


@pytest.fixture
def client(server):
    """The test's own connection to the emptied server."""
    with server.client() as plain:
        plain.flushall()
        yield plain


@pytest.fixture(autouse=True)
def no_secret_around(monkeypatch):
    """Remove secrets from the environment, and close afterwards what the test opened."""
    for name in ("KVBOOST_EDGE_REDIS_SECRET", "KVBOOST_EDGE_REDIS_PASSWORD"):
        monkeypatch.delenv(name, raising=False)
    yield
    while OPENED:
        OPENED.pop().close()
