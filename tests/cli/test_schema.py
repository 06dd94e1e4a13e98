"""Tests of `--json-schema FILE` and `--grammar FILE`: output that matches, and invalid files."""

import json
import os
import re

import jsonschema_rs
import pytest

from kvboost_edge.cli.option_parsing import sampling_options
from kvboost_edge.errors import ConfigError

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
GRAMMAR = 'root ::= item ("\\n" item)?\nitem ::= "- " [a-z] [a-z]'
SMALL = ("-o", "num_blocks=64")


@pytest.fixture
def schema_file(tmp_path):
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA), encoding="utf-8-sig")  # as some editors write it
    return str(path)


def test_generated_text_matches_the_schema(schema_file, answered):
    result = answered("generate", "The owner is", "--json-schema", schema_file, "-n", "80", *SMALL)
    assert result["finish_reason"] == "stop"
    jsonschema_rs.validate(SCHEMA, json.loads(result["output_text"]))


def test_each_chat_answer_matches_the_schema(schema_file, printed, typed):
    typed("Who?\nAnd who else?\n/quit\n")
    out = printed("chat", "--json-schema", schema_file, "-n", "80", "--no-pack-cache", *SMALL).out
    answers = []
    at = out.find("{")
    while at >= 0:
        value, end = json.JSONDecoder().raw_decode(out, at)
        answers.append(value)
        at = out.find("{", end)
    assert len(answers) == 2
    for answer in answers:
        jsonschema_rs.validate(SCHEMA, answer)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "is not JSON in UTF-8: Expecting value: line 1 column 1"),
        (b'{"type":\n "object",}', "line 2 column 11"),
        (b'{"type": "\xff"}', "can't decode byte 0xff"),
        (b'{"maximum": NaN}', "not JSON compliant"),
        (b'{"const": "\\ud800"}', "surrogates not allowed"),
        (b"[" * 100_000, "is not JSON in UTF-8"),
        (b'["type"]', "must hold an object, not list"),
        (b"true", "must hold an object, not bool"),
        (b"null", "must hold an object, not NoneType"),
    ],
)
@pytest.mark.parametrize(
    "command", [["generate", "Hi"], ["chat"], ["chat", "--url", "http://127.0.0.1:1"]]
)
def test_an_invalid_schema_file_is_a_one_line_error(content, named, command, tmp_path, refused):
    path = tmp_path / "wrong.json"
    path.write_bytes(content)
    line = refused(*command, "--json-schema", path)
    assert "wrong.json" in line
    assert named in line


def test_an_unreadable_schema_file_is_a_one_line_error(tmp_path, refused):
    for path, error in ((tmp_path / "none.json", 2), (tmp_path, 21)):
        line = refused("generate", "Hi", "--json-schema", path)
        assert path.name in line
        assert os.strerror(error) in line


def test_a_schema_conflicts_with_other_constraints(schema_file, refused):
    with pytest.raises(ConfigError, match="'json_schema' is given twice"):
        sampling_options(['json_schema={"type": "object"}'], schema_file)
    assert sampling_options(["top_k=4"], schema_file) == {"top_k": 4, "json_schema": SCHEMA}
    line = refused("generate", "Hi", "--json-schema", schema_file, "-s", "regex=[a-z]+", *SMALL)
    assert "json_schema=" in line
    assert "regex=" in line


@pytest.fixture
def grammar_file(tmp_path):
    path = tmp_path / "list.gbnf"
    path.write_text(GRAMMAR, encoding="utf-8-sig")
    return str(path)


def test_generated_text_matches_the_grammar(grammar_file, answered):
    result = answered("generate", "Fruits:", "--grammar", grammar_file, "-n", "40", *SMALL)
    assert result["finish_reason"] == "stop"
    assert re.fullmatch(r"- [a-z]{2}(\n- [a-z]{2})?", result["output_text"])


@pytest.mark.parametrize(
    "command", [["generate", "Hi"], ["chat"], ["chat", "--url", "http://127.0.0.1:1"]]
)
def test_an_invalid_grammar_file_is_a_one_line_error(command, tmp_path, refused):
    path = tmp_path / "wrong.gbnf"
    assert os.strerror(2) in refused(*command, "--grammar", path)
    path.write_bytes(b'root ::= "\xff"')
    line = refused(*command, "--grammar", path)
    assert "wrong.gbnf" in line
    assert "is not text in UTF-8: " in line
    assert "byte 0xff" in line


def test_a_grammar_conflicts_with_other_constraints(grammar_file, schema_file):
    with pytest.raises(ConfigError, match="'grammar' is given twice, by --grammar and --sampling"):
        sampling_options(["grammar=root ::= [a-z]"], grammar_file=grammar_file)
    both = sampling_options(["top_k=4"], schema_file, grammar_file=grammar_file)
    assert both == {"top_k": 4, "json_schema": SCHEMA, "grammar": GRAMMAR}
