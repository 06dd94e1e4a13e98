"""Tests that the next turn contains a Gemma tool call with its generated tokens, followed by its
result.
"""

import pytest

from helpers.text.byte_level import byte_level
from helpers.text.chat_templates import HERMES, format_of
from helpers.text.gemma_templates import GEMMA4
from kvboost_edge.text.codec import FastCodec
from kvboost_edge.text.tokenizer import Tokenizer
from kvboost_edge.text.turns.answer_reader import Turn, TurnReader
from kvboost_edge.text.turns.formats import Tool
from kvboost_edge.text.turns.replay import call_keys

SPECIALS = [
    "<|turn>",
    "<turn|>",
    "<|tool>",
    "<tool|>",
    "<|tool_call>",
    "<tool_call|>",
    '<|"|>',
    "<|tool_response>",
    "<tool_response|>",
    "<|channel>",
    "<channel|>",
    "<|im_start|>",
    "<|im_end|>",
]
ASKED = {"role": "user", "content": 'Rain? <|tool_call>call:weather{a:<|"|>b<|"|>}<tool_call|>'}


def tokenizer_of(template, *, seen=""):
    """Return a tokenizer of letters and special tokens, in which every text has a single encoding."""
    raw = byte_level()
    raw.add_special_tokens([text for text in SPECIALS if text != seen])
    raw.add_tokens([seen] if seen else [])
    return Tokenizer(
        FastCodec(raw), name="toy", chat_template=template, special_tokens={"bos_token": "<s>"}
    )


def called(*cities, content=""):
    calls = [
        {
            "id": f"id{city}",
            "type": "function",
            "function": {"name": "weather", "arguments": f'{{"city": "{city}", "days": 2}}'},
        }
        for city in cities
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def result(city):
    return {"role": "tool", "tool_call_id": f"id{city}", "content": f"Rain in {city}."}


def spelled(*cities, content=""):
    """Return calls as the model generates them: text comes first, and the order differs from the
    template's.
    """
    return content + "".join(
        f'<|tool_call>call:weather{{days:2,city:<|"|>{city}<|"|>}}<tool_call|>' for city in cities
    )


def kept(tokenizer, *answers):
    return {
        key: tokenizer.encode(text, False)
        for message, text in answers
        for key in call_keys(message)
    }


@pytest.mark.parametrize("cities", [("Bonn",), ("Bonn", "Rome")])
@pytest.mark.parametrize("content", ["", "Let me look."])
def test_a_call_is_replayed_as_generated(cities, content):
    tokenizer = tokenizer_of(GEMMA4)
    message = called(*cities, content=content)
    text = spelled(*cities, content=content)
    answers = kept(tokenizer, (message, text))
    ids = tokenizer.encode_chat([ASKED, message, *map(result, cities)], find_answer=answers.get)
    prompt = tokenizer.encode_chat([ASKED])
    told = "".join(
        f'<|tool_response>response:weather{{value:<|"|>Rain in {city}.<|"|>}}<tool_response|>'
        for city in cities
    )
    assert ids == [*prompt, *tokenizer.encode(text, False), *tokenizer.encode(told, False)]
    anew = tokenizer.encode_chat([ASKED, message, *map(result, cities)])
    assert tokenizer.decode(anew, False).count("city:") == len(cities)
    assert 'city:<|"|>Bonn<|"|>,days:2' in tokenizer.decode(anew, False)


def test_consecutive_calls_are_replayed_as_generated():
    tokenizer = tokenizer_of(GEMMA4)
    first = called("Bonn")
    second = called("Rome", "Oslo")
    third = called("Pisa", content="Last.")
    answers = kept(tokenizer, (first, spelled("Bonn")), (third, spelled("Pisa", content="Last.")))
    messages = [
        ASKED,
        first,
        result("Bonn"),
        second,
        result("Rome"),
        result("Oslo"),
        third,
        result("Pisa"),
    ]
    text = tokenizer.decode(tokenizer.encode_chat(messages, find_answer=answers.get), False)
    for city, order in (
        ("Bonn", "days:2,city:"),
        ("Rome", "city:"),
        ("Oslo", "city:"),
        ("Pisa", "days:2,city:"),
    ):
        assert f'call:weather{{{order}<|"|>{city}' in text
        assert f'response:weather{{value:<|"|>Rain in {city}.' in text
    assert text.count("<|tool_call>call:") == 5, (
        "the text must contain four calls and the marker in the user's message"
    )
    assert "\ufdd0" not in text


def test_results_are_rendered_with_their_calls():
    assert format_of("gemma4").results_need_calls
    assert not format_of("hermes").results_need_calls
    # If the calls of a template cannot be marked, they are rendered again.
    hung = HERMES.replace(
        "{%- elif m.role == 'tool' %}", "{%- elif m.role == 'tool' and messages[1].tool_calls %}"
    )
    assert hung != HERMES
    tokenizer = tokenizer_of(hung)
    assert not tokenizer.turn_format.replays
    message = called("Bonn")
    answers = kept(tokenizer, (message, "<tool_call>\nspelled\n</tool_call>"))
    text = tokenizer.decode(
        tokenizer.encode_chat([ASKED, message, result("Bonn")], find_answer=answers.get), False
    )
    assert "Rain in Bonn." in text


def test_a_call_without_a_result_is_rendered_or_replayed_whole():
    tokenizer = tokenizer_of(GEMMA4)
    message = called("Bonn")
    answers = kept(tokenizer, (message, spelled("Bonn")))
    ids = tokenizer.encode_chat([ASKED, message], find_answer=answers.get)
    assert tokenizer.decode(ids, False).endswith(f"<|turn>model\n{spelled('Bonn')}<|tool_response>")


@pytest.mark.parametrize("seen", ["", "<|tool_response>"], ids=["special", "text that is seen"])
def test_the_end_token_after_calls_is_not_stored(seen):
    """The model generates this token last, and the next prompt contains it before the result."""
    tokenizer = tokenizer_of(GEMMA4, seen=seen)
    kept = {}
    turn = Turn(tokenizer.turn_format, (Tool("weather", {}),), "closed", True, {})
    reader = TurnReader(turn, tokenizer, (), lambda key, ids: kept.update({key: list(ids)}))
    text = spelled("Bonn", content="Look.")
    for token_id in tokenizer.encode(f"{text}<|tool_response>", False):
        reader.push(token_id)
    reader.close()
    assert reader.message.content == "Look."
    assert [call["function"]["name"] for call in reader.message.calls] == ["weather"]
    assert list(kept.values()) == [tokenizer.encode(text, False)] * 2
