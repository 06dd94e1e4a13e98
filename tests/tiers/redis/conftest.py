"""A server per file of tests, and blocks to put on it."""

import pytest

from helpers.tiers.redis_cases import OPENED
from helpers.tiers.redis_servers import running_redis


@pytest.fixture(scope="module")
def server():
    with running_redis() as running:
        yield running


@pytest.fixture
def client(server):
    """The server, emptied, by a connection of the test's own."""
    with server.client() as plain:
        plain.flushall()
        yield plain


@pytest.fixture(autouse=True)
def no_secret_around(monkeypatch):
    """No secret in the environment; what the test opened is closed."""
    for name in ("KVBOOST_EDGE_REDIS_SECRET", "KVBOOST_EDGE_REDIS_PASSWORD"):
        monkeypatch.delenv(name, raising=False)
    yield
    while OPENED:
        OPENED.pop().close()
