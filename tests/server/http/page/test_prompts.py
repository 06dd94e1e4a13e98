"""The last requests on the page: what each found, why it computed, and the two texts; by mouse and by keyboard."""

from __future__ import annotations

import httpx
import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.slow

TEXT = "The mine of North Romin is nickel. Its owner is the town. " * 4 + "Today is {}. What does it mine?"


def ask(server, *days, **options):
    return [
        httpx.post(f"{server.base_url}/v1/completions", json={"prompt": TEXT.format(day), "max_tokens": 1}, **options)
        for day in days
    ][-1].headers["x-request-id"]


def test_a_request_shows_its_cause_and_both_texts(visit, live_server):
    ask(live_server, "Monday", "<b>Tuesday</b>")
    row = visit.page.locator(".prompt-row").first
    expect(row).to_contain_text("another text")
    expect(row).to_contain_text("from pool")
    row.focus()
    visit.page.keyboard.press("Enter")
    texts = visit.page.locator("#prompts li").first.locator("pre")
    expect(texts.first).to_contain_text("<b>Tuesday")
    expect(texts.last).to_contain_text("Monday")
    ask(live_server, "Friday")
    expect(visit.page.locator(".prompt-row").nth(1)).to_be_focused()
    expect(visit.page.locator(".prompt-row").nth(1)).to_have_attribute("aria-expanded", "true")
    visit.page.keyboard.press("Enter")
    expect(texts.first).to_be_hidden()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [(1280, 800), (360, 740)])
def test_nothing_is_cut_off_on_any_screen(visiting, live_server, scheme, size):
    request_id = ask(live_server, "Monday", "Tuesday" * 9)
    options = {"viewport": {"width": size[0], "height": size[1]}, "color_scheme": scheme}
    visit = visiting(live_server.base_url, **options)
    visit.page.click("nav button[data-view=live]")
    visit.page.click(f"[aria-controls=why-{request_id}]")
    expect(visit.page.locator(f"#why-{request_id} pre").first).to_be_visible()
    assert visit.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_it_asks_only_while_it_can_be_seen(visit, live_server):
    asked = []
    visit.page.on("request", lambda request: asked.append(request.url) if "/v1/requests" in request.url else None)
    visit.page.click("nav button[data-view=settings]")
    visit.page.wait_for_timeout(100)
    asked.clear()
    visit.page.wait_for_timeout(3000)
    assert asked == []
    visit.page.click("nav button[data-view=live]")
    visit.page.wait_for_timeout(300)
    assert asked
