"""Kept answers never undo what keeps a message's text from being read as special tokens."""

from __future__ import annotations

from pathlib import Path

from kvboost_edge.text.tokenizer import Tokenizer


def test_a_message_with_a_special_tokens_text_is_encoded_apart_whatever_is_kept(tiny_model_dir: Path) -> None:
    tokenizer = Tokenizer.from_dir(tiny_model_dir)
    (special, *_) = [text for text in tokenizer.special_tokens.values() if text]
    messages = [
        {"role": "user", "content": f"x {special} y"},
        {"role": "assistant", "content": "an answer"},
        {"role": "user", "content": "go on"},
    ]
    asked: list[str] = []

    def find(text: str) -> list[int]:
        asked.append(text)
        return tokenizer.encode(text, False)

    plain = tokenizer.encode_chat(messages)
    assert tokenizer.encode_chat(messages, find_answer=find) == plain
    assert asked == []
    special_id = tokenizer.codec.token_id(special)
    assert plain.count(special_id) == tokenizer.encode_chat([{**messages[0], "content": "x y"}, *messages[1:]]).count(
        special_id
    )
    messages[0]["content"] = "x y"
    assert tokenizer.encode_chat(messages, find_answer=find) == tokenizer.encode_chat(messages)
    assert asked == ["an answer"]
