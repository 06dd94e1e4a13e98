"""The browser of the page tests: Debian's Chromium, found on the PATH and driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["find_chromium", "running_chromium"]

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Nothing of the browser's own may start, connect or ask; every name but loopback fails to resolve.
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)


def find_chromium() -> str | None:
    """Path of the browser, or None: the page tests are not collected then."""
    return next((path for path in map(shutil.which, NAMES) if path is not None), None)


@contextmanager
def running_chromium() -> Iterator[Any]:
    """A browser of Playwright's synchronous interface; gone, with its processes, when the block is left.

    While it runs, an event loop runs in this thread: tests that use it cannot be asynchronous.
    """
    from playwright.sync_api import sync_playwright

    path = find_chromium()
    assert path is not None, f"none of {', '.join(NAMES)} is on the PATH"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()
