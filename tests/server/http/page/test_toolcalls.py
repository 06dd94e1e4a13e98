"""Tests of tool calls on the page: streamed, answered by the user, and sent back in OpenAI's
format.
"""

import json

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.slow

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("get_weather", "get_time")]
ARGUMENTS = '{"city":"Wien \\u2764","days":[1]}'
QUESTION = {"role": "user", "content": "Weather?"}
TEXT = {"role": "assistant", "content": ""}


def called(name, arguments):
    return {
        "id": f"call-{name}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def result(name, content):
    return {"role": "tool", "tool_call_id": f"call-{name}", "content": content}


@pytest.fixture
def weather(stand_in):
    """Page whose model has called get_weather after some reasoning."""
    page = stand_in()
    page.begin("Weather?")
    page.deltas({"reasoning_content": "A tool."})
    page.call("get_weather", ARGUMENTS)
    page.end("tool_calls")
    return page


@pytest.mark.full
def test_arguments_are_raw_while_streamed_and_formatted_at_the_end(stand_in):
    page = stand_in()
    page.begin("Weather?")
    page.call("get_weather", ARGUMENTS[:20])
    call = page.locator(".call")
    expect(call.locator(".code-head")).to_have_text("Tool call get_weather")
    expect(call.locator("pre")).to_have_text(ARGUMENTS[:20])
    assert page.locator("textarea:not(#prompt)").locator("visible=true").count() == 0
    page.deltas({"tool_calls": [{"index": 0, "function": {"arguments": ARGUMENTS[20:]}}]})
    page.end("tool_calls")
    shown = call.locator("pre").evaluate("(e) => e.textContent")
    assert shown == json.dumps(json.loads(ARGUMENTS), indent=2, ensure_ascii=False)
    page.shows("#status", "The model calls get_weather and waits for the result.")
    assert "No answer" not in page.locator(".turn").inner_text()


@pytest.mark.full
def test_formatted_arguments_are_copied(weather):
    weather.context.grant_permissions(["clipboard-read", "clipboard-write"])
    weather.stop_timers()  # or "Copied" would disappear
    weather.button("Copy arguments").click()
    expect(weather.button("Copy arguments")).to_have_text("Copied")
    assert json.loads(weather.evaluate("navigator.clipboard.readText()")) == json.loads(ARGUMENTS)


@pytest.mark.full
def test_long_names_and_texts_fit_a_phone(stand_in):
    page = stand_in(viewport={"width": 320, "height": 640})
    page.begin("Weather?")
    page.deltas({"reasoning_content": "w" * 300})
    page.call("n" * 64, json.dumps({"key" * 30: "v" * 300}))
    page.end("tool_calls")
    page.click("summary")
    page.locator(".call textarea").fill("r" * 300)
    page.button("Send result").click()
    page.asked(2)
    page.end("stop")
    fits = "(e) => e.scrollWidth <= e.clientWidth"
    for place in ("#log", ".reasoning", ".call", ".call .code-head", ".call .result"):
        assert page.locator(place).evaluate(fits), place


def test_a_tool_result_is_sent_and_the_conversation_continues(weather):
    weather.get_by_label("Result of get_weather").fill(' {"sun": true}\n')
    weather.button("Send result").click()
    thought = {
        **TEXT,
        "reasoning_content": "A tool.",
        "tool_calls": [called("get_weather", ARGUMENTS)],
    }
    told = [QUESTION, thought, result("get_weather", ' {"sun": true}\n')]
    assert weather.asked(2)["messages"] == told
    assert weather.evaluate("document.activeElement.id") == "prompt"
    weather.deltas({"content": "It is sunny."})
    weather.end("stop")
    assert weather.count(".turn") == 1
    weather.expects(".answer").to_have_count(2)
    weather.shows(".call .result pre", '{"sun": true}')
    assert weather.count(".call textarea") == 0
    assert weather.count(".actions") == 1
    weather.ask("Thanks")
    end = {"role": "user", "content": "Thanks"}
    assert weather.asked(3)["messages"] == [
        *told,
        {"role": "assistant", "content": "It is sunny."},
        end,
    ]
    weather.end("stop")


@pytest.mark.full
def test_several_calls_are_answered_by_keyboard(stand_in):
    page = stand_in()
    keyboard = page.keyboard
    keyboard.type("Weather?")
    keyboard.press("Enter")
    page.asked(1)
    page.deltas({"content": "Let me see."})
    page.call("get_weather", "{}", index=0)
    page.call("get_time", '{"zone": 1}', index=1)
    page.end("tool_calls")
    focused = ""
    while focused != "Result of get_weather":
        keyboard.press("Shift+Tab")
        focused = page.evaluate(
            "(document.activeElement.labels?.[0] ?? document.activeElement).innerText"
        )
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
        assert page.evaluate("document.activeElement.id") != "theme", (
            "the result field must be reachable by keyboard"
        )
    keyboard.type("one")
    keyboard.press("Shift+Enter")
    keyboard.type("two")
    keyboard.press("Enter")
    page.shows("#status", "The result of get_time is missing.")
    assert page.evaluate("window.asked.length") == 1
    field = page.get_by_label("Result of get_time")
    expect(field).to_be_focused()
    expect(field).to_have_attribute("aria-invalid", "true")
    keyboard.type("noon")
    keyboard.press("Tab")
    expect(page.button("Send results")).to_be_focused()
    keyboard.press("Space")
    calls = [called("get_weather", "{}"), called("get_time", '{"zone": 1}')]
    assert page.asked(2)["messages"] == [
        QUESTION,
        {"role": "assistant", "content": "Let me see.", "tool_calls": calls},
        result("get_weather", "one\ntwo"),
        result("get_time", "noon"),
    ]
    page.end("stop")


@pytest.mark.full
def test_a_call_without_a_result_is_not_sent_back(weather):
    weather.ask("Never mind. Hello?")
    assert weather.asked(2)["messages"] == [{"role": "user", "content": "Never mind. Hello?"}]
    first = weather.locator(".turn").first
    expect(first).to_contain_text("No result was entered, so this call is not sent again.")
    assert first.locator("textarea").count() == 0
    assert first.get_by_role("button", name="Send result").count() == 0
    weather.end("stop")


@pytest.mark.full
def test_an_entered_result_is_sent_with_the_next_message(stand_in):
    page = stand_in()
    page.begin("Weather?")
    page.call("get_weather", "{}")
    page.call("get_time", "{}", index=1)
    page.end("tool_calls")
    page.get_by_label("Result of get_weather").fill("rain")
    page.ask("Never mind the time.")
    sent = page.asked(2)["messages"]
    assert [call["id"] for call in sent[1]["tool_calls"]] == ["call-get_weather"]
    assert sent[2:] == [
        result("get_weather", "rain"),
        {"role": "user", "content": "Never mind the time."},
    ]
    page.shows(".call .result pre", "rain")
    expect(page.locator(".call").last).to_contain_text("No result was entered")
    page.end("stop")


@pytest.mark.parametrize("how", ["length", "stopped"])
@pytest.mark.full
def test_a_truncated_call_expects_no_result(stand_in, how):
    page = stand_in()
    page.begin("Weather?")
    page.deltas({"content": "Let me see."})
    page.call("get_weather", ARGUMENTS[:20])
    if how == "stopped":
        page.keyboard.press("Escape")
    else:
        page.end("length")
    turn = page.answer("stopped" if how == "stopped" else "done")
    expect(turn.locator(".call")).to_contain_text("incomplete")
    expect(turn.locator(".call pre")).to_have_text(ARGUMENTS[:20])
    expect(turn).to_contain_text("An incomplete call is not sent again.")
    said = "Stopped." if how == "stopped" else "The call of get_weather is incomplete."
    page.shows("#status", said)
    assert turn.locator("textarea").count() == 0
    page.ask("Go on")
    said = {"role": "assistant", "content": "Let me see."}
    assert page.asked(2)["messages"] == [QUESTION, said, {"role": "user", "content": "Go on"}]
    page.end("stop")


@pytest.mark.full
def test_regenerating_keeps_earlier_tool_results(weather):
    weather.get_by_label("Result of get_weather").fill("rain")
    weather.keyboard.press("Enter")
    first = weather.asked(2)["messages"]
    weather.deltas({"content": "Wet."})
    weather.end("stop")
    weather.button("Regenerate").click()
    assert weather.asked(3)["messages"] == first
    weather.expects(".answer").to_have_count(2)
    weather.keyboard.press("Escape")
    weather.answer()
    expect(weather.locator(".answer-body").last).to_have_text("Wet.")
    weather.button("Regenerate").click()
    assert weather.asked(4)["messages"] == first
    weather.deltas({"content": "Wet!"})
    weather.end("stop")
    expect(weather.locator(".answer-body").last).to_have_text("Wet!")


@pytest.mark.full
def test_a_call_can_be_regenerated_and_its_question_edited(weather):
    weather.button("Regenerate").click()
    assert weather.asked(2)["messages"] == [QUESTION]
    assert weather.count(".call") == 0
    weather.call("get_time", "")
    weather.end("tool_calls")
    weather.button("Edit the last message").click()
    assert weather.input_value("#prompt") == "Weather?"
    weather.keyboard.press("Enter")
    assert weather.asked(3)["messages"] == [QUESTION]
    assert weather.count(".turn") == 1
    weather.click("#new-chat")
    weather.ask("Fresh")
    assert weather.asked(4)["messages"] == [{"role": "user", "content": "Fresh"}]
    weather.end("stop")


def test_tools_choice_and_schema_are_sent_stored_and_reset(stand_in):
    page = stand_in()
    page.click("nav [data-view=settings]")
    page.get_by_label("Tools (JSON)").fill(json.dumps(TOOLS))
    page.get_by_label("Tool choice").select_option("Required")
    page.get_by_label("JSON schema").fill('{"type": "object"}')
    page.reload()
    page.ask("Weather?")
    sent = page.asked(1)
    assert sent["tools"] == TOOLS
    assert sent["tool_choice"] == "required"
    assert sent["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": {"type": "object"}},
    }
    page.end("stop")
    page.click("nav [data-view=settings]")
    page.reset_settings()
    page.ask("Again")
    assert not {"tools", "tool_choice", "response_format"} & page.asked(2).keys()
    page.end("stop")


@pytest.mark.full
def test_invalid_json_is_marked_and_blocks_sending(weather):
    weather.get_by_label("Result of get_weather").fill("rain")
    weather.click("nav [data-view=settings]")
    weather.focus("#tools")
    weather.keyboard.type('[{"type": 1,}]')
    weather.expects("#tools-error").to_be_empty()
    weather.keyboard.press("Tab")
    weather.shows(
        "#tools-error", "Tools: line 1, column 13: expected a name in double quotes, not }."
    )
    weather.expects("#tools").to_have_attribute("aria-invalid", "true")
    weather.click("nav [data-view=live]")
    for press in ("Send result", "Regenerate"):
        weather.button(press).click()
        weather.expects("#tools").to_be_focused()
        weather.click("nav [data-view=live]")
    assert weather.evaluate("window.asked.length") == 1
    assert weather.get_by_label("Result of get_weather").input_value() == "rain"
    weather.click("nav [data-view=settings]")
    weather.fill("#tools", "[]")
    weather.expects("#tools-error").to_be_empty()
    weather.button("Send result").click()
    assert weather.asked(2)["messages"][-1] == result("get_weather", "rain")
    weather.end("stop")


@pytest.mark.full
def test_a_tool_call_of_a_real_model_and_its_result(visit):
    """The server is real, with the bundled model, whose template does not include tools."""
    schema = {"type": "object", "properties": {"city": {"enum": ["Wien"]}}, "required": ["city"]}
    schema["additionalProperties"] = (
        False  # otherwise the small model would generate until its limit truncates the call
    )
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": schema}}
    visit.click("nav [data-view=settings]")
    visit.fill("#temperature", "0")
    visit.get_by_label("Tools (JSON)").fill(json.dumps([tool]))
    visit.get_by_label("Tool choice").select_option("Required")
    visit.ask("Weather?")
    call = visit.locator(".call").first
    expect(call.locator(".code-head")).to_contain_text("Tool call get_weather")
    visit.shows("#status", "The model calls get_weather and waits for the result.")
    assert json.loads(call.locator("pre").evaluate("(e) => e.textContent"))["city"] == "Wien"
    visit.click("nav [data-view=settings]")
    visit.get_by_label("Tool choice").select_option("None")
    visit.fill("#max_tokens", "16")
    results = visit.get_by_label("Result of get_weather")
    for number in range(results.count()):
        results.nth(number).fill("Rain.")
    visit.button("Send result").first.click()
    turn = visit.answer()
    assert "Rain." in turn.inner_text()
