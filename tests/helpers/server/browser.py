"""Browser for the page tests: Debian's Chromium, found on the PATH and driven by Playwright."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from helpers.tools import find_chromium

# Block the browser's own background services and connections. All names but loopback fail to
# resolve.
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
    """Yield a browser with Playwright's synchronous interface, and end it with its processes when
    the block ends.

    An event loop runs in this thread meanwhile, so tests that use the browser cannot be
    asynchronous.
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
