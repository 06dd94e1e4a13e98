"""Lingering close of connections, so that a client that still sends can read its answer.

Closing a socket with unread data makes the kernel reset the connection. A reset discards data that
the client has not read yet, such as the error about its body. Therefore the writing half is closed
first, and incoming data is read and dropped. Time and number of bytes are limited, and a client
that falls silent is disconnected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

__all__ = ["QUIET_SECONDS", "LingeringTransport"]

QUIET_SECONDS = 2.0  # a client that is silent for this long has read its answer, or never will
_MOST_BYTES = 128 * 1024 * 1024


class LingeringTransport:
    """Wrapper of a connection's transport with a lingering `close`."""

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        *,
        may_send: Callable[[], bool],
        seconds: float,
    ) -> None:
        """Wrap a transport.

        Args:
            transport: the transport.
            loop: the event loop.
            may_send: returns whether the client may still be sending; called when the connection
                closes.
            seconds: longest time to drop incoming data.
        """
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
        """True while incoming data is dropped after everything was written."""
        return self._end is not None

    def is_closing(self) -> bool:
        """Return whether the transport is closing or lingers."""
        return self.is_lingering or self._transport.is_closing()

    def close(self) -> None:
        """Close after pending data is written and the client has stopped sending."""
        if self.is_closing():
            return
        if self._may_send():
            self.linger(self._seconds)
        else:
            self._transport.close()

    def linger(self, seconds: float) -> None:
        """Write no more, drop incoming data for at most `seconds`, then close."""
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
        """Drop data that arrived while the transport lingers."""
        self._num_dropped += len(data)
        if self._num_dropped > _MOST_BYTES:
            self.close_now()
        elif self._quiet is not None:
            self._quiet.cancel()
            self._quiet = self._loop.call_later(QUIET_SECONDS, self.close_now)

    def close_now(self) -> None:
        """Close without waiting for the client."""
        self.stop_clocks()
        self._transport.close()

    def stop_clocks(self) -> None:
        """Cancel the timers, because the connection is lost."""
        for timer in (self._end, self._quiet):
            if timer is not None:
                timer.cancel()
