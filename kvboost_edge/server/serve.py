"""Server process, which runs uvicorn with this project's protocol, signal handling and logs.

After the first SIGTERM or SIGINT, /ready returns 503 and new generating requests are rejected.
Running requests continue for at most `drain_seconds`. Then the listener closes and the process
exits with code 0. A second signal ends the process immediately.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn

from kvboost_edge.errors import KVBoostError
from kvboost_edge.host.open_files import allow_open_files, num_open_files
from kvboost_edge.host.signals import ENDING_SIGNALS
from kvboost_edge.server.http.protocol import make_protocol
from kvboost_edge.server.logs import is_watched, log_facts
from kvboost_edge.server.settings import ServerSettings

if TYPE_CHECKING:
    from fastapi import FastAPI

__all__ = ["DrainingServer", "bind", "freeze_heap", "run_server"]

# Time for cancelled requests to send their error and for clients to read it.
_LAST_SECONDS = 2
_CUT_SECONDS = 1  # time for tasks to notice that their connection was aborted
_BACKLOG = 1024
# Descriptors reserved for model files, segments of the disk tier, Redis connections and the event
# loop.
_OTHER_FILES = 64
_AT_ONCE = 64  # connections that the event loop accepts in one iteration
_ROUNDS = 4  # iterations until the first rejected connection is closed
_NO_RESOURCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class DrainingServer(uvicorn.Server):
    """uvicorn's server with the graceful shutdown that the module describes."""

    def __init__(self, app: FastAPI, settings: ServerSettings, at_once: int = _AT_ONCE) -> None:
        """Create the server.

        Args:
            app: an app from `create_app`.
            settings: settings of the server.
            at_once: maximum number of connections that the event loop accepts in one iteration.
        """
        super().__init__(
            uvicorn.Config(
                app,
                host=settings.host,
                port=settings.port,
                loop="asyncio",
                http=make_protocol(app.state.kv, settings),
                # asyncio also accepts this many connections at once; see `startup`
                backlog=at_once,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=_LAST_SECONDS + _CUT_SECONDS,
            )
        )
        self._state = app.state.kv
        self._drain_until: float | None = None
        self._told_of_accept = False

    def drain(self) -> None:
        """Start the shutdown: reject new requests, and let running ones continue for
        `drain_seconds`.

        Safe to call from any thread.
        """
        if self._drain_until is None:
            self._drain_until = time.monotonic() + self._state.settings.drain_seconds
            self._state.drain()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._state.draining:
            log_facts(logging.WARNING, "exiting immediately", signal=signal.Signals(sig).name)
            sys.stderr.flush()
            os._exit(128 + sig)
        running = self._state.sequences
        hint = (
            f"running requests get {self._state.settings.drain_seconds:g} s to finish "
            "(--drain-seconds); press Ctrl-C again, or send another signal, to exit immediately"
            if running
            else None
        )
        log_facts(
            logging.INFO, "draining", signal=signal.Signals(sig).name, in_flight=running, hint=hint
        )
        self.drain()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self._on_loop_error)
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_BACKLOG)
        self._state.models.loader.watch_idle(self._state.models.first)
        if self._state.batches is not None:
            self._state.batches.start()

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log, only once, that no file descriptor is left for new connections."""
        # The loop retries many times a second, and fails each time.
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in _NO_RESOURCE and "socket" in context):
            loop.default_exception_handler(context)
        elif not self._told_of_accept:
            self._told_of_accept = True
            log_facts(
                logging.WARNING,
                "connections wait: no more can be accepted",
                reason=error.strerror,
                hint="raise the limit of open files (ulimit -n) or lower --max-connections",
            )

    async def on_tick(self, counter: int) -> bool:
        if await super().on_tick(counter):
            return True
        if self._drain_until is None:
            return False
        self._state.models.refuse_waiting()
        if self._state.batches is not None:
            await self._state.batches.stop()
        return not self._state.admitted or time.monotonic() >= self._drain_until

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._state.drain()
        if self._state.batches is not None:
            await self._state.batches.close()
        self._state.cancel_all()
        end = asyncio.get_running_loop().call_later(_LAST_SECONDS, self._cut_off)
        try:
            await super().shutdown(sockets)
        finally:
            end.cancel()
        await self._state.models.close()
        if (traces := self._state.shared.traces) is not None:
            await asyncio.to_thread(traces.close)

    def _cut_off(self) -> None:
        """Abort connections with an incomplete request or an unread response."""
        connections = list(self.server_state.connections)
        if connections:
            log_facts(logging.WARNING, "connections cut off", count=len(connections))
        for connection in connections:
            connection.transport.abort()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while the server runs.

        uvicorn's method raises the signal again at the end. This method does not, and a graceful
        shutdown exits with code 0.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in ENDING_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def bind(settings: ServerSettings) -> socket.socket:
    """Return a socket that is bound to the address and not listening yet.

    Port 0 picks a free port.

    Raises:
        KVBoostError: the address cannot be used.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            settings.host.strip("[]"),
            settings.port,
            type=socket.SOCK_STREAM,
            flags=socket.AI_PASSIVE,
        )[0]
        listener = socket.socket(family, kind, proto)
        try:
            # On Windows, SO_REUSEADDR would let two servers listen on the same port.
            if sys.platform == "win32":
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
            else:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise _not_listening(settings, error) from error
    listener.set_inheritable(False)
    return listener


def run_server(app: FastAPI, settings: ServerSettings, listener: socket.socket) -> None:
    """Serve an app from `create_app` on a socket from `bind` until a signal ends the server.

    Does not close the first engine and the socket.
    """
    host, port = listener.getsockname()[:2]
    max_connections, at_once = _connections_within_limit(settings.max_connections)
    settings = dataclasses.replace(settings, max_connections=max_connections)
    server = DrainingServer(app, settings, at_once)
    try:
        listener.listen(_BACKLOG)
    except OSError as error:  # another process bound the same address and listened first
        raise _not_listening(settings, error) from error
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    if is_watched(settings):
        print(f"Open {_opened(host, url)}", file=sys.stderr, flush=True)
    log_facts(
        logging.INFO,
        "listening",
        url=url,
        model=settings.model_name,
        others=", ".join(one.name for one in app.state.kv.models.all[1:]) or None,
        api_keys=len(settings.all_keys),
    )
    freeze_heap()
    # Start this as late as possible. It delays requests by up to a second, which is no longer than
    # a later start of the server would.
    app.state.kv.first.engine.read_ahead()
    try:
        server.run(sockets=[listener])
    finally:
        gc.unfreeze()
    log_facts(logging.INFO, "stopped")


def _connections_within_limit(asked: int) -> tuple[int, int]:
    """Return the connection limit that fits the limit of open files, and how many to accept at
    once.

    Raises the limit of open files as far as needed and allowed. A rejected connection also keeps a
    descriptor until the client has read the response, so each connection counts twice.

    Args:
        asked: maximum number of connections that the settings ask for.
    """
    in_use = num_open_files()
    wanted = in_use + _OTHER_FILES + 2 * asked + _ROUNDS * _AT_ONCE
    allowed = allow_open_files(wanted)
    if allowed >= wanted:
        return asked, _AT_ONCE
    room = max(0, allowed - in_use - min(_OTHER_FILES, allowed // 4))
    at_once = max(1, min(_AT_ONCE, room // (2 * _ROUNDS)))
    possible = max(1, (room - _ROUNDS * at_once) // 2)
    if possible < asked:
        log_facts(
            logging.WARNING,
            "fewer connections than --max-connections: the limit of open files is too low",
            max_connections=possible,
            asked=asked,
            open_files=allowed,
            hint="raise the limit (ulimit -Hn)",
        )
    return min(asked, possible), at_once


def _opened(host: str, url: str) -> str:
    """Return the URL for a local browser. Wildcard addresses become loopback addresses."""
    return (
        url.replace(host, "127.0.0.1", 1) if host == "0.0.0.0" else url.replace("[::]", "[::1]", 1)
    )


def freeze_heap() -> None:
    """Exempt all existing objects from garbage collection."""
    gc.collect()
    # A full collection would visit all of these objects and block the event loop for 50 ms.
    gc.freeze()
    # CPython delays a full collection until the number of new objects is a quarter of those that
    # survived the last one. The second collection below has nothing to visit and resets that number
    # to zero. Otherwise, the garbage of tens of thousands of requests would accumulate, because
    # tasks and errors form reference cycles.
    gc.collect()


def _not_listening(settings: ServerSettings, error: OSError) -> KVBoostError:
    return KVBoostError(
        f"cannot listen on host={settings.host!r} port={settings.port}: {error.strerror}; choose "
        "another --port"
    )
