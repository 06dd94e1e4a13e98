"""Programs that some tests need and that no Python package provides."""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

REDIS_FOLDER = Path(__file__).parents[2] / ".redis"  # `make redis-server` unpacks one there
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# redis-check-rdb is the same program as the server; its name selects the role.
_REDIS = ("redis-server", "valkey-server", "redis-check-rdb")


@dataclasses.dataclass(frozen=True)
class Tool:
    """A program, the command that installs it, and the tests that need it."""

    name: str
    find: Callable[[], str | None]
    install: str
    tests: str

    def report(self) -> str:
        return f"{self.name} is missing: {self.tests} did not run; to install it: {self.install}"


def find_chromium() -> str | None:
    """Return the path of a Chromium or Chrome, or None."""
    return next((path for path in map(shutil.which, _BROWSERS) if path is not None), None)


@functools.cache
def find_compiler() -> str | None:
    """Return the path of a g++ that has its address sanitizer, or None.

    The CUDA kernels run on fibers that exist for Linux only.
    """
    compiler = shutil.which("g++") if sys.platform == "linux" else None
    return compiler if compiler is not None and address_sanitizer(compiler).is_absolute() else None


def address_sanitizer(compiler: str) -> Path:
    """Return the path of the compiler's libasan.so, which is relative if the library is missing."""
    command = [compiler, "-print-file-name=libasan.so"]
    return Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())


def find_redis() -> str | None:
    """Return the path of a Redis or Valkey server, from the PATH or unpacked, or None."""
    unpacked = str(REDIS_FOLDER / "usr" / "bin")
    found = [shutil.which(name) for name in _REDIS]
    found += [shutil.which(name, path=unpacked) for name in _REDIS]
    return next((path for path in found if path is not None), None)


def find_curl() -> str | None:
    """Return the path of curl, or None."""
    return shutil.which("curl")


def find_systemd_analyze() -> str | None:
    """Return the path of systemd-analyze, or None."""
    return shutil.which("systemd-analyze")


TOOLS = (
    Tool("chromium", find_chromium, "apt-get install chromium", "tests/server/http/page"),
    Tool("redis-server", find_redis, "make redis-server", "the tests of the Redis tier"),
    Tool("g++", find_compiler, "apt-get install g++", "the tests of the CUDA kernels"),
    Tool("curl", find_curl, "apt-get install curl", "the README's curl examples"),
    Tool(
        "systemd-analyze",
        find_systemd_analyze,
        "apt-get install systemd",
        "the tests of the systemd units",
    ),
)


def missing_tools() -> list[Tool]:
    """Return the tools that this machine lacks."""
    return [tool for tool in TOOLS if tool.find() is None]


def must_run() -> bool:
    """Return whether tests fail instead of being skipped when their tool is missing."""
    return bool(os.environ.get("CI") or os.environ.get("KVBOOST_EDGE_REQUIRE_TOOLS"))
