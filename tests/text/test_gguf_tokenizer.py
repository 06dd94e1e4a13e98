"""Tests of tokenizers from GGUF metadata against the tokenizers from which the metadata was made."""

import itertools
import json

import numpy as np
import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from kvboost_edge.errors import ModelFormatError, RequestError
from kvboost_edge.text.codec import StreamKind
from kvboost_edge.text.gguf_tokenizer import gguf_tokenizer

SPECIAL = ["<|begin|>", "<|end|>", "<|im_start|>"]
CORPUS = [
    "Hello world! It's 2024, isn't it?  We've 12345 things.",
    "  leading and trailing spaces  \n\n\ttabs\r\n and   runs   of them ",
    "Größe, naïve café; Привет мир; 你好世界; こんにちは; 안녕하세요; 🚀🦙 👩‍👩‍👧",
    "def f(x):\n    return {'a': x**2, \"b\": [1, 22, 333, 4444]}  # comment\n",
    "I'LL DO IT, WE'RE HERE; can't won't y'all'd've",
    "CamelCase snake_case kebab-case http://example.org/path?q=1&r=2",
    "e\u0301 é ﬁ Å Ω ½ ² \u00a0 \u200b \u3000",
    "<|im_start|>user\nhi<|end|> <|end|>text<|begin|>",
    "",
    " ",
    "\n",
    "aaaaaaaaaaaaaaaaaaaa 1111111 ......... \\\\// <unk> <s> </s> ▁x",
]
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# From the tokenizer.json files of Llama 3 and Qwen2.
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL


def _byte_level(pre):
    """Return a trained byte-level BPE tokenizer of the type that `pre` names."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    steps = {
        "gpt-2": [gpt2],
        "smollm": [pre_tokenizers.Digits(individual_digits=True), gpt2],
        "llama-bpe": [pre_tokenizers.Split(Regex(LLAMA3), "isolated"), plain],
        "qwen2": [pre_tokenizers.Split(Regex(QWEN2), "isolated"), plain],
    }[pre]
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=1,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in SPECIAL]
    )
    tokenizer.add_tokens([AddedToken("kebab-case", normalized=False)])
    return tokenizer


def _metadata(tokenizer, pre):
    """Return the metadata that llama.cpp's converter writes, with two unused ids at the end."""
    state = json.loads(tokenizer.to_str())
    count = tokenizer.get_vocab_size()
    tokens = [tokenizer.id_to_token(i) for i in range(count)] + ["[PAD1]", "[PAD2]"]
    types = [1] * count + [5, 5]
    for token in state["added_tokens"]:
        types[token["id"]] = 3 if token["special"] else 4
    merges = [" ".join(m) if isinstance(m, list) else m for m in state["model"]["merges"]]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, dtype=np.int32),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": tokens.index("<|begin|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|end|>"),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": (
            "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}{{ eos_token "
            "}}{% endfor %}"
        ),
    }


def made(metadata):
    """Return the tokenizer of a file with this metadata; keys with the value None are left out."""
    given = {key: value for key, value in metadata.items() if value is not None}
    return gguf_tokenizer(given, name="m.gguf")


def assert_same(ours, original, texts, **options):
    for text in texts:
        expected = original.encode(text, **options).ids
        assert ours.encode(text) == expected, text
        for skip in (False, True):
            assert ours.decode(expected, skip) == original.decode(
                expected, skip_special_tokens=skip
            )


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_byte_level_equals_the_original(pre):
    original = _byte_level(pre)
    ours = made(_metadata(original, pre))
    assert_same(ours, original, CORPUS, add_special_tokens=False)
    assert ours.codec.stream_kind is StreamKind.BYTES
    assert ours.vocab_size == original.get_vocab_size()
    assert (
        ours.codec.token_bytes(ours.vocab_size),
        ours.codec.has_text(ours.vocab_size, False),
    ) == (b"", False)
    assert (ours.bos_token_id, ours.eos_token_id) == tuple(
        original.token_to_id(text) for text in SPECIAL[:2]
    )


def test_chat_template_of_a_gguf_file():
    original = _byte_level("gpt-2")
    ours = made(_metadata(original, "gpt-2"))
    messages = [{"role": "user", "content": "hi"}]
    assert ours.apply_chat_template(messages) == "<|im_start|>user\nhi<|end|>"
    assert ours.encode_chat(messages) == original.encode("<|im_start|>user\nhi<|end|>").ids
    without = made({**_metadata(original, "gpt-2"), "tokenizer.chat_template": None})
    with pytest.raises(RequestError, match=r"m\.gguf has no chat template"):
        without.apply_chat_template(messages)


@pytest.mark.parametrize(("bos", "eos"), [(True, False), (False, True), (True, True), (None, None)])
@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe"])
def test_bos_and_eos_follow_the_metadata(pre, bos, eos):
    original = _byte_level(pre)
    metadata = {
        **_metadata(original, pre),
        "tokenizer.ggml.add_bos_token": bos,
        "tokenizer.ggml.add_eos_token": eos,
    }
    ours = made(metadata)
    begins = pre == "llama-bpe" if bos is None else bos
    begin = [ours.bos_token_id] * begins
    end = [ours.eos_token_id] * bool(eos)
    inner = original.encode("a b", add_special_tokens=False).ids
    assert ours.encode("a b") == [*begin, *inner, *end]
    assert ours.encode("a b", add_special_tokens=False) == inner


@pytest.mark.parametrize("eos", [False, True])
@pytest.mark.parametrize("bos", [False, True])
def test_bos_and_eos_ids_are_needed_only_if_added(bos, eos):
    metadata = _metadata(_byte_level("gpt-2"), "gpt-2")
    metadata |= {"tokenizer.ggml.add_bos_token": bos, "tokenizer.ggml.add_eos_token": eos}
    for key, wanted in (("bos", bos), ("eos", eos)):
        without = {
            name: value
            for name, value in metadata.items()
            if name != f"tokenizer.ggml.{key}_token_id"
        }
        if wanted:
            with pytest.raises(
                ModelFormatError,
                match=f"{key}_token_id is missing, but add_{key}_token is true",
            ):
                made(without)
        else:
            whole = made(metadata)
            assert made(without).encode("a b") == whole.encode("a b")


# Words that differ from llama.cpp's, derived by hand from the expressions. test_gguf_words.py
# compares all others with llama.cpp.
WORDS = {
    "qwen35": {
        "क्या 12!": ["क्या", " ", "1", "2", "!"],
        "a\u0301_x": ["a\u0301", "_x"],
    },
    "qwen2": {"क्या": ["क", "्य", "ा"]},
}


@pytest.mark.parametrize("pre", WORDS)
def test_combining_marks_are_split_as_in_the_models_own_files(pre):
    metadata = {**_metadata(_byte_level("gpt-2"), "gpt-2"), "tokenizer.ggml.pre": pre}
    steps = made(metadata).codec._tokenizer.pre_tokenizer
    for text, words in WORDS[pre].items():
        found = [text[start:stop] for _, (start, stop) in steps.pre_tokenize_str(text)]
        assert found == words, text


def test_phi3_eos_strips_spaces_with_any_type():
    _, metadata = _scored(prefix=False)
    types = metadata["tokenizer.ggml.token_type"].copy()
    types[2] = 4
    ours = made({**metadata, "general.architecture": "phi3", "tokenizer.ggml.token_type": types})
    assert ours.encode("hi</s> \n x") == ours.encode("hi</s>x")
    other = made({**metadata, "tokenizer.ggml.token_type": types})
    assert other.encode("hi</s> x") != other.encode("hi</s>x")


def _scored(prefix):
    """Return a sentencepiece-like BPE tokenizer as in Llama 2's tokenizer.json, and its GGUF
    metadata.
    """
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    learner.train_from_iterator(
        CORPUS * 3, trainers.BpeTrainer(vocab_size=300, show_progress=False)
    )
    state = json.loads(learner.to_str())["model"]
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in state["merges"]]
    control = ["<unk>", "<s>", "</s>"]
    byte_tokens = [f"<0x{i:02X}>" for i in range(256)]
    merged = ["".join(pair) for pair in merges]
    # Non-ASCII letters become byte tokens. Learned pieces precede single letters, as in
    # sentencepiece.
    letters = sorted(t for t in state["vocab"] if len(t) == 1 and (t.isascii() or t == "▁"))
    merged = [t for t in merged if all(c in letters for c in t)]
    pairs = [pair for pair in merges if all(c in letters for c in "".join(pair))]
    tokens = [*control, *byte_tokens, *dict.fromkeys(merged), *letters]
    scores = [0.0] * 259 + [-float(i) for i in range(len(tokens) - 259)]
    tokens.append("<|user|>")
    scores.append(-1000.0)
    original = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=pairs,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    replace = normalizers.Replace(" ", "▁")
    original.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefix else replace
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    original.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    original.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in [*control, "<|user|>"]]
    )
    original.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array(scores, dtype=np.float32),
        "tokenizer.ggml.token_type": np.array(
            [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 260), 3], dtype=np.int32
        ),
        "tokenizer.ggml.add_space_prefix": prefix,
    }
    return original, metadata


def _best_first(text, metadata):
    """Return the tokens by sentencepiece's rule.

    Of all neighbours whose union is a token, the pair with the highest score is merged, leftmost
    first.
    """
    scores = dict(
        zip(
            metadata["tokenizer.ggml.tokens"],
            metadata["tokenizer.ggml.scores"].tolist(),
            strict=True,
        )
    )
    parts = list(text)
    while True:
        found = [
            (-scores[a + b], i)
            for i, (a, b) in enumerate(itertools.pairwise(parts))
            if a + b in scores
        ]
        if not found:
            return parts
        _, at = min(found)
        parts[at : at + 2] = ["".join(parts[at : at + 2])]


@pytest.mark.parametrize("prefix", [True, False])
def test_scored_equals_the_original(prefix):
    original, metadata = _scored(prefix)
    ours = made(metadata)
    assert_same(ours, original, [*CORPUS, "<|user|> hi<|user|>there"])
    assert ours.codec.stream_kind is StreamKind.PIECES
    assert (ours.bos_token_id, ours.eos_token_id) == (1, 2)


def test_scores_decide_the_merges():
    _, metadata = _scored(prefix=False)
    ours = made(metadata)
    for text in (
        "hello world return",
        "things trailing",
        "def f(x): return",
        "spaces and tabs",
        "case_case",
    ):
        plain = text.replace(" ", "▁")
        pieces = _best_first(plain, metadata)
        assert [ours.codec._tokenizer.id_to_token(i) for i in ours.encode(text)[1:]] == pieces


def test_phi3_control_tokens_strip_spaces():
    _, metadata = _scored(prefix=False)
    ours = made({**metadata, "general.architecture": "phi3"})
    assert ours.encode("<|user|> \n hi") == ours.encode("<|user|>hi")
    assert ours.encode("<s> hi") != ours.encode("<s>hi")


def _without(key):
    return {f"tokenizer.ggml.{key}": None}


REFUSED = {
    "no tokenizer": (_without("model"), "tokenizer.ggml.model is missing"),
    "another model": (
        {"tokenizer.ggml.model": "t5"},
        "'t5', which is not supported; supported: 'gpt2'",
    ),
    "no pre": (_without("pre"), "tokenizer.ggml.pre is missing"),
    "unknown pre": ({"tokenizer.ggml.pre": "not-yet"}, "not-yet.*supported: .*dbrx, .*qwen2"),
    "no tokens": (_without("tokens"), "tokenizer.ggml.tokens is missing"),
    "tokens are numbers": (
        {"tokenizer.ggml.tokens": np.arange(4)},
        "tokens must be a non-empty list of strings",
    ),
    "no merges": (_without("merges"), "merges is missing, but tokens such as"),
    "half a merge": ({"tokenizer.ggml.merges": ["ab"]}, "'ab' at index 0"),
    "merge of nothing": (
        {"tokenizer.ggml.merges": ["q\u0120 \u0120q"]},
        "cannot be built.*out of vocabulary",
    ),
    "types too short": (
        {"tokenizer.ggml.token_type": np.ones(3, dtype=np.int32)},
        "token_type must have one number",
    ),
    "bos beyond": ({"tokenizer.ggml.bos_token_id": 99999}, "bos_token_id is 99999"),
    "bos is text": ({"tokenizer.ggml.bos_token_id": "x"}, "bos_token_id must be of type int"),
    "bos wanted": (
        {"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.add_bos_token": True},
        "bos_token_id is missing",
    ),
    "template": ({"tokenizer.chat_template": 3}, "chat_template must be a string"),
}


SCORED = _scored(prefix=True)[1]
TWICE = [*SCORED["tokenizer.ggml.tokens"][:-1], "<0x41>"]
REFUSED_SCORED = {
    "too few scores": ({"tokenizer.ggml.scores": np.ones(3)}, "scores must have one number"),
    "no scores": (_without("scores"), "scores is missing"),
    "squeezing": ({"tokenizer.ggml.remove_extra_whitespaces": True}, "remove_extra_whitespaces"),
    "a byte twice": ({"tokenizer.ggml.tokens": TWICE}, "'<0x41>' twice"),
}


@pytest.mark.parametrize("name", [*REFUSED, *REFUSED_SCORED])
def test_invalid_metadata_is_refused_with_the_key(name):
    change, message = (REFUSED | REFUSED_SCORED)[name]
    whole = SCORED if name in REFUSED_SCORED else _metadata(_byte_level("gpt-2"), "gpt-2")
    with pytest.raises(ModelFormatError, match=message) as caught:
        made({**whole, **change})
    assert "m.gguf" in str(caught.value)
