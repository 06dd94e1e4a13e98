"""Running the server: uvicorn with our protocol, our signals and our logs.

The first SIGTERM or SIGINT turns /ready to 503 and takes no new generating request, while those in
progress go on for `drain_seconds` at most; then the listener closes and the process exits with 0. A
second signal exits at once.
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

from kvboost_edge.errors import ConfigError
from kvboost_edge.host.open_files import allow_open_files, num_open_files
from kvboost_edge.server.http.protocol import make_protocol
from kvboost_edge.server.logs import is_watched, log_facts
from kvboost_edge.server.settings import ServerSettings

if TYPE_CHECKING:
    from fastapi import FastAPI

__all__ = ["DrainingServer", "bind", "freeze_heap", "run_server"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# What is cancelled at the end of the grace may take so long to say so, and its client to read it.
_LAST_SECONDS = 2
_CUT_SECONDS = 1  # who works for a connection that was cut off then may take so long to notice
_BACKLOG = 1024
# Files of models, segments of the disk tiers, connections to Redis, the event loop's own.
_OTHER_FILES = 64
_AT_ONCE = 64  # connections that the event loop accepts before it goes on
_ROUNDS = 4  # in which it may accept as many before it has closed the first that it refuses
_NO_RESOURCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class DrainingServer(uvicorn.Server):
    """uvicorn's server with the end described above.

    Attributes:
        at_once: connections that the event loop accepts before it goes on.
    """

    def __init__(self, app: FastAPI, settings: ServerSettings, at_once: int = _AT_ONCE) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=settings.host,
                port=settings.port,
                loop="asyncio",
                http=make_protocol(app.state.kv, settings),
                backlog=at_once,  # of the event loop, which listens with it too: see `startup`
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
        """Begin to end: nothing new, and `drain_seconds` for what is in progress. Safe to call from
        any thread.
        """
        if self._drain_until is None:
            self._drain_until = time.monotonic() + self._state.settings.drain_seconds
            self._state.drain()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._state.draining:
            log_facts(logging.WARNING, "exiting at once", signal=signal.Signals(sig).name)
            sys.stderr.flush()
            os._exit(128 + sig)
        running = self._state.sequences
        hint = "another signal, or Ctrl-C, stops at once" if running else None
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

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log once that no descriptor is left for a connection: the loop tries again, and fails,
        many times a second.
        """
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in _NO_RESOURCE and "socket" in context):
            loop.default_exception_handler(context)
        elif not self._told_of_accept:
            self._told_of_accept = True
            log_facts(
                logging.WARNING,
                "connections wait: the system accepts no more",
                reason=error.strerror,
                hint="raise the limit of open files (ulimit -n) or lower --max-connections",
            )

    async def on_tick(self, counter: int) -> bool:
        if await super().on_tick(counter):
            return True
        if self._drain_until is None:
            return False
        self._state.models.refuse_waiting()
        return not self._state.admitted or time.monotonic() >= self._drain_until

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._state.drain()
        self._state.cancel_all()
        end = asyncio.get_running_loop().call_later(_LAST_SECONDS, self._cut_off)
        try:
            await super().shutdown(sockets)
        finally:
            end.cancel()
        await self._state.models.close()

    def _cut_off(self) -> None:
        """Who has not sent its request by now, or not taken its answer, has gone as far as anybody
        here can tell.
        """
        connections = list(self.server_state.connections)
        if connections:
            log_facts(logging.WARNING, "connections cut off", count=len(connections))
        for connection in connections:
            connection.transport.abort()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Unlike uvicorn's, it does not raise the signal again at the end: a clean end exits with
        0.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def bind(settings: ServerSettings) -> socket.socket:
    """A socket at the address, not listening yet; port 0 takes a free one. Raises ConfigError
    naming address and reason.
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
    """Serve an app of `create_app` on a socket from `bind` until told to end. The first engine and
    the socket stay open.
    """
    host, port = listener.getsockname()[:2]
    max_connections, at_once = _connections_within_limit(settings.max_connections)
    settings = dataclasses.replace(settings, max_connections=max_connections)
    server = DrainingServer(app, settings, at_once)
    try:
        listener.listen(_BACKLOG)
    except OSError as error:  # another process bound the same address and was the first to listen
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
    # Not before: for a second nothing else runs then, and who comes in it waits no longer than for
    # a later start.
    app.state.kv.first.engine.read_ahead()
    try:
        server.run(sockets=[listener])
    finally:
        gc.unfreeze()
    log_facts(logging.INFO, "stopped")


def _connections_within_limit(asked: int) -> tuple[int, int]:
    """Return how many connections, at most `asked`, the limit of open files has room for, and how
    many to accept at once. Raises the limit as far as needed and allowed.

    As many connections again may be about to read their refusal.
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
    """As a browser on this machine reaches it: an address that stands for all is none to go to."""
    return (
        url.replace(host, "127.0.0.1", 1) if host == "0.0.0.0" else url.replace("[::]", "[::1]", 1)
    )


def freeze_heap() -> None:
    """What is there now stays: a full collection would read all of it again and hold the event loop
    for 50 ms.

    The collector waits with a full collection until what is new is a quarter of what the last one
    left. After the second call, which has nothing to read, that is nothing: else the garbage of
    tens of thousands of requests, whose tasks and errors refer to each other in circles, would be
    kept first.
    """
    gc.collect()
    gc.freeze()
    gc.collect()


def _not_listening(settings: ServerSettings, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot listen on host={settings.host!r} port={settings.port}: {error.strerror}; choose "
        "another --port"
    )
