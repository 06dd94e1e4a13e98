"""Tests of tokens in OpenAI's log probabilities, including partial characters and byte tokens."""

import tokenizers
from tokenizers import decoders, models

from kvboost_edge.engine.handle import TokenEvent
from kvboost_edge.engine.request.results import TokenLogprobs
from kvboost_edge.server.api.completion_requests import CompletionChoice
from kvboost_edge.server.api.logprobs import (
    OffsetCounter,
    chat_logprobs,
    completion_logprobs,
)
from kvboost_edge.text.token_texts import TokenTexts
from kvboost_edge.text.tokenizer import Tokenizer


def test_partial_characters_keep_their_bytes(tiny_engine):
    tokenizer = tiny_engine.tokenizer
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode("漢x", add_special_tokens=False)
    assert len(ids) == 4, "the character must be split into bytes"
    assert b"".join(texts.raw(i) or b"" for i in ids).decode() == "漢x"
    assert [texts.text(i) for i in ids] == ["\ufffd", "\ufffd", "\ufffd", "x"]
    assert [texts.key(i) for i in ids] == ["bytes:\\xe6", "bytes:\\xbc", "bytes:\\xa2", "x"]
    tokens = [TokenLogprobs(i, -1.0, ((i, -1.0),)) for i in ids]
    shown = chat_logprobs(texts, tokens)["content"]
    assert bytes(byte for token in shown for byte in token["bytes"]).decode() == "漢x"
    counter = OffsetCounter(tokenizer, 10)
    offsets = [counter.add(i) for i in ids]
    assert offsets == [10, 10, 10, 11], "the offset must advance with the last byte of a character"


def test_pieces_of_byte_fallback_tokens_are_their_bytes():
    vocab = {"<unk>": 0, "a": 1, **{f"<0x{byte:02X}>": byte + 2 for byte in range(256)}}
    fast = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer = Tokenizer.from_transformers(fast)
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode("a漢!", add_special_tokens=False)
    assert [texts.raw(i) for i in ids] == [b"a", None, None, None, None]
    assert [texts.piece(i) for i in ids] == ["a", [0xE6], [0xBC], [0xA2], "!"]


def test_the_sampled_token_is_listed_with_the_top_logprobs(tiny_engine):
    texts = TokenTexts(tiny_engine.tokenizer)
    a, b, c = tiny_engine.tokenizer.encode("abc", add_special_tokens=False)
    tokens = [TokenLogprobs(c, float("-inf"), ((b, -0.1), (a, -3.0))), None, TokenLogprobs(a, -0.5)]
    shown = completion_logprobs(texts, [c, a, a], tokens, [0, 1, 2])
    assert shown == {
        "tokens": ["c", "a", "a"],
        "token_logprobs": [-9999.0, None, -0.5],
        "top_logprobs": [{"b": -0.1, "a": -3.0, "c": -9999.0}, None, {"a": -0.5}],
        "text_offset": [0, 1, 2],
    }
    assert list(shown["top_logprobs"][0]) == ["b", "a", "c"], (
        "top_logprobs must be sorted by probability"
    )


def test_logprobs_wait_for_withheld_text(tiny_engine):
    """While a stop string such as "aab" may have begun, the shown text is more than one token
    short.
    """
    tokenizer = tiny_engine.tokenizer
    (letter,) = tokenizer.encode("a", add_special_tokens=False)
    choice = CompletionChoice(0, None, tokenizer, TokenTexts(tokenizer), with_ids=False)
    shown = []
    for text in ("", "", "a", "a"):
        if piece := choice.push(TokenEvent(letter, text, 0.0, TokenLogprobs(letter, -1.0))):
            shown.append((piece["text"], piece["logprobs"]["text_offset"]))
    assert shown == [("a", [0]), ("a", [1])]
