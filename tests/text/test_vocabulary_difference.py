"""Tests of the first difference between the tokenizers of a model and its draft model."""

import json

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from kvboost_edge.text.gguf_tokenizer import gguf_tokenizer
from kvboost_edge.text.tokenizer import Tokenizer
from kvboost_edge.text.vocabulary_difference import vocabulary_difference

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ["<|begin|>", "<|end|>"]


def _qwen2() -> tokenizers.Tokenizer:
    """Train a tiny byte-level tokenizer with the settings of Qwen2's tokenizer.json."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False, trim_offsets=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the cat sat on the mat, the hat"] * 3, trainer)
    backend.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in SPECIAL]
    )
    backend.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return backend


def _scored_fields() -> dict:
    """Return GGUF metadata of a sentencepiece vocabulary with scores."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = ["▁", "a", "b", "▁a", "ab", "▁ab"]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens + words,
        "tokenizer.ggml.token_type": np.array([2, 3, 3] + [6] * 256 + [1] * len(words), np.int32),
        "tokenizer.ggml.scores": np.array(
            [0.0] * len(tokens) + [-1.0 - i for i in range(len(words))], np.float32
        ),
    }


STATE = json.loads(_qwen2().to_str())


def _directory(state=STATE, name="target") -> Tokenizer:
    """Return the tokenizer of a model directory with this tokenizer.json."""
    tokenizer = Tokenizer.from_transformers(tokenizers.Tokenizer.from_str(json.dumps(state)))
    tokenizer.name = name
    return tokenizer


def _gguf(state=STATE, name="draft.gguf", padding=5, **changed) -> Tokenizer:
    """Return the tokenizer of a file as from llama.cpp's converter, with three rows of padding."""
    backend = tokenizers.Tokenizer.from_str(json.dumps(state))
    count = backend.get_vocab_size()
    types = [1] * count + [padding] * 3
    for token in state["added_tokens"]:
        types[token["id"]] = 3 if token["special"] else 4
    tokens = [backend.id_to_token(token_id) for token_id in range(count)]
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens + [f"[PAD{count + i}]" for i in range(3)],
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in state["model"]["merges"]],
    }
    return gguf_tokenizer({**fields, **changed}, name=name)


def _changed(change) -> dict:
    state = json.loads(json.dumps(STATE))
    change(state)
    return state


@pytest.mark.parametrize("padding", [5, 4, 1])
def test_a_directory_equals_the_file_converted_from_it(padding):
    file = _gguf(padding=padding)
    assert vocabulary_difference(_directory(), file) == ""
    assert vocabulary_difference(file, _directory()) == ""
    assert vocabulary_difference(file, _gguf(padding=5)) == ""


def test_flags_that_change_only_decoding_are_ignored():
    def all_special(state):
        for token in state["added_tokens"]:
            token["special"] = True

    assert vocabulary_difference(_directory(), _gguf(_changed(all_special))) == ""


def _swap_tokens(state):
    vocabulary = state["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


def _swap_merges(state):
    merges = state["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]


LAST = max(token["id"] for token in STATE["added_tokens"])
A = STATE["model"]["vocab"]["a"]
FIRST, SECOND = STATE["model"]["merges"][:2]
CHANGES = {
    "token": (_swap_tokens, f"token {A} is 'a' in target and 'b' in draft"),
    "fewer tokens": (
        lambda state: state["added_tokens"].pop(),
        f"token {LAST} is '<tool>' in target and missing in draft",
    ),
    "merge": (_swap_merges, f"merge 0 is {FIRST} in target and {SECOND} in draft"),
    "fewer merges": (
        lambda state: state["model"]["merges"].pop(),
        f"target has {len(STATE['model']['merges'])} merges and draft has "
        f"{len(STATE['model']['merges']) - 1}",
    ),
    "stripping": (
        lambda state: state["added_tokens"][-1].update(lstrip=True),
        f"the added token {LAST}, '<tool>', has lstrip=False in target and True in draft",
    ),
    "whole words": (
        lambda state: state["model"].update(ignore_merges=True),
        "ignore_merges is None in target and True in draft",
    ),
    "normalizer": (
        lambda state: state.update(normalizer=None),
        "target has 1 normalizer steps and draft has 0",
    ),
    "pre-tokenizer": (
        lambda state: state["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex=r"\s+"),
        "pre-tokenizer step 0 is {'type': 'Split', ",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_the_first_difference_is_named(case):
    change, said = CHANGES[case]
    other = _directory(_changed(change), "draft")
    assert vocabulary_difference(_directory(), other).startswith(said)
    assert vocabulary_difference(other, _directory())


def test_a_token_added_in_one_model_is_named():
    def keep_in_vocabulary(state):
        added = state["added_tokens"]
        state["model"]["vocab"] |= {token["content"]: token["id"] for token in added}
        added.pop()

    state = _changed(keep_in_vocabulary)
    expected = f"token {LAST}, '<tool>', is an added token in target and an ordinary one in draft"
    assert vocabulary_difference(_directory(), _directory(state, "draft")) == expected
    assert vocabulary_difference(_directory(state, "draft"), _directory()) == expected


def test_a_different_pre_tokenizer_is_named():
    llama = _gguf(**{"tokenizer.ggml.pre": "smaug-bpe"})
    found = vocabulary_difference(_directory(), llama)
    assert found == "ignore_merges is None in target and True in draft.gguf"
    glm = _gguf(**{"tokenizer.ggml.pre": "glm4"})
    found = vocabulary_difference(_directory(), glm)
    assert found == "target has 1 normalizer steps and draft.gguf has 0"


def test_scores_are_compared_as_merges():
    fields = _scored_fields()
    one = gguf_tokenizer(fields, name="one.gguf")
    assert vocabulary_difference(one, gguf_tokenizer(fields, name="two.gguf")) == ""
    fields["tokenizer.ggml.scores"][-3:-1] = [-9.0, -2.0]
    other = gguf_tokenizer(fields, name="two.gguf")
    assert vocabulary_difference(one, other).startswith("merge 0 is ")


def test_kinds_of_tokenizers_differ():
    found = vocabulary_difference(_directory(), gguf_tokenizer(_scored_fields(), name="two.gguf"))
    assert found == "token 0 is '!' in target and '<unk>' in two.gguf"
    vocabulary = [(STATE_TOKENS[token_id], -1.0) for token_id in range(len(STATE_TOKENS))]
    backend = tokenizers.Tokenizer(models.Unigram(vocabulary, unk_id=0))
    unigram = Tokenizer.from_transformers(backend)
    unigram.name = "unigram"
    assert vocabulary_difference(_directory(_changed(_no_added)), unigram).startswith("merge 0 is ")


def _no_added(state):
    state["added_tokens"].clear()


STATE_TOKENS = {token_id: token for token, token_id in STATE["model"]["vocab"].items()}
