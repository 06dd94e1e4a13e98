"""Fixtures of browser pages that record everything unexpected, and of a model slow enough to watch."""

from __future__ import annotations

import dataclasses
import json
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from helpers.server.browser import running_chromium
from helpers.tools import find_chromium, must_run

# Without a browser the tests are not collected; tests/conftest.py reports it in the summary.
collect_ignore_glob = [] if find_chromium() or must_run() else ["test_*.py"]

STEP_SECONDS = 0.02
PATIENCE_SECONDS = 30  # test machines may be slow and busy

# On every page, timers set while window.hurries is true run immediately; see `Visit.hurry`.
HURRY = """{
  const waitReally = window.setTimeout;
  window.setTimeout = (action, delay, ...rest) => waitReally(action, window.hurries ? 0 : delay, ...rest);
}"""

# Makes a page idle until the next test loads its own, which is faster than loading about:blank in
# between. On leaving, the page stores the chat of a running answer, so the storage is cleared then.
QUIET = """
  window.stop();
  for (let timer = setTimeout(() => 0); timer > 0; timer -= 1) clearTimeout(timer);
  window.setTimeout = window.setInterval = window.requestAnimationFrame = () => 0;
  addEventListener('pagehide', () => { localStorage.clear(); sessionStorage.clear(); });
"""

# Replaces the server's chat: requests are recorded, and the test sends the response in pieces. A
# test may set window.requestId, the id of the responses.
STAND_IN = """
  const fetchReally = window.fetch;
  window.asked = [];
  window.fetch = (path, options) => {
    if (path !== '/v1/chat/completions') return fetchReally(path, options);
    window.asked.push(JSON.parse(options.body));
    const start = (controller) => {
      window.say = (text) => controller.enqueue(new TextEncoder().encode(text));
      options.signal.addEventListener('abort', () => controller.error(options.signal.reason));
    };
    const headers = window.requestId ? {'x-request-id': window.requestId} : {};
    return Promise.resolve(new Response(new ReadableStream({start}), {headers}));
  };
"""


@dataclasses.dataclass
class Visit:
    """Page of the browser and a record of its events.

    `expected_failures` lists parts of console errors that may occur.
    """

    page: Any
    origin: str
    key: str
    problems: list[str] = dataclasses.field(default_factory=list)
    foreign: list[str] = dataclasses.field(default_factory=list)
    expected_failures: tuple[str, ...] = ()

    def __getattr__(self, name):
        """Return an attribute of Playwright's page."""
        return getattr(self.page, name)

    def listen(self):
        self._heard_by = {
            "console": self._heard,
            "pageerror": lambda error: self.problems.append(f"exception: {error}"),
            "dialog": self._dialog,
            "request": self._requested,
            "popup": lambda popup: self.problems.append(f"popup: {popup.url}"),
        }
        for event, heard in self._heard_by.items():
            self.page.on(event, heard)

    def ignore(self):
        """Stop listening to the page's events."""
        for event, heard in self._heard_by.items():
            self.page.remove_listener(event, heard)

    def ask(self, text):
        """Type a message and send it with Enter."""
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")

    def answer(self, state="done"):
        """Wait until the last answer has ended; check its state and return its turn."""
        self.page.locator(".turn:last-child:not(.running)").wait_for()
        turn = self.page.locator(".turn").last
        assert turn.get_attribute("class") == f"turn {state}", turn.inner_text()
        return turn

    def settings(self, **fields):
        """Fill in fields under Settings.

        The live view is shown again afterwards, unless an API key or a value for `top_p` is set.
        """
        self.page.click("nav [data-view=settings]")
        for name, text in fields.items():
            self.page.fill(f"#{name.replace('_key', '-key')}", text)
        if not {"api_key", "top_p"} & set(fields):
            self.page.click("nav [data-view=live]")

    def reset_settings(self):
        """Reset the settings, which are shown, and confirm it."""
        self.button("Reset settings").click()
        self.page.click("#confirm-action")

    def button(self, name):
        return self.page.get_by_role("button", name=name)

    def count(self, selector):
        return self.page.locator(selector).count()

    def expects(self, selector):
        """Return Playwright's assertions about a selector."""
        from playwright.sync_api import expect

        return expect(self.page.locator(selector))

    def shows(self, selector, text, **options):
        self.expects(selector).to_have_text(text, **options)

    def serve(self, path, answer):
        """Answer requests for a path with JSON instead of the server's response."""
        self.page.route(path, lambda route: route.fulfill(json=answer))

    def until(self, condition):
        """Wait until a JavaScript expression is true.

        Playwright's own way to wait uses `eval`, which the page's security policy forbids.
        """
        end = time.monotonic() + PATIENCE_SECONDS
        while not self.page.evaluate(condition):
            assert time.monotonic() < end, f"waited {PATIENCE_SECONDS} s for {condition}"
            self.page.wait_for_timeout(10)

    def hurry(self):
        """Make the page read immediately what it would read after a pause of up to 2.5 s."""
        self.page.evaluate(
            "window.hurries = true; document.dispatchEvent(new Event('visibilitychange'));"
            "window.hurries = false;"
        )

    def read_models(self):
        """Make the page read the list of models now."""
        with self.page.expect_response("**/v1/models"):
            self.hurry()

    def stop_timers(self):
        """Disable timers that are set from now on, so that "Copied" stays visible."""
        self.page.evaluate("window.setTimeout = () => 0")

    def stop_clock(self):
        """Stop the page's clock, including timers and frames; `page.clock.run_for(ms)` advances it."""
        self.page.clock.install(time=0)
        self.page.clock.pause_at(3600)

    def module(self, name, body, argument=None):
        """Return the value of the JavaScript `body`, in which `it` is the module and `argument` the
        argument.
        """
        script = f"async (argument) => {{ const it = await import('/static/{name}.js'); {body} }}"
        return self.page.evaluate(script, argument)

    def check(self):
        assert not self.foreign, f"requests to other origins: {self.foreign}"
        unexpected = [
            text
            for text in self.problems
            if not any(part in text for part in self.expected_failures)
        ]
        assert not unexpected, unexpected

    def _heard(self, message):
        if message.type in ("error", "warning"):
            self.problems.append(f"console: {message.text} ({message.location})")

    def _dialog(self, dialog):
        self.problems.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _requested(self, request):
        parts = urlsplit(request.url)
        if f"{parts.scheme}://{parts.netloc}" != self.origin:
            self.foreign.append(request.url)


class Pages:
    """Browser with a pool of idle pages, keyed by their context options. A new page takes a second."""

    def __init__(self, browser):
        self._browser = browser
        self._idle = {}

    def open(self, base_url, *, init_script="", prepare=None, **options):
        """Load the page of a server.

        `prepare` is called with the visit before loading, to add routes that answer the first
        requests.
        """
        chosen = {"viewport": {"width": 1280, "height": 800}, "color_scheme": "light", **options}
        key = json.dumps([chosen, init_script])
        page = self._idle.pop(key, None)
        if page is None:
            context = self._browser.new_context(**chosen)
            context.set_default_timeout(PATIENCE_SECONDS * 1000)
            context.add_init_script(HURRY + init_script)
            page = context.new_page()
        page.set_viewport_size(chosen["viewport"])
        page.emulate_media(color_scheme=chosen["color_scheme"])
        visit = Visit(page, base_url, key)
        visit.listen()
        if prepare is not None:
            prepare(visit)
        page.goto(f"{base_url}/")
        return visit

    def close(self, visit):
        """Reset the page and keep it for reuse, unless it was closed or its clock was changed."""
        page = visit.page
        if page.is_closed():
            return
        is_kept = visit.key not in self._idle and page.evaluate("!('__pwClock' in globalThis)")
        if is_kept:
            page.unroute_all(behavior="ignoreErrors")
            visit.ignore()
            page.evaluate(QUIET)
            page.evaluate("0")  # wait for events caused by the end of its requests
            page.context.clear_permissions()
            self._idle[visit.key] = page
        else:
            page.context.close()


class Running:
    """Single browser, shared by consecutive test files of this folder."""

    def __init__(self):
        self._stack = ExitStack()
        self._pages = None

    def pages(self):
        if self._pages is None:
            self._pages = Pages(self._stack.enter_context(running_chromium()))
        return self._pages

    def stop(self):
        self._pages = None
        self._stack.close()


RUNNING = Running()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem):
    """Stop the browser before tests of other folders, which are asynchronous and cannot run next to
    it.
    """
    if nextitem is None or nextitem.path.parent != Path(__file__).parent:
        RUNNING.stop()


@pytest.fixture(scope="session")
def running_browser(nothing_left_running):
    """Browser that is stopped before the check for running processes.

    After the last test the fixtures of the session end before the hook above is called.
    """
    yield RUNNING
    RUNNING.stop()


@pytest.fixture(scope="module")
def pages(demo_engine, running_browser):
    from playwright.sync_api import expect

    expect.set_options(timeout=PATIENCE_SECONDS * 1000)
    with demo_engine._core.reading():  # pins of other test files would last for minutes
        demo_engine._parts.manager.pins.expire(time.monotonic() + 1e6)
    return running_browser.pages()


@contextmanager
def opening(pages):
    """Yield `open_page(base_url, **options of the browser's context)`; then check that nothing
    unexpected happened.
    """
    visits = []

    def open_page(base_url, **options):
        visits.append(pages.open(base_url, **options))
        return visits[-1]

    yield open_page
    for visit in visits:
        pages.close(visit)
    for visit in visits:
        visit.check()


@pytest.fixture
def visiting(pages):
    with opening(pages) as open_page:
        yield open_page


@pytest.fixture
def held_without_key(visiting, live_server):
    """Function that opens the page and holds its requests for a path that have no API key.

    It returns the page and the held requests, of which there is at least one.
    """

    def opened(path):
        held = []

        def answer_by_key(route):
            if "authorization" in route.request.headers:
                route.continue_()
            else:
                held.append(route)

        visit = visiting(
            live_server.base_url, prepare=lambda one: one.route(f"**{path}", answer_by_key)
        )
        visit.expected_failures = ("401",)
        while not held:
            visit.wait_for_timeout(10)
        return visit, held

    return opened


@pytest.fixture
def visit(visiting, live_server):
    """Page of the server without API keys, after its first update."""
    visit = visiting(live_server.base_url)
    visit.shows("#model", "kvboost-edge/demo")  # the page has cleared what it showed before
    visit.shows("#live-state", "live")
    return visit


@dataclasses.dataclass
class StandIn:
    """Page whose chat responses come from the test."""

    visit: Visit

    def __getattr__(self, name):
        """Return an attribute of the visit."""
        return getattr(self.visit, name)

    @contextmanager
    def another_tab(self):
        """Yield the page in another tab of the browser."""
        page = self.visit.page.context.new_page()
        page.goto(f"{self.visit.origin}/")
        yield StandIn(dataclasses.replace(self.visit, page=page))
        page.close()

    def deltas(self, *deltas, **choice):
        """Send the next parts of the response as OpenAI's deltas; `choice` has more fields of their
        choice.
        """
        self._send(*({"choices": [{"index": 0, "delta": delta, **choice}]} for delta in deltas))

    def reading(self, **progress):
        """Send prompt progress as a server reports it on request."""
        head = [
            {"index": 0, "delta": {"role": "assistant", "content": None}, "finish_reason": None}
        ]
        self._send({"choices": head, "usage": None, "prompt_progress": progress})

    def end(self, reason, **last):
        """End the response; `last` has fields of its last chunk, such as usage."""
        self.deltas({}, finish_reason=reason)
        self._send({"choices": [], **last}, "[DONE]")
        self.visit.answer()

    def fail(self, message):
        """End the response with an error."""
        self._send({"error": {"message": message, "code": "internal_error"}})

    def call(self, name, arguments, *, index=0):
        """Send a whole tool call, with its arguments in pieces of three characters."""
        function = {"name": name, "arguments": ""}
        first = {"index": index, "id": f"call-{name}", "type": "function", "function": function}
        pieces = [{"arguments": arguments[at : at + 3]} for at in range(0, len(arguments), 3)]
        rest = [{"index": index, "function": piece} for piece in pieces]
        self.deltas(*({"tool_calls": [piece]} for piece in (first, *rest)))

    def begin(self, text):
        """Send the first message; return the body of its request."""
        self.visit.ask(text)
        return self.asked(1)

    def asked(self, times):
        """Wait until this many requests were sent; return the body of the last one."""
        self.visit.until(f"window.asked.length === {times}")
        return self.visit.page.evaluate("window.asked.at(-1)")

    def _send(self, *events):
        lines = [event if isinstance(event, str) else json.dumps(event) for event in events]
        stream = [f"data: {line}\n\n" for line in lines]
        self.visit.page.evaluate("(lines) => lines.forEach((line) => window.say(line))", stream)


@pytest.fixture
def stand_in(visiting, live_server):
    """Function `stand_in(**options of the browser's context)` that opens a StandIn page."""
    return lambda **options: StandIn(
        visiting(live_server.base_url, init_script=STAND_IN, **options)
    )


@pytest.fixture(scope="module")
def modules(pages, live_server):
    """Single page for all tests of a file that only call functions of the scripts."""
    with opening(pages) as open_page:
        yield open_page(live_server.base_url)


@pytest.fixture
def slow_model(demo_engine):
    """Context manager in which steps are slow and no answer ends before its token limit."""

    @contextmanager
    def slowed():
        runner = demo_engine._parts.runner
        forward = runner.forward

        def slow_forward(batch):
            time.sleep(STEP_SECONDS)
            logits = forward(batch).copy()
            logits[:, 2] = -1e9  # the token that ends an answer
            return logits

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runner, "forward", slow_forward)
            yield

    return slowed


@pytest.fixture
def answering():
    """Function `answering(visit, text, ...)` that sets the response to chat requests, one streamed
    chunk per text.
    """

    def install(visit, *pieces, **last):
        chunks = [
            {"choices": [{"index": 0, "delta": {"content": piece}, "finish_reason": None}]}
            for piece in pieces
        ]
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in (*chunks, {"choices": [], **last})]
        body = "".join(lines) + "data: [DONE]\n\n"
        visit.page.unroute("**/v1/chat/completions")
        visit.page.route(
            "**/v1/chat/completions",
            lambda route: route.fulfill(status=200, content_type="text/event-stream", body=body),
        )

    return install
