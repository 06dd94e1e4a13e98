"""Tests of the bounds of tokenizer.json: no text grows beyond the computed bound, and tokenizers of
real models pass.

Files that would expand a text too much are rejected before the library parses them.
"""

import base64
import json
import resource
import time

import pytest
import tokenizers
from hypothesis import given, reject
from hypothesis import strategies as st
from tokenizers import Regex, decoders, normalizers, pre_tokenizers

from helpers.raising import assert_raises
from kvboost_edge.errors import ModelFormatError
from kvboost_edge.text.tokenizer import Tokenizer
from kvboost_edge.text.tokenizer_bounds import _growth, _steps, read_tokenizer_file

MODEL = {"type": "WordLevel", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]"}
EMPTY = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder"))


def token(content, token_id=2, *, normalized=True):
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "special": False}
    return {"id": token_id, "content": content, "normalized": normalized, **flags}


def written(path, **parts):
    """Write a tokenizer.json of these parts; return its path."""
    path.write_text(
        json.dumps({"version": "1.0", "added_tokens": [], **EMPTY, **parts, "model": MODEL})
    )
    return path


def replace(pattern, content):
    fields = {"String": pattern} if isinstance(pattern, str) else pattern
    return {"type": "Replace", "pattern": fields, "content": content}


def regex(pattern):
    return {"Regex": pattern}


def normalizer(*steps):
    return {"type": "Sequence", "normalizers": list(steps)}


def pre_tokenizer(*steps):
    return {"type": "Sequence", "pretokenizers": list(steps)}


def decoder(*steps):
    return {"type": "Sequence", "decoders": list(steps)}


def of(part):
    """Return the JSON of an object of the library."""
    return json.loads(part.__getstate__())


def charsmap(*texts):
    """Return sentencepiece's table with a trie that matches nothing."""
    trie = bytes(4096)
    data = len(trie).to_bytes(4, "little") + trie + "\0".join([*texts, ""]).encode()
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


BYTE_LEVEL = of(pre_tokenizers.ByteLevel(add_prefix_space=False))
TEXT = {"Sequence": {"id": "A", "type_id": 0}}
OTHER_TEXT = {"Sequence": {"id": "B", "type_id": 1}}
BOS = {"SpecialToken": {"id": "a", "type_id": 0}}


def template(*single, num_ids=1):
    return {
        "type": "TemplateProcessing",
        "single": list(single),
        "pair": [BOS, TEXT, BOS, OTHER_TEXT],
        "special_tokens": {"a": {"id": "a", "ids": [0] * num_ids, "tokens": ["a"] * num_ids}},
    }


TO_NFKC = charsmap("صلى الله عليه وسلم", "1⁄2", "...", "a", "")
QUOTES = [replace(one, other) for one, other in (("``", '"'), ("''", '"'))]
FRACTIONS = {
    "½": "1/2",
    "¼": "1/4",
    "¾": "3/4",
    "…": "...",
    "™": "(tm)",
    "©": "(c)",
    "®": "(r)",
    "€": "EUR",
}
SPACES = [
    replace(regex(one), " ")
    for one in (" {2,}", r"\s+", r"[\u2028\u2029]", r"[^\S\n]+", r"\t", r"\p{Zs}+")
]
REAL = {
    "none": {},
    "GPT-2": {"pre_tokenizer": BYTE_LEVEL, "post_processor": of(tokenizers.processors.ByteLevel())},
    "Qwen": {
        "normalizer": of(normalizers.NFC()),
        "pre_tokenizer": pre_tokenizer(
            of(pre_tokenizers.Split(Regex(r"\p{N}|\s+(?!\S)|\s+"), "isolated")), BYTE_LEVEL
        ),
        "decoder": of(decoders.ByteLevel()),
        "added_tokens": [token(f"<|token_{index}|>", 2 + index) for index in range(70_000)],
    },
    "Llama": {
        "normalizer": normalizer(of(normalizers.Prepend("▁")), replace(" ", "▁")),
        "decoder": decoder(
            replace("▁", " "),
            of(decoders.ByteFallback()),
            of(decoders.Fuse()),
            of(decoders.Strip(" ", 1, 0)),
        ),
        "post_processor": template(BOS, TEXT),
    },
    "T5": {
        "normalizer": normalizer(TO_NFKC, of(normalizers.Strip()), replace(regex(" {2,}"), "▁")),
        "pre_tokenizer": pre_tokenizer(
            of(pre_tokenizers.WhitespaceSplit()), of(pre_tokenizers.Metaspace())
        ),
        "decoder": of(decoders.Metaspace()),
        "post_processor": template(TEXT, BOS),
        "added_tokens": [token(f"<extra_id_{index}>", 2 + index) for index in range(100)],
    },
    "XLNet": {
        "normalizer": normalizer(
            *QUOTES,
            *map(of, (normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase())),
            TO_NFKC,
            replace(regex(" {2,}"), " "),
        ),
        "pre_tokenizer": of(pre_tokenizers.Metaspace()),
        "decoder": of(decoders.Metaspace()),
    },
    "BERT": {
        "normalizer": of(normalizers.BertNormalizer()),
        "pre_tokenizer": of(pre_tokenizers.BertPreTokenizer()),
        "decoder": of(decoders.WordPiece()),
    },
    "many replacements": {
        "normalizer": normalizer(
            *(replace(one, other) for one, other in FRACTIONS.items()),
            *SPACES,
            of(normalizers.NFKC()),
            of(normalizers.ByteLevel()),
        )
    },
}


@pytest.mark.parametrize("name", REAL)
def test_realistic_tokenizers_are_accepted(name, tmp_path):
    path = written(tmp_path / "tokenizer.json", **REAL[name])
    assert read_tokenizer_file(path) == path.read_bytes()
    assert tokenizers.Tokenizer.from_buffer(path.read_bytes())


TWICE = replace("a", "aa")
BOMBS = {
    "letters doubled": {"normalizer": normalizer(*[TWICE] * 24)},
    "nested": {"normalizer": normalizer(normalizer(*[TWICE] * 12), normalizer(*[TWICE] * 12))},
    "without types": {
        "normalizer": {"normalizers": [{name: TWICE[name] for name in ("pattern", "content")}] * 24}
    },
    "two letters in turn": {
        "normalizer": normalizer(*[replace("a", "bbb"), replace("b", "aaa")] * 8)
    },
    "a long content": {"normalizer": replace("a", "b" * 300)},
    "between all characters": {"normalizer": normalizer(*[replace(regex("x*"), "y")] * 16)},
    "an empty pattern": {"normalizer": normalizer(*[replace("", "y")] * 16)},
    "a lookahead": {"normalizer": normalizer(*[replace(regex("(?=a)"), "a")] * 16)},
    "forms of Unicode": {
        "normalizer": normalizer(*[replace("ل", "ﷺ"), of(normalizers.NFKD())] * 6)
    },
    "a long prefix": {"normalizer": of(normalizers.Prepend("a" * 300))},
    "a prefix that grows": {
        "normalizer": normalizer(of(normalizers.Prepend("aaaa")), *[TWICE] * 8)
    },
    "a table": {"normalizer": charsmap("a" * 300)},
    "tables": {"normalizer": normalizer(*[charsmap("a" * 18)] * 3)},
    "bytes of bytes": {"pre_tokenizer": pre_tokenizer(*[BYTE_LEVEL] * 20)},
    "a normalizer and then bytes": {
        "normalizer": normalizer(*[TWICE] * 7),
        "pre_tokenizer": BYTE_LEVEL,
    },
    "decoded text": {"decoder": decoder(*[TWICE] * 20)},
    "suffixes": {"decoder": decoder(*[of(decoders.BPEDecoder(""))] * 20)},
    "steps": {"pre_tokenizer": pre_tokenizer(*[of(pre_tokenizers.Whitespace())] * 2000)},
    "ids of a special token": {"post_processor": template(*[BOS] * 100, TEXT, num_ids=100)},
    "copies of the text": {"post_processor": template(*[TEXT] * 300)},
    "templates": {
        "post_processor": {"type": "Sequence", "processors": [template(TEXT, TEXT)] * 20}
    },
    "added tokens": {
        "normalizer": replace("a", "b" * 200),
        "added_tokens": [token("a" * 1000 + str(index), 2 + index) for index in range(100)],
    },
}
PARTS = {"added tokens": "added tokens", "a normalizer and then bytes": "pre_tokenizer"}


@pytest.mark.parametrize("name", BOMBS)
def test_expanding_normalizers_are_refused(name, tmp_path):
    part = PARTS.get(name) or next(iter(BOMBS[name]))
    written(tmp_path / "tokenizer.json", **BOMBS[name])
    assert_raises(ModelFormatError, rf"tokenizer\.json: its .*{part}", Tokenizer.from_dir, tmp_path)


@pytest.mark.alone
def test_an_expansion_bomb_is_refused_cheaply(tmp_path):
    """The library would expand these 24 characters to 4 GB."""
    path = written(
        tmp_path / "tokenizer.json",
        normalizer=normalizer(*[TWICE] * 28),
        added_tokens=[token("a" * 24)],
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()
    with pytest.raises(ModelFormatError, match="one character into more than 256"):
        Tokenizer.from_dir(path.parent)
    assert time.process_time() - started < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


@pytest.mark.parametrize("spelled", ["normalizer", r"norm\u0061lizer"])
@pytest.mark.parametrize("place", ["before", "behind"])
def test_an_expanding_part_is_found_anywhere(place, spelled, tmp_path):
    part = f'"{spelled}": {json.dumps(BOMBS["letters doubled"]["normalizer"])}'
    model = f'"model": {json.dumps(MODEL)}'
    text = {"before": f"{part}, {model}", "behind": f'"normalizer": null, {model}, {part}'}[place]
    (tmp_path / "tokenizer.json").write_text(f'{{"version": "1.0", {text}}}')
    assert_raises(ModelFormatError, "its normalizer", Tokenizer.from_dir, tmp_path)


def test_tokens_of_the_config_are_counted(tmp_path):
    written(tmp_path / "tokenizer.json", normalizer=replace("a", "b" * 200))
    listed = {str(2 + index): token("a" * 1000 + str(index)) for index in range(100)}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": listed}))
    assert_raises(
        ModelFormatError, "100190 characters of added tokens", Tokenizer.from_dir, tmp_path
    )


def test_a_normalizer_that_makes_the_library_panic_is_refused(tmp_path):
    written(
        tmp_path / "tokenizer.json",
        normalizer=normalizer(replace(regex(""), "a"), of(normalizers.Lowercase())),
        added_tokens=[token(" b")],
    )
    assert_raises(
        ModelFormatError, r"tokenizer\.json is not a readable", Tokenizer.from_dir, tmp_path
    )


def test_a_file_over_the_limit_is_not_read(tmp_path):
    with open(tmp_path / "tokenizer.json", "wb") as file:
        file.truncate(100_000_001)
    assert_raises(ModelFormatError, "100000001 bytes, over the limit", Tokenizer.from_dir, tmp_path)


LETTERS = "abﷺصلé▁ "
CONTENTS = st.text(alphabet=LETTERS, max_size=3)
PATTERNS = [
    "a",
    "a+",
    "a*",
    "[ab]",
    "[^a]",
    "b{1,2}",
    "b{0,2}",
    "(?=a)",
    "a|",
    r"\b",
    "",
    " ?",
    r"\s",
    "(a|b)*",
    "$",
]
STEPS = st.one_of(
    st.builds(normalizers.Replace, st.text(alphabet=LETTERS, min_size=1, max_size=2), CONTENTS),
    st.builds(normalizers.Replace, st.sampled_from(PATTERNS).map(Regex), CONTENTS),
    st.builds(normalizers.Prepend, CONTENTS),
    st.sampled_from(
        [
            normalizers.NFKD(),
            normalizers.NFKC(),
            normalizers.Lowercase(),
            normalizers.StripAccents(),
            normalizers.ByteLevel(),
            normalizers.BertNormalizer(),
        ]
    ),
)


@given(steps=st.lists(STEPS, max_size=6), text=st.text(alphabet=LETTERS, max_size=8))
def test_the_growth_bound_holds(steps, text):
    """The library's own normalizers are the oracle. Unicode normalization expands a text further,
    by a factor of at most 18.
    """
    chain = normalizers.Sequence(steps)
    bound = _growth(_steps(of(chain)))
    try:
        result = chain.normalize_str(text) if bound <= 256 else ""
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        reject()  # the library fails on some insertions at the end of a text
    assert len(result) <= 18 * bound * max(1, len(text))
