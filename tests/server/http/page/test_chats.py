"""Tests of chats stored in the browser: reload, several chats, deletion, tabs, and failing storage."""

import json

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.slow

CHAT = "chat:"
UNSTORED = "The browser cannot store this chat. Export it before you close or reload the page."


def kept_turns(visit):
    """Return the turns of each stored chat."""
    chats = visit.evaluate(
        "(name) => Object.entries(localStorage).filter(([key]) => key.startsWith(name))", CHAT
    )
    return [json.loads(text)["turns"] for _, text in chats]


def kept(visit):
    """Return the questions of the stored chats by the first one, which is their title."""
    questions = [[turn["question"] for turn in turns] for turns in kept_turns(visit)]
    return {asked[0]: asked for asked in questions}


def options(visit):
    return visit.locator("#chats option").all_inner_texts()


def say(stand_in, text, answer, times):
    """Send a message, answer it, and return the messages of its request."""
    stand_in.ask(text)
    messages = stand_in.asked(times)["messages"]
    stand_in.deltas({"content": answer})
    stand_in.end("stop")
    return [message["content"] for message in messages]


def delete(visit):
    """Delete the shown chat and confirm it."""
    visit.click("#delete-chat")
    visit.click("#confirm-action")


def flags(visit):
    """Return the flag of each answer, or ""."""
    shown = "(all) => all.map((one) => one.querySelector('.flag')?.textContent ?? '')"
    return visit.locator(".answer").evaluate_all(shown)


def reload(visit):
    visit.reload()
    visit.locator("#chats option").first.wait_for(state="attached")


def test_a_chat_survives_a_reload(stand_in):
    chat = stand_in()
    chat.ask("First  question")
    chat.asked(1)
    chat.deltas({"reasoning_content": "Hm."}, {"content": "One.\n```py\nx = 1\n```\n"})
    chat.end("stop")
    shown = chat.locator(".turn .answer-body").inner_text()
    reload(chat)
    expect(chat.locator(".turn .question")).to_have_text("First  question")
    assert chat.locator(".turn .answer-body").inner_text() == shown
    expect(chat.locator(".turn .reasoning summary")).to_have_text("Reasoning")
    chat.expects("#empty").to_be_hidden()
    assert options(chat) == ["New chat", "First question"]
    assert say(chat, "Second", "Two", 1) == [
        "First  question",
        "One.\n```py\nx = 1\n```\n",
        "Second",
    ]
    reload(chat)
    assert chat.count(".turn") == 2
    chat.button("Regenerate").click()
    assert [one["content"] for one in chat.asked(1)["messages"]][-1] == "Second"


def test_an_unsent_message_survives_a_reload(stand_in):
    chat = stand_in()
    chat.fill("#prompt", "A draft\nof two lines")
    reload(chat)
    assert chat.input_value("#prompt") == "A draft\nof two lines"
    chat.press("#prompt", "Enter")
    chat.asked(1)
    reload(chat)
    assert chat.input_value("#prompt") == ""


@pytest.mark.full
def test_a_reload_cancels_an_edit_and_restores_the_draft(stand_in):
    chat = stand_in()
    say(chat, "Apples", "Red", 1)
    chat.fill("#prompt", "A draft")
    chat.button("Edit the last message").click()
    chat.fill("#prompt", "Pears")
    reload(chat)
    chat.expects("#editing").to_be_hidden()
    assert chat.input_value("#prompt") == "A draft"
    assert say(chat, "Plums", "Blue", 1) == ["Apples", "Red", "Plums"]


@pytest.mark.full
@pytest.mark.parametrize("key", ["isComposing: true", "keyCode: 229"])
def test_keys_of_an_input_method_neither_send_nor_stop(stand_in, key):
    chat = stand_in()
    press = (
        "(name) => document.getElementById('prompt').dispatchEvent(new KeyboardEvent('keydown', "
        f"{{key: name, {key}, bubbles: true, cancelable: true}}))"
    )
    chat.fill("#prompt", "日本")
    assert chat.evaluate(press, "Enter")  # not prevented
    assert chat.count(".turn") == 0
    chat.press("#prompt", "Enter")
    chat.asked(1)
    chat.evaluate(press, "Escape")
    chat.deltas({"content": "はい"})
    chat.end("stop")


@pytest.mark.full
def test_several_chats_are_stored_and_selected(stand_in):
    chat = stand_in()
    say(chat, "Apples", "Red", 1)
    chat.click("#new-chat")
    assert chat.input_value("#chats") == ""
    chat.expects("#delete-chat").to_be_hidden()
    assert say(chat, "Bananas", "Yellow", 2) == ["Bananas"]
    assert options(chat) == ["New chat", "Bananas", "Apples"]
    chat.select_option("#chats", label="Apples")
    expect(chat.locator(".question")).to_have_text("Apples")
    assert say(chat, "Pears", "Green", 3) == ["Apples", "Red", "Pears"]
    assert kept(chat) == {"Apples": ["Apples", "Pears"], "Bananas": ["Bananas"]}
    reload(chat)
    assert chat.locator(".question").all_inner_texts() == ["Apples", "Pears"]


@pytest.mark.full
def test_delete_removes_a_chat_from_storage_after_a_question(stand_in):
    chat = stand_in()
    say(chat, "Apples", "Red", 1)
    chat.click("#new-chat")
    say(chat, "Bananas", "Yellow", 2)
    chat.click("#delete-chat")
    chat.shows("#confirm-text", "This browser will no longer keep “Bananas”.")
    chat.keyboard.press("Enter")  # the focus is on "Cancel"
    chat.expects("#confirm").to_be_hidden()
    assert chat.count(".turn") == 1
    assert kept(chat).keys() == {"Apples", "Bananas"}
    delete(chat)
    assert chat.count(".turn") == 0
    assert chat.evaluate("document.activeElement.id") == "prompt"
    assert kept(chat).keys() == {"Apples"}
    reload(chat)
    assert chat.count(".turn") == 0
    assert options(chat) == ["New chat", "Apples"]


@pytest.mark.full
def test_an_answer_cut_by_a_reload_is_stored_as_stopped(stand_in):
    chat = stand_in()
    chat.begin("Tell me")
    chat.deltas({"content": "Once upon"})
    chat.until("document.querySelector('.answer-body').textContent === 'Once upon'")
    reload(chat)
    expect(chat.locator(".turn.stopped .answer-body")).to_have_text("Once upon")
    chat.expects("#send").to_be_visible()
    assert say(chat, "Go on", "a time", 1) == ["Tell me", "Once upon", "Go on"]


@pytest.mark.full
def test_a_page_that_is_hidden_stores_the_running_answer(stand_in):
    chat = stand_in()
    chat.begin("Tell me")
    chat.deltas({"content": "Once upon"})
    chat.until("document.querySelector('.answer-body').textContent === 'Once upon'")
    chat.evaluate(
        "Object.defineProperty(document, 'visibilityState', {configurable: true, value: 'hidden'});"
        "document.dispatchEvent(new Event('visibilitychange'));"
        "delete document.visibilityState;"
    )
    assert [step["answer"] for [turn] in kept_turns(chat) for step in turn["steps"]] == [
        "Once upon"
    ]
    chat.deltas({"content": " a time"})
    chat.end("stop")
    expect(chat.locator(".answer-body")).to_have_text("Once upon a time")


@pytest.mark.full
def test_an_incomplete_answer_is_marked_after_a_reload(stand_in):
    chat = stand_in()
    chat.begin("One")
    chat.deltas({"content": "Long"})
    chat.end("length")
    chat.ask("Two")
    chat.asked(2)
    chat.deltas({"content": "Half"})
    chat.fail("broken")
    chat.answer("failed")
    assert say(chat, "Three", "Whole", 3)[-1] == "Three"
    chat.ask("Four")
    chat.asked(4)
    chat.deltas({"content": "Once upon"})
    chat.until("document.querySelector('.turn:last-child .answer-body').textContent !== ''")
    chat.click("#stop")
    chat.answer("stopped")
    assert flags(chat) == ["stopped at max tokens", "", "", "stopped"]  # the second has an error
    reload(chat)
    assert flags(chat) == ["stopped at max tokens", "failed", "", "stopped"]


@pytest.mark.full
def test_switching_chats_stops_and_keeps_the_running_answer(stand_in):
    chat = stand_in()
    chat.begin("Tell me")
    chat.deltas({"content": "Once upon"})
    chat.until("document.querySelector('.answer-body').textContent === 'Once upon'")
    chat.click("#new-chat")
    assert chat.count(".turn") == 0
    chat.select_option("#chats", label="Tell me")
    expect(chat.locator(".turn.stopped .answer-body")).to_have_text("Once upon")


@pytest.mark.full
def test_a_late_answer_does_not_restore_a_deleted_chat(stand_in):
    chat = stand_in()
    chat.begin("Tell me")
    delete(chat)
    assert kept(chat) == {}
    say(chat, "Another", "Yes", 2)
    assert kept(chat).keys() == {"Another"}


@pytest.mark.full
def test_a_pending_tool_call_survives_a_reload(stand_in):
    chat = stand_in()
    chat.begin("Weather?")
    chat.call("weather", '{"city": "Oslo"}')
    chat.end("tool_calls")
    reload(chat)
    chat.locator(".result textarea").fill("Rain")
    chat.button("Send result").click()
    assert [one["role"] for one in chat.asked(1)["messages"]] == ["user", "assistant", "tool"]
    chat.deltas({"content": "Take an umbrella."})
    chat.end("stop")
    reload(chat)
    chat.shows(".call .result pre", "Rain")
    expect(chat.locator(".answer-body").last).to_have_text("Take an umbrella.")


@pytest.mark.full
def test_editing_loses_nothing_before_the_message_is_sent(stand_in):
    chat = stand_in()
    say(chat, "Apples", "Red", 1)
    chat.fill("#prompt", "A draft")
    cancels = (
        lambda: chat.keyboard.press("Escape"),
        lambda: chat.click("#cancel-edit"),
        lambda: chat.select_option("#chats", label="New chat"),
    )
    for cancel in cancels:
        chat.button("Edit the last message").click()
        assert chat.input_value("#prompt") == "Apples"
        assert chat.evaluate("document.activeElement.id") == "prompt"
        expect(chat.locator("#editing")).to_be_visible()
        chat.fill("#prompt", "Pears")
        cancel()
        expect(chat.locator("#editing")).to_be_hidden()
        assert chat.input_value("#prompt") == "A draft"
        assert kept(chat) == {"Apples": ["Apples"]}
    chat.select_option("#chats", label="Apples")
    chat.button("Edit the last message").click()
    assert say(chat, "Pears", "Green", 2) == ["Pears"]
    assert chat.input_value("#prompt") == "A draft"
    expect(chat.locator(".question")).to_have_text(["Pears"])
    assert kept(chat) == {"Pears": ["Pears"]}
    assert options(chat) == ["New chat", "Pears"]


@pytest.mark.full
@pytest.mark.parametrize("end", ["failed", "stopped", "other chat", "reload"])
def test_an_answer_is_kept_until_a_new_one_begins(stand_in, end):
    chat = stand_in()
    say(chat, "Apples", "Red", 1)
    chat.button("Regenerate").click()
    chat.asked(2)
    chat.expects(".answer-body").to_be_empty()
    if end == "failed":
        chat.fail("too slow")
        expect(chat.answer().locator(".error")).to_contain_text("too slow")
    elif end == "stopped":
        chat.click("#stop")
    elif end == "other chat":
        chat.click("#new-chat")
        chat.select_option("#chats", label="Apples")
    else:
        reload(chat)
    expect(chat.answer().locator(".answer-body")).to_have_text("Red")
    chat.button("Regenerate").click()
    chat.asked(1 if end == "reload" else 3)
    chat.deltas({"content": "Gre"})
    expect(chat.locator(".answer-body")).to_have_text("Gre")
    chat.click("#stop")
    expect(chat.answer("stopped").locator(".answer-body")).to_have_text("Gre")


@pytest.mark.full
def test_the_end_of_the_chat_stays_in_view_above_a_long_message(stand_in):
    chat = stand_in()
    say(chat, "Apples\n" * 9, "Red\n\n" * 40, 1)
    hidden = (
        "((log) => log.scrollHeight - log.scrollTop - log.clientHeight)"
        "(document.getElementById('log'))"
    )
    assert chat.evaluate(hidden) < 2
    chat.fill("#prompt", "Pears\n" * 9)
    assert chat.evaluate(hidden) < 2
    chat.fill("#prompt", "")
    chat.button("Edit the last message").click()
    assert chat.evaluate(hidden) < 2
    chat.locator("#log").evaluate("(log) => { log.scrollTop = 0; }")
    chat.until(f"{hidden} > 99")
    chat.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
    chat.fill("#prompt", "Pears")
    assert chat.evaluate("document.getElementById('log').scrollTop") == 0


@pytest.mark.full
def test_an_edit_continues_while_the_answer_is_regenerated(stand_in):
    chat = stand_in()
    say(chat, "Apples", "Red", 1)
    chat.button("Edit the last message").click()
    chat.fill("#prompt", "Pears")
    chat.button("Regenerate").click()
    chat.asked(2)
    chat.keyboard.press("Enter")  # waits for the answer
    chat.keyboard.press("Escape")
    chat.answer()
    assert say(chat, chat.input_value("#prompt"), "Green", 3) == ["Pears"]


@pytest.mark.full
def test_a_chat_of_another_tab_is_listed(stand_in):
    chat = stand_in()
    turns = [{"question": "From afar", "steps": []}]
    text = json.dumps({"title": "From afar", "changed": 1, "turns": turns})
    with chat.another_tab() as other:
        other.evaluate("(text) => localStorage.setItem('chat:x', text)", text)
        expect(chat.locator("#chats option")).to_have_text(["New chat", "From afar"])
    chat.select_option("#chats", label="From afar")
    expect(chat.locator(".turn.stopped .question")).to_have_text("From afar")


@pytest.mark.full
def test_two_tabs_continue_the_same_chat(stand_in):
    chat = stand_in()
    say(chat, "Apples", "Red", 1)
    with chat.another_tab() as other:
        other.select_option("#chats", label="Apples")
        chat.button("Edit the last message").click()
        chat.fill("#prompt", "Apples?")
        assert say(other, "Pears", "Green", 1) == ["Apples", "Red", "Pears"]
        expect(chat.locator(".answer-body")).to_have_text(["Red", "Green"])
        assert chat.input_value("#prompt") == "Apples?"
        expect(chat.locator("#editing")).to_be_hidden()
        assert say(chat, "Plums", "Blue", 2) == ["Apples", "Red", "Pears", "Green", "Plums"]
        expect(other.locator(".question")).to_have_text(["Apples", "Pears", "Plums"])
    assert kept(chat) == {"Apples": ["Apples", "Pears", "Plums"]}


@pytest.mark.full
@pytest.mark.parametrize(
    ("edited", "left"),
    [("Apples?", "Apples?\n\nA draft"), ("Apples", "A draft"), (" ", "A draft")],
)
def test_an_edit_that_another_tab_ends_is_announced_and_keeps_the_draft(stand_in, edited, left):
    chat = stand_in()
    say(chat, "Apples", "Red", 1)
    chat.fill("#prompt", "A draft")
    chat.button("Edit the last message").click()
    chat.fill("#prompt", edited)
    with chat.another_tab() as other:
        other.select_option("#chats", label="Apples")
        say(other, "Pears", "Green", 1)
        expect(chat.locator(".answer-body")).to_have_text(["Red", "Green"])
        chat.expects("#editing").to_be_hidden()
        chat.shows("#chat-warning", "Another tab changed this chat. Sending adds a new message.")
        assert chat.input_value("#prompt") == left


@pytest.mark.full
def test_a_chat_that_another_tab_deletes_stays_until_it_is_left(stand_in):
    chat = stand_in()
    say(chat, "Apples", "Red", 1)
    with chat.another_tab() as other:
        other.select_option("#chats", label="Apples")
        delete(other)
        expect(chat.locator("#chat-warning")).to_contain_text("no longer keeps this chat")
        assert kept(chat) == {}
    expect(chat.locator(".answer-body")).to_have_text("Red")
    assert say(chat, "Pears", "Green", 2) == ["Apples", "Red", "Pears"]
    assert kept(chat) == {"Apples": ["Apples", "Pears"]}
    expect(chat.locator("#chat-warning")).to_be_empty()


@pytest.mark.full
def test_a_running_answer_does_not_store_a_chat_that_another_tab_deleted(stand_in):
    chat = stand_in()
    chat.begin("Apples")
    with chat.another_tab() as other:
        other.select_option("#chats", label="Apples")
        delete(other)
        expect(chat.locator("#chat-warning")).to_contain_text("no longer keeps this chat")
    chat.deltas({"content": "Red"})
    chat.end("stop")
    assert kept(chat) == {}
    expect(chat.locator("#chat-warning")).to_contain_text("no longer keeps this chat")
    assert say(chat, "Pears", "Green", 2) == ["Apples", "Red", "Pears"]
    assert kept(chat) == {"Apples": ["Apples", "Pears"]}


@pytest.mark.full
def test_a_chat_that_another_tab_deletes_and_puts_back_is_not_stored_twice(stand_in):
    chat = stand_in()
    chat.begin("Apples")
    chat.evaluate(
        "localStorage.setItem('other', 'x'.repeat(5_000_000));"
        "addEventListener('storage', ({key}) => { window.changed = key; })"
    )
    with chat.another_tab() as other:
        other.click("#new-chat")
        say(other, "Too much", "x" * 500_000, 1)
        other.shows("#chat-warning", UNSTORED)
        other.evaluate("localStorage.setItem('last', '')")
        chat.until("window.changed === 'last'")
    expect(chat.locator("#chat-warning")).to_be_empty()
    chat.deltas({"content": "Red"})
    chat.end("stop")
    answers = [[step["answer"] for step in turn["steps"]] for [turn] in kept_turns(chat)]
    assert sorted(answers) == [[], ["Red"]]


@pytest.mark.full
def test_two_tabs_that_answer_in_the_same_chat_keep_both_answers(stand_in):
    chat = stand_in()
    say(chat, "Apples", "Red", 1)
    chat.ask("Plums")
    chat.asked(2)
    with chat.another_tab() as other:
        other.select_option("#chats", label="Apples")
        say(other, "Pears", "Green", 1)
        expect(chat.locator("#chats option")).to_have_text(["New chat", "Apples", "Apples"])
    chat.deltas({"content": "Blue"})
    chat.end("stop")
    assert options(chat) == ["New chat", "Apples", "Apples"]
    questions = [[turn["question"] for turn in turns] for turns in kept_turns(chat)]
    assert sorted(questions) == [["Apples", "Plums"], ["Apples", "Plums", "Pears"]]
    expect(chat.locator(".answer-body")).to_have_text(["Red", "Blue"])


@pytest.mark.full
def test_invalid_stored_chats_are_ignored(stand_in):
    chat = stand_in()
    step = {"reasoning": "", "answer": "One", "calls": [], "state": "done"}
    turns = [
        [],
        [{}],
        [{"question": 1, "steps": []}],
        [{"question": "x", "steps": [{}]}],
        [{"question": "x", "steps": [step | {"answer": None}]}],
        [{"question": "x", "steps": [step | {"calls": [{"id": "1"}]}]}],
    ]
    texts = ["", "[]", "{", "null", *(json.dumps({"turns": one}) for one in turns)]
    store = "(texts) => texts.forEach((text, at) => localStorage.setItem(`chat:${at}`, text))"
    chat.evaluate(store, texts)
    reload(chat)
    assert options(chat) == ["New chat"]
    chat.evaluate("sessionStorage.setItem('chat', '7')")
    reload(chat)
    assert say(chat, "Hello", "Hi", 1) == ["Hello"]


@pytest.mark.full
def test_full_storage_evicts_the_oldest_chats_if_that_helps_or_warns(stand_in):
    chat = stand_in()
    # Chromium stores 5 MiB of text per site; another key leaves space for two of the chats.
    chat.evaluate("localStorage.setItem('other', 'x'.repeat(4_000_000))")
    say(chat, "Oldest", "x" * 500_000, 1)
    chat.click("#new-chat")
    say(chat, "Older", "x" * 500_000, 2)
    chat.click("#new-chat")
    say(chat, "Newest", "x" * 500_000, 3)
    assert kept(chat).keys() == {"Older", "Newest"}
    chat.click("#new-chat")
    say(chat, "Too much", "x" * 1_500_000, 4)
    assert kept(chat).keys() == {"Older", "Newest", "Too much"}
    expect(chat.locator("#chat-warning")).to_be_visible()
    chat.shows("#chat-warning", UNSTORED)
    chat.click("#new-chat")
    expect(chat.locator("#chat-warning")).to_be_hidden()


def test_the_page_works_without_storage(stand_in):
    chat = stand_in()
    chat.evaluate(
        "window.storage = Object.getOwnPropertyDescriptor(window, 'localStorage');"
        "Object.defineProperty(window, 'localStorage', "
        "{configurable: true, get() { throw new Error('no'); }})"
    )
    say(chat, "Hello", "Hi", 1)
    assert options(chat) == ["New chat"]
    chat.shows("#chat-warning", UNSTORED)
    chat.evaluate("Object.defineProperty(window, 'localStorage', window.storage)")
