"""Fixtures of a model that generates scripted text with a tool template, and of the app that serves
it.
"""

import pytest

from helpers.server.live_servers import app_client
from helpers.server.scripted_model import FORMATS, scripted
from kvboost_edge.server.app import create_app
from kvboost_edge.server.settings import ServerSettings

KEYS = ("first-key", "second-key")


@pytest.fixture
def form(request):
    """Chat format of the model; tests choose another one by indirect parametrization."""
    return getattr(request, "param", "hermes")


@pytest.fixture
def _scripted(form, monkeypatch):
    with scripted(monkeypatch, FORMATS[form]) as found:
        yield found


@pytest.fixture
def spoken_engine(_scripted):
    """Scripted engine, new for each test because tests change its template. It takes milliseconds
    to build.
    """
    return _scripted[0]


@pytest.fixture
def speaker(_scripted):
    return _scripted[1]


@pytest.fixture
async def app(spoken_engine):
    """Client of the served engine. `app.engine` is the engine; `app.state` is the state of the
    model.
    """
    served = create_app(spoken_engine, ServerSettings(model_name="fake", max_queue_tokens=1 << 22))
    async with app_client(served) as client:
        client.engine = spoken_engine
        client.state = served.state.kv.first
        yield client


@pytest.fixture
def submitted(spoken_engine, monkeypatch):
    """List of the sampling parameters that reached the engine."""
    found = []
    submit = spoken_engine.submit

    def recorded(*args, **options):
        found.append(options["sampling"])
        return submit(*args, **options)

    monkeypatch.setattr(spoken_engine, "submit", recorded)
    return found


@pytest.fixture
async def keyed_app(spoken_engine):
    """Client of a server with two API keys, hence two tenants."""
    app = create_app(spoken_engine, ServerSettings(model_name="fake", api_keys=KEYS))
    async with app_client(app) as client:
        yield client
