"""Tests of reasoning on the page: it is folded, counted, and sent back with its answer."""

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.slow

ANSWER = {"role": "assistant", "content": "4", "reasoning_content": "Two and two.\nThat is four."}


def test_reasoning_is_collapsed_and_timed(stand_in):
    page = stand_in()
    page.stop_clock()
    page.begin("2 + 2?")
    page.deltas({"role": "assistant", "content": ""}, {"reasoning_content": "Two and"})
    details = page.locator("details.reasoning")
    summary = details.locator("summary")
    thoughts = details.locator(".text")
    expect(summary).to_have_text("Thinking…")
    expect(thoughts).to_be_hidden()
    for _ in range(3):
        page.clock.run_for(1000)
    expect(summary).to_contain_text("3 s")
    page.deltas({"reasoning_content": " two.\nThat is four."})
    page.clock.run_for(100)  # a frame
    expect(thoughts).to_have_text(ANSWER["reasoning_content"], use_inner_text=False)
    expect(thoughts).to_be_hidden()
    page.deltas({"content": "4"})
    expect(summary).to_contain_text("Thought for")
    told = summary.inner_text()
    page.clock.run_for(5000)
    page.end("stop")
    assert summary.inner_text() == told, "the time must not change after the reasoning"
    assert details.get_attribute("open") is None
    page.shows(".answer-body", "4")


@pytest.mark.full
def test_reasoning_opens_by_keyboard_and_is_not_announced(stand_in):
    page = stand_in()
    page.begin("2 + 2?")
    page.deltas({"reasoning_content": "Two and two."}, {"content": "4"})
    page.end("stop")
    details = page.locator("details.reasoning")
    assert details.get_attribute("aria-live") == "off"
    page.focus("#log")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.tagName") == "SUMMARY"
    page.keyboard.press("Enter")
    expect(details.locator(".text")).to_be_visible()
    page.keyboard.press("Space")
    expect(details.locator(".text")).to_be_hidden()


@pytest.mark.full
def test_reasoning_is_sent_back_but_not_copied(stand_in):
    page = stand_in()
    page.visit.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.begin("2 + 2?")
    page.deltas(
        {"reasoning_content": "Two and two.\n"},
        {"reasoning_content": "That is four."},
        {"content": "4"},
    )
    page.end("stop")
    page.stop_timers()  # or "Copied" would disappear
    page.button("Copy answer").click()
    expect(page.button("Copy answer")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "4"
    page.ask("And 3 + 3?")
    question = {"role": "user", "content": "2 + 2?"}
    assert page.asked(2)["messages"] == [
        question,
        ANSWER,
        {"role": "user", "content": "And 3 + 3?"},
    ]
    page.end("stop")


@pytest.mark.full
def test_reasoning_without_an_answer_is_shown_but_not_sent_back(stand_in):
    page = stand_in()
    page.begin("2 + 2?")
    page.deltas({"reasoning_content": "Hm."})
    page.end("length")
    turn = page.answer()
    expect(turn.locator("summary")).to_contain_text("Thought for")
    expect(turn.locator(".flag")).to_have_text("stopped at max tokens")
    expect(turn).to_contain_text("No answer")
    page.ask("Again")
    assert page.asked(2)["messages"] == [{"role": "user", "content": "Again"}]
    page.deltas({"reasoning_content": "Hm"})
    page.keyboard.press("Escape")
    stopped = page.answer("stopped")
    expect(stopped.locator("summary")).to_contain_text("Thought for")
    expect(stopped.locator(".text").last).to_have_text("Hm", use_inner_text=False)
