"""Kept answers never undo what keeps a message's text from being read as special tokens."""

from kvboost_edge.text.rendered_chat import encode_with_answers
from kvboost_edge.text.tokenizer import Tokenizer


def test_a_message_with_a_special_tokens_text_is_encoded_apart_whatever_is_kept(tiny_model_dir):
    tokenizer = Tokenizer.from_dir(tiny_model_dir)
    (special, *_) = [text for text in tokenizer.special_tokens.values() if text]
    messages = [
        {"role": "user", "content": f"x {special} y"},
        {"role": "assistant", "content": "an answer"},
        {"role": "user", "content": "go on"},
    ]
    asked = []

    def find(text):
        asked.append(text)
        return tokenizer.encode(text, False)

    plain = tokenizer.encode_chat(messages)
    assert tokenizer.encode_chat(messages, find_answer=find) == plain
    assert asked == []
    special_id = tokenizer.codec.token_id(special)
    assert plain.count(special_id) == tokenizer.encode_chat(
        [{**messages[0], "content": "x y"}, *messages[1:]]
    ).count(special_id)
    messages[0]["content"] = "x y"
    assert tokenizer.encode_chat(messages, find_answer=find) == tokenizer.encode_chat(messages)
    assert set(asked) == {"an answer"}


def test_only_answers_that_are_kept_are_searched_for(tiny_model_dir, monkeypatch):
    """Each is searched for in the whole text: of ten thousand messages that was most of the
    time.
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
