"""Running the server: uvicorn with our protocol, our signals and our logs.

The first SIGTERM or SIGINT turns /ready to 503 and takes no new generating request, while those in
progress go on for `drain_seconds` at most; then the listener closes and the process exits with 0. A
second signal exits at once.
"""

from __future__ import annotations

import asyncio
import contextlib
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
from typing import TYPE_CHECKING

import uvicorn

from kvboost_edge.errors import ConfigError
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


class DrainingServer(uvicorn.Server):
    """uvicorn's server with the end described above."""

    def __init__(self, app: FastAPI, settings: ServerSettings) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=settings.host,
                port=settings.port,
                loop="asyncio",
                http=make_protocol(app.state.kv),
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
        await super().startup(sockets)
        self._state.models.loader.watch_idle(self._state.models.first)

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
    server = DrainingServer(app, settings)
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
