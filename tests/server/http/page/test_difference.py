"""Tests of the differences that the page highlights between two texts, and of its words for causes."""

import random
import re
from itertools import pairwise

import pytest

from kvboost_edge.server.cache_report.diagnosis import CAUSES

PIECE = re.compile(r"\s+|\w+|[^\w\s]", re.DOTALL)
SHOW = """
  const sides = it.marked(it.parts(...argument));
  return sides.map((side) => side.map((node) => [node.nodeName.toLowerCase(), node.textContent]));
"""


def longest_common(one, other):
    """Return the length of the longest common subsequence of two lists."""
    row = [0] * (len(other) + 1)
    for piece in one:
        before = row[:]
        for at, at_other in enumerate(other):
            row[at + 1] = before[at] + 1 if piece == at_other else max(before[at + 1], row[at])
    return row[-1]


def test_the_difference_reconstructs_both_texts_with_a_longest_common_part(modules, scale):
    rng = random.Random(11)
    words = ["a", "b", "to day", "é", " ", "\n", ".", "{", "x1", "  "]
    pairs = [
        ["".join(rng.choices(words, k=rng.randrange(14))) for _ in range(2)]
        for _ in range(scale(100, 300))
    ]
    for (before, now), found in zip(
        pairs,
        modules.module("difference", "return argument.map((two) => it.parts(...two));", pairs),
        strict=True,
    ):
        assert "".join(part[1] for part in found) == before
        assert "".join(part[2] for part in found) == now
        assert all(part[1] == part[2] for part in found if part[0] == "same")
        assert all(part[0] == "same" or "" in part[1:] or part[1] != part[2] for part in found)
        assert all(one[0] != next_one[0] for one, next_one in pairwise(found))
        pieces = [PIECE.findall(text) for text in (before, now)]
        assert sum(
            len(PIECE.findall(part[1])) for part in found if part[0] == "same"
        ) == longest_common(*pieces)


@pytest.mark.parametrize(
    ("before", "now", "shown", "said"),
    [
        (
            "Today is Monday. Go",
            "Today is Tuesday. Go on",
            [
                [["#text", "Today is "], ["del", "Monday"], ["#text", ". Go"]],
                [["#text", "Today is "], ["ins", "Tuesday"], ["#text", ". Go"], ["#text", " on"]],
            ],
            "“Monday” changed to “Tuesday”.",
        ),
        (
            "The answer.",
            "The answer. And now?",
            [[["#text", "The answer."]], [["#text", "The answer."], ["ins", " And now?"]]],
            "“ And now?” was added.",
        ),
        (
            "a  b",
            "a\nb",
            [
                [["#text", "a"], ["del", "␣␣"], ["#text", "b"]],
                [["#text", "a"], ["ins", "⏎\n"], ["#text", "b"]],
            ],
            "“␣␣” changed to “⏎\n”.",
        ),
        (
            "a\u200b b",
            "a b",
            [
                [["#text", "a"], ["del", "⟨U+200B⟩"], ["#text", " b"]],
                [["#text", "a"], ["#text", " b"]],
            ],
            "“⟨U+200B⟩” was removed.",
        ),
        ("same", "same", [[["#text", "same"]], [["#text", "same"]]], ""),
        ("\u202ex", "\u202ex", [[["#text", "⟨U+202E⟩x"]], [["#text", "⟨U+202E⟩x"]]], ""),
        (
            "<b>x",
            "<i>x",
            [
                [["#text", "<"], ["del", "b"], ["#text", ">x"]],
                [["#text", "<"], ["ins", "i"], ["#text", ">x"]],
            ],
            "“b” changed to “i”.",
        ),
        ("x" * 70, "y", [[["del", "x" * 70]], [["ins", "y"]]], f"“{'x' * 60}…” changed to “y”."),
    ],
)
def test_a_difference_is_highlighted_and_described(modules, before, now, shown, said):
    assert modules.module("difference", SHOW, [before, now]) == shown
    assert (
        modules.module(
            "difference", "return it.differenceInWords(it.parts(...argument));", [before, now]
        )
        == said
    )


def test_long_texts_are_compared_by_prefix_only(modules):
    texts = [
        f"same {' '.join(str(number) for number in range(start, start + 5000))}"
        for start in (0, 7000)
    ]
    found = modules.module("difference", "return it.parts(...argument);", texts)
    assert found == [["same", "same ", "same "], ["other", texts[0][5:], texts[1][5:]]]


def test_every_miss_cause_has_a_description_and_a_kind(modules):
    causes = modules.module("causes", "return it.CAUSES;")
    assert set(causes) == set(CAUSES)
    assert {kind for _, kind, _ in causes.values()} == set(
        modules.module("causes", "return it.SHAPES;")
    )
    assert all(words for words, _, _ in causes.values())
    assert all(helps for _, kind, helps in causes.values() if kind == "look")
    unknown = modules.module(
        "causes", "return ['constructor', '__proto__', 'a_new_one'].map(it.causeInWords);"
    )
    assert unknown == ["constructor", "  proto  ", "a new one"]
