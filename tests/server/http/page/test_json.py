"""Tests of JSON typed by users and written by models: validation, error positions and formatting
match Python's json module.
"""

import json
import random
import string

import pytest

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
SEEDS = (
    '[{"a": [1, -2.5e+3, true], "b\\n": {}}, null, "\\u00e9\\\\"]',
    ' {"x":{"y":[[],{}]},"z":""}\n',
    "-0",
    '"a"',
)


def test_the_parser_accepts_what_json_parse_accepts(modules):
    rng = random.Random(5)
    alphabet = '{}[]:,"\\ue+-.01 \n\ttrfalsn\x01é'
    texts = [text[:at] for text in SEEDS for at in range(len(text) + 1)]
    for _ in range(3000):
        text = list(rng.choice(SEEDS))
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(text) + 1)
            text[at : at + rng.randint(0, 1)] = rng.choice(alphabet) * rng.randint(0, 1)
        texts.append("".join(text))
    body = """
      const reads = (text) => { try { JSON.parse(text); return true; } catch { return false; } };
      return argument.map((text) => [reads(text), it.scan(text).error === "", it.readJson(text).error === ""]);
    """
    judged = modules.module("jsontext", body, texts)
    assert [row for row in judged if len(set(row)) > 1] == []
    assert 200 < sum(row[0] for row in judged) < len(texts) - 200


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "line 1, column 1: the text ends, expected a value."),
        ("[1,\n 2,\n]", "line 3, column 1: expected a value, not ]."),
        ('{"a": 1,}', "line 1, column 9: expected a name in double quotes, not }."),
        ('{"a": 1\n "b": 2}', 'line 2, column 2: expected a comma or }, not ".'),
        ("[1 2]", "line 1, column 4: expected a comma or ], not 2."),
        ("[1}", "line 1, column 3: expected a comma or ], not }."),
        ('{"a" 1}', "line 1, column 6: expected a colon, not 1."),
        ("{a: 1}", "line 1, column 2: expected a name in double quotes or }, not a."),
        ("[True]", "line 1, column 2: expected a value or ], not True."),
        ("[", "line 1, column 2: the text ends, expected a value or ]."),
        (
            '["abc',
            "line 1, column 2: a string that is unterminated, or contains a line break or an "
            "invalid escape.",
        ),
        ("{} {}", "line 1, column 4: expected the end, not {."),
        ("🌍", "line 1, column 1: expected a value, not 🌍."),
    ],
)
def test_a_json_error_names_its_position_and_cause(modules, text, error):
    assert modules.module("jsontext", "return it.readJson(argument).error;", text) == error


def test_arguments_are_formatted_like_json_dumps(modules):
    rng = random.Random(9)

    def value(depth):
        kind = rng.randrange(7 if depth < 4 else 5)
        if kind > 4:
            items = [value(depth + 1) for _ in range(rng.randrange(4))]
            return (
                items
                if kind == 5
                else {f"{rng.choice(string.printable)}{at}é": it for at, it in enumerate(items)}
            )
        return [
            None,
            True,
            rng.randrange(10**20),
            -1.5,
            "".join(rng.choices('a"\\\n\x01é🌍{}[],:', k=6)),
        ][kind]

    values = [value(0) for _ in range(200)]
    shown = modules.module(
        "jsontext", "return argument.map(it.pretty);", [json.dumps(one) for one in values]
    )
    assert shown == [json.dumps(one, indent=2, ensure_ascii=False) for one in values]


def test_formatting_keeps_numbers_and_skips_invalid_json(modules):
    texts = ["[12345678901234567890,1.50E+3]", '{"a":1,"a":2}', '{"city": "Vie', ""]
    assert modules.module("jsontext", "return argument.map(it.pretty);", texts) == [
        "[\n  12345678901234567890,\n  1.50E+3\n]",
        '{\n  "a": 1,\n  "a": 2\n}',
        None,
        None,
    ]


def test_formatting_deeply_nested_json_has_bounded_size(modules):
    assert (
        modules.module(
            "jsontext", "return it.pretty(argument).length;", "[" * 100_000 + "]" * 100_000
        )
        < 20_000_000
    )


@pytest.mark.parametrize(
    ("raw", "values"),
    [
        ({"tools": " ", "schema": "\n", "tool_choice": "required"}, {}),
        ({"tools": "[]", "tool_choice": "none"}, {}),
        ({"tools": json.dumps([TOOL])}, {"tools": [TOOL]}),
        (
            {"tools": json.dumps([TOOL]), "tool_choice": "required"},
            {"tools": [TOOL], "tool_choice": "required"},
        ),
        (
            {"schema": '{"type": "object"}'},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": {"type": "object"}},
                }
            },
        ),
    ],
)
def test_valid_json_fields_are_sent(modules, raw, values):
    checked = modules.module("jsonfields", "return it.validateJson(argument);", raw)
    assert checked == {"values": values, "errors": {}}


ENTRY = 'is not {"type": "function", "function": {"name": …}}.'


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        (
            "tools",
            "[\n{]",
            "Tools: line 2, column 2: expected a name in double quotes or }, not ].",
        ),
        ("tools", json.dumps(TOOL), "Tools: must be a JSON array."),
        ("tools", json.dumps([TOOL, TOOL["function"]]), f"Tools: entry 2 {ENTRY}"),
        ("tools", '[{"type": "function", "function": {"name": ""}}]', f"Tools: entry 1 {ENTRY}"),
        ("tools", "[null]", f"Tools: entry 1 {ENTRY}"),
        ("schema", "[]", "JSON schema: must be a JSON object."),
        ("schema", "null", "JSON schema: must be a JSON object."),
        ("schema", '{"type"}', "JSON schema: line 1, column 8: expected a colon, not }."),
    ],
)
def test_invalid_json_fields_are_reported_and_not_sent(modules, name, text, error):
    checked = modules.module("jsonfields", "return it.validateJson(argument);", {name: text})
    assert checked == {"values": {}, "errors": {name: error}}
