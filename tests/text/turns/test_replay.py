"""What calls of earlier turns are known by."""

from __future__ import annotations

from typing import Any

import pytest

from kvboost_edge.text.turns.replay import call_keys, find_calls


def called(call_id: str, arguments: str = "{}") -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": call_id, "function": function}]}


def test_no_text_of_an_answer_is_known_as_a_call() -> None:
    """A model that was made to write a key down would put its words in the place of somebody's call."""
    for key in call_keys(called("a")):
        with pytest.raises(UnicodeEncodeError):
            key.encode()


def test_the_same_call_made_twice_is_told_apart_by_its_id() -> None:
    kept: dict[str, list[int]] = {}
    for message, ids in ((called("a", '{"x": 1, "y": 2}'), [1]), (called("b", '{"y":2,"x":1}'), [2])):
        kept |= dict.fromkeys(call_keys(message), ids)
    spelled = [called(call_id, '{"y": 2, "x": 1}') for call_id in ("a", "b", "the client's own")]
    assert [find_calls(message, kept.get) for message in spelled] == [[1], [2], [2]]
    assert find_calls(called("a", '{"x": 1}'), kept.get) is None, "an edited call is another"
    assert find_calls({"content": "x", "tool_calls": []}, kept.get) is None
