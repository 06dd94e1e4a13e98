"""Lingering close of connections, which lets a client that is still sending read its response.

If a socket is closed with unread data, the kernel resets the connection. A reset discards data that
the client has not read yet, such as an error about its request body. The transport therefore closes
its sending side first, and reads and drops incoming data. It limits time and bytes, and disconnects
a client that stops sending.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

__all__ = ["QUIET_SECONDS", "LingeringTransport"]

# seconds without data after which the client has read its response, or never will
QUIET_SECONDS = 2.0
_MOST_BYTES = 128 * 1024 * 1024


class LingeringTransport:
    """Wrapper of a connection's transport whose `close` lingers."""

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
            may_send: function called when the connection closes, to find out whether the client may
                still be sending.
            seconds: maximum time to drop incoming data.
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
        """True after everything was written, while incoming data is dropped."""
        return self._end is not None

    def is_closing(self) -> bool:
        """Return whether the transport is closing or lingering."""
        return self.is_lingering or self._transport.is_closing()

    def close(self) -> None:
        """Close after the pending data is written and the client has stopped sending."""
        if self.is_closing():
            return
        if self._may_send():
            self.linger(self._seconds)
        else:
            self._transport.close()

    def linger(self, seconds: float) -> None:
        """Stop writing, drop incoming data for at most `seconds`, then close."""
        if self.is_closing():
            return
        self._end = self._loop.call_later(seconds, self.close_now)
        self._quiet = self._loop.call_later(min(QUIET_SECONDS, seconds), self.close_now)
        try:
            self._transport.write_eof()
        except OSError:  # the client has disconnected
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
        """Cancel the timers after the connection is lost."""
        for timer in (self._end, self._quiet):
            if timer is not None:
                timer.cancel()
