"""A real server in a thread of this process for tests, and an app without a socket."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

KEYS = ("key-of-the-first-tenant", "key-of-the-second-tenant")
ADMIN_KEY = "key-of-the-admin"
ENGINE_OPTIONS = {"num_blocks": 512, "max_num_seqs": 8, "reuse_gate": "off"}


@dataclasses.dataclass(frozen=True)
class LiveServer:
    """A server that runs in a thread of this process. `state` is its first model."""

    host: str
    port: int
    engine: Any
    state: Any
    server: Any
    keys: tuple[str, ...] = ()

    @property
    def kv(self) -> Any:
        """The `ServerState` of the server."""
        return self.server._state

    @property
    def base_url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.keys[0]}"} if self.keys else {}

    def client(self, **options: Any) -> httpx.Client:
        options.setdefault("headers", self.headers)
        return httpx.Client(base_url=self.base_url, timeout=30, **options)

    def connect(self, timeout: float = 20.0) -> socket.socket:
        """Open a plain socket to the server."""
        return socket.create_connection((self.host, self.port), timeout=timeout)

    def request_bytes(self, path: str, body: dict[str, Any], *headers: str) -> bytes:
        """Return a complete POST request as bytes."""
        text = json.dumps(body).encode()
        lines = [
            f"POST {path} HTTP/1.1",
            f"Host: {self.host}:{self.port}",
            "Content-Type: application/json",
        ]
        lines += [
            f"Content-Length: {len(text)}",
            *(f"{name}: {value}" for name, value in self.headers.items()),
        ]
        return "\r\n".join([*lines, *headers, "", ""]).encode() + text

    def idle(self) -> bool:
        """Return whether no request is in flight, running or waiting, and no block is referenced.
        Pinned blocks may remain.
        """
        stats = self.engine.paged_stats()
        admission = self.state.admission
        figures = (
            stats["used_blocks"] - stats["pinned_blocks"],
            stats["num_running"],
            stats["num_waiting"],
        )
        return (
            not any(figures)
            and not admission.sequences
            and not admission.tokens
            and not admission.admitted
        )


def app_client(app: Any, key: str = "") -> httpx.AsyncClient:
    """Return a client of the app over ASGI, with an API key if one is given."""
    headers = {"x-api-key": key} if key else {}
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app), base_url="http://localhost", headers=headers
    )


class HeldForward:
    """Blocks an engine's model in its forward pass until `release()`. `steps` counts started
    passes.
    """

    def __init__(self, engine: Any) -> None:
        self.steps = 0
        self._real = engine._core._runner.forward
        self._gate = threading.Semaphore(0)
        self._free = False
        engine._core._runner.forward = self._forward

    def _forward(self, batch: Any) -> Any:
        self.steps += 1
        if not self._free:
            assert self._gate.acquire(timeout=60)
        return self._real(batch)

    def step(self, count: int = 1) -> None:
        """Let `count` passes continue."""
        if count:
            self._gate.release(count)

    def release(self) -> None:
        """Let all passes continue from now on."""
        self._free = True
        self._gate.release(1000)


@contextmanager
def serving(
    engine: Any,
    *,
    source: Any = None,
    others: Any = (),
    budget: int | None = None,
    process: Any = None,
    managed: Any = None,
    **settings: Any,
) -> Iterator[LiveServer]:
    """Serve `engine` in a thread until the block ends. The engine stays open. The parameters
    source, others, budget, process and managed are those of `create_app`.
    """
    from kvboost_edge.server.app import create_app
    from kvboost_edge.server.serve import DrainingServer, bind
    from kvboost_edge.server.settings import ServerSettings

    chosen = ServerSettings(
        **{"port": 0, "model_name": "kvboost-edge/demo", "max_batch_size": 8, **settings}
    )
    listener = bind(chosen)
    host, port = listener.getsockname()[:2]
    app = create_app(engine, chosen, source, others, budget, process, managed)
    server = DrainingServer(app, chosen)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="test-server")
    thread.start()
    try:
        wait_until(lambda: server.started, "the server to start")
        yield LiveServer(host, port, engine, app.state.kv.first, server, chosen.api_keys)
    finally:
        server.should_exit = True
        thread.join(timeout=30)
        listener.close()
        assert not thread.is_alive(), f"the server did not stop\n{_what_runs(server)}"


def _what_runs(server: Any) -> str:
    """Return the stacks of all threads, and the tasks of the server's event loop."""
    frames = sys._current_frames()
    named = [(one.name, frames[one.ident]) for one in threading.enumerate() if one.ident in frames]
    lines = [f"{name}:\n{''.join(traceback.format_stack(frame)[-8:])}" for name, frame in named]
    lines += [str(task) for task in asyncio.all_tasks(server.servers[0].get_loop())]
    return "\n".join(lines)


def raw_answer(sock: socket.socket) -> bytes:
    """Return all bytes that the server sends until it closes, within the socket's timeout."""
    received = bytearray()
    while True:
        try:
            data = sock.recv(65536)
        except ConnectionResetError:
            return bytes(received)
        if not data:
            return bytes(received)
        received += data


def wait_until(condition: Callable[[], Any], what: str, seconds: float = 60.0) -> None:
    """Poll until `condition()` is true; fail with `what` after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        time.sleep(0.005)
