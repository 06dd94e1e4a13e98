"""Tests of the questions of `make quality`: right answers match their schemas, and the judge
distinguishes right from wrong.
"""

import json

import jsonschema_rs
import pytest

from benchmarks.quality.answers import QUESTIONS, is_sensible, is_valid


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.text[:20])
def test_a_correct_answer_is_valid_and_sensible(question):
    jsonschema_rs.meta.validate(question.schema)
    assert is_sensible(question, json.dumps(question.right))
    assert is_sensible(
        question, json.dumps(question.right, indent=1).lower().replace("\n", "\n ")
    ) or any(isinstance(value, str) and value != value.lower() for value in question.properties)


def test_a_wrong_answer_is_valid_but_not_sensible():
    question = next(each for each in QUESTIONS if each.kind == "extract")
    wrong = json.dumps({**question.right, "name": "Nobody"})
    assert is_valid(question, wrong)
    assert not is_sensible(question, wrong)


@pytest.mark.parametrize(
    "text", ["", "{", "Sure! {}", "{}", '{"name": 1, "age": 2}', '["Anna", 34]']
)
def test_a_schema_violation_is_invalid(text):
    question = next(each for each in QUESTIONS if each.kind == "extract")
    assert not is_valid(question, text)
    assert not is_sensible(question, text)


def test_twenty_questions_of_two_kinds():
    assert len(QUESTIONS) == 20
    assert {each.kind for each in QUESTIONS} == {"classify", "extract"}
