"""What calls of earlier turns are known by."""

from __future__ import annotations

import pytest

from kvboost_edge.text.turns.replay import call_key


def test_no_text_of_an_answer_is_known_as_a_call() -> None:
    """A model that was made to write a key down would put its words in the place of somebody's call."""
    key = call_key({"content": None, "tool_calls": [{"function": {"name": "weather", "arguments": "{}"}}]})
    assert key is not None
    with pytest.raises(UnicodeEncodeError):
        key.encode()


def test_a_call_is_known_however_it_is_spelled() -> None:
    spelled = ('{"a": 1, "b": [2]}', '{ "b":[2],"a":1 }')
    keys = {call_key({"tool_calls": [{"function": {"name": "f", "arguments": text}}]}) for text in spelled}
    assert len(keys) == 1
    assert call_key({"content": "f", "tool_calls": []}) is None
