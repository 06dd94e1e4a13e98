"""Tests of stop strings against a plain search of the whole text."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvboost_edge.errors import RequestError
from kvboost_edge.text.stop_strings import StopChecker

WORDS = st.text(alphabet="aab\n🙂", min_size=1, max_size=4)


def cut(text, stops):
    """Return the expected text and stop string.

    The first occurrence to end counts; among those that end together, the longest.
    """
    found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    end, length, stop = min(found)
    return text[: end + length], stop


def run(parts, stops):
    checker = StopChecker(stops)
    shown = []
    for part in parts:
        emit, stopped = checker.push(part)
        shown.append(emit)
        if stopped:
            break
    shown.append(checker.flush())
    return "".join(shown), checker.stop, shown


@given(
    parts=st.lists(st.text(alphabet="aab\n🙂", max_size=5), max_size=12),
    stops=st.lists(WORDS, max_size=3),
)
@example(["aaa", "ab"], ["aab"])
@example(["xabc"], ["abcd", "bc"])
@example(["xabc"], ["abc", "bc"])
def test_streamed_stops_equal_a_search_of_the_whole_text(parts, stops):
    shown, stop, _ = run(parts, stops)
    assert (shown, stop) == cut("".join(parts), stops)


@given(text=st.text(alphabet="ab", max_size=20), stops=st.lists(WORDS, min_size=1, max_size=3))
def test_only_possible_stop_prefixes_are_withheld(text, stops):
    checker = StopChecker(stops)
    shown = ""
    for count, char in enumerate(text, start=1):
        emit, stopped = checker.push(char)
        shown += emit
        if stopped:
            return
        seen = text[:count]
        longest = max(
            (n for stop in stops for n in range(1, len(stop)) if seen.endswith(stop[:n])),
            default=0,
        )
        assert shown == seen[: count - longest]


def test_nothing_is_emitted_after_a_stop():
    checker = StopChecker(["END"])
    assert checker.push("one E") == ("one ", False)
    assert checker.push("ND two") == ("", True)
    assert checker.push("three") == ("", True)
    assert checker.flush() == ""
    assert checker.stop == "END"


def test_no_stop_strings_show_all_at_once():
    assert StopChecker([]).push("text") == ("text", False)


@pytest.mark.parametrize("stops", [[""], [3], [None], "END"])
def test_invalid_stop_strings_are_refused(stops):
    with pytest.raises(RequestError, match="stop"):
        StopChecker(stops)


@given(
    parts=st.lists(st.text(alphabet="aab\n🙂", max_size=5), max_size=12),
    stops=st.lists(WORDS, max_size=3),
)
def test_an_included_stop_string_is_emitted(parts, stops):
    checker = StopChecker(stops, included=True)
    shown = ""
    for count, part in enumerate(parts, start=1):
        text, stopped = checker.push(part)
        shown += text
        whole, stop = cut("".join(parts[:count]), stops)
        assert (shown, checker.stop) == (whole + (stop or ""), stop)
        if stopped:
            break
    assert checker.flush() == ""


@given(
    early=st.text(alphabet="aab\n", max_size=20),
    late=st.text(alphabet="aab\n", max_size=20),
    stops=st.lists(WORDS, max_size=3),
    size=st.integers(1, 4),
    included=st.booleans(),
)
def test_stop_strings_ending_in_the_early_text_are_ignored(early, late, stops, size, included):
    """The first stop string to end in the late text counts. It may begin in the early text."""
    text = early + late
    ends = [
        (end, -len(stop), stop)
        for stop in stops
        for end in range(len(early) + 1, len(text) + 1)
        if text[:end].endswith(stop)
    ]
    end, length, stop = min(ends, default=(len(text), 0, None))
    expected = text[: end if included else end + length]
    checker = StopChecker(stops, included=included)
    shown = ""
    for part, counts in ((early, False), (late, True)):
        for at in range(0, len(part), size):
            emit, stopped = checker.push(part[at : at + size], counts=counts)
            shown += emit
            assert not stopped or counts
    assert (shown + checker.flush(), checker.stop) == (expected, stop)
