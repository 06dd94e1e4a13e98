"""Input files of batches, and an app with the batch API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from helpers.server.live_servers import app_client

COMPLETIONS = "/v1/completions"
UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")


def line(
    custom_id: str, body: Mapping[str, Any] | None = None, url: str = COMPLETIONS, **more: Any
) -> dict[str, Any]:
    """Return a line of a file. Its body is a short completion by default."""
    body = {"prompt": f"say {custom_id}", "max_tokens": 3} if body is None else body
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": dict(body), **more}


def jsonl(lines: Iterable[Mapping[str, Any]]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


def records_of(text: bytes | str) -> dict[str, dict[str, Any]]:
    """Return the records of an output file by custom id. Each id must occur once."""
    content = text.encode() if isinstance(text, str) else text
    found = [json.loads(one) for one in content.splitlines()]
    by_id = {one["custom_id"]: one for one in found}
    assert len(by_id) == len(found), "a line was answered twice"
    return by_id


class BatchClient:
    """Client of the batch API over ASGI; `app` is the application."""

    def __init__(self, http: httpx.AsyncClient, app: Any) -> None:
        self.http = http
        self.app = app

    async def upload(self, content: bytes, name: str = "in.jsonl", **fields: str) -> Any:
        """Upload a file and return the response."""
        return await self.http.post(
            "/v1/files", files={"file": (name, content)}, data={"purpose": "batch", **fields}
        )

    async def create(self, content: bytes, **fields: Any) -> Any:
        """Upload a file, create a batch of it, and return the response."""
        file = (await self.upload(content)).json()
        return await self.http.post(
            "/v1/batches",
            json={
                "input_file_id": file["id"],
                "endpoint": COMPLETIONS,
                "completion_window": "24h",
                **fields,
            },
        )

    async def batch(self, batch_id: str) -> dict[str, Any]:
        found: dict[str, Any] = (await self.http.get(f"/v1/batches/{batch_id}")).json()
        return found

    async def ended(self, batch_id: str) -> dict[str, Any]:
        """Wait until the batch has ended and return it."""
        for _ in range(3000):
            found = await self.batch(batch_id)
            if found["status"] not in UNFINISHED:
                return found
            await asyncio.sleep(0.01)
        raise AssertionError(f"the batch did not end: {found}")

    async def records(self, file_id: str) -> dict[str, dict[str, Any]]:
        answer = await self.http.get(f"/v1/files/{file_id}/content")
        assert answer.status_code == 200
        return records_of(answer.content)


@asynccontextmanager
async def batch_app(
    engine: Any, directory: Path, key: str = "", **settings: Any
) -> AsyncIterator[BatchClient]:
    """Run an app with the batch API until the block ends. Its files stay on disk."""
    from kvboost_edge.server.app import create_app
    from kvboost_edge.server.settings import ServerSettings

    chosen = ServerSettings(model_name="tiny", batch_dir=directory, **settings)
    app = create_app(engine, chosen)
    service = app.state.kv.batches
    service.start()
    try:
        async with app_client(app, key) as http:
            yield BatchClient(http, app)
    finally:
        await service.close()
