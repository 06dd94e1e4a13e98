"""Tests of the page with axe-core, which finds no problem in any filled view, in both themes, on
desktop and phone.
"""

import json

import pytest
from playwright.sync_api import expect

from helpers.server.axe import AXE, axe_findings

pytestmark = pytest.mark.slow

SCREENS = {"desk": {"width": 1280, "height": 800}, "phone": {"width": 320, "height": 640}}
LOOKS = [(screen, scheme) for screen in SCREENS for scheme in ("light", "dark")]
TOOLS = (
    '[{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]'
)


def looks(view):
    """Return a decorator with all looks as cases.

    One of them runs in `make test`: each view has one look there, and each look some views.
    """
    marks = [
        () if number == view % len(LOOKS) else pytest.mark.full for number in range(len(LOOKS))
    ]
    cases = [
        pytest.param(look, marks=mark, id="-".join(look))
        for look, mark in zip(LOOKS, marks, strict=True)
    ]
    return pytest.mark.parametrize("page", cases, indirect=True)


@pytest.fixture
def page(request, stand_in):
    screen, scheme = request.param
    made = stand_in(viewport=SCREENS[screen], color_scheme=scheme)
    made.evaluate(AXE)
    return made


def findings(made):
    # Axe-core cannot decide about text over a gradient, and on a phone about the target of the
    # skip link, the message field, which the link shows first (test_live.py).
    return axe_findings(made, {"color-contrast", "skip-link"})


@looks(0)
def test_the_checker_finds_violations(page):
    page.evaluate(
        "document.querySelector('main').append(document.createElement('button'), "
        "document.createElement('input'))"
    )
    assert [one.split(":")[0] for one in findings(page)] == ["button-name", "label"]


@looks(1)
def test_chat_has_no_accessibility_violations(page):
    assert findings(page) == []
    page.begin("Weather?")
    page.reading(total=4000, cache=400, processed=1600, time_ms=3000, estimated_ms=6000)
    expect(page.get_by_role("progressbar")).to_be_visible()
    assert findings(page) == []
    page.deltas({"reasoning_content": "A tool."})
    assert findings(page) == []
    page.deltas({"content": "Let me see.\n```py\nx = 1\n```\n"})
    page.call("get_weather", '{"city": "Wien"}')
    page.end(
        "tool_calls",
        usage={"prompt_tokens": 50, "completion_tokens": 9},
        kvboost={"miss_reason": "first_seen"},
    )
    page.click("summary")
    assert findings(page) == []
    page.get_by_label("Result of get_weather").fill("Rain.")
    page.button("Send result").click()
    page.asked(2)
    page.keyboard.press("Escape")
    page.answer("stopped")
    assert findings(page) == []


@looks(2)
@pytest.mark.full
def test_model_choice_has_no_accessibility_violations(page):
    models = [
        {"id": name, "state": state}
        for name, state in (("small", "loaded"), ("large", "not_loaded"))
    ]
    page.serve("**/v1/models", {"data": models})
    page.route("**/v1/blocks?*", lambda route: route.continue_(url=route.request.url.split("?")[0]))
    page.reload()
    page.evaluate(AXE)
    page.get_by_label("Model", exact=True).select_option("large (not loaded)")
    page.expects("#model-remark").not_to_be_empty()
    assert findings(page) == []


@looks(0)
@pytest.mark.full
def test_models_view_has_no_accessibility_violations(page):
    models = [
        {"id": "a", "state": "loaded", "managed": True, "unloadable": True, "file_bytes": 1e9},
        {"id": "b", "state": "not_loaded", "failure": "it is damaged"},
        {"id": "c", "state": "loading"},
    ]
    memory = {"max_bytes": 8e9, "taken_bytes": 2e9, "data": []}
    answer = {"data": models, "memory": memory, "changes": {"allowed": True}}
    page.serve("**/v1/models", answer)
    page.route("**/v1/blocks?*", lambda route: route.continue_(url=route.request.url.split("?")[0]))
    event = {"status": "pulling x", "digest": "x", "total": 100, "completed": 30}
    page.route(
        "**/api/pull",
        lambda route: route.fulfill(body=f'{json.dumps(event)}\n{{"error": "cut"}}\n'),
    )
    page.reload()
    page.evaluate(AXE)
    page.click("nav [data-view=models]")
    expect(page.locator(".model-row")).to_have_count(3)
    page.button("Download").click()
    page.expects("#pull-error").not_to_be_empty()
    assert findings(page) == []
    page.get_by_label("Add a model").fill("m")
    page.button("Download").click()
    page.expects("#pull-view").to_contain_text("was not added")
    page.button("Delete a").click()
    expect(page.get_by_role("alertdialog")).to_be_visible()
    assert findings(page) == []
    page.keyboard.press("Escape")
    answer["changes"] = {"allowed": False, "reason": "closed"}
    page.serve("**/v1/models", answer)
    page.reload()
    page.evaluate(AXE)
    page.click("nav [data-view=models]")
    page.expects("#models-closed").to_be_visible()
    assert findings(page) == []


@pytest.mark.full
@looks(1)
def test_dialogs_have_no_accessibility_violations(page):
    page.keyboard.press("Control+k")
    expect(page.locator("#palette-list li").first).to_be_visible()
    assert findings(page) == []
    page.fill("#palette-field", "zzz")
    page.expects("#palette-count").to_be_visible()
    assert findings(page) == []
    page.keyboard.press("Escape")
    page.keyboard.press("Control+/")
    expect(page.get_by_role("dialog", name="Keyboard shortcuts")).to_be_visible()
    assert findings(page) == []
    page.keyboard.press("Escape")
    page.begin("Hello")
    page.keyboard.press("Escape")
    page.answer("stopped")
    page.button("Export").click()
    expect(page.get_by_role("dialog", name="Export this chat")).to_be_visible()
    assert findings(page) == []


@pytest.mark.full
@looks(3)
def test_errors_have_no_accessibility_violations(page):
    page.evaluate("void (Storage.prototype.setItem = () => { throw new Error('full'); })")
    page.begin("Hello")
    page.fail("too slow")
    page.answer("failed")
    page.expects("#chat-warning").not_to_be_empty()
    assert findings(page) == []
    page.button("Edit the last message").click()
    page.expects("#editing").to_be_visible()
    assert findings(page) == []


@pytest.mark.full
@looks(4)
def test_live_view_has_no_accessibility_violations(page):
    page.click("nav [data-view=live]")
    page.shows("#live-state", "live")
    assert findings(page) == []


@looks(5)
@pytest.mark.full
def test_live_view_without_data_has_no_accessibility_violations(page):
    page.visit.expected_failures = ("503",)
    page.route("**/v1/blocks", lambda route: route.fulfill(status=503, json={}))
    page.click("nav [data-view=live]")
    page.shows("#live-state", "status 503, retrying")
    assert findings(page) == []


@pytest.mark.full
@looks(6)
def test_settings_have_no_accessibility_violations(page):
    page.click("nav [data-view=settings]")
    page.fill("#tools", TOOLS)
    page.fill("#preset-name", "Mine")
    page.button("Save").click()
    page.expects("#delete-preset").to_be_visible()
    assert findings(page) == []
    page.fill("#top_p", "7")
    page.button("Save").click()
    page.expects("#preset-error").not_to_be_empty()
    page.fill("#schema", "{")
    page.press("#schema", "Tab")
    page.expects("#schema-error").not_to_be_empty()
    assert findings(page) == []


@pytest.mark.full
@looks(7)
def test_requests_view_has_no_accessibility_violations(page, live_server, request):
    text = (
        f"Town of {request.node.name}. "
        + "The mine of North Romin is nickel. Its owner is the town. " * 4
    )
    with live_server.client() as client:
        for day in ("Monday", "Tuesday"):
            answer = client.post(
                "/v1/completions", json={"prompt": f"{text}Today is {day}. What?", "max_tokens": 1}
            )
    page.click("nav [data-view=requests]")
    page.click(f"[aria-controls=why-{answer.headers['x-request-id']}]")
    page.shows(f"#why-{answer.headers['x-request-id']} ins", "Tuesday")
    assert findings(page) == []
    page.locator(".chip:visible").first.click()
    assert findings(page) == []
