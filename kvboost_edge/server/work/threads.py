"""Work that takes too long for the threads that requests share."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["in_thread"]

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """Run in a thread of its own: loading a model takes longer than those that requests share may be held. A caller
    that is cancelled meanwhile does not wait."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def tell(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)  # type: ignore[arg-type]  # it is work's result
        else:
            future.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:
            error = raised
        loop.call_soon_threadsafe(tell, result, error)

    threading.Thread(target=run, name="kvboost-models").start()
    return await future
