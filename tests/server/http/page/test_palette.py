"""Tests of the command palette and shortcuts: opening, searching, and use with the keyboard alone
or the mouse.
"""

import re

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.slow

FOUND = "return it.found(argument[0], argument[1]).map(({title}) => title);"


@pytest.fixture
def page(stand_in):
    return stand_in()


def opened(page, keys="Control+k"):
    page.keyboard.press(keys)
    field = page.get_by_role("combobox", name="Find a command")
    expect(field).to_be_focused()
    return field


def active(page):
    """Return the texts of the command that Enter would run, found as a screen reader does."""
    named = page.get_attribute("#palette-field", "aria-activedescendant")
    selected = page.locator("#palette-list [aria-selected=true]")
    expect(selected).to_have_count(1)
    assert selected.get_attribute("id") == named
    return selected.inner_text().split("\n")


def run(page, text):
    opened(page).fill(text)
    page.keyboard.press("Enter")
    expect(page.locator("#palette")).to_be_hidden()


@pytest.mark.parametrize(
    ("query", "titles"),
    [
        ("", ["New chat", "Show models", "Use model", "Model a"]),
        ("model", ["Model a", "Show models", "Use model"]),
        (" USE  mod", ["Use model"]),
        ("b mod", ["Use model"]),
        ("xyz", []),
    ],
)
def test_commands_are_found_by_words(modules, query, titles):
    commands = [
        {"title": "New chat"},
        {"title": "Show models"},
        {"title": "Use model", "detail": "b"},
        {"title": "Model a"},
    ]
    assert modules.module("palette", FOUND, [commands, query]) == titles


@pytest.mark.full
def test_the_palette_opens_by_shortcut_and_restores_focus(page):
    for keys in ("Control+k", "Meta+k"):
        opened(page, keys)
        expect(page.get_by_role("listbox", name="Commands")).to_be_visible()
        page.keyboard.press(keys)
        expect(page.locator("#palette")).to_be_hidden()
        page.expects("#prompt").to_be_focused()
        opened(page, keys)
        page.keyboard.press("Escape")
        expect(page.locator("#palette")).to_be_hidden()
        page.expects("#prompt").to_be_focused()


@pytest.mark.full
def test_arrow_keys_select_and_enter_runs_a_command(page):
    field = opened(page)
    first = active(page)
    assert first == ["New chat"]
    page.keyboard.press("ArrowUp")  # around
    last = active(page)
    assert last[0] == "Keyboard shortcuts"
    page.keyboard.press("ArrowDown")
    assert active(page) == first
    page.keyboard.press("PageDown")
    page.keyboard.press("PageUp")
    assert active(page) == first
    field.fill("show")
    page.keyboard.press("ArrowDown")
    assert active(page)[1] == "live view of the block pool"
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.expects("#requests").to_be_visible()
    expect(page.locator("nav [data-view=requests]")).to_have_attribute("aria-pressed", "true")
    field = opened(page)
    expect(field).to_have_value("")
    assert active(page) == first


@pytest.mark.full
def test_the_palette_reports_no_match(page):
    opened(page).fill("zzz")
    page.shows("#palette-count", "No command matches.")
    page.expects("#palette-list").to_be_hidden()
    expect(page.locator("#palette-field")).to_have_attribute("aria-expanded", "false")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.expects("#palette").to_be_visible()
    page.fill("#palette-field", "")
    assert active(page) == ["New chat"]


@pytest.mark.full
def test_the_palette_works_with_a_mouse(page):
    page.button("Commands").click()
    page.get_by_role("option", name=re.compile("Show.*settings")).click()
    page.expects("#settings").to_be_visible()
    page.button("Commands").click()
    page.mouse.click(5, 5)  # outside
    page.expects("#palette").to_be_hidden()


@pytest.mark.full
def test_escape_closes_the_palette_without_stopping_the_answer(page):
    page.begin("Tell me")
    assert "Stop the answer" in texts_of(page)
    page.keyboard.press("Escape")
    page.deltas({"content": "all of it"})
    page.end("stop")
    expect(page.locator(".turn.done .answer-body")).to_have_text("all of it")
    assert "Stop the answer" not in texts_of(page)


def test_palette_commands_perform_their_actions(page):
    page.begin("First")
    page.deltas({"content": "One"})
    page.end("stop")
    run(page, "new chat")
    page.expects("#empty").to_be_visible()
    assert "Export this chat" not in texts_of(page)
    page.keyboard.press("Escape")
    run(page, "open chat first")
    expect(page.locator(".question")).to_have_text("First")
    run(page, "colours dark")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.evaluate("localStorage.getItem('theme')") == "dark"
    run(page, "colours system")
    assert page.evaluate("document.documentElement.dataset.theme") is None
    run(page, "preset determ")
    assert page.input_value("#temperature") == "0"
    run(page, "system prompt")
    page.expects("#system").to_be_focused()
    with page.expect_download() as saved:
        run(page, "export json")
    assert saved.value.suggested_filename == "first.json"


@pytest.mark.full
def test_the_palette_finds_every_stored_chat(page):
    page.evaluate("""
      for (let number = 0; number < 100; number += 1) {
        const question = `Question #${number}`;
        const chat = {title: question, changed: number, turns: [{question, steps: []}]};
        localStorage.setItem(`chat:${number}`, JSON.stringify(chat));
      }
    """)
    run(page, "question #0")
    expect(page.locator(".question")).to_have_text("Question #0")


@pytest.mark.full
def test_the_palette_selects_a_model(page):
    models = [{"id": "small", "state": "loaded"}, {"id": "a <b>large</b> one", "state": "loaded"}]
    page.serve("**/v1/models", {"data": models})
    page.route("**/v1/blocks?*", lambda route: route.continue_(url=route.request.url.split("?")[0]))
    page.reload()
    page.shows("#model", "small")
    assert "Add a model" not in texts_of(page)  # the server does not allow it
    page.keyboard.press("Escape")
    run(page, "use model large")
    page.shows("#model", "a <b>large</b> one")
    page.serve("**/v1/models", {"data": models, "changes": {"allowed": True}})
    page.reload()
    page.shows("#model", "a <b>large</b> one")
    run(page, "add a model")
    page.expects("#pull-name").to_be_focused()


@pytest.mark.full
def test_the_help_lists_the_shortcuts(page):
    page.keyboard.press("Control+/")
    help = page.get_by_role("dialog", name="Keyboard shortcuts")
    expect(help).to_contain_text("stop the answer")
    page.keyboard.press("Control+k")  # one dialog at a time
    page.expects("#palette").to_be_hidden()
    help.get_by_role("button", name="Close").click()
    expect(help).to_be_hidden()
    run(page, "keyboard shortcuts")
    expect(help).to_be_visible()


@pytest.mark.full
def test_a_slash_that_needs_shift_opens_the_help(page):
    press = (
        "(key) => document.dispatchEvent(new KeyboardEvent('keydown', "
        "{key, ctrlKey: true, shiftKey: true, cancelable: true}))"
    )
    assert page.evaluate(press, "K")  # left to the browser
    page.expects("#palette").to_be_hidden()
    assert not page.evaluate(press, "/")
    page.expects("#shortcuts").to_be_visible()


@pytest.mark.full
def test_the_palette_fits_a_phone(stand_in):
    page = stand_in(viewport={"width": 320, "height": 480})
    page.serve("**/v1/models", {"data": [{"id": "a"}, {"id": "n" * 300}]})
    page.reload()
    page.shows("#model", "a")
    page.button("Commands").click()
    expect(page.locator("#palette-list li").first).to_be_visible()
    box = page.locator("#palette").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 320
    assert box["y"] + box["height"] <= 480
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def texts_of(page):
    """Return the titles of the current commands; open the palette if needed."""
    if page.is_hidden("#palette"):
        opened(page)
    return page.locator("#palette-list .command-title").all_inner_texts()
