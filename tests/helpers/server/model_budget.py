"""An app without a socket over three models of equal size with fake engines. The memory budget
holds two of them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import httpx

from helpers.engine.fake_runner import fake_engine
from helpers.server.live_servers import app_client
from helpers.server.scripted_model import TEMPLATE
from kvboost_edge.server.app import create_app
from kvboost_edge.server.models.served import ModelSource, ServedModel
from kvboost_edge.server.models.server import ServerState
from kvboost_edge.server.settings import ServerSettings

SIZE = 100


class Room:
    """An app over the models a, b and c, of which `budget` fit in memory.

    Attributes:
        wrong: exceptions that the next load of a model raises once, by name.
        held: events that loads wait for, by name of the model.
        made: engines that were loaded.
    """

    def __init__(self, *, budget: float = 2.5, **settings: Any) -> None:
        self.wrong: dict[str, Exception] = {}
        self.held: dict[str, threading.Event] = {}
        self.made: list[Any] = []
        self._first = _engine()
        others = [((name,), self._source(name)) for name in ("b", "c")]
        chosen = ServerSettings(model_name="a", **settings)
        app = create_app(self._first, chosen, self._source("a"), others, int(budget * SIZE))
        self.kv: ServerState = app.state.kv
        self.client = app_client(app)

    def _source(self, name: str) -> ModelSource:
        def load(stopped: threading.Event) -> Any:
            if name in self.wrong:
                raise self.wrong.pop(name)
            if name in self.held:
                assert self.held[name].wait(60)
            self.made.append(_engine())
            return self.made[-1]

        return ModelSource(lambda: SIZE, load)

    async def ask(self, name: str) -> httpx.Response:
        return await self.client.post("/tokenize", json={"model": name, "content": "x"})

    def model(self, name: str) -> ServedModel:
        found = self.kv.models.find(name)
        assert found is not None
        return found

    @property
    def loaded(self) -> str:
        return "".join(one.name for one in self.kv.models.all if one.state is not None)

    async def close(self) -> None:
        await self.client.aclose()
        await self.kv.models.close()
        self._first.close()
        assert not self.kv.models.first.num_loads or self.loaded == ""


def _engine() -> Any:
    engine = fake_engine(64)
    engine.tokenizer.chat_template = TEMPLATE
    return engine


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)
