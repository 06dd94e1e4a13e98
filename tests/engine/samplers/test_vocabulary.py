"""Bad words, sequence breakers and texts as tokens of a tokenizer."""

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers

from helpers.engine.fake_runner import fake_tokenizer
from kvboost_edge.engine.request.request import RequestInputs, SamplingParams
from kvboost_edge.engine.request.terms import Terms
from kvboost_edge.engine.request.words import NO_WORDS
from kvboost_edge.engine.samplers.vocabulary import WordFields
from kvboost_edge.errors import RequestError
from kvboost_edge.text.tokenizer import Tokenizer

PIECES = ["a", "b", "c", "ab", "▁", "▁a", "▁b", "▁ab", "\n", "a\n", "x", "ax", "xy", "y", "▁x"]


def piece_tokenizer():
    """Tokenizer in the style of SentencePiece, which writes a space as ▁."""
    raw = RawTokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(PIECES)},
            merges=[("a", "b"), ("▁", "a"), ("▁", "b"), ("a", "x"), ("x", "y"), ("▁", "x")],
        )
    )
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    raw.decoder = decoders.Metaspace(prepend_scheme="never")
    return Tokenizer.from_transformers(raw)


def words_of(tokenizer, vocab_size=10**6, generates=True, **options):
    params = SamplingParams(**options)
    fields = WordFields(tokenizer, vocab_size)
    return fields.prepare(RequestInputs(Terms(), params, [1], generates))["words"]


def text_of(tokenizer, token):
    return tokenizer.decode([token], skip_special_tokens=False)


def test_a_request_without_words_reads_no_vocabulary():
    tokenizer = piece_tokenizer()
    assert words_of(tokenizer) is NO_WORDS
    assert words_of(tokenizer, dry_multiplier=1.0, dry_penalty_last_n=0) is NO_WORDS
    assert words_of(tokenizer, dry_multiplier=1.0, samplers=("top_k",)) is NO_WORDS
    assert words_of(tokenizer, bad_words=("a",), generates=False) is NO_WORDS


@pytest.mark.parametrize("make", [piece_tokenizer, fake_tokenizer])
def test_breakers_are_all_tokens_that_contain_one(make):
    tokenizer = make()
    breakers = words_of(tokenizer, dry_multiplier=1.0, dry_sequence_breakers=("\n", "b")).breakers
    texts = {token: text_of(tokenizer, token) for token in range(tokenizer.vocab_size)}
    assert breakers.alone == {token for token, text in texts.items() if "\n" in text or "b" in text}
    assert breakers.begun == {}
    usual = words_of(tokenizer, dry_multiplier=1.0).breakers
    assert usual.alone == {token for token, text in texts.items() if set(text) & set('\n:"*')}


def test_a_breaker_of_several_tokens():
    tokenizer = piece_tokenizer()
    found = words_of(tokenizer, dry_multiplier=1.0, dry_sequence_breakers=("xyx",)).breakers
    ids = {piece: i for i, piece in enumerate(PIECES)}
    assert found.alone == frozenset()
    assert found.begun == {
        ids["x"]: ((ids["y"], ids["x"]),),
        ids["ax"]: ((ids["y"], ids["x"]),),
        ids["▁x"]: ((ids["y"], ids["x"]),),
        ids["xy"]: ((ids["x"],),),
    }
    none = words_of(tokenizer, dry_multiplier=1.0, dry_sequence_breakers=()).breakers
    assert not none.alone
    assert not none.begun


def test_bad_words_at_the_start_and_after_a_space():
    tokenizer = piece_tokenizer()
    ids = {piece: i for i, piece in enumerate(PIECES)}
    assert words_of(tokenizer, bad_words=("a",)).bad == ((ids["a"],), (ids["▁a"],))
    assert words_of(tokenizer, bad_words=(" a", "a")).bad == ((ids["a"],), (ids["▁a"],))
    # The variant after a space has more tokens, so it ends with the word itself.
    assert words_of(tokenizer, bad_words=("c",)).bad == ((ids["c"],),)


@pytest.mark.parametrize("make", [piece_tokenizer, fake_tokenizer])
def test_infill_texts_equal_the_tokens_texts(make):
    tokenizer = make()
    sampled = {"samplers": ("infill",), "temperature": 1.0}
    texts = words_of(tokenizer, **sampled).texts
    special = {tokenizer.codec.token_id(text) for text in tokenizer.codec.special_texts()[0]}
    assert len(texts) == tokenizer.vocab_size
    anchor = tokenizer.encode("ab", False)
    for token, text in enumerate(texts):
        whole = tokenizer.decode([*anchor, token], skip_special_tokens=True)
        assert text.decode(errors="replace") == whole.removeprefix("ab"), token
        assert bool(text) == (token not in special)
    assert len(words_of(tokenizer, vocab_size=9, **sampled).texts) == 9
    for unused in ({"temperature": 0.0}, {"mirostat": 2}, {"samplers": ("top_k",)}):
        assert words_of(tokenizer, **{**sampled, **unused}) is NO_WORDS


def test_words_that_cannot_be_tokenized_are_refused():
    tokenizer = piece_tokenizer()
    with pytest.raises(RequestError, match="bad_words holds '🙂'"):
        words_of(tokenizer, bad_words=("🙂",))
    with pytest.raises(RequestError, match="bad_words needs token id 13"):
        words_of(tokenizer, vocab_size=10, bad_words=("y",))
