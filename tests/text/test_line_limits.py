"""Tests of line-based ends of a text against rules over the whole text."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvboost_edge.text.line_limits import LineLimits

PARTS = st.lists(st.text(alphabet="ab \t\n", max_size=6), max_size=12)


def short_line(text, min_indent):
    """Return the text before the first line, except line one, with too little indentation."""
    at = 0
    for number, line in enumerate(text.split("\n")):
        indent = len(line) - len(line.lstrip(" \t"))
        # The last line may continue with more spaces.
        has_more = indent < len(line) or at + len(line) < len(text)
        if number and has_more and indent < min_indent:
            return text[: at + indent]
        at += len(line) + 1
    return text


@given(PARTS, st.integers(0, 4))
@example(["a\n", "  b\n\n"], 2)
@example(["a\n ", " b\n c"], 2)
def test_min_indent_ends_the_text(parts, min_indent):
    limits = LineLimits(min_indent, None)
    shown = ""
    for part in parts:
        text, ended = limits.push(part)
        shown += text
        if ended:
            break
    whole = "".join(parts)
    expected = short_line(whole, min_indent) if min_indent else whole
    assert shown == expected
    assert (shown == whole) or ended


@pytest.mark.parametrize("breaks_line", [False, True])
def test_the_text_ends_at_the_first_line_break_after_the_time(breaks_line):
    times = iter([10.0, 10.4, 10.5, 10.6, 11.0])
    limits = LineLimits(0, 500, clock=lambda: next(times))
    texts = ["a\n", "b\n", "c\n", "d" + "\n" * breaks_line + "e"]
    assert [limits.push(text) for text in texts] == [
        *((text, False) for text in texts[:3]),
        (texts[3], breaks_line),
    ]
    assert limits.push("\n") == ("\n", True)


def test_the_time_starts_with_the_first_text():
    times = iter([99.0, 99.9])
    limits = LineLimits(0, 1000, clock=lambda: next(times))
    assert limits.push("\n") == ("\n", False)
    assert limits.push("\n") == ("\n", False)


def test_min_indent_applies_after_the_time():
    times = iter([0.0, 9.0])
    limits = LineLimits(2, 1, clock=lambda: next(times))
    limits.push("a")
    assert limits.push("\n b\n") == ("\n ", True)
