"""Calls of tools on the page: shown as they come, answered by the person, sent back in OpenAI's shape."""

import json

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.slow

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("get_weather", "get_time")]
ARGUMENTS = '{"city":"Wien \\u2764","days":[1]}'
QUESTION = {"role": "user", "content": "Weather?"}
TEXT = {"role": "assistant", "content": ""}


def called(name, arguments):
    return {"id": f"call-{name}", "type": "function", "function": {"name": name, "arguments": arguments}}


def result(name, content):
    return {"role": "tool", "tool_call_id": f"call-{name}", "content": content}


@pytest.fixture
def weather(stand_in):
    """A page whose model has called get_weather, after some thought."""
    page = stand_in()
    page.ask("Weather?")
    page.asked(1)
    page.deltas({"reasoning_content": "A tool."})
    page.call("get_weather", ARGUMENTS)
    page.end("tool_calls")
    return page


def test_arguments_are_raw_while_they_come_and_laid_out_at_the_end(stand_in):
    page = stand_in()
    page.ask("Weather?")
    page.asked(1)
    page.call("get_weather", ARGUMENTS[:20])
    call = page.locator(".call")
    expect(call.locator(".code-head")).to_have_text("Tool call get_weather")
    expect(call.locator("pre")).to_have_text(ARGUMENTS[:20])
    assert page.locator("textarea:not(#prompt)").locator("visible=true").count() == 0
    page.deltas({"tool_calls": [{"index": 0, "function": {"arguments": ARGUMENTS[20:]}}]})
    page.end("tool_calls")
    shown = call.locator("pre").evaluate("(e) => e.textContent")
    assert shown == json.dumps(json.loads(ARGUMENTS), indent=2, ensure_ascii=False)
    expect(page.locator("#status")).to_have_text("The model calls get_weather and waits for the result.")
    assert "Nothing was answered" not in page.locator(".turn").inner_text()


def test_arguments_are_copied_as_they_are_laid_out(weather):
    page = weather.visit.page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    weather.stop_clock()  # or "Copied" would go
    page.get_by_role("button", name="Copy arguments").click()
    expect(page.get_by_role("button", name="Copy arguments")).to_have_text("Copied")
    assert json.loads(page.evaluate("navigator.clipboard.readText()")) == json.loads(ARGUMENTS)


def test_long_names_and_texts_fit_a_phone(stand_in):
    page = stand_in(viewport={"width": 320, "height": 640})
    page.ask("Weather?")
    page.asked(1)
    page.deltas({"reasoning_content": "w" * 300})
    page.call("n" * 64, json.dumps({"key" * 30: "v" * 300}))
    page.end("tool_calls")
    page.click("summary")
    page.locator(".call textarea").fill("r" * 300)
    page.get_by_role("button", name="Send result").click()
    page.asked(2)
    page.end("stop")
    fits = "(e) => e.scrollWidth <= e.clientWidth"
    for place in ("#log", ".reasoning", ".call", ".call .code-head", ".call .result"):
        assert page.locator(place).evaluate(fits), place


def test_a_result_is_sent_and_the_conversation_goes_on(weather):
    page = weather.visit.page
    page.get_by_label("Result of get_weather").fill(' {"sun": true}\n')
    page.get_by_role("button", name="Send result").click()
    thought = {**TEXT, "reasoning_content": "A tool.", "tool_calls": [called("get_weather", ARGUMENTS)]}
    told = [QUESTION, thought, result("get_weather", ' {"sun": true}\n')]
    assert weather.asked(2)["messages"] == told
    assert page.evaluate("document.activeElement.id") == "prompt"
    weather.deltas({"content": "It is sunny."})
    weather.end("stop")
    assert page.locator(".turn").count() == 1
    expect(page.locator(".answer")).to_have_count(2)
    expect(page.locator(".call .result pre")).to_have_text('{"sun": true}')
    assert page.locator(".call textarea").count() == 0
    assert page.locator(".actions").count() == 1
    weather.ask("Thanks")
    end = {"role": "user", "content": "Thanks"}
    assert weather.asked(3)["messages"] == [*told, {"role": "assistant", "content": "It is sunny."}, end]
    weather.end("stop")


def test_several_calls_are_answered_together_by_the_keyboard_alone(stand_in):
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
        focused = page.evaluate("(document.activeElement.labels?.[0] ?? document.activeElement).innerText")
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
        assert page.evaluate("document.activeElement.id") != "theme", "no way to the field"
    keyboard.type("one")
    keyboard.press("Shift+Enter")
    keyboard.type("two")
    keyboard.press("Enter")
    expect(page.locator("#status")).to_have_text("The result of get_time is missing.")
    assert page.evaluate("window.asked.length") == 1
    field = page.get_by_label("Result of get_time")
    expect(field).to_be_focused()
    expect(field).to_have_attribute("aria-invalid", "true")
    keyboard.type("noon")
    keyboard.press("Tab")
    expect(page.get_by_role("button", name="Send results")).to_be_focused()
    keyboard.press("Space")
    calls = [called("get_weather", "{}"), called("get_time", '{"zone": 1}')]
    assert page.asked(2)["messages"] == [
        QUESTION,
        {"role": "assistant", "content": "Let me see.", "tool_calls": calls},
        result("get_weather", "one\ntwo"),
        result("get_time", "noon"),
    ]
    page.end("stop")


def test_a_call_without_a_result_is_not_sent_again(weather):
    weather.ask("Never mind. Hello?")
    assert weather.asked(2)["messages"] == [{"role": "user", "content": "Never mind. Hello?"}]
    first = weather.locator(".turn").first
    expect(first).to_contain_text("No result was given; this call is not sent again.")
    assert first.locator("textarea").count() == 0
    assert first.get_by_role("button", name="Send result").count() == 0
    weather.end("stop")


@pytest.mark.parametrize("how", ["length", "stopped"])
def test_a_call_that_was_cut_waits_for_nothing(stand_in, how):
    page = stand_in()
    page.ask("Weather?")
    page.asked(1)
    page.deltas({"content": "Let me see."})
    page.call("get_weather", ARGUMENTS[:20])
    if how == "stopped":
        page.keyboard.press("Escape")
    else:
        page.end("length")
    turn = page.answer("stopped" if how == "stopped" else "done")
    expect(turn.locator(".call")).to_contain_text("not complete")
    expect(turn.locator(".call pre")).to_have_text(ARGUMENTS[:20])
    expect(turn).to_contain_text("A call that was cut is not sent again.")
    said = "Stopped." if how == "stopped" else "The call of get_weather was cut."
    expect(page.locator("#status")).to_have_text(said)
    assert turn.locator("textarea").count() == 0
    page.ask("Go on")
    said = {"role": "assistant", "content": "Let me see."}
    assert page.asked(2)["messages"] == [QUESTION, said, {"role": "user", "content": "Go on"}]
    page.end("stop")


def test_another_answer_keeps_the_results_before_it(weather):
    page = weather.visit.page
    page.get_by_label("Result of get_weather").fill("rain")
    page.keyboard.press("Enter")
    first = weather.asked(2)["messages"]
    weather.deltas({"content": "Wet."})
    weather.end("stop")
    page.get_by_role("button", name="Regenerate").click()
    assert weather.asked(3)["messages"] == first
    expect(page.locator(".answer")).to_have_count(2)
    page.keyboard.press("Escape")
    weather.answer("stopped")
    page.get_by_role("button", name="Try again").click()
    assert weather.asked(4)["messages"] == first
    weather.deltas({"content": "Wet!"})
    weather.end("stop")
    expect(page.locator(".answer-body").last).to_have_text("Wet!")


def test_a_call_can_be_asked_for_anew_and_the_question_edited(weather):
    page = weather.visit.page
    page.get_by_role("button", name="Regenerate").click()
    assert weather.asked(2)["messages"] == [QUESTION]
    assert page.locator(".call").count() == 0
    weather.call("get_time", "")
    weather.end("tool_calls")
    page.get_by_role("button", name="Edit the last message").click()
    assert page.input_value("#prompt") == "Weather?"
    assert page.locator(".turn").count() == 0
    page.keyboard.press("Enter")
    assert weather.asked(3)["messages"] == [QUESTION]
    page.click("#new-chat")
    weather.ask("Fresh")
    assert weather.asked(4)["messages"] == [{"role": "user", "content": "Fresh"}]
    weather.end("stop")


def test_tools_choice_and_schema_are_sent_kept_and_reset(stand_in):
    page = stand_in()
    form = page.visit.page
    form.click("nav [data-view=settings]")
    form.get_by_label("Tools (JSON)").fill(json.dumps(TOOLS))
    form.get_by_label("Tool choice").select_option("Required")
    form.get_by_label("Answer schema (JSON)").fill('{"type": "object"}')
    form.reload()
    page.ask("Weather?")
    sent = page.asked(1)
    assert sent["tools"] == TOOLS
    assert sent["tool_choice"] == "required"
    assert sent["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": {"type": "object"}},
    }
    page.end("stop")
    form.click("nav [data-view=settings]")
    form.get_by_role("button", name="Reset settings").click()
    page.ask("Again")
    assert not {"tools", "tool_choice", "response_format"} & page.asked(2).keys()
    page.end("stop")


def test_json_that_is_wrong_is_marked_when_it_is_left_and_stops_what_would_be_sent(weather):
    page = weather.visit.page
    page.get_by_label("Result of get_weather").fill("rain")
    page.click("nav [data-view=settings]")
    page.focus("#tools")
    page.keyboard.type('[{"type": 1,}]')
    expect(page.locator("#tools-error")).to_be_empty()
    page.keyboard.press("Tab")
    expect(page.locator("#tools-error")).to_have_text(
        "Tools: line 1, column 13: expected a name in double quotes, not }."
    )
    expect(page.locator("#tools")).to_have_attribute("aria-invalid", "true")
    page.click("nav [data-view=live]")
    for press in ("Send result", "Regenerate"):
        page.get_by_role("button", name=press).click()
        expect(page.locator("#tools")).to_be_focused()
        page.click("nav [data-view=live]")
    assert page.evaluate("window.asked.length") == 1
    assert page.get_by_label("Result of get_weather").input_value() == "rain"
    page.click("nav [data-view=settings]")
    page.fill("#tools", "[]")
    expect(page.locator("#tools-error")).to_be_empty()
    page.get_by_role("button", name="Send result").click()
    assert weather.asked(2)["messages"][-1] == result("get_weather", "rain")
    weather.end("stop")


def test_a_call_by_the_model_itself_and_its_result(visit):
    """With the real server and the bundled model, whose template shows no tools."""
    page = visit.page
    schema = {"type": "object", "properties": {"city": {"enum": ["Wien"]}}, "required": ["city"]}
    schema["additionalProperties"] = False  # the model is small and would write on until its limit cuts the call
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": schema}}
    page.click("nav [data-view=settings]")
    page.fill("#temperature", "0")
    page.get_by_label("Tools (JSON)").fill(json.dumps([tool]))
    page.get_by_label("Tool choice").select_option("Required")
    visit.ask("Weather?")
    call = page.locator(".call").first
    expect(call.locator(".code-head")).to_contain_text("Tool call get_weather")
    expect(page.locator("#status")).to_have_text("The model calls get_weather and waits for the result.")
    assert json.loads(call.locator("pre").evaluate("(e) => e.textContent"))["city"] == "Wien"
    page.click("nav [data-view=settings]")
    page.get_by_label("Tool choice").select_option("None")
    page.fill("#max_tokens", "16")
    results = page.get_by_label("Result of get_weather")
    for number in range(results.count()):
        results.nth(number).fill("Rain.")
    page.get_by_role("button", name="Send result").first.click()
    turn = visit.answer()
    assert "Rain." in turn.inner_text()
