"""Tests that stored answers never cause a message's text to be encoded as special tokens."""

from pathlib import Path

import kvboost_edge
from kvboost_edge.text.rendered_chat import encode_with_answers
from kvboost_edge.text.tokenizer import Tokenizer

DEMO = Path(kvboost_edge.__path__[0]) / "assets" / "demo"


def test_special_texts_are_encoded_separately_next_to_stored_answers():
    """Stored answers have the ids that were generated, which differ from the tokenizer's own."""
    tokenizer = Tokenizer.from_dir(DEMO)
    special = "<|user|>"
    messages = [
        {"role": "user", "content": f"x {special} y"},
        {"role": "assistant", "content": "an answer"},
        {"role": "user", "content": "go on"},
    ]
    kept = [tokenizer.encode(letter, False)[0] for letter in "an answer"]
    own = tokenizer.encode("an answer", False)
    assert own != kept
    special_id = tokenizer.codec.token_id(special)
    counts = []
    for question in (f"x {special} y", "x y"):
        messages[0]["content"] = question
        plain = tokenizer.encode_chat(messages)
        ids = tokenizer.encode_chat(messages, find_answer={"an answer": kept}.get)
        assert tokenizer.decode(ids, False) == tokenizer.decode(plain, False)
        at = len(tokenizer.encode_chat(messages[:1]))
        assert plain[at : at + len(own)] == own
        assert ids == [*plain[:at], *kept, *plain[at + len(own) :]]
        counts.append(ids.count(special_id))
    assert counts[0] == counts[1]


def test_only_stored_answers_are_searched(tiny_model_dir, monkeypatch):
    """Each answer is searched for in the whole text. With ten thousand messages this took most of
    the time.
    """
    tokenizer = Tokenizer.from_dir(tiny_model_dir)
    searched = []

    def search(text, answers, *others):
        searched.append(answers)
        return encode_with_answers(text, answers, *others)

    monkeypatch.setattr("kvboost_edge.text.tokenizer.encode_with_answers", search)
    messages = [{"role": "user", "content": "q"}]
    for number in range(40):
        messages += [
            {"role": "assistant", "content": f"answer {number}"},
            {"role": "user", "content": "go on"},
        ]
    kept = {"answer 7": tokenizer.encode("answer 7", False)}
    assert tokenizer.encode_chat(messages, find_answer=kept.get) == tokenizer.encode_chat(messages)
    assert searched == [["answer 7"]]
