"""Work that takes too long for the threads that requests share."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import TypeVar, cast

__all__ = ["in_thread"]

T = TypeVar("T")

_LOOK_SECONDS = 1.0  # after so long it is looked again whether the loop has ended


async def in_thread(work: Callable[[], T], *, unwanted: Callable[[T], object] | None = None) -> T:
    """Run in a thread of its own: loading a model takes longer than those that requests share may
    be held. A caller that is cancelled meanwhile does not wait.

    Args:
        unwanted: is given, in that thread, a result that nobody waits for any more; the process may
            end without it.
    """
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
        except RuntimeError:  # the loop has ended, and who called with it
            is_taken = False
        if error is None and not is_taken and unwanted is not None:
            unwanted(cast("T", result))

    threading.Thread(target=run, name="kvboost-models", daemon=unwanted is not None).start()
    return await future


def _taken(told: queue.SimpleQueue[bool], loop: asyncio.AbstractEventLoop) -> bool:
    """What a loop tells, however long it takes: a result must not be both handed over and given
    back. False where it was closed before it told anything.
    """
    while True:
        ended = loop.is_closed()  # read first: what was told before that is in the queue by now
        try:
            return told.get(block=not ended, timeout=_LOOK_SECONDS)
        except queue.Empty:
            if ended:
                return False
