"""A real redis-server for tests, found on the PATH or unpacked by `make redis-server`. It ends with
its block.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from helpers.server.live_servers import wait_until
from helpers.tools import REDIS_FOLDER, find_redis, must_run

HOW = "no redis-server: `make redis-server` unpacks one (Debian, Ubuntu), or put one on the PATH"


@dataclasses.dataclass
class RedisServer:
    """A server that `url` and `client` reach by its socket file. `port` is its TCP port, which also
    replaces PORT in options.
    """

    folder: Path
    port: int
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"unix://{self.folder}/s"

    def client(self, **options: object) -> redis.Redis:
        """Connect directly, without any of the tier's code."""
        return redis.Redis(
            unix_socket_path=f"{self.folder}/s", socket_timeout=10, protocol=2, **options
        )  # type: ignore[arg-type]

    def kill(self) -> None:
        """Kill the server as a power cut would; its data is lost."""
        self.process.kill()
        self.process.wait()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Suspend the server while the block runs. The system accepts connections, but no request
        is answered.
        """
        os.kill(self.process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.process.pid, signal.SIGCONT)


@contextmanager
def running_redis(
    *options: str, tcp: bool = False, folder: Path | None = None
) -> Iterator[RedisServer]:
    """Start a server in a new folder with a short path, as sockets require, or restart one in the
    folder of a killed server.
    """
    program = find_redis()
    if program is None:
        if must_run():
            pytest.fail(HOW)
        pytest.skip(HOW)
    own = Path(tempfile.mkdtemp(prefix="kvb-redis-")) if folder is None else folder
    port = _free_port() if tcp or "PORT" in options else 0
    plain = [] if "--tls-port" in options else ["--port", str(port if tcp else 0)]
    chosen = [str(port) if option == "PORT" else option for option in options]
    process = subprocess.Popen(
        [
            "redis-server",
            "--unixsocket",
            f"{own}/s",
            "--save",
            "",
            "--dir",
            str(own),
            *plain,
            *chosen,
        ],
        executable=program,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=_environment(program),
    )
    server = RedisServer(own, port, process)
    try:
        wait_until(lambda: process.poll() is not None or _accepts(own), "redis-server to listen")
        assert process.poll() is None, f"{program} {chosen} ended with {process.returncode}"
        yield server
    finally:
        server.kill()
        if folder is None:
            shutil.rmtree(own, ignore_errors=True)


def _accepts(folder: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            sock.connect(f"{folder}/s")
        except OSError:
            return False
    return True


def _environment(program: str) -> dict[str, str]:
    """Return the environment of the program. The unpacked one finds its libraries in its own
    folder.
    """
    if REDIS_FOLDER not in Path(program).parents:
        return dict(os.environ)
    folders: Sequence[str] = sorted({str(path.parent) for path in REDIS_FOLDER.rglob("*.so*")})
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(folders)}


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
