"""A model that says what a test wrote, behind a template with tools, and the app over it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from helpers.engine import fake_runner
from helpers.engine.fake_runner import fake_engine
from helpers.server.live_servers import app_client
from helpers.server.scripted_model import TEMPLATE, Speaker
from kvboost_edge.server.app import create_app
from kvboost_edge.server.settings import ServerSettings

KEYS = ("first-key", "second-key")


@pytest.fixture
def spoken_engine() -> Iterator[Any]:
    """A new one for each test, some milliseconds: tests change its template."""
    with fake_engine(num_blocks=1024, max_context=8000) as engine:
        engine.tokenizer.chat_template = TEMPLATE
        yield engine


@pytest.fixture
def speaker(spoken_engine: Any, monkeypatch: pytest.MonkeyPatch) -> Speaker:
    speaker = Speaker(spoken_engine)
    speaker.text = "Good day."
    monkeypatch.setattr(fake_runner, "token_logits", speaker.logits)
    return speaker


@pytest.fixture
async def app(spoken_engine: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with app_client(create_app(spoken_engine, ServerSettings(model_name="fake"))) as client:
        yield client


@pytest.fixture
async def keyed_app(spoken_engine: Any) -> AsyncIterator[httpx.AsyncClient]:
    """With two API keys, which are two tenants."""
    app = create_app(spoken_engine, ServerSettings(model_name="fake", api_keys=KEYS))
    async with app_client(app) as client:
        yield client
