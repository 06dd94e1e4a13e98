"""A server whose models change, accessed with Ollama's client."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import ollama

REPO = "someone/Tiny-GGUF"
NAME = f"{REPO}:Q8_0"


@contextlib.contextmanager
def closing_client(server: Any) -> Iterator[ollama.Client]:
    """Yield Ollama's client of a server."""
    client = ollama.Client(server.base_url)
    try:
        yield client
    finally:
        client._client.close()


def names(server: Any, key: str = "") -> list[str]:
    """Return the names of the models that a server lists."""
    headers = {"x-api-key": key} if key else {}
    with server.client(headers=headers) as client:
        return [one["id"] for one in client.get("/v1/models").json()["data"]]
