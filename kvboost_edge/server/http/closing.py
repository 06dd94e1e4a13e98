"""The end of a connection: a client that is still sending must be able to read what it was
answered.

Closing a socket with bytes that nobody read makes the kernel reset the connection, and a reset
takes away what the client has not read yet, such as the reason why its body is too large. So the
writing half is closed first, and what still comes is read and dropped: for a time, up to a number
of bytes, and not from who falls silent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

__all__ = ["QUIET_SECONDS", "LingeringTransport"]

QUIET_SECONDS = 2.0  # who sends nothing for so long has read its answer, or never will
_MOST_BYTES = 128 * 1024 * 1024


class LingeringTransport:
    """A connection's transport for its protocol, all the same but for `close`.

    Attributes:
        may_send: whether the client may still be sending, asked when the connection is closed.
        seconds: how long what it sends is dropped before it is cut off.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        *,
        may_send: Callable[[], bool],
        seconds: float,
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._may_send = may_send
        self._seconds = seconds
        self._num_dropped = 0
        self._end: asyncio.TimerHandle | None = None
        self._quiet: asyncio.TimerHandle | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    @property
    def is_lingering(self) -> bool:
        """Whether everything was written and what comes is dropped."""
        return self._end is not None

    def is_closing(self) -> bool:
        """As of any transport; also while it lingers."""
        return self.is_lingering or self._transport.is_closing()

    def close(self) -> None:
        """Close once what was written has gone and the client sends no more; at once if it cannot
        be sending.
        """
        if self.is_closing():
            return
        if self._may_send():
            self.linger(self._seconds)
        else:
            self._transport.close()

    def linger(self, seconds: float) -> None:
        """Write nothing more, drop what comes for `seconds` at most, close."""
        if self.is_closing():
            return
        self._end = self._loop.call_later(seconds, self.close_now)
        self._quiet = self._loop.call_later(min(QUIET_SECONDS, seconds), self.close_now)
        try:
            self._transport.write_eof()
        except OSError:  # the client has gone
            self.close_now()
        else:
            self._transport.resume_reading()

    def drop(self, data: bytes) -> None:
        """Bytes that came while it lingers."""
        self._num_dropped += len(data)
        if self._num_dropped > _MOST_BYTES:
            self.close_now()
        elif self._quiet is not None:
            self._quiet.cancel()
            self._quiet = self._loop.call_later(QUIET_SECONDS, self.close_now)

    def close_now(self) -> None:
        """Close, whatever the client still sends."""
        self.stop_clocks()
        self._transport.close()

    def stop_clocks(self) -> None:
        """The connection is lost: nothing is left to wait for."""
        for timer in (self._end, self._quiet):
            if timer is not None:
                timer.cancel()
