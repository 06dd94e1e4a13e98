"""The browser of the page tests: Debian's Chromium, found on the PATH and driven by Playwright."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from helpers.tools import find_chromium

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


@contextmanager
def running_chromium() -> Iterator[Any]:
    """A browser of Playwright's synchronous interface; gone, with its processes, when the block is
    left.

    While it runs, an event loop runs in this thread: tests that use it cannot be asynchronous.
    """
    from playwright.sync_api import sync_playwright

    path = find_chromium()
    assert path is not None, "no Chromium on the PATH; install it: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()
