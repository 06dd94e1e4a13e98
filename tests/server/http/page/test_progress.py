"""Tests of the progress bar of prefill: progress, estimated time, and no repeated announcements to
screen readers.
"""

import threading

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.slow

FIRST = {"total": 10_000, "cache": 0, "processed": 0, "time_ms": 0, "estimated_ms": None}
HALF = {"total": 10_000, "cache": 1000, "processed": 3200, "time_ms": 4000, "estimated_ms": 12_300}
LAST = {"total": 10_000, "cache": 1000, "processed": 10_000, "time_ms": 16_000, "estimated_ms": 0}
# All texts of the status line in order.
HEARD = """
  window.heard = [];
  new MutationObserver(() => window.heard.push(document.getElementById('status').textContent))
    .observe(document.getElementById('status'), {childList: true});
"""


@pytest.fixture
def page(stand_in):
    page = stand_in()
    page.evaluate(HEARD)
    return page


def ask(page):
    assert page.begin("A long text.")["return_progress"] is True
    return page


@pytest.fixture
def asked(page):
    return ask(page)


@pytest.fixture
def timed(page):
    """Page with a stopped clock that waits for its first answer."""
    page.stop_clock()
    return ask(page)


@pytest.mark.parametrize(
    ("progress", "words"),
    [
        (FIRST, "waiting to read 10,000 tokens"),
        (FIRST | {"estimated_ms": 200_000}, "waiting to read 10,000 tokens, about 3 min"),
        (HALF, "reading 3,200 of 10,000 tokens, 1,000 from the cache, 550 tok/s, about 12 s"),
        (
            HALF | {"cache": 0, "estimated_ms": 300},
            "reading 3,200 of 10,000 tokens, 800 tok/s, less than a second",
        ),
        (
            {"total": 1, "cache": 0, "processed": 0, "time_ms": 3, "estimated_ms": None},
            "reading 0 of 1 token",
        ),
    ],
)
def test_progress_is_described_in_words(modules, progress, words):
    assert modules.module("progress", "return it.progressInWords(argument);", progress) == words


def test_the_progress_bar_disappears_at_the_first_token(asked):
    bar = asked.get_by_role("progressbar", name="Reading the prompt")
    asked.reading(**FIRST)
    expect(bar).to_have_attribute("aria-valuenow", "0")
    asked.reading(**HALF)
    expect(bar).to_have_attribute("aria-valuenow", "3200")
    expect(bar).to_have_attribute("aria-valuemax", "10000")
    asked.shows(
        ".progress .note",
        "reading 3,200 of 10,000 tokens, 1,000 from the cache, 550 tok/s, about 12 s",
    )
    widths = "(bar) => [...bar.children].map((part) => [part.className, part.style.width])"
    assert bar.evaluate(widths) == [["cached", "10%"], ["read", "22%"]]
    asked.reading(**LAST)
    expect(bar).to_have_attribute("aria-valuenow", "10000")
    asked.deltas({"content": "Yes."})
    expect(bar).to_have_count(0)
    asked.end("stop")
    asked.shows(".answer-body", "Yes.")


@pytest.mark.full
def test_a_short_prefill_shows_no_progress_bar(asked):
    asked.evaluate(
        "new MutationObserver(() => { window.flashed ||= document.querySelector('.progress') !== "
        "null; }).observe(document.getElementById('log'), {childList: true, subtree: true})"
    )
    asked.reading(**LAST)
    asked.deltas({"content": "Yes."})
    asked.end("stop")
    assert asked.evaluate("window.flashed") is False
    assert [text for text in asked.evaluate("window.heard") if "reading" in text] == []


@pytest.mark.full
def test_progress_is_announced_at_once_and_every_ten_seconds(timed):
    for number in range(30):  # one every half second
        timed.reading(**HALF | {"processed": 2000 + 200 * number})
        expect(timed.get_by_role("progressbar")).to_have_attribute(
            "aria-valuenow", str(2000 + 200 * number)
        )
        timed.clock.run_for(500)
    timed.reading(**LAST)
    timed.deltas({"content": "Yes."})
    timed.end("stop")
    heard = [text for text in timed.evaluate("window.heard") if "reading" in text]
    assert [text.split(" of ")[0] for text in heard] == ["reading 2,000", "reading 6,000"]
    assert timed.get_attribute(".answer", "aria-busy") is None


@pytest.mark.full
@pytest.mark.parametrize("how", ["stopped", "failed", "calls"])
def test_the_progress_bar_is_removed_when_the_request_ends(asked, how):
    asked.reading(**HALF)
    expect(asked.get_by_role("progressbar")).to_be_visible()
    if how == "stopped":
        asked.keyboard.press("Escape")
    elif how == "failed":
        asked.evaluate('window.say(\'data: {"error": {"message": "too slow"}}\\n\\n\')')
    else:
        asked.call("get_weather", "{}")
        expect(asked.get_by_role("progressbar")).to_have_count(0)
        asked.end("tool_calls")
    asked.answer("done" if how == "calls" else how)
    expect(asked.get_by_role("progressbar")).to_have_count(0)


@pytest.mark.full
def test_progress_of_a_real_server_is_shown(visit, demo_engine):
    """The model pauses during prefill until the bar is visible."""
    runner = demo_engine._parts.runner
    may_go = threading.Event()
    forward = runner.forward

    def held_forward(batch):
        assert may_go.wait(60)
        return forward(batch)

    visit.settings(max_tokens="2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "forward", held_forward)
        try:
            visit.ask("The mine of North Romin is nickel. " * 40)
            expect(visit.get_by_role("progressbar", name="Reading the prompt")).to_be_visible()
            visit.expects(".progress .note").to_contain_text("reading ")
        finally:
            may_go.set()
        visit.answer()
    expect(visit.get_by_role("progressbar")).to_have_count(0)


@pytest.mark.full
def test_the_progress_bar_fits_a_phone(stand_in):
    page = stand_in(viewport={"width": 320, "height": 640})
    page.begin("Hello")
    page.reading(**HALF | {"total": 10**9, "processed": 10**8, "cache": 10**7, "estimated_ms": 1e9})
    page.expects(".progress .note").to_contain_text("min")
    assert page.locator("#log").evaluate("(e) => e.scrollWidth <= e.clientWidth")
