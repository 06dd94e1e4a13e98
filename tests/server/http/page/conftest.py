"""Pages of a browser that note everything unexpected, and a model slow enough to watch."""

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

# Without a browser there is nothing to drive; tests/conftest.py reports it in the summary.
collect_ignore_glob = [] if find_chromium() or must_run() else ["test_*.py"]

STEP_SECONDS = 0.02
PATIENCE_SECONDS = 30  # machines that run the tests are slow and loaded

# On every page: a timer that is set while window.hurries is true runs at once; see `Visit.hurry`.
HURRY = """{
  const waitReally = window.setTimeout;
  window.setTimeout = (action, delay, ...rest) => waitReally(action, window.hurries ? 0 : delay, ...rest);
}"""

# A page does nothing until it is left for the next test's, which loads faster than after about:blank
# in between. As it is left, the page keeps the chat of an answer under way.
QUIET = """
  window.stop();
  for (let timer = setTimeout(() => 0); timer > 0; timer -= 1) clearTimeout(timer);
  window.setTimeout = window.setInterval = window.requestAnimationFrame = () => 0;
  addEventListener('pagehide', () => { localStorage.clear(); sessionStorage.clear(); });
"""

# In place of the server's chat: what is asked is kept, what is answered is said by the test, piece
# by piece. A test may set window.requestId, the id of the answers.
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
    """A page of the browser with what happened on it. `expected_failures`: parts of console errors
    that may occur.
    """

    page: Any
    origin: str
    key: str
    problems: list[str] = dataclasses.field(default_factory=list)
    foreign: list[str] = dataclasses.field(default_factory=list)
    expected_failures: tuple[str, ...] = ()

    def __getattr__(self, name):
        """All that Playwright's page has."""
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
        """Hear nothing more of the page."""
        for event, heard in self._heard_by.items():
            self.page.remove_listener(event, heard)

    def ask(self, text):
        """Type a message and send it with Enter."""
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")

    def answer(self, state="done"):
        """The last turn, once its answer ended in `state`."""
        self.page.locator(".turn:last-child:not(.running)").wait_for()
        turn = self.page.locator(".turn").last
        assert turn.get_attribute("class") == f"turn {state}", turn.inner_text()
        return turn

    def settings(self, **fields):
        """Fill fields under Settings; show the live view again, unless a key or a wrong value is
        set.
        """
        self.page.click("nav [data-view=settings]")
        for name, text in fields.items():
            self.page.fill(f"#{name.replace('_key', '-key')}", text)
        if not {"api_key", "top_p"} & set(fields):
            self.page.click("nav [data-view=live]")

    def button(self, name):
        return self.page.get_by_role("button", name=name)

    def count(self, selector):
        return self.page.locator(selector).count()

    def expects(self, selector):
        """Playwright's assertions about a selector."""
        from playwright.sync_api import expect

        return expect(self.page.locator(selector))

    def shows(self, selector, text, **options):
        self.expects(selector).to_have_text(text, **options)

    def serve(self, path, answer):
        """Answer requests of a path with JSON in place of the server."""
        self.page.route(path, lambda route: route.fulfill(json=answer))

    def until(self, condition):
        """Wait for a JavaScript expression to be true. (Playwright's own way to wait uses `eval`,
        which the page's policy refuses.)
        """
        end = time.monotonic() + PATIENCE_SECONDS
        while not self.page.evaluate(condition):
            assert time.monotonic() < end, f"waited {PATIENCE_SECONDS} s for {condition}"
            self.page.wait_for_timeout(10)

    def hurry(self):
        """The page reads now what it would read after a pause of up to 2.5 s."""
        self.page.evaluate(
            "window.hurries = true; document.dispatchEvent(new Event('visibilitychange'));"
            "window.hurries = false;"
        )

    def read_models(self):
        """The page reads the list of models now."""
        with self.page.expect_response("**/v1/models"):
            self.hurry()

    def stop_timers(self):
        """No timer that is set from now on runs, so that "Copied" stays."""
        self.page.evaluate("window.setTimeout = () => 0")

    def stop_clock(self):
        """The page's time stands still, timers and frames too; `page.clock.run_for(ms)` moves
        it.
        """
        self.page.clock.install(time=0)
        self.page.clock.pause_at(3600)

    def module(self, name, body, argument=None):
        """The value of the JavaScript `body` with `it` the module and `argument` as it is."""
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
    """The browser, and its pages that no test uses, by the options of their contexts: a new one
    takes a second.
    """

    def __init__(self, browser):
        self._browser = browser
        self._idle = {}

    def open(self, base_url, *, init_script="", prepare=None, **options):
        """Load the page of a server. prepare: called with the visit before that, for routes that
        answer the first requests.
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
        """It is kept, unless it was closed or its clock is another; nothing of the visit stays."""
        page = visit.page
        if page.is_closed():
            return
        is_kept = visit.key not in self._idle and page.evaluate("!('__pwClock' in globalThis)")
        if is_kept:
            page.unroute_all(behavior="ignoreErrors")
            visit.ignore()
            page.evaluate(QUIET)
            page.evaluate("0")  # what the end of its requests led to was told before this
            page.context.clear_permissions()
            self._idle[visit.key] = page
        else:
            page.context.close()


class Running:
    """The one browser for the files of this folder that follow each other."""

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
    """While a browser runs no test may be asynchronous, and those of other folders are."""
    if nextitem is None or nextitem.path.parent != Path(__file__).parent:
        RUNNING.stop()


@pytest.fixture(scope="session")
def running_browser(nothing_left_running):
    """The browser, gone before the check for what is left running: after the last test of a run the
    fixtures of the session end before the hook above is called.
    """
    yield RUNNING
    RUNNING.stop()


@pytest.fixture(scope="module")
def pages(demo_engine, running_browser):
    from playwright.sync_api import expect

    expect.set_options(timeout=PATIENCE_SECONDS * 1000)
    with demo_engine._core.reading():  # what tests of other files pinned is in use for minutes
        demo_engine._parts.manager.pins.expire(time.monotonic() + 1e6)
    return running_browser.pages()


@contextmanager
def opening(pages):
    """`open_page(base_url, **options of the browser's context)`; afterwards nothing unexpected
    happened.
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
def visit(visiting, live_server):
    """The page of the server without keys, its first figures read."""
    visit = visiting(live_server.base_url)
    visit.page.locator("#live-state", has_text="live").wait_for()
    return visit


@dataclasses.dataclass
class StandIn:
    """A page whose chat is answered by the test."""

    visit: Visit

    def __getattr__(self, name):
        """All that the visit has."""
        return getattr(self.visit, name)

    def deltas(self, *deltas, **choice):
        """The next pieces of the answer, in the shape of OpenAI's deltas, and what else stands in
        their choice.
        """
        self._send(*({"choices": [{"index": 0, "delta": delta, **choice}]} for delta in deltas))

    def reading(self, **progress):
        """How far the prompt is read, as a server tells it to those who ask."""
        head = [
            {"index": 0, "delta": {"role": "assistant", "content": None}, "finish_reason": None}
        ]
        self._send({"choices": head, "usage": None, "prompt_progress": progress})

    def end(self, reason, **last):
        """The end of the answer; `last`: fields of its last chunk, such as usage."""
        self.deltas({}, finish_reason=reason)
        self._send({"choices": [], **last}, "[DONE]")
        self.visit.answer()

    def call(self, name, arguments, *, index=0):
        """A whole call of a tool, its arguments in pieces of three characters."""
        function = {"name": name, "arguments": ""}
        first = {"index": index, "id": f"call-{name}", "type": "function", "function": function}
        pieces = [{"arguments": arguments[at : at + 3]} for at in range(0, len(arguments), 3)]
        rest = [{"index": index, "function": piece} for piece in pieces]
        self.deltas(*({"tool_calls": [piece]} for piece in (first, *rest)))

    def begin(self, text):
        """Send the first message; its request's body."""
        self.visit.ask(text)
        return self.asked(1)

    def asked(self, times):
        """The body of the last request, once there were so many."""
        self.visit.until(f"window.asked.length === {times}")
        return self.visit.page.evaluate("window.asked.at(-1)")

    def _send(self, *events):
        lines = [event if isinstance(event, str) else json.dumps(event) for event in events]
        stream = [f"data: {line}\n\n" for line in lines]
        self.visit.page.evaluate("(lines) => lines.forEach((line) => window.say(line))", stream)


@pytest.fixture
def stand_in(visiting, live_server):
    """`stand_in(**options of the browser's context)`."""
    return lambda **options: StandIn(
        visiting(live_server.base_url, init_script=STAND_IN, **options)
    )


@pytest.fixture(scope="module")
def modules(pages, live_server):
    """One page for all tests of a module that only call functions of the scripts."""
    with opening(pages) as open_page:
        yield open_page(live_server.base_url)


@pytest.fixture
def slow_model(demo_engine):
    """In `with slow_model():` each step takes a moment and no answer ends before its limit of
    tokens.
    """

    @contextmanager
    def slowed():
        runner = demo_engine._parts.runner
        forward = runner.forward

        def slow_forward(batch):
            time.sleep(STEP_SECONDS)
            logits = forward(batch).copy()
            logits[:, 2] = -1e9  # the end of an answer
            return logits

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runner, "forward", slow_forward)
            yield

    return slowed


@pytest.fixture
def answering():
    """`answering(visit, text, ...)`: the server's answers to chat requests, one streamed piece per
    text.
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
