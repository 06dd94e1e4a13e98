"""Tests of the timeline of recent requests: cache hits, the cost and cause of misses, and the two
diverging texts, with mouse and keyboard.
"""

import json
import re

import httpx
import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.slow

TEXT = (
    "The mine of North Romin is nickel. Its owner is the town. " * 4
    + "Today is {}. What does it mine?"
)
# Requests as the server lists them, the latest first. The name of none begins an identifier that
# the server gives: it finds requests by the beginning of their identifier.
LISTED = [
    {
        "cause": "none",
        "prompt_tokens": 160,
        "hit_tokens": {"pool": 160},
        "computed_tokens": 0,
        "seconds": 0.004,
    },
    {
        "cause": "other_position",
        "prompt_tokens": 400,
        "hit_tokens": {"pool": 40},
        "reused_span_tokens": 320,
        "computed_tokens": 40,
        "seconds": 0.3,
    },
    {
        "cause": "evicted",
        "prompt_tokens": 2000,
        "hit_tokens": {"pool": 200, "disk": 400, "redis": 400},
        "computed_tokens": 1000,
        "seconds": 2.5,
    },
    {
        "cause": "changed_text",
        "prompt_tokens": 1000,
        "hit_tokens": {"pool": 960},
        "computed_tokens": 40,
        "position": 975,
        "seconds": 0.1,
    },
    {
        "cause": "changed_text",
        "prompt_tokens": 10_000,
        "hit_tokens": {"pool": 48},
        "computed_tokens": 9952,
        "position": 48,
        "step_share": 0.3371,
        "seconds": 31.25,
    },
]
BARE = {
    "reused_span_tokens": 0,
    "position": 0,
    "field": "",
    "field_before": "",
    "text": "",
    "text_before": "",
    "compared_with": "",
    "evicted_from": [],
    "normalised": [],
}
LISTED = [
    BARE | one | {"request_id": f"req-listed-{number}", "at": 1e9 - number}
    for number, one in enumerate(LISTED)
]
DETAILS = {
    "field": "message 0 (system)",
    "field_before": "message 0 (system)",
    "compared_with": "req-listed-3",
    "text": "Today is Tuesday.",
    "text_before": "Today is Monday.",
    "normalised": ["tools", "billing"],
}
NO_SIDEWAYS = "document.documentElement.scrollWidth <= window.innerWidth"
OUTSIDE = """[...document.querySelectorAll('#requests *')].filter((e) => e.checkVisibility()
  && !e.closest('.chips, .sr') && e.getBoundingClientRect().right > window.innerWidth + 0.5)
  .map((e) => e.outerHTML.slice(0, 80))"""


def ask(server, *days, **options):
    return [
        httpx.post(
            f"{server.base_url}/v1/completions",
            json={"prompt": TEXT.format(day), "max_tokens": 1},
            **options,
        )
        for day in days
    ][-1].headers["x-request-id"]


@pytest.fixture
def listed(visiting, live_server):
    """Function `listed(**options of the browser's context)` that opens the page with the requests
    of LISTED.
    """

    def opened(**options):
        visit = visiting(live_server.base_url, **options)
        answer = {"object": "list", "data": LISTED, "kept_seconds": 60}
        visit.serve("**/v1/requests", answer)
        details = LISTED[4] | DETAILS
        visit.serve("**/v1/requests/req-listed-4/cache", details)
        visit.click("nav button[data-view=requests]")
        visit.expects(".prompt").to_have_count(5)
        return visit

    return opened


def test_a_request_shows_its_miss_cause_and_both_texts(visit, live_server):
    before = ask(live_server, "Monday")
    changed = ask(live_server, "<b>Tuesday</b>")
    visit.click("nav button[data-view=requests]")
    row = visit.locator(f"[aria-controls=why-{changed}]")
    expect(row).to_contain_text("text changed at token ")
    expect(row).to_contain_text("from pool")
    row.focus()
    visit.keyboard.press("Enter")
    details = visit.locator(f"#why-{changed}")
    expect(details.locator("del")).to_have_text("Monday")
    expect(details.locator("ins").first).to_contain_text("<b>Tuesday")
    expect(details.locator("pre").last).to_contain_text("Today is <b>Tuesday</b>.")
    expect(details.locator(".prompt-said")).to_contain_text("“Monday” changed to “<b>Tuesday</b>”.")
    expect(details).to_contain_text("Put changing text after stable text.")
    ask(live_server, "Friday")
    visit.hurry()
    expect(visit.locator(".prompt-row").nth(1)).to_be_focused()
    expect(row).to_be_focused()
    expect(row).to_have_attribute("aria-expanded", "true")
    details.get_by_role("button", name=before).click()
    visit.expects(f"[aria-controls=why-{before}]").to_be_focused()
    visit.expects(f"#why-{before}").to_be_visible()
    row.click()
    expect(details).to_be_hidden()


def test_request_rows_show_the_servers_costs_and_causes(listed):
    page = listed()
    rows = page.locator(".prompt")
    figures = [row.locator(".prompt-figures").inner_text() for row in rows.all()]
    assert figures == [
        "160 from pool, 0 of 160 tokens computed",
        "40 from pool, 320 reused at other positions, 40 of 400 tokens computed",
        "200 from pool, 400 from disk, 400 from redis, 1,000 of 2,000 tokens computed",
        "960 from pool, 40 of 1,000 tokens computed",
        "48 from pool, 9,952 of 10,000 tokens computed",
    ]
    parts = "(bar) => [...bar.children].map((part) => [part.className, part.style.width])"
    assert rows.nth(2).locator(".prompt-bar").evaluate(parts) == [
        ["fill pool", "10%"],
        ["fill disk", "20%"],
        ["fill redis", "20%"],
        ["fill computed", "50%"],
    ]
    assert rows.nth(1).locator(".prompt-bar").evaluate(parts)[1] == ["fill span", "80%"]
    heads = [
        row.locator(".prompt-cause").text_content() + row.locator(".prompt-cost").text_content()
        for row in rows.all()
    ]
    assert heads == [
        "○fully cachedcost 4.0 ms",
        "●reused at other positionscost 300 ms",
        "▲evictedcost 2.50 s",
        "●text changed at token 975cost 100 ms",
        "▲text changed at token 48cost 31.3 s",
    ]
    told = (
        "evicted cost 2.50 s 200 from pool, 400 from disk, 400 from redis, 1,000 of 2,000 tokens "
        "computed"
    )
    expect(page.locator(".prompt-row").nth(2)).to_have_accessible_name(re.compile(told))
    told = "5 requests: 19 % of 13,560 prompt tokens from the cache, the rest computed in 34.2 s."
    page.shows("#prompts-note", told)
    heights = page.locator("#prompts-columns > span > span").evaluate_all(
        "(all) => all.map((one) => one.style.height)"
    )
    assert [round(float(height.rstrip("%")), 2) for height in heights] == [100, 0.32, 8, 0.96, 0.01]


@pytest.mark.full
def test_requests_are_filtered_by_cause(listed):
    page = listed()
    chips = page.locator(".chip:visible")
    assert chips.all_inner_texts() == [
        "▲ 2 × text changed, 31.4 s",
        "▲ 1 × evicted, 2.50 s",
        "● 1 × reused at other positions, 300 ms",
        "○ 1 × fully cached, 4.0 ms",
    ]
    chips.first.click()
    expect(chips.first).to_have_attribute("aria-pressed", "true")
    page.expects(".prompt:visible").to_have_count(2)
    page.expects("#prompts-columns .out").to_have_count(3)
    chips.first.click()
    page.expects(".prompt:visible").to_have_count(5)


@pytest.mark.full
def test_the_requests_view_works_by_keyboard_alone(listed):
    visit = listed()
    keyboard = visit.keyboard
    focused = "document.activeElement"
    visit.evaluate("document.querySelector('.skip').focus()")

    def tab_to(selector):
        for _ in range(40):
            keyboard.press("Tab")
            assert visit.evaluate(f"getComputedStyle({focused}).outlineStyle") != "none"
            if visit.evaluate(f"{focused}.matches({json.dumps(selector)})"):
                return
        raise AssertionError(f"{selector} is not reachable by keyboard")

    tab_to("nav [data-view=requests]")
    tab_to(".chip[data-cause=changed_text]")
    keyboard.press("Space")
    visit.expects(".prompt:visible").to_have_count(2)
    tab_to(".prompt-row")
    keyboard.press("End")
    visit.expects("[aria-controls=why-req-listed-4]").to_be_focused()
    keyboard.press("ArrowDown")  # no row is below
    keyboard.press("Enter")
    details = visit.locator("#why-req-listed-4")
    expect(details.locator("del")).to_have_text("Monday")
    expect(details.locator("ins")).to_have_text("Tuesday")
    facts = [line.split("\n") for line in details.locator(".facts > div").all_inner_texts()]
    assert facts == [
        ["Position", "token 48 of 10,000, in message 0 (system)"],
        ["Remedy", "Put changing text after stable text."],
        ["Step share", "34 % of the tokens of its steps"],
        ["Normalized", "tools, billing"],
        ["Compared with", "req-listed-3"],
        ["Request", "req-listed-4"],
    ]
    tab_to(".facts .link")
    keyboard.press("Escape")
    expect(details).to_be_hidden()
    visit.expects("[aria-controls=why-req-listed-4]").to_be_focused()
    for key, number in (("ArrowUp", 3), ("ArrowDown", 4), ("Home", 3)):
        keyboard.press(key)
        visit.expects(f"[aria-controls=why-req-listed-{number}]").to_be_focused()


@pytest.mark.parametrize(
    ("size", "scheme"),
    [
        ((1280, 800), "light"),
        ((320, 640), "dark"),
        pytest.param((1280, 800), "dark", marks=pytest.mark.full),
        pytest.param((320, 640), "light", marks=pytest.mark.full),
    ],
)
@pytest.mark.full
def test_the_requests_view_fits_every_screen(listed, scheme, size):
    page = listed(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
    long = (
        LISTED[4]
        | DETAILS
        | {"text": "t" * 400, "field": "tool 3 (" + "n" * 64 + ")", "compared_with": "c" * 64}
    )
    page.unroute("**/v1/requests/req-listed-4/cache")
    page.serve("**/v1/requests/req-listed-4/cache", long)
    page.click("[aria-controls=why-req-listed-4]")
    expect(page.locator("#why-req-listed-4 pre").first).to_be_visible()
    assert page.evaluate(NO_SIDEWAYS)
    assert page.evaluate(OUTSIDE) == []


@pytest.mark.full
def test_the_miss_reason_links_to_its_request(stand_in, live_server):
    page = stand_in()
    request_id = ask(live_server, "Sunday")
    page.evaluate("(id) => { window.requestId = id; }", request_id)
    page.begin("Hello")
    page.deltas({"content": "Hi."})
    page.end("stop", kvboost={"hit_tokens": {"pool": 0}, "miss_reason": "first_seen"})
    page.button("new prefix: show this request").click()
    page.expects(f"[aria-controls=why-{request_id}]").to_be_focused()
    page.expects(f"#why-{request_id} .facts").to_be_visible()


def shown(page, **told):
    """Open the report of the last request with these additional fields. The page reads the report
    each time.
    """
    page.unroute("**/v1/requests/req-listed-4/cache")
    page.serve("**/v1/requests/req-listed-4/cache", LISTED[4] | told)
    opener = page.locator("[aria-controls=why-req-listed-4]")
    if opener.get_attribute("aria-expanded") == "true":
        opener.click()
    opener.click()
    page.locator("#why-req-listed-4:not([aria-busy]) .facts").wait_for()


@pytest.mark.full
def test_only_different_texts_are_shown_side_by_side(listed):
    page = listed()
    for told, captions, said in (
        (
            {"cause": "retokenized", "text": "same", "text_before": "same"},
            ["Both requests"],
            "The same text as different tokens.",
        ),
        ({"cause": "tail", "text": "same", "text_before": "same"}, ["Both requests"], None),
        ({"cause": "first_seen", "text": "new", "text_before": ""}, ["This request"], None),
        (
            {"cause": "new_text", "text": "", "text_before": "old"},
            ["Earlier request, in message 0 (system)"],
            None,
        ),
        ({"cause": "tools", "text": "", "text_before": ""}, [], None),
    ):
        shown(page, **DETAILS | told)
        assert page.locator("#why-req-listed-4 figcaption").all_inner_texts() == captions, told
        page.expects("#why-req-listed-4 .prompt-said").to_have_count(0 if said is None else 1)
        assert said is None or page.locator("#why-req-listed-4 .prompt-said").inner_text() == said


@pytest.mark.full
def test_a_position_is_shown_only_for_requests_with_a_difference(listed):
    page = listed()
    for cause, has_position in (
        ("first_seen", False),
        ("none", False),
        ("bypassed", False),
        ("evicted", True),
    ):
        shown(page, cause=cause, position=0)
        facts = page.locator("#why-req-listed-4 .facts dt").all_inner_texts()
        assert ("Position" in facts, "Request" in facts) == (has_position, True), cause


@pytest.mark.full
def test_a_request_that_cannot_be_shown_names_the_reason(listed):
    visit = listed()
    visit.expected_failures = ("404", "500")
    visit.click("[aria-controls=why-req-listed-0]")
    visit.shows("#why-req-listed-0", "This request is no longer kept.")
    visit.route("**/v1/requests/**", lambda route: route.fulfill(status=500, json={}))
    visit.click("[aria-controls=why-req-listed-1]")
    visit.shows("#why-req-listed-1", "The server failed while answering.")


@pytest.mark.full
def test_requests_of_other_keys_are_hidden(visiting, keyed_server):
    first, second = ({"Authorization": f"Bearer {key}"} for key in keyed_server.keys)
    ids = [ask(keyed_server, "Monday", headers=headers) for headers in (first, second)]
    visit = visiting(keyed_server.base_url)
    visit.expected_failures = ("401", "403")
    visit.click("nav button[data-view=requests]")
    visit.shows("#prompts-state", "API key needed")
    for at, key in enumerate(keyed_server.keys):
        visit.click("nav button[data-view=settings]")
        visit.fill("#api-key", key)
        visit.press("#api-key", "Tab")
        visit.click("nav button[data-view=requests]")
        visit.expects(f"[aria-controls=why-{ids[at]}]").to_be_visible()
        visit.expects(f"[aria-controls=why-{ids[1 - at]}]").to_have_count(0)


@pytest.mark.full
def test_the_requests_view_polls_only_while_visible(visiting, live_server):
    visit = visiting(live_server.base_url)
    visit.clock.install()
    asked = []
    visit.on(
        "request",
        lambda request: asked.append(request.url) if "/v1/requests" in request.url else None,
    )
    visit.clock.run_for(10_000)
    assert asked == []
    with visit.expect_response("**/v1/requests"):
        visit.click("nav button[data-view=requests]")
        visit.clock.run_for(1)
    visit.shows("#prompts-state", "live")
    with visit.expect_response("**/v1/requests"):
        visit.clock.run_for(3000)
    visit.click("nav button[data-view=live]")
    visit.evaluate(
        "fetch('/v1/models').then((response) => response.text())"
    )  # any pending response has arrived by now
    asked.clear()
    visit.clock.run_for(10_000)
    assert asked == []
