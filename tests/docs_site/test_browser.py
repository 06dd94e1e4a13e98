"""Tests of the documentation site in a browser: search, both color schemes, desktop and phone, and
no findings of axe.
"""

import functools
import http.server
import threading

import pytest

from helpers.server.axe import AXE, axe_findings
from helpers.server.browser import running_chromium
from helpers.tools import find_chromium, must_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_chromium() is None and not must_run(), reason="Chromium is missing"),
]

SCREENS = {"desk": {"width": 1280, "height": 860}, "phone": {"width": 390, "height": 844}}
# The index, a guide, and generated pages. `make test` tests the index and a generated page in one
# look each.
PAGES = (
    "index.html",
    "how-to/serve-a-team.html",
    "reference/options.html",
    "reference/python.html",
    "reference/http-api.html",
)
LOOKS = [("desk", "light"), ("phone", "dark"), ("desk", "dark"), ("phone", "light")]
CASES = [
    pytest.param(
        path,
        look,
        marks=() if page == turn and page in (0, 2) else pytest.mark.full,
        id=f"{path}-{'-'.join(look)}",
    )
    for page, path in enumerate(PAGES)
    for turn, look in enumerate(LOOKS)
]


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


class _Server(http.server.ThreadingHTTPServer):
    # With the default of five, a busy machine refuses some of the browser's connections.
    request_queue_size = 128


@pytest.fixture(scope="module")
def origin(site):
    handler = functools.partial(_Quiet, directory=str(site))
    with _Server(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser():
    with running_chromium() as one:
        yield one


@pytest.fixture
def visit(browser):
    """Function that opens a page. Errors and requests to other servers fail the test at the end."""
    contexts, asked, errors, failed = [], [], [], []

    def opened(url, screen="desk", scheme="light"):
        context = browser.new_context(viewport=SCREENS[screen], color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)
        context.on("request", lambda request: asked.append(request.url))
        context.on("requestfailed", lambda request: failed.append((request.url, request.failure)))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(url)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not errors
    assert not failed
    near = ("http://127.0.0.1:", "file:", "data:", "blob:")
    assert not [url for url in asked if not url.startswith(near)]


@pytest.mark.parametrize(("path", "look"), CASES)
def test_pages_have_no_accessibility_violations(path, look, visit, origin):
    page = visit(f"{origin}/{path}", *look)
    page.evaluate(AXE)
    # Axe-core cannot decide about code under its copy button and about single characters.
    assert axe_findings(page, {"color-contrast"}) == []
    wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(wide) == 0, "the page must not scroll horizontally"


def search(page, words, target):
    """Type the words until the search finds the target page; return its link.

    The index may still be loading. If the search finds nothing for a long time, the page is
    reloaded.
    """
    field = page.locator(".md-search__input")
    found = page.locator(f".md-search-result__link[href*='{target}']").first
    for attempt in range(60):
        if attempt == 40:
            page.reload()
        field.fill("")
        field.press_sequentially(words)
        page.wait_for_timeout(min(50 * (attempt + 1), 1000))
        if found.is_visible():
            return found
    meta = page.locator(".md-search-result__meta").inner_text()
    raise AssertionError(f"the search for {words} does not show {target}: {meta}")


@pytest.mark.parametrize("place", [pytest.param("server", marks=pytest.mark.full), "file"])
def test_search_finds_a_page_also_in_a_site_opened_as_a_file(place, visit, origin, site):
    page = visit(f"{origin}/index.html" if place == "server" else (site / "index.html").as_uri())
    search(page, "speculative decoding", "speculation.html").click()
    page.wait_for_url("**/speculation.html*")
    assert page.locator("h1").inner_text().startswith("Speculative decoding")


def test_the_search_finds_names(visit, origin):
    page = visit(f"{origin}/index.html")
    for words, searched, target in (
        ("--max-memory", "max-memory", "reference/options.html"),
        ("response_format", "response_format", "structured.html"),
        ("Q4_K_M", "Q4_K_M", "models.html"),
        ("image_url", "image_url", "apis.html"),
    ):
        search(page, words, target)
        assert page.locator(".md-search__input").input_value() == searched


def test_the_scheme_can_be_chosen_and_stays(visit, origin):
    page = visit(f"{origin}/index.html")
    scheme = "document.body.getAttribute('data-md-color-scheme')"
    assert page.evaluate(scheme) == "default"
    page.click("label[for=__palette_1]")
    page.goto(f"{origin}/glossary.html")
    assert page.evaluate(scheme) == "slate"
