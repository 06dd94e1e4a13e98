"""Tests of the questions about the standard library: sampling, judging, and statistics."""

import ast
import textwrap

import pytest

from benchmarks.quality.source_questions import (
    PER_CONTEXT,
    _questions,
    contexts,
    mcnemar,
    right,
    stdlib_functions,
    summary,
)


def questions(source):
    (node,) = ast.parse(textwrap.dedent(source)).body
    return [answer for _, answer in _questions(node)]


@pytest.mark.parametrize(
    ("source", "answers"),
    [
        ("def f(a, b=5, *, c='x'): pass", ["5", "x"]),
        ("def f(a=None, b=True, c=0, d=1, e=''): pass", []),
        ("def f(*, a, b=2.5): pass", ["2.5"]),
        ("def f(a=-1, b=N): pass", []),
        ("def f(a):\n    raise KeyError(a)", ["KeyError"]),
        ("def f(a):\n    if a:\n        raise KeyError\n    raise KeyError('x')", ["KeyError"]),
        ("def f(a):\n    if a:\n        raise KeyError\n    raise OSError", []),
        ("def f(a):\n    raise a.Error()", []),
        ("def f(a):\n    raise", []),
    ],
)
def test_questions_have_answers_that_reading_alone_gives(source, answers):
    assert questions(source) == answers


@pytest.mark.full
def test_a_context_has_functions_with_different_names():
    functions = stdlib_functions()
    assert len(functions) >= 300
    drawn = contexts(functions, 50, "a seed")
    names = [one.name for context in drawn for one in context.functions]
    assert len(names) == len(set(names)) == 50 * PER_CONTEXT
    assert drawn == contexts(functions, 50, "a seed") != contexts(functions, 50, "another")


@pytest.mark.parametrize(
    ("answer", "value", "is_right"),
    [
        ("5", "5", True),
        (" `5`.\nBecause", "5", True),
        ("'utf-8'", "utf-8", True),
        ("5.0", "5", False),
        ("The value is 5", "5", False),
        ("", "5", False),
    ],
)
def test_an_answer_is_right_by_its_first_line(answer, value, is_right):
    assert right(answer, value) is is_right


def test_p_values_are_the_tails_of_the_binomial_distribution():
    assert mcnemar(1, 8) == pytest.approx(2 * (1 + 9) / 2**9)
    assert mcnemar(4, 4) == 1


def test_the_summary_pairs_each_way_with_the_full_computation():
    ways = {"other order": (True, False), "reuse": (False, False), "closed book": (True, True)}
    rows = [
        {
            "full": full,
            "full text": "a",
            "reused": 0.5,
            **{way: ok[number] for way, ok in ways.items()},
            **{f"{way} text": "ab"[number] for way in ways},
        }
        for number, full in enumerate((True, False))
    ]
    found = {row["way"]: row for row in summary(rows)}
    assert [found[way]["right"] for way in ("full", *ways)] == [1, 1, 0, 2]
    assert (found["reuse"]["only full right"], found["reuse"]["reused"]) == (1, 0.5)
    assert (found["closed book"]["only this right"], found["closed book"]["same text as full"]) == (
        1,
        0.5,
    )
