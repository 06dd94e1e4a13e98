"""Tests of turns of several messages, as gpt-oss generates them: recorded turns, arbitrary cuts,
histories, grammars.
"""

import functools
import itertools
import json

import jsonschema_rs
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.text.chat_templates import CHANNELS as TEMPLATE
from helpers.text.chat_templates import TOOLS
from helpers.text.grammars import DEMO, Vocabulary
from helpers.text.turn_parts import parts_of
from kvboost_edge.text.chat_template import ChatTemplate
from kvboost_edge.text.codec import FastCodec
from kvboost_edge.text.tokenizer import Tokenizer
from kvboost_edge.text.turns.answer_reader import Turn, TurnReader
from kvboost_edge.text.turns.call_grammar import answer_grammar, calls_grammar
from kvboost_edge.text.turns.format_detection import turn_format
from kvboost_edge.text.turns.formats import CHANNELS, Tool, TurnFormat
from kvboost_edge.text.turns.harmony.history import one_call_each
from kvboost_edge.text.turns.parser import (
    CallArguments,
    CallStart,
    ContentDelta,
    Part,
    ReasoningDelta,
    TurnParser,
    merge_parts,
)

FORMAT = turn_format(ChatTemplate(TEMPLATE, model_name="m", variables={}).render)
MARKERS = (
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<|call|>",
    "<|return|>",
)  # the demo has <|end|>
THOUGHT = "<|channel|>analysis<|message|>We need weather.<|end|><|start|>assistant"
ARGUMENTS = '{"city": "Zürich 🙂 \\"x\\" {<|", "days": 3}'
CALL = (
    "<|channel|>commentary to=functions.get_weather "
    f"<|constrain|>json<|message|>{ARGUMENTS}<|call|>"
)
SPELT = '{"city": "a <|call|> b<|end|>", "days": [3]}'
WEATHER = [CallStart(0, "get_weather"), CallArguments(0, ARGUMENTS)]

# Recorded turns: text -> parts.
TURNS = {
    "an answer": (
        "<|channel|>final<|message|>2 + 2 = 4. <|return|>",
        [ContentDelta("2 + 2 = 4. ")],
    ),
    "an answer that is thought about": (
        "<|channel|>analysis<|message|>Sum: "
        "5050.<|end|><|start|>assistant<|channel|>final<|message|>**5050**",
        [ReasoningDelta("Sum: 5050."), ContentDelta("**5050**")],
    ),
    "two thoughts": (
        f"{THOUGHT}<|channel|>analysis<|message|>Second.<|end|><|start|>assistant<|channel|>final<|message|>Done.",
        [ReasoningDelta("We need weather.\n\nSecond."), ContentDelta("Done.")],
    ),
    "a call": (THOUGHT + CALL, [ReasoningDelta("We need weather."), *WEATHER]),
    "a call that names the tool in front": (
        f"{THOUGHT} to=functions.get_weather<|channel|>commentary "
        f"json<|message|>{ARGUMENTS}<|call|>",
        [ReasoningDelta("We need weather."), *WEATHER],
    ),
    "a call in the channel of thoughts": (
        "<|channel|>analysis to=functions.get_weather "
        f"<|constrain|>json<|message|>{ARGUMENTS}<|call|>",
        WEATHER,
    ),
    "a call of another kind of text": (
        f"<|channel|>commentary to=functions.get_weather code<|message|>{ARGUMENTS}<|call|>",
        WEATHER,
    ),
    "words in front of a call": (
        f"{THOUGHT}<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant{CALL}",
        [ReasoningDelta("We need weather."), ContentDelta("Let me look."), *WEATHER],
    ),
    "a call without arguments": (
        "<|channel|>commentary to=functions.ping <|constrain|>json<|message|> <|call|>",
        [CallStart(0, "ping"), CallArguments(0, "{}")],
    ),
    "two calls": (
        CALL.replace("<|call|>", "<|end|>")
        + "<|start|>assistant<|channel|>commentary to=functions.ping <|message|>{}",
        [*WEATHER, CallStart(1, "ping"), CallArguments(1, "{}")],
    ),
    "a call that is cut short": (
        '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Par',
        [CallStart(0, "get_weather"), CallArguments(0, '{"city": "Par')],
    ),
    "no header": ("Hello <|x|> there", [ContentDelta("Hello <|x|> there")]),
    "what is no header": ("to=day is fine", [ContentDelta("to=day is fine")]),
    "no channel": ("<|message|>Hi<|end|>", [ContentDelta("Hi")]),
    "a header that is cut short": ("<|channel|>commentary to=functions.get_wea", []),
    "nothing": ("", []),
    "an unknown channel": ("<|channel|>notes<|message|>Hm.<|end|>", [ContentDelta("Hm.")]),
    "a marker inside of arguments": (
        '<|channel|>commentary to=functions.get_weather json<|message|>{"city"<|message|>: "Hi"}<|call|>',
        [CallStart(0, "get_weather"), CallArguments(0, '{"city"<|message|>: "Hi"}')],
    ),
    "a marker spelt inside of a string": (
        f"<|channel|>commentary to=functions.get_weather json<|message|>{SPELT}<|call|>",
        [CallStart(0, "get_weather"), CallArguments(0, SPELT)],
    ),
    "an object that a marker cuts": (
        '<|channel|>commentary to=functions.get_weather json<|message|>{"city": "Rom"<|end|>'
        "<|start|>assistant<|channel|>final<|message|>So.",
        [CallStart(0, "get_weather"), CallArguments(0, '{"city": "Rom"'), ContentDelta("So.")],
    ),
    "arguments cut short in front of an escape": (
        '<|channel|>commentary to=functions.get_weather json<|message|>{"city": "a\\',
        [CallStart(0, "get_weather"), CallArguments(0, '{"city": "a\\')],
    ),
    "words after an object": (
        "<|channel|>commentary to=functions.ping json<|message|>{} "
        f"so<|end|><|start|>assistant{CALL}",
        [
            CallStart(0, "ping"),
            CallArguments(0, "{}"),
            CallStart(1, "get_weather"),
            CallArguments(1, ARGUMENTS),
        ],
    ),
    "a call of no tool": (
        '<|channel|>commentary to=functions.hack <|constrain|>json<|message|>{"x": 1}<|call|>',
        [
            ContentDelta(
                '<|channel|>commentary to=functions.hack <|constrain|>json<|message|>{"x": 1}'
            )
        ],
    ),
    "arguments that are no object": (
        "<|channel|>commentary to=functions.ping <|constrain|>json<|message|>[1]<|call|>",
        [ContentDelta("<|channel|>commentary to=functions.ping <|constrain|>json<|message|>[1]")],
    ),
    "text after an end": (
        "<|channel|>final<|message|>One.<|end|> Two.",
        [ContentDelta("One.\n\n Two.")],
    ),
    "ends in a row": ("<|channel|>final<|message|>One.<|end|><|return|>", [ContentDelta("One.")]),
    "the beginning of an end": ("<|channel|>final<|message|>a <|en", [ContentDelta("a <|en")]),
}


read = functools.partial(parts_of, FORMAT, reasoning="possible")


def test_the_format_is_read_from_the_template():
    assert FORMAT.channels == CHANNELS
    assert FORMAT.calls is not None
    assert (FORMAT.calls.kind, FORMAT.calls.arguments_as_text) == ("channels", False)
    assert FORMAT.shows_tools
    assert not FORMAT.replays
    text = TEMPLATE.replace("call.arguments | tojson", "call.arguments")
    as_text = turn_format(ChatTemplate(text, model_name="m", variables={}).render)
    assert as_text.calls is not None
    assert as_text.calls.arguments_as_text


def test_unknown_call_formats_are_not_recognized():
    text = TEMPLATE.replace("to=functions.", "for:")
    found = turn_format(ChatTemplate(text, model_name="m", variables={}).render)
    assert found.channels is not None
    assert found.calls is None


@pytest.mark.parametrize("name", TURNS)
def test_recorded_turns_parse_at_any_split(name):
    text, wanted = TURNS[name]
    assert read(text) == wanted
    assert read(*text) == wanted, "the result must not change character by character"
    for at in range(1, len(text)):
        assert read(text[:at], text[at:]) == wanted, at


@settings(deadline=None)
@given(st.sampled_from(sorted(TURNS)), st.lists(st.integers(0, 200), max_size=6))
def test_recorded_turns_parse_in_any_pieces(name, cuts):
    text, wanted = TURNS[name]
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    assert read(*(text[a:b] for a, b in itertools.pairwise(places))) == wanted


@pytest.mark.parametrize("name", TURNS)
def test_emitted_parts_are_never_retracted(name):
    """At any time the emitted parts are a prefix of the parts of the whole text."""
    text, wanted = TURNS[name]
    parser = TurnParser(FORMAT, TOOLS, reasoning="possible", calls=True)
    shown = list[Part]()
    for letter in text:
        shown = merge_parts([*shown, *parser.push(letter)])
        assert len(shown) <= len(wanted)
        assert shown[:-1] == wanted[: len(shown[:-1])]
    assert merge_parts([*shown, *parser.close()]) == wanted


@pytest.mark.parametrize(
    ("state", "text", "wanted"),
    [
        (
            "opened",
            "Hm.<|end|><|start|>assistant<|channel|>final<|message|>So.",
            [ReasoningDelta("Hm."), ContentDelta("So.")],
        ),
        ("closed", " and so on<|return|>", [ContentDelta(" and so on")]),
        ("opened", f"Hm.<|end|><|start|>assistant{CALL}", [ReasoningDelta("Hm."), *WEATHER]),
    ],
)
def test_prompts_that_end_within_a_message(state, text, wanted):
    assert read(text, reasoning=state) == read(*text, reasoning=state) == wanted


def test_the_longest_tool_name_is_parsed():
    name = "n" * 128
    text = (
        f"{THOUGHT} to=functions.{name}<|channel|>commentary "
        "<|constrain|>json<|message|>{}<|call|>"
    )
    assert read(text, tools=[Tool(name, {})])[1:] == [CallStart(0, name), CallArguments(0, "{}")]


def test_calls_are_text_if_not_requested():
    (part,) = read(CALL, calls=False)
    assert part == ContentDelta(CALL.removesuffix("<|call|>"))


@pytest.mark.parametrize(
    ("prompt", "state"),
    [
        ("<|end|><|start|>assistant", "possible"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "opened"),
        ("<|start|>assistant<|channel|>final<|message|>", "closed"),
    ],
)
def test_the_reasoning_state_follows_from_the_prompt(prompt, state):
    assert FORMAT.reasoning_after(prompt) == state


# -- histories --


def _call(number, name, arguments="{}"):
    return {
        "id": f"id{number}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


@functools.cache
def _tokenizer():
    raw = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    raw.add_special_tokens([tokenizers.AddedToken(text, normalized=False) for text in MARKERS])
    return Tokenizer(FastCodec(raw), name="m", special_tokens={}, chat_template=TEMPLATE)


def test_a_history_is_converted_for_the_template():
    """Reasoning and text before a call become reasoning. Each call of a message becomes a message,
    followed by its result.
    """
    messages = [
        {"role": "user", "content": "Look."},
        {
            "role": "assistant",
            "content": "First this.",
            "reasoning_content": "Hm.",
            "tool_calls": [_call(1, "get_weather", '{"city": "Rom"}'), _call(2, "ping")],
        },
        {"role": "tool", "tool_call_id": "id2", "content": "pong"},
        {"role": "tool", "tool_call_id": "id1", "content": "sun"},
        {"role": "assistant", "content": None, "tool_calls": [_call(3, "ping")]},
        {"role": "tool", "tool_call_id": "other", "content": "again"},
        {"role": "assistant", "content": "All well.", "reasoning_content": "Done."},
        {"role": "user", "content": "Thanks."},
    ]
    assert _tokenizer().apply_chat_template(messages) == (
        "<|start|>user<|message|>Look.<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>Hm.\n\nFirst this.<|end|>"
        '<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Rom"}<|call|>'
        '<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>"sun"<|end|>'
        "<|start|>assistant to=functions.ping<|channel|>commentary json<|message|>{}<|call|>"
        '<|start|>functions.ping to=assistant<|channel|>commentary<|message|>"pong"<|end|>'
        "<|start|>assistant to=functions.ping<|channel|>commentary json<|message|>{}<|call|>"
        '<|start|>functions.ping to=assistant<|channel|>commentary<|message|>"again"<|end|>'
        "<|start|>assistant<|channel|>final<|message|>All well.<|end|>"
        "<|start|>user<|message|>Thanks.<|end|><|start|>assistant"
    )


def test_results_without_ids_keep_their_order():
    calls = [{"function": {"name": name, "arguments": "{}"}} for name in ("a", "b")]
    messages = [
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
    ]
    found = one_call_each(messages)
    assert [message.get("content") for message in found] == ["", "", "1", "2"]
    assert [len(message["tool_calls"]) for message in found[:2]] == [1, 1]


def test_messages_without_calls_are_unchanged():
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y", "reasoning_content": "z"},
    ]
    assert one_call_each(messages) == messages


# -- an answer token by token --


def _read(text, kept):
    tokenizer = _tokenizer()
    reader = TurnReader(
        Turn(FORMAT, tuple(TOOLS), "possible", True, {}), tokenizer, (), kept.__setitem__
    )
    for token_id in tokenizer.encode(text, False):
        reader.push(token_id)
    reader.close()
    return reader


def test_answers_are_stored_as_clients_return_them():
    kept = {}
    text, _ = TURNS["an answer that is thought about"]
    reader = _read(text, kept)
    assert (reader.message.content, reader.reason("stop")) == ("**5050**", "stop")
    assert kept == {"**5050**": _tokenizer().encode("**5050**", False)}
    thought = text[: text.index("<|start|>")]
    assert reader.num_reasoning_tokens == len(_tokenizer().encode(thought, False))
    history = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "**5050**"}]
    ids = _tokenizer().encode_chat(history, find_answer=kept.get)
    assert ids == _tokenizer().encode_chat(history)


def test_a_call_ends_a_turn():
    reader = _read(THOUGHT + CALL, {})
    assert reader.reason("stop") == "tool_calls"
    (call,) = reader.message.as_sent()["tool_calls"]
    assert json.loads(call["function"]["arguments"])["days"] == 3


# -- grammars --


@functools.cache
def words(special):
    """Return a vocabulary with the markers as special tokens or as text; `<|end|>` does not end a
    turn here.
    """
    return Vocabulary(MARKERS if special else (), end="<eot>")


def _grammar(special, choice, state="possible", **more):
    return calls_grammar(
        FORMAT,
        TOOLS,
        choice=choice,
        parallel=True,
        reasoning=state,
        special_id=words(special).codec.marker_id,
        **more,
    )


PLAIN_CALL = CALL.replace(ARGUMENTS, '{"city": "Rom", "days": 3}')
FINAL = "<|channel|>final<|message|>It rains."
BOTH = pytest.mark.parametrize("special", [True, False], ids=["as special tokens", "as text"])


@BOTH
@pytest.mark.parametrize(
    "front", ["", THOUGHT, THOUGHT * 2, THOUGHT.replace("analysis", "commentary")]
)
def test_the_grammar_accepts_valid_turns(special, front):
    taken = words(special).takes
    for choice, calls, answers in (
        ("auto", True, True),
        ("required", True, False),
        ("none", False, True),
    ):
        grammar = _grammar(special, choice)
        assert taken(grammar, front + PLAIN_CALL) is calls
        assert taken(grammar, front + PLAIN_CALL.removesuffix("<|call|>")) is calls
        assert taken(grammar, front + FINAL) is answers
        named = ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Rom"}'
        assert taken(grammar, front + named) is calls


@BOTH
@pytest.mark.parametrize(
    "wrong",
    [
        PLAIN_CALL.replace("get_weather", "hack"),
        PLAIN_CALL.replace('"days": 3', '"days": 300'),
        PLAIN_CALL.replace('"city": "Rom", ', ""),
        "It rains.",
        FINAL + "<|end|><|start|>assistant" + PLAIN_CALL,
        THOUGHT.removesuffix("<|start|>assistant") + FINAL,
    ],
)
def test_the_grammar_rejects_invalid_turns(special, wrong):
    for choice in ("auto", "required"):
        assert not words(special).takes(_grammar(special, choice), wrong)


@BOTH
def test_the_grammar_depends_on_the_prompts_end(special):
    taken = words(special).takes
    thought = THOUGHT.removeprefix("<|channel|>analysis<|message|>")
    assert taken(_grammar(special, "required", "opened"), thought + PLAIN_CALL)
    assert taken(_grammar(special, "auto", "opened"), thought + FINAL)
    assert taken(_grammar(special, "auto", "closed"), " and so on")
    assert not taken(
        _grammar(special, "auto", "closed"), f"So.<|end|><|start|>assistant{PLAIN_CALL}"
    )
    assert taken(
        _grammar(special, "required", "closed"), f"So.<|end|><|start|>assistant{PLAIN_CALL}"
    )


@BOTH
def test_a_json_answer_is_in_the_final_channel(special):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    lone = answer_grammar(
        FORMAT, schema, reasoning="possible", special_id=words(special).codec.marker_id
    )
    beside = _grammar(special, "auto", answer=schema)
    for grammar in (lone, beside):
        for head in (
            "<|channel|>final<|message|>",
            "<|channel|>final <|constrain|>json<|message|>",
        ):
            assert words(special).takes(grammar, THOUGHT + head + '{"a": 1}')
            assert not words(special).takes(grammar, THOUGHT + head + '{"a": "x"}')
    assert words(special).takes(beside, PLAIN_CALL)
    assert not words(special).takes(lone, PLAIN_CALL)


def test_accepted_calls_match_their_schema():
    _, start, arguments = read(THOUGHT + PLAIN_CALL)
    assert isinstance(start, CallStart)
    assert isinstance(arguments, CallArguments)
    jsonschema_rs.validator_for(TOOLS[0].parameters).validate(json.loads(arguments.text))
    assert isinstance(FORMAT, TurnFormat)
