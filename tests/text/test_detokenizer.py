"""Tests of the incremental detokenizer against `decode` of all ids, for each tokenizer family."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Fast

from kvboost_edge.text.codec import StreamKind
from kvboost_edge.text.detokenizer import IncrementalDetokenizer
from kvboost_edge.text.tokenizer import Tokenizer

SPECIAL = ["<s>", "</s>", "<|tool|>"]
TEXTS = [
    "Hello, world!",
    "naïve café — “quotes”",
    "日本語のテキスト",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈",
    "a  b   c",
    " lead",
    "tab\tnew\nline",
    "𝔘𝔫𝔦",
]


def with_special(fast, **options):
    fast.add_special_tokens([AddedToken(text, special=True, **options) for text in SPECIAL])
    return fast


def byte_level():
    """Return a tokenizer in GPT-2's style: 256 bytes, some merges, and an ordinary added token that
    contains a space.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("l", "l"), ("h", "e"), ("ð", "Ł"), ("Ġ", "a")]
    vocab = {token: i for i, token in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    fast = Fast(models.BPE(vocab=vocab, merges=merges))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_tokens([AddedToken("two words é", special=False)])
    return with_special(fast)


def llama2():
    """Return a sentencepiece tokenizer in Llama 2's style: byte fallback, and a leading space that
    is added and removed.
    """
    pieces = [
        "<unk>",
        "▁",
        "▁▁",
        "▁hello",
        "hello",
        "world",
        ",",
        "a",
        "b",
        "▁a",
        "é",
        "語",
        "",
        "\ufffd",
        "🙂",
    ]
    vocab = {
        piece: i for i, piece in enumerate([*pieces, *(f"<0x{byte:02X}>" for byte in range(256))])
    }
    fast = Fast(
        models.BPE(vocab=vocab, merges=[], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    fast.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    fast.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    return with_special(fast, normalized=False)


def gemma():
    """Return a tokenizer with byte fallback and without the leading space."""
    fast = llama2()
    fast.normalizer = normalizers.Replace(" ", "▁")
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return fast


def metaspace():
    vocab = [
        ("<unk>", 0.0),
        ("▁", -1.0),
        ("▁the", -2.0),
        ("cat", -2.5),
        ("s", -3.0),
        ("▁sat", -3.5),
        ("é", -4.0),
    ]
    fast = Fast(models.Unigram([*vocab, *((char, -6.0) for char in "tha▂")], unk_id=0))
    fast.pre_tokenizer = pre_tokenizers.Metaspace()
    fast.decoder = decoders.Metaspace()
    return with_special(fast)


def wordpiece():
    words = [
        "[UNK]",
        "un",
        "##aff",
        "##able",
        "do",
        "n't",
        "'",
        "##t",
        ".",
        ",",
        "i",
        "'m",
        "##.",
        "é",
        "日",
    ]
    fast = Fast(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    fast.decoder = decoders.WordPiece(cleanup=True)
    return with_special(fast)


def no_decoder():
    return Fast(
        models.WordLevel({"[UNK]": 0, "one": 1, "two": 2, "drei": 3, "": 4}, unk_token="[UNK]")
    )


def bpe_suffix():
    """Return a tokenizer that decodes the last token of a text differently, so nothing can be
    streamed.
    """
    fast = Fast(models.BPE(vocab={"lo": 0, "w</w>": 1, "er</w>": 2}, merges=[]))
    fast.decoder = decoders.BPEDecoder(suffix="</w>")
    return fast


FAMILIES = {
    "byte-level": (byte_level, StreamKind.BYTES),
    "llama2": (llama2, StreamKind.PIECES),
    "gemma": (gemma, StreamKind.PIECES),
    "metaspace": (metaspace, StreamKind.PIECES),
    "wordpiece": (wordpiece, StreamKind.PIECES),
    "no-decoder": (no_decoder, StreamKind.PIECES),
    "bpe-suffix": (bpe_suffix, StreamKind.WHOLE),
}
TOKENIZERS = {name: Tokenizer.from_transformers(make()) for name, (make, _) in FAMILIES.items()}
every_family = pytest.mark.parametrize("family", FAMILIES)


def stream(tokenizer, ids, *, skip=True):
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


def byte_ids(tokenizer, raw):
    """Return the tokens of single bytes, in a tokenizer that has one for every byte."""
    if tokenizer.codec.stream_kind is StreamKind.BYTES:
        back = {tokenizer.codec.token_bytes(i): i for i in range(256)}
        return [back[bytes([byte])] for byte in raw]
    return [tokenizer.codec.token_id(f"<0x{byte:02X}>") or 0 for byte in raw]


@every_family
def test_stream_kind_of_each_family(family):
    assert TOKENIZERS[family].codec.stream_kind is FAMILIES[family][1]


@every_family
@given(data=st.data(), skip=st.booleans())
def test_streamed_text_equals_decode(family, data, skip):
    tokenizer = TOKENIZERS[family]
    ids = data.draw(st.lists(st.integers(-3, tokenizer.vocab_size + 40), max_size=30))
    assert "".join(stream(tokenizer, ids, skip=skip)) == tokenizer.decode(
        ids, skip_special_tokens=skip
    )


@pytest.mark.parametrize("family", ["byte-level", "llama2", "gemma"])
@given(text=st.text(max_size=20))
@example("🙂 🙂")
@example("  two leading spaces")
def test_any_text_round_trips_without_partial_characters(family, text):
    tokenizer = TOKENIZERS[family]
    ids = tokenizer.encode(text, add_special_tokens=False)
    parts = stream(tokenizer, ids)
    assert "".join(parts) == tokenizer.decode(ids)
    if "\ufffd" not in text and "▁" not in text and not any(special in text for special in SPECIAL):
        assert "".join(parts) == text
        assert not any("\ufffd" in part for part in parts)


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_shows_each_character_with_its_last_byte(text):
    tokenizer = TOKENIZERS["byte-level"]
    raw = text.encode()
    ids = byte_ids(tokenizer, raw)
    detokenizer = IncrementalDetokenizer(tokenizer)
    shown = ""
    for count, token_id in enumerate(ids, start=1):
        shown += detokenizer.push(token_id)
        assert shown == raw[:count].decode(errors="ignore")
    assert shown == text


@given(raw=st.binary(max_size=12))
def test_invalid_utf8_is_replaced_like_decode(raw):
    for family in ("byte-level", "llama2", "gemma"):
        tokenizer = TOKENIZERS[family]
        ids = byte_ids(tokenizer, raw)
        assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


def test_a_special_token_inside_a_character_does_not_break_it():
    for family in ("byte-level", "llama2"):
        tokenizer = TOKENIZERS[family]
        eos = tokenizer.codec.token_id("</s>")
        ids = tokenizer.encode("😀", add_special_tokens=False)
        ids = [*ids[:-1], eos, tokenizer.vocab_size + 5, ids[-1]]
        assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids) == "😀"


def test_flush_resets_the_detokenizer():
    tokenizer = TOKENIZERS["llama2"]
    ids = tokenizer.encode("hello world", add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tokenizer)
    first = "".join([*map(detokenizer.push, ids), detokenizer.flush()])
    second = "".join([*map(detokenizer.push, ids), detokenizer.flush()])
    assert first == second == "hello world"


def test_unknown_ids_decode_to_nothing():
    for tokenizer in TOKENIZERS.values():
        assert tokenizer.decode([tokenizer.vocab_size + 100, -1, 1 << 40]) == ""
        assert stream(tokenizer, [tokenizer.vocab_size + 100, -1, 1 << 40]) == ["", "", "", ""]


@pytest.mark.parametrize("family", ["byte-level", "llama2"])
def test_work_per_token_is_constant(family, monkeypatch):
    tokenizer = Tokenizer.from_transformers(FAMILIES[family][0]())
    longest = 0
    real = tokenizer.codec.decode

    def decode(ids, skip):
        nonlocal longest
        longest = max(longest, len(ids))
        return real(ids, skip)

    monkeypatch.setattr(tokenizer.codec, "decode", decode)
    ids = tokenizer.encode("hello world, " * 500, add_special_tokens=False)
    assert "".join(stream(tokenizer, ids)) == "hello world, " * 500
    assert longest <= 8


def test_decoder_json_names_equal_the_librarys():
    """The codec parses the decoder's JSON, so a renamed field must fail here and not corrupt
    output.
    """
    assert json.loads(llama2().decoder.__getstate__())["decoders"][3] == {
        "type": "Strip",
        "content": " ",
        "start": 1,
        "stop": 0,
    }
