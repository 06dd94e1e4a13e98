"""Tests of the turn parser: the output of a family's template is parsed back unchanged, however the
text is cut.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import LONG
from helpers.text.chat_templates import CALLING, TOOLS, format_of, written
from helpers.text.turn_parts import calls_of, parts_of
from kvboost_edge.errors import RequestError
from kvboost_edge.text.turns.formats import Tool, TurnFormat
from kvboost_edge.text.turns.parser import (
    CallArguments,
    CallStart,
    ContentDelta,
    ReasoningDelta,
    TurnParser,
    merge_parts,
)

ODD = 'Zürich 🙂 "quoted" \\ {[ </x> \n\t<tool'
CALLS = [
    [("get_weather", {"city": "Paris", "days": 3, "unit": "c"})],
    [("get", {"at": {"x": -4}})],
    [("ping", {})],
    [("get_weather", {"city": ODD})],
    [("get_weather", {"city": "Rome"}), ("ping", {}), ("get", {"at": {"x": 1}})],
]


@pytest.mark.parametrize("name", CALLING)
def test_template_output_round_trips(name):
    for calls in CALLS:
        if len(calls) > 1 and name == "llama3":
            continue
        text = written(name, calls)
        assert calls_of(parts_of(name, text)) == calls
        assert parts_of(name, *text) == parts_of(name, text), (
            "the result must not change character by character"
        )


@pytest.mark.parametrize("name", [name for name in CALLING if name != "llama3"])
def test_content_before_calls_drops_trailing_white_space(name):
    for space in ("", "\n", "\n\n  "):
        found = parts_of(name, f" Let me look, 1 < 2 [x].{space}{written(name, CALLS[0])}\n")
        assert found[0] == ContentDelta(" Let me look, 1 < 2 [x].")
        assert calls_of(found[1:]) == CALLS[0]


@pytest.mark.parametrize("name", CALLING)
@pytest.mark.parametrize(
    "text",
    [
        "",
        "Hello",
        "  a\n",
        "<tool_call",
        "a <tool_call> b",
        "[TOOL_CALLS] x",
        '{"name": "Bob"}',
        '{"a": [1]}',
        "<｜tool▁ca",
    ],
)
def test_text_that_resembles_a_call_is_content(name, text):
    assert parts_of(name, text) == ([ContentDelta(text)] if text else [])


@pytest.mark.parametrize("name", CALLING)
def test_a_call_of_an_unknown_tool_is_content(name):
    text = written(name, CALLS[0])
    assert parts_of(name, text, tools=TOOLS[2:]) == [ContentDelta(text)]


@pytest.mark.parametrize("name", CALLING)
def test_a_truncated_call_keeps_its_partial_arguments(name):
    text = written(name, [("get_weather", {"city": "Paris", "days": 3})])
    whole = parts_of(name, text)[1]
    assert isinstance(whole, CallArguments)
    at = text.index("Par") + 3
    name_part, arguments = parts_of(name, text[:at])
    assert name_part == CallStart(0, "get_weather")
    assert isinstance(arguments, CallArguments)
    assert whole.text.startswith(arguments.text)
    assert arguments.text.endswith("Par")


@pytest.mark.parametrize(
    ("state", "text", "wanted"),
    [
        (
            "possible",
            "<think>\nHm.\n</think>\n\nHello",
            [ReasoningDelta("Hm."), ContentDelta("Hello")],
        ),
        ("possible", "\n<think></think>\nHello", [ContentDelta("Hello")]),
        ("possible", "Hello <think>", [ContentDelta("Hello <think>")]),
        ("possible", "<thin", [ContentDelta("<thin")]),
        (
            "opened",
            "Hm <b>.\n</think>\nHello\n",
            [ReasoningDelta("Hm <b>."), ContentDelta("Hello\n")],
        ),
        ("opened", "<think>\nHm.</think>", [ReasoningDelta("Hm.")]),
        ("opened", "\nHm </thi", [ReasoningDelta("Hm </thi")]),
        ("closed", "<think>a</think>b", [ContentDelta("<think>a</think>b")]),
        (
            "opened",
            "a<tool_call>\n{}</think>b",
            [ReasoningDelta("a<tool_call>\n{}"), ContentDelta("b")],
        ),
    ],
)
def test_reasoning_is_separated_from_the_answer(state, text, wanted):
    assert parts_of("qwen3", text, reasoning=state) == wanted
    assert parts_of("qwen3", *text, reasoning=state) == wanted


def test_calls_follow_reasoning():
    text = f"<think>\nHm.\n</think>\n\n{written('qwen3', CALLS[4])}"
    first, *others = parts_of("qwen3", text, reasoning="possible")
    assert first == ReasoningDelta("Hm.")
    assert calls_of(others) == CALLS[4]


def test_members_may_come_in_any_order():
    text = '<tool_call>{"id": [{"x": "}"}], "arguments": {"at": {"x": 1}}, "name": "get"}</tool_call> So.'
    found = parts_of("hermes", text)
    assert calls_of(found[:2]) == [("get", {"at": {"x": 1}})]
    assert found[2:] == [ContentDelta("So.")]


def test_a_tool_name_that_prefixes_another_is_distinguished():
    tools = [Tool("get", {}), Tool("get_weather", {})]
    for name in ("get", "get_weather"):
        text = written("mistral-v11", [(name, {"city": "x"})])
        assert calls_of(parts_of("mistral-v11", *text, tools=tools)) == [(name, {"city": "x"})]


@pytest.mark.parametrize(
    ("schema", "text", "wanted"),
    [
        ({"type": "string"}, "12", "12"),
        ({"type": "string"}, "\n a\n", "\n a\n"),
        ({"type": "integer"}, " 12 ", 12),
        ({"type": "boolean"}, "true", True),
        ({"type": "array"}, '["a", {"b": null}]', ["a", {"b": None}]),
        ({"type": "integer"}, "many", "many"),
        ({"type": ["string", "null"]}, "null", None),
        ({"enum": ["a", "b"]}, " a ", "a"),
        ({}, "12", 12),
        ({}, "NaN", "NaN"),
        ({}, "twelve", "twelve"),
        ({"$ref": "#/$defs/s"}, "12", "12"),
        ({"$ref": "#/$defs/none"}, "12", 12),
    ],
)
def test_tagged_values_become_json_by_the_schema(schema, text, wanted):
    tool = Tool(
        "f", {"type": "object", "properties": {"a": schema}, "$defs": {"s": {"type": "string"}}}
    )
    for name, call in (
        ("glm", f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"),
        (
            "qwen3-coder",
            f"<tool_call><function=f><parameter=a>\n{text}\n</parameter></function></tool_call>",
        ),
    ):
        assert calls_of(parts_of(name, call, tools=[tool])) == [("f", {"a": wanted})]


def test_calls_are_content_if_not_requested():
    parser = TurnParser(format_of("hermes"), TOOLS, reasoning="closed", calls=False)
    text = written("hermes", CALLS[0])
    assert merge_parts([*parser.push(text), *parser.close()]) == [ContentDelta(text)]
    with pytest.raises(
        RequestError, match="tool-call format of the model's chat template is not supported"
    ):
        TurnParser(TurnFormat(None, None, True, True), TOOLS, reasoning="closed", calls=True)


def test_content_is_streamed():
    parser = TurnParser(format_of("hermes"), TOOLS, reasoning="closed", calls=True)
    assert parser.push("Hello wor") == [ContentDelta("Hello wor")]
    assert parser.push("ld <to") == [ContentDelta("ld")]
    assert parser.push("ol> ") == [ContentDelta(" <tool>")]
    assert parser.push('x <tool_call>{"name": "get_weather", "arg') == [ContentDelta(" x")]
    assert parser.push('uments": {"ci') == [CallStart(0, "get_weather"), CallArguments(0, '{"ci')]
    assert parser.push('ty": "}') == [CallArguments(0, 'ty": "}')]


PIECES = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "<think>",
            "</think>",
            "[TOOL_CALLS]",
            "\n",
            " ",
            '"',
            "\\",
            "}",
            "{",
            ", ",
        ),
        *(
            "🙂",
            "abc",
            "<",
            "]",
            "get",
            "get_weather",
            "ping",
            "<function=",
            "</parameter>",
            "</arg_value>",
        ),
    ]
)


@st.composite
def turns(draw):
    """Strategy of a family, a state of reasoning, and a damaged text of calls in pieces."""
    name = draw(st.sampled_from(CALLING))
    calls = draw(st.sampled_from(CALLS[:4] if name == "llama3" else CALLS))
    text = written(name, calls)
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(PIECES) + text[at + draw(st.integers(0, 3)) :]
    text = "".join(draw(st.lists(PIECES, max_size=4))) + text
    cuts = sorted(draw(st.sets(st.integers(0, len(text)), max_size=12)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    return name, draw(st.sampled_from(["opened", "possible", "closed"])), pieces


@settings(max_examples=600 if LONG else 200, deadline=None)
@given(turns())
def test_any_split_gives_the_same_parts(turn):
    name, state, pieces = turn
    assert parts_of(name, *pieces, reasoning=state) == parts_of(
        name, "".join(pieces), reasoning=state
    )


LFM2_VALUES = [
    ({"type": "string"}, "'it's one'", "it's one"),
    ({"type": "string"}, '"a \\"b\\" c"', 'a "b" c'),
    ({"type": "string"}, r"'a\n\t\'b\\ \d \u00fc\x41'", "a\n\t'b\\ \\d üA"),
    ({"type": "string"}, "12", "12"),
    ({"type": "string"}, "True", "true"),
    ({"type": "integer"}, " 12 ", 12),
    ({"type": "number"}, "-1.5e3", -1500.0),
    ({"type": "boolean"}, "True", True),
    ({"type": "boolean"}, "false", False),
    ({}, "None", None),
    ({}, "null", None),
    ({}, "word", "word"),
    ({}, "NaN", "NaN"),
    ({}, "['a', \"b\", (1, 2.5), [],]", ["a", "b", [1, 2.5], []]),
    ({}, "{'a': {\"b\": [True, None]}, 'c': 'it's'}", {"a": {"b": [True, None]}, "c": "it's"}),
    ({}, "''", ""),
]


@pytest.mark.parametrize(("schema", "text", "wanted"), LFM2_VALUES)
def test_python_values_become_json(schema, text, wanted):
    tool = Tool("f", {"type": "object", "properties": {"a": schema, "b": {}}})
    for call, arguments in (
        (f"f(a={text})", {"a": wanted}),
        (f"f( b = 1 , a = {text} )", {"b": 1, "a": wanted}),
        (f"f(a={text}, b='x',)", {"a": wanted, "b": "x"}),
    ):
        whole = f"<|tool_call_start|>[{call}]<|tool_call_end|>"
        assert calls_of(parts_of("lfm2", whole, tools=[tool])) == [("f", arguments)]
        assert parts_of("lfm2", *whole, tools=[tool]) == parts_of("lfm2", whole, tools=[tool])


@pytest.mark.parametrize(
    "call",
    [
        "f(1)",
        "f(a)",
        "f(a=)",
        "f(=1)",
        "f",
        "f a=1",
        "g(a=1)",
        "f(a={1: 2})",
        "f(a=" + 40 * "[" + 40 * "]" + ")",
    ],
)
def test_invalid_python_calls_are_content(call):
    text = f"<|tool_call_start|>[{call}]<|tool_call_end|>"
    assert parts_of("lfm2", text, tools=[Tool("f", {})]) == [ContentDelta(text)]


def test_a_call_ends_at_its_last_valid_argument():
    found = parts_of(
        "lfm2", "<|tool_call_start|>[f(a='x', 7)]<|tool_call_end|>", tools=[Tool("f", {})]
    )
    assert found == [
        CallStart(0, "f"),
        CallArguments(0, '{"a": "x"}'),
        ContentDelta("7)]<|tool_call_end|>"),
    ]


def test_strings_of_python_calls_are_streamed():
    parser = TurnParser(format_of("lfm2"), TOOLS, reasoning="closed", calls=True)
    assert parser.push("So: <|tool_call_") == [ContentDelta("So:")]
    assert parser.push("start|>[get_weather(ci") == []
    assert parser.push("ty='L'Aq") == [
        CallStart(0, "get_weather"),
        CallArguments(0, '{"city": "L\'Aq'),
    ]
    assert parser.push("uila'") == [CallArguments(0, "uila")]
    assert parser.push(", da") == [CallArguments(0, '"')]
    assert parser.push("ys=3), ping()") == [
        CallArguments(0, ', "days": 3}'),
        CallStart(1, "ping"),
        CallArguments(1, "{}"),
    ]
    assert parser.push("]<|tool_call_end|>\nDone.") == [ContentDelta("Done.")]
