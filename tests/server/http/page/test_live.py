"""Tests of the live view: its contents, its polling, and its appearance on a phone and in the dark
theme.
"""

import base64

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.slow

QUESTION = (
    "Doc 3.\n" + "The mine of North Romin is nickel. " * 12 + "\n\nWhat is the mine of North Romin?"
)
# Runs timers immediately and records requests.
FAST_TIMERS = """
  window.delays = [];
  const real = window.setTimeout;
  window.setTimeout = (action, delay, ...rest) => {
    window.delays.push(delay);
    return real(action, Math.min(delay, 5), ...rest);
  };
"""
ANSWERED = "fetch('/v1/blocks').then((response) => response.text())"
FIGURES = {
    "num_blocks": 5,
    "block_size": 16,
    "states": base64.b64encode(bytes([0, 1, 2, 3, 4])).decode(),
    "refs": base64.b64encode(bytes([0, 0, 1, 2, 1])).decode(),
    "tokens": base64.b64encode(bytes([0, 16, 5, 16, 9])).decode(),
    "counts": {"free": 1, "cached": 1, "used": 1, "shared": 1, "span": 1},
    "running": 2,
    "waiting": 7,
    "hit_tokens": 300,
    "span_tokens": 45,
    "miss_tokens": 100,
    "hit_rate": 0.75,
    "generated_tokens_total": 1234,
    "evictions": 3,
    "preemptions": 1,
    "memory": {
        "weight_bytes": 12_300_000,
        "pool_bytes": 64_000_000,
        "process_rss_bytes": 213_000_000,
        "process_peak_bytes": None,
    },
    "recent_span_tokens": 45,
    "recent_computed_tokens": 1100,
    "tiers": {
        "pool": {
            "blocks": 3,
            "bytes": 48_000_000,
            "max_bytes": 64_000_000,
            "writable": True,
            "state": "",
            "recent_hit_tokens": 2048,
        },
        "disk": {
            "blocks": 1234,
            "bytes": 19_700_000_000,
            "max_bytes": 17_200_000_000,
            "writable": False,
            "state": "<b>no room on the device</b>",
            "recent_hit_tokens": 16,
        },
        "redis": {
            "blocks": None,
            "bytes": None,
            "max_bytes": None,
            "writable": False,
            "state": "",
            "recent_hit_tokens": 0,
        },
    },
}


def answer(visit, figures):
    """Set the server's next figures and make the page read them."""
    visit.serve("**/v1/blocks", figures)
    visit.hurry()


def test_the_block_map_and_statistics_follow_the_engine(visit, slow_model, demo_engine):
    demo_engine.reset_cache()
    visit.shows("#count-cached", "0")
    idle = _picture(visit)
    visit.settings(max_tokens="800")
    with slow_model():
        visit.ask(QUESTION)
        visit.shows("#running", "1")
        visit.until("Number(document.querySelector('#count-used').textContent) > 4")
        busy = _picture(visit)
        assert busy != idle
        visit.until("Number(document.querySelector('#speed').textContent) > 1")
        visit.press("#prompt", "Escape")
        visit.answer("stopped")
        visit.hurry()
        visit.shows("#running", "0")
        visit.shows("#count-used", "0")
    visit.until("Number(document.querySelector('#count-cached').textContent) > 4")
    assert _picture(visit) not in (idle, busy)
    stats = demo_engine.paged_stats()
    assert visit.inner_text("#count-cached") == str(stats["cached_blocks"])
    assert visit.inner_text("#count-free") == str(stats["num_blocks"] - stats["cached_blocks"])
    assert (
        visit.inner_text("#pool-size")
        == f"{stats['num_blocks']} blocks of {stats['block_size']} tokens"
    )
    assert visit.inner_text("#hit_tokens") == f"{stats['hit_tokens']:,}"
    assert visit.inner_text("#miss_tokens") == f"{stats['miss_tokens']:,}"
    for name in ("weight_bytes", "pool_bytes", "process_rss_bytes", "process_peak_bytes"):
        assert visit.inner_text(f"#{name}").split()[1] in ("MB", "GB")


def test_every_statistic_is_shown(visit):
    answer(visit, FIGURES)
    visit.shows("#waiting", "7")
    shown = {
        name: visit.inner_text(f"#{name}")
        for name in (
            "running",
            "hit-rate",
            "hit_tokens",
            "span_tokens",
            "miss_tokens",
            "generated_tokens_total",
            "evictions",
            "preemptions",
            "weight_bytes",
            "pool_bytes",
            "process_rss_bytes",
            "process_peak_bytes",
            "pool-size",
        )
    }
    assert shown == {
        "running": "2",
        "hit-rate": "75 %",
        "hit_tokens": "300",
        "span_tokens": "45",
        "miss_tokens": "100",
        "generated_tokens_total": "1,234",
        "evictions": "3",
        "preemptions": "1",
        "weight_bytes": "12.3 MB",
        "pool_bytes": "64.0 MB",
        "process_rss_bytes": "213 MB",
        "process_peak_bytes": "–",
        "pool-size": "5 blocks of 16 tokens",
    }
    said = "Map of the block pool: 1 free, 1 cached, 1 referenced, 1 shared, 1 at another position"
    assert visit.get_attribute("#map", "aria-label") == said
    legend = [item.inner_text().split("\n") for item in visit.locator("#legend li").all()]
    assert legend == [
        [words, "1"] for words in ("free", "cached", "referenced", "shared", "at another position")
    ]


def test_every_tier_shows_its_contents_and_errors(visit):
    answer(visit, FIGURES)
    visit.expects("#tiers > div").to_have_count(3)
    assert [row.inner_text().split("\n") for row in visit.locator("#tiers > div").all()] == [
        ["pool", "3 blocks, 48.0 MB of 64.0 MB"],
        ["disk", "1,234 blocks, 19.7 GB of 17.2 GB", "<b>no room on the device</b>"],
        ["redis", "shared", "not storing blocks at the moment"],
    ]
    widths = [
        bar.evaluate("bar => bar.style.width")
        for bar in visit.locator("#tiers .bar-track span").all()
    ]
    assert widths == ["75%", "100%", "0px"]
    found = (
        "2,048 from pool, 16 from disk, 0 from redis, 45 reused at other positions, 1,100 computed"
    )
    visit.shows("#tier-hits", f"Prompt tokens, last 60 s: {found}")


def test_recurrent_states_are_shown_next_to_the_blocks(visit):
    memory = FIGURES["memory"] | {"state_bytes": 30_200_000}
    answer(
        visit,
        FIGURES
        | {"memory": memory, "state_slots": 12, "state_slots_used": 9, "replayed_tokens": 1616},
    )
    visit.expects("#tiers > div").to_have_count(4)
    rows = [row.inner_text().split("\n") for row in visit.locator("#tiers > div").all()[:2]]
    assert rows == [
        ["pool", "3 blocks, 48.0 MB of 64.0 MB"],
        ["recurrent state", "9 of 12 slots, 30.2 MB"],
    ]
    assert (
        visit.locator("#tiers .bar-track span").all()[1].evaluate("bar => bar.style.width") == "75%"
    )
    assert (visit.inner_text("#state_bytes"), visit.inner_text("#replayed_tokens")) == (
        "30.2 MB",
        "1,616",
    )
    answer(visit, FIGURES | {"state_slots": 0, "state_slots_used": 0, "replayed_tokens": 0})
    visit.expects("#tiers > div").to_have_count(3)


@pytest.mark.full
def test_every_replica_shows_its_pool_and_blocks(visit):
    one = {
        "num_blocks": 2,
        "blocks": 1,
        "bytes": 16_000_000,
        "max_bytes": 32_000_000,
        "running": 2,
        "waiting": 0,
    }
    two = {
        "num_blocks": 3,
        "blocks": 3,
        "bytes": 48_000_000,
        "max_bytes": 48_000_000,
        "running": 0,
        "waiting": 7,
    }
    answer(visit, FIGURES | {"replicas": {"<b>a</b>": one, "b": two}})
    visit.expects("#tiers > div").to_have_count(5)
    assert [row.inner_text().split("\n") for row in visit.locator("#tiers > div").all()[3:]] == [
        ["replica <b>a</b>", "1 block, 16.0 MB of 32.0 MB, 2 running, 0 waiting"],
        ["replica b", "3 blocks, 48.0 MB of 48.0 MB, 0 running, 7 waiting"],
    ]
    widths = [
        bar.evaluate("bar => bar.style.width")
        for bar in visit.locator("#tiers .bar-track span").all()[3:]
    ]
    assert widths == ["50%", "100%"]
    visit.locator("#map").focus()
    said = [visit.inner_text("#map-detail")]
    for _ in range(2):
        visit.keyboard.press("ArrowRight")
        said.append(visit.inner_text("#map-detail"))
    assert [text.split(", ")[-1] for text in said] == [
        "replica <b>a</b>",
        "replica <b>a</b>",
        "replica b",
    ]


@pytest.mark.full
def test_unknown_statistics_are_shown_as_a_dash(visit):
    bare = dict.fromkeys(FIGURES) | {"num_blocks": 2, "block_size": 16, "states": "AAA="}
    answer(visit, bare)
    visit.shows("#running", "–")
    shown = [
        visit.inner_text(f"#{name}")
        for name in ("hit-rate", "speed", "evictions", "weight_bytes", "count-free")
    ]
    assert shown == ["–"] * 5
    visit.focus("#map")
    assert visit.inner_text("#map-detail") == "Block 0: free"


@pytest.mark.full
def test_a_block_shows_its_tokens_and_references(visit):
    answer(visit, FIGURES)
    visit.shows("#waiting", "7")
    detail = visit.locator("#map-detail")
    visit.hover("#map", position={"x": 70, "y": 8})
    expect(detail).to_have_text("Block 3: shared, 16 tokens, 2 references")
    visit.hover("h2 >> nth=0")
    expect(detail).to_contain_text("arrow keys")
    visit.focus("#map")
    said = [detail.inner_text()]
    for key in ("ArrowRight", "ArrowRight", "End", "ArrowRight", "Home", "ArrowLeft"):
        visit.keyboard.press(key)
        said.append(detail.inner_text().split(":")[0])
    assert said == [
        "Block 0: free, 0 tokens, 0 references",
        *(f"Block {number}" for number in (1, 2, 4, 4, 0, 0)),
    ]


@pytest.mark.full
def test_a_hundred_thousand_blocks_are_drawn_in_groups(visit):
    number = 100_000
    states = bytes(3 if block < 152 else 2 if block % 3 == 0 else 1 for block in range(number))
    pool = {
        **FIGURES,
        "num_blocks": number,
        "states": base64.b64encode(states).decode(),
        "refs": None,
        "tokens": None,
        "counts": {name: states.count(state) for state, name in enumerate(FIGURES["counts"])},
    }
    answer(visit, pool)
    visit.expects("#pool-size").to_contain_text("100,000 blocks of 16 tokens, ")
    per_cell = int(visit.inner_text("#pool-size").split()[-5])
    visit.focus("#map")
    head = states[:per_cell]
    words = [
        f"{head.count(state)} {word}"
        for state, word in ((1, "cached"), (2, "referenced"), (3, "shared"))
        if state in head
    ]
    visit.shows("#map-detail", f"Blocks 0–{per_cell - 1}: {', '.join(words)}")
    strokes = visit.module(
        "poolmap",
        """
        const map = new it.PoolMap(document.getElementById('map'), () => {});
        const pool = {states: it.decodeBytes(argument), refs: null, tokens: null};
        const drawing = CanvasRenderingContext2D.prototype;
        const really = {};
        let strokes = 0;
        for (const name of ['fillRect', 'strokeRect', 'drawImage', 'fill', 'stroke']) {
          really[name] = drawing[name];
          drawing[name] = function (...places) { strokes += 1; return really[name].apply(this, places); };
        }
        map.update(pool);
        Object.assign(drawing, really);
        return strokes;
        """,
        pool["states"],
    )
    cells = -(-number // per_cell)
    assert (
        cells <= strokes <= 10 * cells
    )  # the five states and the edge of each cell, whatever the number of blocks


@pytest.mark.full
def test_the_live_view_polls_twice_a_second_and_backs_off_on_errors(visiting, live_server):
    visit = visiting(live_server.base_url, init_script=FAST_TIMERS)
    visit.shows("#model", "kvboost-edge/demo")  # its arrival ends a pause
    visit.until("window.delays.filter((delay) => delay === 500).length > 3")
    visit.expected_failures = ("ERR_FAILED",)
    visit.evaluate("window.delays.length = 0")
    visit.route("**/v1/blocks", lambda route: route.abort())
    visit.until("window.delays.filter((delay) => delay === 16000).length > 2")
    pauses = visit.evaluate(
        "window.delays.filter((delay) => delay > 500 && delay !== 2500)"
    )  # the list of prompts has a delay of 2500
    assert pauses[:6] == [1000, 2000, 4000, 8000, 16000, 16000]
    visit.shows("#live-state", "not reachable, retrying")
    visit.unroute("**/v1/blocks")
    visit.shows("#live-state", "live")


@pytest.mark.full
def test_a_key_that_is_entered_during_a_refused_request_is_tried(held_without_key):
    visit, refused = held_without_key("/v1/blocks")
    visit.settings(api_key="key")
    # The page clears its figures when it has read the models with the key.
    visit.evaluate("document.querySelector('#live-state').textContent = 'not cleared'")
    visit.press("#api-key", "Tab")
    visit.shows("#live-state", "waiting for the server")
    refused[0].fulfill(status=401, json={"error": {"message": "no key"}})
    visit.shows("#live-state", "API key needed")
    visit.click("nav [data-view=live]")
    visit.shows("#live-state", "live")


@pytest.mark.full
def test_the_live_view_does_not_poll_while_hidden(visiting, live_server):
    visit = visiting(live_server.base_url, init_script=FAST_TIMERS)
    visit.until("window.delays.length > 3")
    for hide, show in (
        (
            lambda: visit.click("nav [data-view=settings]"),
            lambda: visit.click("nav [data-view=live]"),
        ),
        (lambda: _visibility(visit, "hidden"), lambda: _visibility(visit, "visible")),
    ):
        hide()
        visit.evaluate(ANSWERED)  # any pending response has arrived by now
        visit.evaluate("window.delays.length = 0")
        visit.evaluate(ANSWERED)
        visit.evaluate(ANSWERED)
        assert visit.evaluate("window.delays.filter((delay) => delay >= 500)") == []
        show()
        visit.until("window.delays.includes(500)")


@pytest.mark.parametrize("width", [320, pytest.param(390, marks=pytest.mark.full)])
@pytest.mark.full
def test_a_phone_shows_one_view_at_a_time_without_scrolling_sideways(
    visiting, live_server, answering, width
):
    options = {
        "viewport": {"width": width, "height": 760},
        "has_touch": True,
        "is_mobile": True,
        "device_scale_factor": 2,
    }
    visit = visiting(live_server.base_url, **options)
    long = "w" * 300
    answering(
        visit,
        f"{long}\n```\n{'code ' * 60}\n```\n",
        usage={"prompt_tokens": 10_000, "completion_tokens": 5000},
    )
    visit.ask(f"{long} question")
    visit.answer()
    views = ("chat", "live", "requests", "settings")
    for view in views:
        visit.tap(f"nav [data-view={view}]")
        assert [visit.is_visible(f"#{name}") for name in views] == [name == view for name in views]
        widest = visit.evaluate(
            "Math.max(document.documentElement.scrollWidth, document.body.scrollWidth)"
        )
        assert widest <= width
        out = visit.evaluate(
            f"""[...document.querySelectorAll('#{view} *')].filter((e) => e.checkVisibility()
            && !e.closest('pre, .sr, .chips') && e.getBoundingClientRect().right > {width} + 0.5)
            .map((e) => e.outerHTML.slice(0, 80))"""
        )
        assert out == []
        small = visit.evaluate(
            "[...document.querySelectorAll('nav button, #composer button')].filter((e) => "
            "e.checkVisibility() && e.getBoundingClientRect().height < 36).length"
        )
        assert small == 0


@pytest.mark.full
def test_the_skip_link_focuses_the_message_field_from_any_view(visiting, live_server):
    page = visiting(live_server.base_url, viewport={"width": 320, "height": 640})
    for view in ("live", "requests", "settings", "chat"):
        page.click(f"nav [data-view={view}]")
        page.focus(".skip")
        page.keyboard.press("Enter")
        page.expects("#prompt").to_be_focused()


@pytest.mark.full
def test_the_colours_follow_the_system_until_chosen(visiting, live_server):
    visit = visiting(live_server.base_url, color_scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = visit.evaluate(ground)
    visit.emulate_media(color_scheme="light")
    light = visit.evaluate(ground)
    assert dark != light
    visit.click("#theme")
    assert visit.get_attribute("#theme", "aria-label") == "Colours: light"
    visit.click("#theme")
    assert visit.get_attribute("html", "data-theme") == "dark"
    assert visit.evaluate(ground) == dark
    visit.reload()
    assert visit.evaluate(ground) == dark
    visit.click("#theme")
    assert visit.get_attribute("html", "data-theme") is None
    assert visit.evaluate(ground) == light


def _picture(page):
    return page.evaluate("document.getElementById('map').toDataURL()")


def _visibility(page, state):
    page.evaluate(
        f"Object.defineProperty(document, 'visibilityState', {{value: '{state}', configurable: "
        "true});document.dispatchEvent(new Event('visibilitychange'));"
    )
