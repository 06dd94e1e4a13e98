"""Tests of the keys of calls in earlier turns."""

import pytest

from kvboost_edge.text.turns.formats import ReasoningFormat
from kvboost_edge.text.turns.replay import call_keys, find_calls, thought_key, with_thoughts


def called(call_id, arguments="{}"):
    function = {"name": "weather", "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": call_id, "function": function}],
    }


def test_answer_text_cannot_be_a_call_key():
    """Otherwise a model that is made to write a key could replace another call with its own text."""
    for key in call_keys(called("a")):
        with pytest.raises(UnicodeEncodeError):
            key.encode()


def test_equal_calls_are_distinguished_by_id():
    kept = {}
    for message, ids in (
        (called("a", '{"x": 1, "y": 2}'), [1]),
        (called("b", '{"y":2,"x":1}'), [2]),
    ):
        kept |= dict.fromkeys(call_keys(message), ids)
    spelled = [called(call_id, '{"y": 2, "x": 1}') for call_id in ("a", "b", "the client's own")]
    assert [find_calls(message, kept.get) for message in spelled] == [[1], [2], [2]]
    assert find_calls(called("a", '{"x": 1}'), kept.get) is None, "an edited call must not match"
    assert find_calls({"content": "x", "tool_calls": []}, kept.get) is None


THINKS = ReasoningFormat("<think>", "</think>")


@pytest.mark.parametrize("raw", ["<think>\nHm.\n</think>\n\nYes.", "Hm.</think>Yes."])
def test_reasoning_is_restored_to_its_turn(raw):
    said = {"role": "assistant", "content": "Yes."}
    kept = {thought_key({**said, "reasoning_content": "Hm."}): list(raw.encode())}
    user = {"role": "user", "content": "Yes."}
    found, known = with_thoughts([user, said], THINKS, lambda ids: bytes(ids).decode(), kept.get)
    assert (found, known) == ([user, {**said, "reasoning_content": "Hm."}], True)
    other = {**said, "reasoning_content": "What the client sent."}
    assert with_thoughts([other], THINKS, lambda ids: bytes(ids).decode(), kept.get) == (
        [other],
        True,
    )
    for changed in ({**said, "content": "Yes"}, user):
        assert with_thoughts([changed], THINKS, lambda ids: bytes(ids).decode(), kept.get) == (
            [changed],
            False,
        )


def test_reasoning_is_keyed_by_its_tool_calls():
    calls = [{"id": number, "function": {"name": "a", "arguments": "{}"}} for number in "12"]
    keys = {
        thought_key({"content": "Yes.", "tool_calls": made}) for made in ([], calls[:1], calls[1:])
    }
    assert len(keys) == 3
    assert "Yes." not in keys
