"""Tests of a chat with the bundled model through the page."""

import pytest
from playwright.sync_api import expect

from helpers.server.live_servers import HeldForward, serving, wait_until

pytestmark = pytest.mark.slow

QUESTION = (
    "Doc 3.\nThe pet of Main Zorgo is hen. The code of Main Zorgo is 2818.\n\nWhat is the pet of "
    "Main Zorgo?"
)
SYSTEM = "Doc 3.\n" + "The mayor of North Romin is Dorna. The mine of North Romin is nickel. " * 8
LENGTH = "document.querySelector('.turn:last-child .answer-body').textContent.length"


def test_an_answer_and_its_statistics_are_shown(visit, live_server):
    visit.settings(system=SYSTEM, temperature="0", max_tokens="24")
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    with live_server.client() as client:
        body = {
            "model": "kvboost-edge/demo",
            "messages": messages,
            "temperature": 0,
            "max_tokens": 24,
        }
        told = [client.post("/v1/chat/completions", json=body).json() for _ in range(2)][1]
    visit.ask(QUESTION)
    turn = visit.answer()
    expect(turn.locator(".answer-body")).to_have_text(
        told["choices"][0]["message"]["content"].strip()
    )
    usage = told["usage"]  # of the same prompt with the largest possible cache hit
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    prompt = usage["prompt_tokens"]
    assert cached > 0
    figures = turn.locator(".figures").inner_text()
    assert f"{cached} of {prompt} prompt tokens ({100 * cached / prompt:.0f} %)" in figures
    assert "first token" in figures
    assert "tok/s" in figures
    assert f"{usage['completion_tokens']} token" in figures
    visit.expects("#status").to_contain_text("Answer complete")


@pytest.mark.full
def test_text_is_streamed_and_statistics_follow_at_the_end(visit, slow_model, demo_engine):
    visit.settings(max_tokens="60")
    with slow_model():
        held = HeldForward(demo_engine)
        try:
            visit.ask(QUESTION)
            turn = visit.locator(".turn.running")
            expect(turn.locator(".answer")).to_have_attribute("aria-busy", "true")
            lengths = set()
            for _ in range(4):
                held.step(10)  # all of them compute fewer tokens than the answer has
                visit.until(f"{LENGTH} > {max(lengths, default=0)}")
                lengths.add(visit.evaluate(LENGTH))
            assert len(lengths) == 4
            assert turn.locator(".figures").count() == 0
        finally:
            held.release()
        done = visit.answer()
    assert done.locator(".answer").get_attribute("aria-busy") is None
    assert "60 tokens" in done.locator(".figures").inner_text()
    assert "stopped at max tokens" in done.locator(".figures").inner_text()


def test_stop_keeps_the_partial_answer_and_cancels_the_request(
    visit, slow_model, demo_engine, scale
):
    visit.settings(max_tokens="800")
    with slow_model():
        stops = (lambda: visit.click("#stop"), lambda: visit.keyboard.press("Escape"))
        for stop in stops[: scale(1, 2)]:
            visit.ask(QUESTION)
            visit.until(f"{LENGTH} > 8")
            visit.hurry()
            visit.shows("#running", "1")
            assert demo_engine.num_running() == 1
            stop()
            turn = visit.answer("stopped")
            kept = turn.locator(".answer-body").inner_text()
            assert len(kept) > 8
            visit.hurry()
            visit.shows("#running", "0")
            visit.shows("#count-used", "0")
            assert demo_engine.num_running() == 0
            expect(turn.locator(".flag")).to_have_text("stopped")
            assert turn.locator(".answer-body").inner_text() == kept
            visit.expects("#send").to_be_visible()
            assert visit.evaluate("document.activeElement.id") == "prompt"


@pytest.mark.full
def test_empty_settings_show_the_defaults(visit, demo_engine):
    values = demo_engine.sampling_defaults.as_dict()
    assert values["temperature"] == 0
    for name in ("temperature", "top_p", "top_k", "min_p"):
        expect(visit.locator(f"#{name}")).to_have_attribute("placeholder", f"{values[name]:g}")
    expect(visit.locator("#seed")).to_have_attribute("placeholder", "default")


def test_settings_are_sent_with_the_request(visit):
    visit.settings(
        system="Be brief.", temperature="0.7", top_p="0,9", top_k="40", max_tokens="3", seed="12"
    )
    sent = _sent(visit, "Hello")
    assert sent == {
        "model": "kvboost-edge/demo",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello"},
        ],
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "max_tokens": 3,
        "seed": 12,
        "stream": True,
        "return_progress": True,
        "stream_options": {"include_usage": True},
    }
    answer = visit.answer().locator(".answer-body").inner_text()
    visit.button("Regenerate").click()  # the same seed gives the same answer
    visit.until("document.querySelectorAll('.turn.done').length === 1")
    assert visit.answer().locator(".answer-body").inner_text() == answer
    visit.reload()
    assert visit.input_value("#seed") == "12"
    visit.click("nav [data-view=settings]")
    visit.reset_settings()
    assert [visit.input_value(f"#{name}") for name in ("system", "seed", "temperature")] == [
        "",
        "",
        "",
    ]


@pytest.mark.full
def test_approximate_answers_are_requested_and_labelled(visit, answering):
    told = {
        "hit_tokens": {"pool": 16},
        "approximate": True,
        "reused_span_tokens": 40,
        "recomputed_tokens": 24,
    }
    usage = {
        "prompt_tokens": 100,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 16},
    }
    answering(visit, "an answer", usage=usage, kvboost=told)
    assert "kvboost" not in _sent(visit, "Hello")
    visit.answer()
    visit.click("nav [data-view=settings]")
    visit.get_by_label("Answers").select_option("Approximate")
    assert _sent(visit, "Again")["kvboost"] == {"mode": "chunk_kv_reuse"}
    turn = visit.answer()
    expect(turn.locator(".flag")).to_have_text("approximate")
    expect(turn.locator(".figures")).to_contain_text("40 tokens reused, 24 recomputed")
    visit.shows("#status", "Answer complete, approximate, 2 tokens.")
    visit.reload()
    assert visit.input_value("#reuse") == "chunk_kv_reuse"
    visit.click("nav [data-view=settings]")
    visit.reset_settings()
    assert visit.input_value("#reuse") == ""


@pytest.mark.full
def test_an_invalid_setting_is_not_sent(visit):
    visit.settings(top_p="7")
    assert visit.get_attribute("#top_p", "aria-invalid") == "true"
    visit.click("nav [data-view=live]")
    visit.ask("Hello")
    assert visit.count(".turn") == 0
    assert visit.input_value("#prompt") == "Hello"
    assert visit.evaluate("document.activeElement.id") == "top_p"
    visit.shows("#top_p-error", "Top p must be above 0, up to 1.")


def test_a_conversation_is_continued_edited_and_restarted(visit):
    visit.settings(max_tokens="4", temperature="0")
    _sent(visit, "First")
    first = visit.answer().locator(".answer-body").inner_text()
    assert [message["role"] for message in _sent(visit, "Second")["messages"]] == [
        "user",
        "assistant",
        "user",
    ]
    visit.answer()
    assert visit.count(".actions") == 1
    visit.button("Edit the last message").click()
    assert visit.input_value("#prompt") == "Second"
    assert visit.count(".turn") == 2
    third = _sent(visit, "Third")["messages"]
    assert [message["content"].strip() for message in third] == ["First", first.strip(), "Third"]
    visit.answer()
    assert visit.count(".turn") == 2
    visit.click("#new-chat")
    assert visit.count(".turn") == 0
    visit.expects("#empty").to_be_visible()
    assert len(_sent(visit, "Fresh")["messages"]) == 1
    visit.answer()


@pytest.mark.full
def test_a_new_chat_cancels_the_running_answer(visit, slow_model, demo_engine):
    visit.settings(max_tokens="800")
    with slow_model():
        visit.ask("One")
        visit.until(f"{LENGTH} > 0")
        visit.click("#new-chat")
        visit.settings(max_tokens="5")
        visit.ask("Two")
        visit.answer()
        visit.shows("#running", "0")
    assert visit.count(".turn") == 1
    wait_until(lambda: demo_engine.num_running() == 0, "both answers to end")


@pytest.mark.full
def test_copy_buttons_copy_the_answer_and_its_code(visit, answering):
    visit.context.grant_permissions(["clipboard-read", "clipboard-write"])
    answering(visit, "one\n```py\n", "x = 1\n", "y = 2\n```\n", "end")
    visit.ask("Hello")
    turn = visit.answer()
    visit.stop_timers()  # or "Copied" would disappear
    turn.get_by_role("button", name="Copy answer").click()
    expect(turn.get_by_role("button", name="Copy answer")).to_have_text("Copied")
    assert visit.evaluate("navigator.clipboard.readText()") == "one\n```py\nx = 1\ny = 2\n```\nend"
    turn.get_by_role("button", name="Copy code").click()
    expect(turn.get_by_role("button", name="Copy code")).to_have_text("Copied")
    assert visit.evaluate("navigator.clipboard.readText()") == "x = 1\ny = 2"
    visit.shows("#status", "Copied.")


@pytest.mark.full
def test_copying_twice_restores_the_label_and_keeps_the_focus(visit, answering):
    visit.context.grant_permissions(["clipboard-read", "clipboard-write"])
    answering(visit, "one")
    visit.ask("Hello")
    button = visit.answer().get_by_role("button", name="Copy answer")
    visit.evaluate("void (Clipboard.prototype.writeText = () => Promise.reject(new Error('no')))")
    visit.stop_clock()
    for _ in range(2):
        button.press("Enter")
        expect(button).to_have_text("Copied")
        visit.page.clock.run_for(700)
    visit.page.clock.run_for(1200)
    expect(button).to_have_text("Copy")
    expect(button).to_be_focused()
    assert visit.evaluate("navigator.clipboard.readText()") == "one"


def test_an_api_key_is_requested_kept_in_the_tab_and_sent_in_the_header(visiting, keyed_server):
    visit = visiting(keyed_server.base_url)
    visit.expected_failures = ("401", "403")
    visit.shows("#model", "API key needed")
    visit.shows("#live-state", "API key needed")
    visit.settings(api_key="wrong", max_tokens="4")
    visit.ask("Hello")
    error = visit.answer("failed").locator(".error")
    expect(error).to_contain_text("The server does not accept the API key.")
    expect(error.locator("code")).not_to_be_empty()  # the request's id
    visit.settings(api_key=keyed_server.keys[0])
    visit.press("#api-key", "Tab")
    visit.shows("#model", "kvboost-edge/demo")
    visit.click("nav [data-view=live]")
    visit.shows("#live-state", "admin key needed")  # the pool is shared by several keys
    with visit.expect_request("**/v1/chat/completions") as seen:
        visit.button("Try again").click()
    visit.answer()
    assert seen.value.headers["authorization"] == f"Bearer {keyed_server.keys[0]}"
    assert keyed_server.keys[0] not in seen.value.url + visit.url + seen.value.post_data
    stored = visit.evaluate(
        "[JSON.stringify({...sessionStorage}), JSON.stringify({...localStorage}), document.cookie]"
    )
    assert keyed_server.keys[0] in stored[0]
    assert keyed_server.keys[0] not in stored[1] + stored[2]


@pytest.mark.full
def test_an_api_key_with_an_impossible_character_is_reported(visit):
    visit.settings(api_key="k\u200bey")
    visit.press("#api-key", "Tab")
    visit.shows("#model", "API key needed")
    visit.ask("Hello")
    error = visit.answer("failed").locator(".error")
    expect(error).to_contain_text("The API key has a character that no key can have.")
    visit.click("nav [data-view=live]")
    visit.shows("#live-state", "API key needed")


@pytest.mark.full
def test_a_refused_request_shows_the_servers_message(visit):
    visit.expected_failures = ("400",)
    visit.settings(max_tokens="16777216")
    visit.ask("Hello")
    turn = visit.answer("failed")
    expect(turn.locator(".error")).to_contain_text(
        "16777216"
    )  # the server's own message names the value
    with visit.expect_response("**/v1/chat/completions") as seen:
        turn.get_by_role("button", name="Try again").click()
    visit.answer("failed")
    expect(visit.locator(".turn").last.locator(".error code")).to_have_text(
        seen.value.headers["x-request-id"]
    )


@pytest.mark.full
def test_a_stream_error_is_shown_below_the_partial_answer(visit):
    body = (
        'data: {"choices": [{"delta": {"content": "half an "}}]}\n\n'
        'data: {"error": {"message": "too slow", "code": "deadline_exceeded"}}\n\n'
    )
    visit.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(content_type="text/event-stream", body=body),
    )
    visit.ask("Hello")
    turn = visit.answer("failed")
    expect(turn.locator(".answer-body")).to_have_text("half an")
    expect(turn.locator(".error")).to_contain_text("The request exceeded the server's time limit.")
    expect(turn.locator(".error")).to_contain_text("too slow")


@pytest.mark.full
def test_an_unreachable_server_is_reported(visiting, demo_engine, slow_model):
    with serving(demo_engine, drain_seconds=0.0) as server:
        visit = visiting(server.base_url)
        visit.expected_failures = ("ERR_",)
        visit.settings(max_tokens="800")
        with slow_model():
            visit.ask(QUESTION)
            visit.until(f"{LENGTH} > 8")
            server.server.should_exit = True
            turn = visit.answer("failed")
    assert len(turn.locator(".answer-body").inner_text()) > 8
    expect(turn.locator(".error")).not_to_be_empty()
    visit.ask("Anybody there?")
    expect(visit.answer("failed").locator(".error")).to_contain_text(
        "The server cannot be reached."
    )
    visit.click("nav [data-view=live]")
    visit.shows("#live-state", "not reachable, retrying")


@pytest.mark.full
def test_the_page_works_by_keyboard_alone(visit):
    assert visit.evaluate("document.activeElement.id") == "prompt"
    visit.keyboard.type("one")
    visit.keyboard.press("Shift+Enter")
    visit.keyboard.type("two")
    assert visit.input_value("#prompt") == "one\ntwo"
    visit.settings(max_tokens="2")
    visit.focus("#prompt")
    visit.keyboard.press("Enter")
    expect(visit.answer().locator(".question")).to_have_text("one\ntwo")
    assert visit.input_value("#prompt") == ""
    visit.keyboard.press("Enter")  # nothing to send
    assert visit.count(".turn") == 1
    visit.click("nav [data-view=live]")
    visit.evaluate("document.querySelector('.skip').focus()")
    focused = ["Skip to the message field"]
    while focused[-1] != "map":
        visit.keyboard.press("Tab")
        name = visit.evaluate(
            "((e) => e.id || (e.matches('.link') ? 'the reason' : "
            "e.textContent.trim()))(document.activeElement)"
        )
        assert name not in focused, focused
        focused.append(name)
        ring = visit.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert ring != "none", f"no visible focus on {name}"
    names = [
        "Skip to the message field",
        "Live",
        "Requests",
        "Models",
        "Settings",
        "commands",
        "theme",
        "chats",
        "export-chat",
        "delete-chat",
        "new-chat",
        "log",
        "the reason",
        "Copy",
        "Regenerate",
        "Edit",
        "prompt",
        "send",
        "map",
    ]
    assert focused == names


def _sent(visit, text):
    """Send a message; return the body of its request."""
    with visit.expect_request("**/v1/chat/completions") as seen:
        visit.ask(text)
    return seen.value.post_data_json
