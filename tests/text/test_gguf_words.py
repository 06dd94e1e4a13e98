"""Tests of the pre-tokenizers that GGUF files name, against recorded splits of llama.cpp.

`make bench-peers` compares them with llama.cpp again. The texts and vocabularies are those of
hostile_words.py.
"""

import json
from pathlib import Path

import pytest

from helpers.text.hostile_words import GEMMA4_TEXTS, TEXTS, gemma4_metadata, metadata_of
from kvboost_edge.errors import ModelFormatError
from kvboost_edge.text.codec import StreamKind
from kvboost_edge.text.gguf_tokenizer import gguf_tokenizer
from kvboost_edge.text.pre_tokenizers import PRE_TOKENIZERS

RECORDED = json.loads((Path(__file__).parent / "llama_cpp_words.json").read_text(encoding="utf-8"))
WORDS = {pre: words for names, words in RECORDED["words"] for pre in names}
_MARKS = ("naïve Größe é\u0301", "e\u0301a\u0308 क्या हिन्दी", "ไทย ລາວ ខ្មែរ")
# Texts that are split differently here, according to the models' tokenizer.json. llama.cpp writes
# classes of cased letters as lookaheads that omit combining marks, does not normalize, and does
# not support ranges that contain spaces.
OTHERWISE = {
    **dict.fromkeys(("gpt-4o", "kanana2", "llama4", "tekken"), _MARKS),
    **dict.fromkeys(("qwen2", "qwen35"), (_MARKS[1],)),
    **dict.fromkeys(("deepseek-coder", "deepseek-llm"), ("\u00a0a\u3000b\u2003c",)),
}


def test_every_pre_tokenizer_is_recorded():
    assert WORDS.keys() == PRE_TOKENIZERS.keys()
    assert all(len(words) == len(TEXTS) for words in WORDS.values())


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_words_equal_llama_cpps(pre):
    ours = gguf_tokenizer(metadata_of(pre), name="m.gguf")
    otherwise = set()
    for text, words in zip(TEXTS, WORDS[pre], strict=True):
        ids = ours.encode(text, add_special_tokens=False)
        if [ours.decode([token]) for token in ids] != words:
            otherwise.add(text)
    assert otherwise == set(OTHERWISE.get(pre, ()))


def test_afmoe_groups_digits_from_the_end():
    """The published vocabulary has the same order: "33333" is the token of "33" followed by that of
    "333".
    """
    steps = gguf_tokenizer(metadata_of("afmoe"), name="m.gguf").codec._tokenizer.pre_tokenizer
    for text, words in {
        "33333": ["33", "333"],
        "a1234567": ["a", "1", "234", "567"],
        "333": ["333"],
    }.items():
        assert [word for word, _ in steps.pre_tokenize_str(text)] == words


def test_gemma4_encodes_as_llama_cpp_does():
    metadata = gemma4_metadata()
    tokens = metadata["tokenizer.ggml.tokens"]
    ours = gguf_tokenizer(metadata, name="m.gguf")
    for text, expected in zip(GEMMA4_TEXTS, RECORDED["gemma4"], strict=True):
        ids = ours.encode(text, add_special_tokens=False)
        assert [tokens[token] for token in ids] == expected, text
        assert ours.encode(text) == [2, *ids]
        assert ours.decode(ids, False) == text.replace("▁", " ")
    assert ours.codec.stream_kind is StreamKind.PIECES


def test_channel_and_tool_markers_are_decoded_as_text():
    ours = gguf_tokenizer(gemma4_metadata(), name="m.gguf")
    text = "<|turn>model\n<|channel>thought\nx<channel|><|tool_call>f{}<tool_call|><turn|>"
    ids = ours.encode(text, add_special_tokens=False)
    assert (
        ours.decode(ids, True) == "model\n<|channel>thought\nx<channel|><|tool_call>f{}<tool_call|>"
    )
    assert ours.decode(ids, False) == text


def test_gemma4_always_adds_bos():
    ours = gguf_tokenizer(
        {**gemma4_metadata(), "tokenizer.ggml.add_bos_token": False}, name="m.gguf"
    )
    assert ours.encode("a")[0] == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.merges": None}, "merges is missing, but tokens such as"),
        (
            {"tokenizer.ggml.merges": ["ab"]},
            "has the entry 'ab' at index 0, which is not two tokens",
        ),
        ({"tokenizer.ggml.add_space_prefix": True}, "add_space_prefix is true"),
        (
            {"tokenizer.ggml.bos_token_id": None},
            "bos_token_id is missing, but add_bos_token is true",
        ),
    ],
)
def test_gemma4_metadata_is_required(change, message):
    metadata = {
        key: value for key, value in {**gemma4_metadata(), **change}.items() if value is not None
    }
    with pytest.raises(ModelFormatError, match=message):
        gguf_tokenizer(metadata, name="m.gguf")
