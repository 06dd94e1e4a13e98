"""Tests of exported chats: Markdown that a parser reads back, and JSON that the server accepts."""

import json
import re
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from kvboost_edge.server.api.schemas.chat import ChatRequest

pytestmark = pytest.mark.slow

BACKTICKS = "a ```` b\n```\nnot closed"
CODE = "Look:\n```py\nx = '```'\n"  # stopped inside a code block


@pytest.fixture
def page(stand_in):
    return stand_in()


def talk(page, tool):
    """Hold a chat with every possible element, including a call of `tool`."""
    page.settings(system="Be <b>brief</b>.", temperature="0.5", max_tokens="9")
    page.ask("What is\n# the weather?")
    page.asked(1)
    page.deltas({"reasoning_content": "Hm.\n\nA tool."}, {"content": "Let me see."})
    page.call(tool, '{"city":"Wien"}')
    page.end("tool_calls")
    page.locator(".result textarea").fill(BACKTICKS)
    page.button("Send result").click()
    page.asked(2)
    page.deltas({"content": "It rains."})
    page.end("stop")
    page.ask("Code!")
    page.asked(3)
    page.deltas({"content": CODE})
    page.until("document.querySelector('.turn:last-child code')?.textContent.includes('x =')")
    page.keyboard.press("Escape")
    page.answer("stopped")


def exported(page, kind):
    page.button("Export").click()
    with page.expect_download() as saved:
        page.get_by_role("dialog", name="Export this chat").get_by_role("button", name=kind).click()
    page.expects("#export").to_be_hidden()
    return saved.value.suggested_filename, Path(saved.value.path()).read_text(encoding="utf-8")


@pytest.mark.full
def test_an_empty_chat_cannot_be_exported(page):
    page.expects("#export-chat").to_be_hidden()


@pytest.mark.full
def test_exported_markdown_contains_the_whole_chat(page):
    talk(page, "get`weather")
    name, text = exported(page, "Markdown")
    assert name == "what-is-the-weather.md"
    tokens = MarkdownIt().parse(text)
    headings = [tokens[at + 1].content for at, one in enumerate(tokens) if one.tag == "h2"][::2]
    answers = ["Assistant (kvboost-edge/demo)"] * 2
    assert headings == ["System", "User", *answers, "User", answers[0]]
    blocks = [one.content for one in tokens if one.type == "fence"]
    assert blocks == ['{\n  "city": "Wien"\n}\n', f"{BACKTICKS}\n", "x = '```'\n"]
    assert re.search(r"^- Exported: \d{4}-\d\d-\d\dT[\d:.]+Z$", text, re.MULTILINE)
    assert "- Model: kvboost-edge/demo\n- Sampling: temperature 0.5, max_tokens 9\n" in text
    assert "## System\n\nBe <b>brief</b>.\n\n## User\n\nWhat is\n# the weather?\n" in text
    assert "> **Reasoning**\n>\n> Hm.\n>\n> A tool.\n\nLet me see.\n" in text
    assert "**Tool call:** `` get`weather ``" in text
    assert text.endswith("```py\nx = '```'\n```\n\n*This answer was stopped.*\n")


def test_exported_json_is_a_valid_chat_request(page):
    talk(page, "get_weather")
    sent = page.evaluate("window.asked.at(-1)")["messages"]
    name, text = exported(page, "JSON")
    chat = json.loads(text)
    assert name == "what-is-the-weather.json"
    assert (chat["format"], chat["version"]) == ("kvboost-edge-chat", 1)
    assert chat["title"] == "What is # the weather?"
    assert chat["models"] == ["kvboost-edge/demo"]
    assert chat["settings"] == {"temperature": 0.5, "max_tokens": 9}
    assert chat["messages"][:-1] == sent
    assert chat["messages"][-1] == {"role": "assistant", "content": CODE}
    ChatRequest.model_validate({"messages": chat["messages"], **chat["settings"]})


@pytest.mark.full
def test_a_chat_stored_by_an_older_page_is_exported(page):
    step = {"reasoning": "", "answer": "Yes", "calls": [], "state": "done", "finish": "stop"}
    turns = [{"question": "</script> ?", "steps": [step]}, {"question": "Lost", "steps": []}]
    chat = {"title": "</script> ?", "changed": 1, "turns": turns}
    page.evaluate("(text) => localStorage.setItem('chat:x', text)", json.dumps(chat))
    page.reload()
    page.shows("#model", "kvboost-edge/demo")
    page.select_option("#chats", label="</script> ?")
    name, text = exported(page, "Markdown")
    assert name == "script.md"
    assert "- Model: kvboost-edge/demo\n" in text
    assert "## User\n\n</script> ?\n\n## Assistant\n\nYes\n\n## User\n\nLost\n" in text
    asked = [one["content"] for one in json.loads(exported(page, "JSON")[1])["messages"]]
    assert asked == ["</script> ?", "Yes", "Lost"]


@pytest.mark.parametrize(
    ("question", "name"),
    [
        ("../../etc/passwd", "etc-passwd.md"),
        ("  ", "chat.md"),
        ("Grüße, Ελλάδα?", "grüße-ελλάδα.md"),
        ("con:aux|?*<>\u202e", "con-aux.md"),
    ],
)
def test_export_file_names_contain_only_letters_and_digits(modules, question, name):
    body = "return it.fileName([{question: argument, steps: []}], 'md');"
    assert modules.module("chatexport", body, question) == name
