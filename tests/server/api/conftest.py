"""A model that says what a test wrote, behind a template with tools, and the app over it."""

import pytest

from helpers.server.live_servers import app_client
from helpers.server.scripted_model import FORMATS, scripted
from kvboost_edge.server.app import create_app
from kvboost_edge.server.settings import ServerSettings

KEYS = ("first-key", "second-key")


@pytest.fixture
def form(request):
    """The format of the model's turns; tests choose others by `indirect`."""
    return getattr(request, "param", "hermes")


@pytest.fixture
def _scripted(form, monkeypatch):
    with scripted(monkeypatch, FORMATS[form]) as found:
        yield found


@pytest.fixture
def spoken_engine(_scripted):
    """A new one for each test, some milliseconds: tests change its template."""
    return _scripted[0]


@pytest.fixture
def speaker(_scripted):
    return _scripted[1]


@pytest.fixture
async def app(spoken_engine):
    """`app.engine` is the engine, `app.state` the model's."""
    served = create_app(spoken_engine, ServerSettings(model_name="fake", max_queue_tokens=1 << 22))
    async with app_client(served) as client:
        client.engine = spoken_engine
        client.state = served.state.kv.first
        yield client


@pytest.fixture
async def keyed_app(spoken_engine):
    """With two API keys, which are two tenants."""
    app = create_app(spoken_engine, ServerSettings(model_name="fake", api_keys=KEYS))
    async with app_client(app) as client:
        yield client
