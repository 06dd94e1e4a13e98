"""Tests of several models in one server: they are selected above the chat, each with its status;
requests and the live view follow the selection.
"""

import re

import pytest
from playwright.sync_api import expect

from helpers.server.live_servers import serving
from helpers.server.served_models import CountedSource

pytestmark = pytest.mark.slow

SMALL = "kvboost-edge/demo"
LARGE = "large <b>model</b>"


def model(name, state="loaded", failure=None, **more):
    return {"id": name, "object": "model", "root": name, "state": state, "failure": failure} | more


class Several:
    """Page of a simulated server with several models, and a record of the pools that it requested."""

    def __init__(self, stand_in, **options):
        self.models = [model(SMALL), model(LARGE, "not_loaded")]
        self.pools = []
        self.page = stand_in(prepare=self._answer_requests, **options)
        expect(self.page.get_by_label("Model", exact=True)).to_be_visible()

    def _answer_requests(self, visit):
        visit.route(
            "**/v1/models",
            lambda route: route.fulfill(json={"object": "list", "data": self.models}),
        )
        visit.route("**/v1/blocks*", self._pool)

    def _pool(self, route):
        self.pools.append(route.request.url.split("/v1/blocks")[1])
        route.continue_(url=route.request.url.split("?")[0])  # the server itself has one model

    def tells(self, *models):
        """Change the models' states and make the page read them."""
        self.models = list(models)
        self.page.read_models()


@pytest.fixture
def several(stand_in):
    return Several(stand_in)


def test_a_single_model_has_no_model_choice(visit):
    assert visit.is_hidden("#model-choice")
    assert visit.inner_text("#model") == "kvboost-edge/demo"


def test_aliases_of_one_model_are_not_listed(modules):
    listed = [
        model("a"),
        model("b", root="a"),
        model("c", "loading", "no room"),
        {"id": "d"},
        {"id": "e", "root": "a"},
    ]
    found = modules.module("models", "return it.different(argument);", listed)
    assert [(one["id"], one["state"], one["failure"]) for one in found] == [
        ("a", "loaded", ""),
        ("c", "loading", "no room"),
        ("d", "", ""),
    ]


@pytest.mark.full
def test_the_selected_model_is_sent_and_remembered(several):
    page = several.page
    choice = several.page.get_by_label("Model", exact=True)
    assert choice.locator("option").all_inner_texts() == [
        f"{SMALL} (loaded)",
        f"{LARGE} (not loaded)",
    ]
    several.page.ask("One")
    assert several.page.asked(1)["model"] == SMALL
    several.page.end("stop")
    choice.select_option(value=LARGE)
    page.shows("#model", LARGE)
    page.shows("#model-remark", "This model is not loaded. Your next message loads it.")
    several.page.ask("Two")
    assert several.page.asked(2)["model"] == LARGE
    several.tells(model(SMALL), model(LARGE, "loading"))
    page.shows("#model-remark", "This model is being loaded.")
    expect(choice.locator("option").last).to_have_text(f"{LARGE} (loading)")
    several.page.end("stop")
    several.tells(model(SMALL), model(LARGE))
    page.expects("#model-remark").to_be_empty()
    several.tells(model(SMALL), model(LARGE, "not_loaded", "it needs <i>9 GB</i>"))
    page.shows("#model-remark", "This model could not be loaded: it needs <i>9 GB</i>")
    page.reload()
    expect(choice).to_have_value(LARGE)
    several.tells(model("another"), model(SMALL))
    expect(choice).to_have_value("another")
    several.tells(model(SMALL))
    expect(choice).to_be_hidden()
    page.shows("#model", SMALL)


def test_selecting_a_model_loads_it_with_progress(several):
    page = several.page
    asked = []

    def load(route):
        asked.append(route.request.post_data_json)
        route.fulfill(status=503, json={"error": "the model <b>does not fit</b>"})

    page.route("**/api/generate", load)
    page.visit.expected_failures = ("503",)
    page.expects("#model-load").to_be_hidden()
    page.get_by_label("Model", exact=True).select_option(value=LARGE)
    page.button("Load now").click()
    page.shows("#model-remark", "the model <b>does not fit</b>")
    assert asked == [{"model": LARGE, "stream": False}]
    several.tells(model(SMALL), model(LARGE, "loading"))
    page.shows("#model-remark", "This model is being loaded.")
    page.expects("#model-load").to_be_hidden()
    bar = page.get_by_role("progressbar", name="Loading the model")
    expect(bar).to_be_visible()
    several.tells(model(SMALL), model(LARGE, "loading"))
    expect(bar).to_have_attribute("aria-valuetext", re.compile(r"^\d+ s$"))
    several.tells(model(SMALL), model(LARGE))
    expect(bar).to_be_hidden()
    page.expects("#model-remark").to_be_empty()


@pytest.mark.full
def test_a_failed_load_is_not_reported_below_another_model(several):
    page = several.page
    page.visit.expected_failures = ("503",)
    loads = []
    page.route("**/api/generate", lambda route: loads.append(route))
    page.get_by_label("Model", exact=True).select_option(value=LARGE)
    with page.expect_request("**/api/generate"):
        page.button("Load now").click()
    page.get_by_label("Model", exact=True).select_option(value=SMALL)
    with page.expect_response("**/v1/models"):
        loads[0].fulfill(status=503, json={"error": "the model does not fit"})
    several.tells(model(SMALL), model(LARGE, "unloading"))
    expect(page.locator("#model-choice option").last).to_contain_text("unloading")
    page.expects("#model-remark").to_be_empty()


@pytest.mark.full
def test_a_failed_model_list_is_retried(stand_in):
    page = stand_in()
    page.visit.expected_failures = ("503",)
    page.route("**/v1/models", lambda route: route.fulfill(status=503, json={}))
    page.clock.install()
    page.reload()
    page.shows("#model", "server not responding")
    page.serve("**/v1/models", {"data": [model(SMALL)]})
    page.clock.run_for(5000)
    page.shows("#model", SMALL)


@pytest.mark.full
def test_the_models_are_read_again_if_the_server_has_another_one(visiting, live_server):
    old = {"data": [model("kvboost-edge/old")]}
    visit = visiting(live_server.base_url, prepare=lambda one: one.serve("**/v1/models", old))
    visit.expected_failures = ("404",)
    visit.settings(max_tokens="2")
    visit.shows("#model", "kvboost-edge/old")
    visit.unroute("**/v1/models")
    visit.ask("Hello")
    expect(visit.answer("failed").locator(".error")).to_contain_text("kvboost-edge/old")
    visit.shows("#model", SMALL)
    visit.button("Try again").click()
    visit.locator(".turn.done").wait_for()


@pytest.mark.full
def test_a_message_reports_that_the_list_of_models_takes_too_long(stand_in):
    page = stand_in(prepare=lambda visit: visit.route("**/v1/models", lambda route: None))
    page.evaluate(
        "AbortSignal.timeout = () => AbortSignal.abort(new DOMException('late', 'TimeoutError'))"
    )
    page.ask("Hello")
    error = page.answer("failed").locator(".error")
    expect(error).to_have_text("The server takes too long to answer.")


@pytest.mark.full
def test_stop_does_not_wait_for_the_list_of_models(stand_in):
    page = stand_in(prepare=lambda visit: visit.route("**/v1/models", lambda route: None))
    page.evaluate("AbortSignal.timeout = () => new AbortController().signal")
    page.ask("Hello")
    page.click("#stop")
    expect(page.answer("stopped").locator(".flag")).to_have_text("stopped")
    assert page.evaluate("window.asked") == []


@pytest.mark.full
def test_a_single_unloaded_model_can_be_loaded_again(stand_in):
    answer = {"data": [model(SMALL, "not_loaded")]}
    page = stand_in(prepare=lambda visit: visit.serve("**/v1/models", answer))
    page.shows("#model-remark", "This model is not loaded. Your next message loads it.")
    page.shows("#live-state", "not loaded")
    page.expects("#model-choice").to_be_hidden()
    page.serve("**/v1/models", {"data": [model(SMALL)]})
    page.read_models()
    page.shows("#live-state", "live")
    page.expects("#model-remark").to_be_empty()


@pytest.mark.full
def test_the_live_view_shows_the_selected_model(several):
    page = several.page
    choice = several.page.get_by_label("Model", exact=True)
    state = page.locator("#live-state")
    several.page.until("document.getElementById('live-state').textContent === 'live'")
    assert several.pools[-1] == "?model=kvboost-edge%2Fdemo"
    page.clock.install()
    choice.select_option(value=LARGE)
    page.clock.run_for(1)
    expect(state).to_have_text("not loaded")
    page.evaluate(
        "fetch('/v1/models').then((response) => response.text())"
    )  # any pending response has arrived by now
    assert (
        page.inner_text("#count-free") == page.inner_text("#weight_bytes") == "–"
    )  # not those of the other model
    several.pools.clear()
    page.clock.run_for(2000)
    assert several.pools == []
    several.models = [model(SMALL), model(LARGE)]
    with page.expect_request("**/v1/blocks?model=large*"):
        with page.expect_response("**/v1/models"):
            page.clock.run_for(2500)
        page.clock.run_for(1)
    choice.select_option(value=SMALL)
    page.clock.run_for(1)
    page.expects("#count-free").not_to_have_text("–")


@pytest.mark.full
def test_a_model_may_be_unloaded_while_a_block_is_described(several):
    page = several.page
    page.shows("#live-state", "live")
    page.focus("#map")
    page.expects("#map-detail").to_contain_text("Block 0: ")
    several.tells(model(SMALL, "not_loaded"), model(LARGE))
    page.shows("#live-state", "not loaded")
    page.shows("#models-state", "live")
    page.expects("#map-detail").to_contain_text("arrow keys")
    several.tells(model(SMALL), model(LARGE))
    page.shows("#live-state", "live")
    page.keyboard.press("ArrowRight")
    page.expects("#map-detail").to_contain_text("Block 0: ")


@pytest.mark.full
def test_request_rows_name_their_model_if_there_are_several(several):
    page = several.page
    long = "n" * 300
    bare = {
        "cause": "first_seen",
        "prompt_tokens": 20,
        "hit_tokens": {"pool": 0},
        "reused_span_tokens": 0,
        "computed_tokens": 20,
        "seconds": 0.1,
    }
    data = [
        bare | {"request_id": f"req-{at}", "at": 1e9 - at, "model": name}
        for at, name in enumerate([LARGE, SMALL, long])
    ]
    answer = {"object": "list", "data": data, "kept_seconds": 60}
    page.serve("**/v1/requests", answer)
    page.click("nav [data-view=requests]")
    named = page.locator(".prompt-model")
    expect(named).to_have_text([f"model {LARGE}", f"model {SMALL}", f"model {long}"])
    expect(named.first).to_be_visible()
    expect(page.locator(".prompt-row").first).to_have_accessible_name(
        re.compile(f"cost 100 ms model {LARGE} ")
    )
    page.set_viewport_size({"width": 320, "height": 640})
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    several.tells(model(SMALL))
    expect(named.first).to_be_hidden()
    expect(page.locator(".prompt-row").first).not_to_have_accessible_name(re.compile("model"))


@pytest.mark.full
def test_the_model_choice_fits_a_phone_and_works_by_keyboard(stand_in):
    made = Several(stand_in, viewport={"width": 320, "height": 640})
    made.tells(model(SMALL), model("n" * 90, "not_loaded", "w" * 200))
    page = made.page
    expect(page.locator("#model-choice option").last).to_contain_text("nnn")
    for _ in range(4):  # from the message field over the log, the button and the choice of chats
        page.keyboard.press("Shift+Tab")
    expect(page.get_by_label("Model", exact=True)).to_be_focused()
    page.keyboard.press("ArrowDown")
    page.expects("#model-remark").to_contain_text("could not be loaded: www")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    out = (
        "[...document.querySelectorAll('.chat-head *')].filter((e) => "
        "e.getBoundingClientRect().right > 320).length"
    )
    assert page.evaluate(out) == 0


@pytest.mark.full
def test_the_first_message_to_a_model_loads_it(visiting, demo_engine, tiny_model_dir):
    """The server is real. Loading waits until the page shows that the model is being loaded."""
    other = CountedSource(tiny_model_dir)
    other.hold()
    with serving(demo_engine, others=[(("other", "alias"), other.source)]) as server:
        visit = visiting(server.base_url)
        visit.expected_failures = (
            "503",
        )  # the page may request the pool just before the model is loaded
        choice = visit.get_by_label("Model", exact=True)
        expect(choice.locator("option")).to_have_text([f"{SMALL} (loaded)", "other (not loaded)"])
        choice.select_option(value="other")
        visit.settings(max_tokens="2", temperature="0")
        visit.shows("#live-state", "not loaded")
        try:
            visit.ask("Hi")
            visit.hurry()
            visit.shows("#model-remark", "This model is being loaded.")
        finally:
            other.release()
        visit.answer()
        visit.hurry()
        expect(choice.locator("option").last).to_have_text("other (loaded)")
        visit.shows("#pool-size", "64 blocks of 16 tokens")
        choice.select_option(value=SMALL)
        visit.expects("#pool-size").to_contain_text(
            f"{demo_engine.paged_stats()['num_blocks']} blocks"
        )
        assert other.loads == 1
        visit.context.close()  # before the server stops, since the page polls it
