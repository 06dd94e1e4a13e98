"""Helpers for the tests of cache-miss reports over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from helpers.server.live_servers import app_client
from kvboost_edge.server.app import create_app
from kvboost_edge.server.settings import ServerSettings

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
EXPLAIN = {"kvboost": {"explain": True}}
SYSTEM = "You are a helper of few words. Today is {}. Answer in English, in short sentences."


@asynccontextmanager
async def app_of(engine: Any, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with app_client(
        create_app(engine, ServerSettings(model_name="fake", **settings))
    ) as client:
        yield client


async def ask(app: httpx.AsyncClient, *said: str, **more: Any) -> dict[str, Any]:
    """Send a chat and return the cache report of its answer. The system message comes first, then
    user and assistant in turn.
    """
    roles = ["system", *["user", "assistant"] * len(said)]
    messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]
    body = {"messages": messages, "max_tokens": 90, "temperature": 0, **EXPLAIN, **more}
    answer = await app.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["kvboost"]["cache"]
    assert found["request_id"] == answer.headers["x-request-id"]
    assert found["hit_tokens"].get("pool", 0) + found["computed_tokens"] == found["prompt_tokens"]
    return found


async def complete(app: httpx.AsyncClient, prompt: Any, **more: Any) -> dict[str, Any]:
    headers = more.pop("headers", {})
    answer = await app.post(
        COMPLETIONS, json={"prompt": prompt, "max_tokens": 2, **EXPLAIN, **more}, headers=headers
    )
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["kvboost"]["cache"]
    return found
