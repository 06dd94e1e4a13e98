"""Long-running work in separate threads."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import TypeVar, cast

__all__ = ["in_thread"]

T = TypeVar("T")

_LOOK_SECONDS = 1.0  # interval between checks whether the loop has closed


async def in_thread(work: Callable[[], T], *, unwanted: Callable[[T], object] | None = None) -> T:
    """Run `work` in a separate thread and return its result.

    If the caller is cancelled, it does not wait for the thread.

    Args:
        unwanted: function called in that thread with a result that nobody waits for any more. The
            process may end without waiting for the thread.
    """
    # Loading a model or computing would occupy a shared worker thread for too long.
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    taken: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def tell(result: T | None, error: BaseException | None) -> None:
        taken.put(not future.done())
        if future.done():
            return
        if error is None:
            future.set_result(result)  # type: ignore[arg-type]  # it is work's result
        else:
            future.set_exception(error)

    def run() -> None:
        result = None
        error = None
        try:
            result = work()
        except BaseException as raised:
            error = raised
        try:
            loop.call_soon_threadsafe(tell, result, error)
            is_taken = unwanted is None or _taken(taken, loop)
        except RuntimeError:  # the loop is closed, so no caller waits
            is_taken = False
        if error is None and not is_taken and unwanted is not None:
            unwanted(cast("T", result))

    threading.Thread(target=run, name="kvboost-work", daemon=unwanted is not None).start()
    return await future


def _taken(told: queue.SimpleQueue[bool], loop: asyncio.AbstractEventLoop) -> bool:
    """Return whether the loop delivered the result. False if the loop closed first."""
    # Wait as long as the loop takes. A result must not be both delivered and discarded.
    while True:
        # Read this first. Anything reported before the loop closed is already in the queue.
        ended = loop.is_closed()
        try:
            return told.get(block=not ended, timeout=_LOOK_SECONDS)
        except queue.Empty:
            if ended:
                return False
