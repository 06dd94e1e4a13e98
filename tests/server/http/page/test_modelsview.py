"""Tests of the models view: models are added, loaded, unloaded and deleted; if changes are not
allowed, the view says so.
"""

import json
import re

import pytest
from playwright.sync_api import expect

from helpers.gguf.writer import write_gguf
from helpers.models.fake_hub import fake_hub
from helpers.server.live_servers import serving
from helpers.server.served_models import CountedSource
from kvboost_edge.models.locate.managed import managed_models
from kvboost_edge.server.models.changes import ManagedModels

pytestmark = pytest.mark.slow

REPO = "someone/Tiny-GGUF"
NAME = f"{REPO}:Q8_0"
DIGEST = "sha256:" + "0" * 64
MARKUP = '<img src=x onerror="window.hacked=1">'

# Replaces the server's download: the test sends the stream. Bodies of other changes are recorded
# too.
PULLS = """
  const fetchReally = window.fetch;
  window.changes = [];
  window.fetch = (path, options) => {
    if (!['/api/pull', '/api/generate', '/api/delete'].includes(path)) return fetchReally(path, options);
    window.changes.push([options.method, path, JSON.parse(options.body)]);
    if (path !== '/api/pull') return Promise.resolve(new Response(window.refused ?? '{}', {status: window.refused ? 409 : 200}));
    const start = (controller) => {
      window.tell = (...events) => events.forEach((event) => controller.enqueue(new TextEncoder().encode(JSON.stringify(event) + '\\n')));
      window.cut = (text) => { controller.enqueue(new TextEncoder().encode(text)); };
      window.finish = () => controller.close();
      options.signal.addEventListener('abort', () => controller.error(options.signal.reason));
    };
    return Promise.resolve(new Response(new ReadableStream({start})));
  };
"""


def model(name, state="loaded", **more):
    return {"id": name, "root": name, "state": state, "unloadable": True, "managed": True} | more


class ModelsPage:
    """Models view of a simulated server, whose responses come from the test."""

    def __init__(self, visiting, server, **options):
        self.answer = {"data": [model("a", managed=False), model("b", "not_loaded")]}
        self.answer["changes"] = {"allowed": True, "reason": None}
        self.visit = visiting(
            server.base_url, init_script=PULLS, prepare=self._answer_requests, **options
        )
        self.visit.click("nav [data-view=models]")
        self.visit.shows("#models-state", "live")

    def _answer_requests(self, visit):
        visit.route("**/v1/models", lambda route: route.fulfill(json=self.answer))
        visit.route(
            "**/v1/blocks*", lambda route: route.continue_(url=route.request.url.split("?")[0])
        )

    def __getattr__(self, name):
        """Return an attribute of the visit."""
        return getattr(self.visit, name)

    def says(self, **answer):
        """Change the server's response and make the page read it."""
        self.answer = {**self.answer, **answer}
        self.visit.read_models()

    def row(self, name):
        return self.visit.locator(".model-row", has=self.visit.get_by_text(name, exact=True))

    def changes(self):
        return self.visit.evaluate("window.changes")

    def add(self, name):
        self.visit.get_by_label("Add a model").fill(name)
        self.visit.keyboard.press("Enter")
        self.visit.until("window.changes.length > 0 && 'tell' in window")

    def tell(self, *events):
        self.visit.evaluate("(events) => window.tell(...events)", list(events))


@pytest.fixture
def page(visiting, live_server):
    return ModelsPage(visiting, live_server)


def loading(completed, total=100_000_000, digest=DIGEST):
    return {
        "status": f"pulling {digest[7:19]}",
        "digest": digest,
        "total": total,
        "completed": completed,
    }


@pytest.mark.full
def test_a_model_is_added_loaded_unloaded_and_deleted(
    visiting, demo_engine, tiny_model_dir, tmp_path, monkeypatch
):
    """The server is real; the hub is simulated."""
    monkeypatch.setenv("KVBOOST_EDGE_CACHE", str(tmp_path / "own"))
    write_gguf(tiny_model_dir, tmp_path / "Tiny-Q8_0.gguf", kind="Q8_0")
    files = {"Tiny-Q8_0.gguf": (tmp_path / "Tiny-Q8_0.gguf").read_bytes()}
    store = managed_models()
    managed = ManagedModels(store, lambda model: CountedSource(store.path_of(model)).source)
    with (
        fake_hub(REPO, files, tmp_path / "hub", monkeypatch),
        serving(demo_engine, managed=managed) as server,
    ):
        visit = visiting(server.base_url)
        visit.expected_failures = (
            "503",
        )  # the page may request a pool just before its model is loaded
        visit.click("nav [data-view=models]")
        rows = visit.locator(".model-row")
        expect(rows).to_have_count(1)
        expect(rows.get_by_role("button", name=re.compile("Delete|Unload"))).to_have_count(0)
        visit.get_by_label("Add a model").fill(NAME)
        visit.button("Download").click()
        expect(visit.locator("#pull-view")).to_contain_text(f"{NAME} was added.")
        assert visit.input_value("#pull-name") == ""
        row = rows.nth(1)
        expect(row.locator(".state")).to_have_text("not loaded")
        expect(row).to_contain_text("on disk")
        row.get_by_role("button", name=f"Load {NAME}").click()
        expect(row.locator(".state")).to_have_text("loaded")
        expect(row).to_contain_text("of memory")
        visit.locator("#pull-view").get_by_role("button", name="Use in chat").click()
        visit.shows("#model", NAME)
        visit.settings(max_tokens="2")
        visit.ask("Hi")
        visit.answer()
        visit.click("nav [data-view=models]")
        row.get_by_role("button", name=f"Unload {NAME}").click()
        expect(row.locator(".state")).to_have_text("not loaded")
        row.get_by_role("button", name=f"Delete {NAME}").click()
        asked = visit.get_by_role("alertdialog", name="Delete this model?")
        expect(asked).to_contain_text(NAME)
        asked.get_by_role("button", name="Cancel").click()
        expect(rows).to_have_count(2)
        row.get_by_role("button", name=f"Delete {NAME}").click()
        asked.get_by_role("button", name="Delete").click()
        expect(rows).to_have_count(1)
        visit.expects("#models-title").to_be_focused()
        visit.shows("#model", "kvboost-edge/demo")
        assert not list(store.root.rglob("*.gguf"))
        visit.context.close()


def test_download_progress_is_shown(page):
    page.add("org/model:Q4")
    assert page.changes() == [["POST", "/api/pull", {"model": "org/model:Q4"}]]
    view = page.locator("#pull-view")
    bar = page.get_by_role("progressbar", name="Downloading org/model:Q4")
    page.tell({"status": "pulling manifest"})
    expect(view).to_contain_text("Looking up the model")
    assert bar.get_attribute("aria-valuenow") is None
    page.tell(loading(25_000_000))
    expect(bar).to_have_attribute("aria-valuenow", "25")
    expect(view).to_contain_text("25.0 MB of 100 MB")
    page.tell(loading(100_000_000), loading(0, 2_000_000, DIGEST.replace("0", "1")))
    expect(view).to_contain_text("file 2, 0 B of 2.00 MB")
    page.get_by_label("Add a model").fill("another")
    page.keyboard.press("Enter")
    page.expects("#pull-error").to_contain_text("Another model is being downloaded.")
    page.tell({"status": "verifying sha256 digest"})
    expect(view).to_contain_text("Checking the files")
    page.click("nav [data-view=live]")
    expect(page.locator("#pull-progress")).to_contain_text("Downloading org/model:Q4")
    page.answer["data"].append(model("org/model:Q4", "not_loaded"))
    page.tell({"status": "success"})
    page.evaluate("window.finish()")
    expect(page.locator("#pull-progress")).to_contain_text("org/model:Q4 was added.")
    assert page.input_value("#pull-name") == "another"
    page.expects("#pull-error").to_be_empty()
    page.locator("#pull-progress").get_by_role("button", name="Use in chat").click()
    page.shows("#model", "org/model:Q4")
    page.expects("#pull-progress").to_be_hidden()


@pytest.mark.full
def test_a_model_is_used_that_the_page_does_not_list_yet(page):
    page.add("m")
    with page.expect_response("**/v1/models"):
        page.tell({"status": "success"})
        page.evaluate("window.finish()")
    page.answer["data"].append(model("m", "not_loaded"))
    page.locator("#pull-view").get_by_role("button", name="Use in chat").click()
    page.shows("#model", "m")


@pytest.mark.full
def test_a_download_is_cancelled(page):
    page.add("m")
    page.tell(loading(1000))
    page.button("Cancel").click()
    expect(page.locator("#pull-view")).to_contain_text("The download of m was cancelled.")
    page.button("Dismiss").click()
    page.expects("#pull-view").to_be_hidden()


@pytest.mark.full
def test_a_failed_download_shows_its_error_and_can_be_retried(page):
    page.add(MARKUP)
    error = page.locator("#pull-view [role=alert]")
    ends = (
        (f"window.tell({{error: {json.dumps(MARKUP)}}})", MARKUP),
        ("window.finish()", "The connection ended before the download was complete."),
        ("window.cut('{\\n')", "The server sent invalid JSON."),
    )
    for number, (end, said) in enumerate(ends, 1):
        page.evaluate(f"{{ {end} }}")
        expect(error).to_contain_text(said)
        expect(page.locator("#pull-view")).to_contain_text(f"{MARKUP} was not added.")
        assert page.evaluate("window.hacked") is None
        page.button("Try again").click()
        page.until(f"window.changes.length === {number + 1}")
        expect(error).to_have_count(0)


@pytest.mark.full
def test_split_stream_events_are_joined(page):
    page.add("m")
    line = json.dumps(loading(50_000_000, digest="ä"), ensure_ascii=False)
    page.evaluate("(text) => [...text].forEach((piece) => window.cut(piece))", f"{line}\r\n\n")
    expect(page.locator("#pull-view")).to_contain_text("50.0 MB of 100 MB")


@pytest.mark.full
def test_speed_and_time_left_of_a_download(modules):
    body = """
      const pull = it.newPull('m');
      const told = [it.pullInWords(pull, 0)];
      it.takeEvent(pull, {status: 'pulling x', digest: 'x', total: 90e6, completed: 10e6}, 1000);
      told.push(it.pullInWords(pull, 1500));
      it.takeEvent(pull, {status: 'pulling x', digest: 'x', total: 90e6, completed: 50e6}, 5000);
      told.push(it.pullInWords(pull, 5000), it.shareOf(pull));
      it.takeEvent(pull, {status: 'something new'}, 6000);
      return [...told, it.pullInWords(pull, 6000), it.shareOf(pull)];
    """
    assert modules.module("pulls", body) == [
        "Waiting for the server",
        "10.0 MB of 90.0 MB",
        "50.0 MB of 90.0 MB, 10.0 MB/s, about 4 s",
        pytest.approx(50 / 90),
        "something new",
        None,
    ]


def test_model_rows_show_the_servers_data(page):
    rows = [
        model("a", max_model_len=4096, meta={"dtype": "int4", "runner": "native"}, managed=False),
        model(MARKUP, "not_loaded", failure="it needs <i>9 GB</i>", file_bytes=1_500_000_000),
        model("c", "loading"),
        model("d", "loaded", unloadable=False),
    ]
    memory = {"max_bytes": 8e9, "taken_bytes": 2e9, "waiting": 0, "data": []}
    figures = {"bytes": 1e9, "in_use": 0, "unloads_in_seconds": 90.0, "waits_for": ""}
    waits = {"bytes": 0, "in_use": 1, "unloads_in_seconds": None, "waits_for": "no <b>room</b>"}
    memory["data"] = [{"id": "a", **figures}, {"id": "c", **waits}]
    page.says(data=rows, memory=memory)
    page.shows("#models-memory", "Loaded models use 2.00 GB of 8.00 GB of memory.")
    figures = "1.00 GB of memory, 4,096 tokens of context, int4, native runner, unloads in 90.0 s"
    expect(page.row("a").locator(".note").first).to_have_text(figures)
    failed = page.row(MARKUP)
    expect(failed.locator(".note").first).to_have_text("1.50 GB on disk")
    expect(failed.locator(".field-error")).to_have_text("it needs <i>9 GB</i>")
    expect(failed.get_by_role("button", name="Load")).to_be_visible()
    expect(page.row("c").get_by_role("progressbar", name="Loading c")).to_be_visible()
    expect(page.row("c")).to_contain_text("no <b>room</b>")
    expect(page.row("c").get_by_role("button", name="Load")).to_have_attribute(
        "aria-disabled", "true"
    )
    expect(page.row("d").get_by_role("button", name="Unload")).to_have_count(0)
    assert page.evaluate("window.hacked") is None


def test_row_buttons_load_unload_and_select_a_model(page):
    page.row("b").get_by_role("button", name="Load").click()
    page.row("a").get_by_role("button", name="Unload").click()
    expect(page.row("a")).to_contain_text("waits until no request uses the model")
    page.row("b").get_by_role("button", name="Delete").click()
    page.get_by_role("alertdialog").get_by_role("button", name="Delete").click()
    page.until("window.changes.length === 3")
    assert page.changes() == [
        ["POST", "/api/generate", {"model": "b", "stream": False}],
        ["POST", "/api/generate", {"model": "a", "stream": False, "keep_alive": 0}],
        ["DELETE", "/api/delete", {"model": "b"}],
    ]
    page.row("b").get_by_role("button", name="Use b in chat").click()
    page.shows("#model", "b")


@pytest.mark.full
def test_a_refused_change_is_shown_in_its_row(page):
    page.evaluate('window.refused = \'{"error": "the model is <b>in use</b>"}\'')
    page.row("b").get_by_role("button", name="Delete").click()
    page.get_by_role("alertdialog").get_by_role("button", name="Delete").click()
    error = page.row("b").get_by_role("alert")
    expect(error).to_contain_text("The model is in use.")
    expect(error.locator(".said")).to_have_text("the model is <b>in use</b>")
    page.row("b").get_by_role("button", name="Load").click()
    expect(error).to_have_count(1)


@pytest.mark.full
def test_an_invalid_model_name_is_not_sent(page):
    for name in ("", " ", "x" * 201):
        page.get_by_label("Add a model").fill("m")
        page.expects("#pull-error").to_be_empty()
        page.get_by_label("Add a model").fill(name)
        page.button("Download").click()
        page.expects("#pull-error").not_to_be_empty()
        page.expects("#pull-name").to_be_focused()
    assert page.changes() == []


@pytest.mark.full
def test_the_page_explains_why_models_are_fixed(page):
    for changes, said in (
        ({"allowed": False, "reason": "closed <b>here</b>"}, ": closed <b>here</b>"),
        (None, "."),  # from an older server
    ):
        page.says(changes=changes)
        page.shows("#models-closed", f"Models cannot be added or deleted here{said}")
        page.expects("#pull-form").to_be_hidden()
        expect(page.get_by_role("button", name=re.compile("^Delete b"))).to_be_hidden()
        expect(page.row("b").get_by_role("button", name="Load")).to_be_visible()


@pytest.mark.full
def test_one_fixed_model_is_shown(visit):
    visit.click("nav [data-view=models]")
    row = visit.locator(".model-row")
    expect(row).to_have_count(1)
    expect(row).to_contain_text("tokens of context")
    expect(row.get_by_role("button")).to_have_count(1)  # "Use in chat"
    visit.expects("#models-closed").to_contain_text("the models of this server are fixed")


@pytest.mark.full
def test_an_api_key_is_requested(visiting, keyed_server):
    visit = visiting(keyed_server.base_url)
    visit.expected_failures = ("401", "403")
    visit.click("nav [data-view=models]")
    visit.shows("#models-state", "API key needed")
    visit.expects("#pull-form").to_be_hidden()
    visit.settings(api_key=keyed_server.keys[0])
    visit.press("#api-key", "Tab")
    visit.click("nav [data-view=models]")
    visit.shows("#models-state", "live")
    visit.expects("#models-memory").to_be_empty()  # only admins see it


@pytest.mark.full
def test_a_late_refusal_of_an_earlier_key_is_ignored(held_without_key):
    visit, held = held_without_key("/v1/models")
    visit.settings(api_key="key")
    visit.press("#api-key", "Tab")
    visit.click("nav [data-view=models]")
    visit.shows("#models-state", "live")
    with visit.expect_response(lambda response: response.status == 401):
        held[0].fulfill(status=401, json={"error": {"message": "no key"}})
    visit.evaluate(
        "fetch('/v1/blocks').then((response) => response.text())"
    )  # the page has read the refusal by now
    assert visit.inner_text("#models-state") == "live"


@pytest.mark.full
def test_long_names_fit_a_phone(visiting, live_server):
    page = ModelsPage(visiting, live_server, viewport={"width": 320, "height": 640})
    long = model("n" * 200, "not_loaded", failure="w" * 300, file_bytes=1)
    page.says(data=[model("a"), long], changes={"allowed": True})
    page.add("p" * 200)
    page.tell(loading(1))
    expect(page.row("n" * 200)).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    wide = "[...document.querySelectorAll('#models *')].filter((e) => e.getBoundingClientRect().right > 320).length"
    assert page.evaluate(wide) == 0
