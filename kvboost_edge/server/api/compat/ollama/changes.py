"""Bodies and progress of Ollama's routes that change models."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.types import Send

from kvboost_edge.models.pull.download import PullEvent
from kvboost_edge.server.api.compat.ollama.schemas import ModelNameFields
from kvboost_edge.server.api.compat.ollama.writer import LINES
from kvboost_edge.server.api.schemas.shared import ModelName, OnlyFalse
from kvboost_edge.server.api.schemas.strict import Strict
from kvboost_edge.server.api.schemas.unsupported_fields import UnsupportedField
from kvboost_edge.server.api_errors import ApiError, ClientGone, as_api_error
from kvboost_edge.server.models.changes import ModelChanges
from kvboost_edge.server.models.registry import until_gone
from kvboost_edge.server.models.server import server_of
from kvboost_edge.server.work.streams import EventStream, dumps, send_json

__all__ = ["OllamaCopy", "OllamaDelete", "OllamaPull", "changes_of", "send_progress"]

_SUCCESS = {"status": "success"}
_NO_LOGIN = UnsupportedField("set HF_TOKEN in the environment of the server", ("",))


class OllamaPull(ModelNameFields):
    """Body of /api/pull."""

    unsupported = dict.fromkeys(("username", "password"), _NO_LOGIN)

    insecure: OnlyFalse = None
    stream: bool | None = Field(
        None, description="Send the progress as a stream of JSON lines; true by default."
    )


class OllamaDelete(ModelNameFields):
    """Body of /api/delete."""


class OllamaCopy(Strict):
    """Body of /api/copy."""

    source: ModelName
    destination: ModelName


def changes_of(request: Request) -> ModelChanges:
    """Return what changes the server's models.

    Raises:
        ApiError: the models cannot be changed (403).
    """
    return server_of(request).allowed_changes()


async def send_progress(
    request: Request,
    send: Send,
    work: Callable[[Callable[[PullEvent], None], threading.Event], Awaitable[None]],
    *,
    streams: bool,
) -> None:
    """Run `work` and send its progress. If the client disconnects, the work is stopped."""
    loop = asyncio.get_running_loop()
    events: asyncio.Queue[PullEvent | None] = asyncio.Queue()
    stopped = threading.Event()

    def tell(event: PullEvent) -> None:
        loop.call_soon_threadsafe(events.put_nowait, event)

    def wake(_: object) -> None:
        events.put_nowait(None)

    task = asyncio.ensure_future(work(tell, stopped))
    gone = asyncio.ensure_future(until_gone(request))
    task.add_done_callback(wake)
    gone.add_done_callback(wake)
    stream = EventStream(send, _failure, content_type=LINES)
    try:
        while (event := await events.get()) is not None:
            if streams:
                stream.add(_line(event))
                await stream.flush()
        if not task.done():
            raise ClientGone
        task.result()
    except Exception as error:
        if not stream.started:
            raise
        if not isinstance(error, ClientGone):
            await stream.fail(as_api_error(error))
        return
    finally:
        stopped.set()
        gone.cancel()
        # A stopped pull ends by itself; retrieve its error, because no other code does.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
    if streams:
        stream.add(dumps(_SUCCESS) + b"\n")
        await stream.end()
    else:
        await send_json(send, dumps(_SUCCESS))


def _line(event: PullEvent) -> bytes:
    line: dict[str, Any] = {"status": event.status}
    if event.digest:
        line |= {"digest": event.digest, "total": event.total, "completed": event.completed}
    return dumps(line) + b"\n"


def _failure(error: ApiError) -> bytes:
    return dumps({"error": error.message}) + b"\n"
