"""Tests of the tokenizer against transformers', from a saved directory and from a loaded tokenizer;
errors name damaged files.
"""

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from llguidance import LLTokenizer
from tokenizers import AddedToken
from tokenizers import Tokenizer as RawTokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import kvboost_edge
from helpers.raising import assert_raises
from kvboost_edge.errors import ConfigError, ModelFormatError, RequestError
from kvboost_edge.text.codec import FastCodec
from kvboost_edge.text.detokenizer import IncrementalDetokenizer
from kvboost_edge.text.tokenizer import Tokenizer

DEMO = Path(kvboost_edge.__path__[0]) / "assets" / "demo"
CHAT = [
    {"role": "user", "content": "Grüße 🙂"},
    {"role": "assistant", "content": "Hi"},
    {"role": "user", "content": "?"},
]


@pytest.fixture
def directory(tiny_model_dir, tmp_path):
    """Copy of the tiny model's tokenizer files, which a test may damage."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"):
        if (tiny_model_dir / name).is_file():
            shutil.copy(tiny_model_dir / name, tmp_path / name)
    return tmp_path


def edit(path, **fields):
    old = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**old, **fields}))


def both_ways(directory):
    """Return pairs of our tokenizer and transformers', ours once from the files and once from
    theirs.
    """
    theirs = AutoTokenizer.from_pretrained(directory)
    return [
        (ours, theirs)
        for ours in (Tokenizer.from_dir(directory), Tokenizer.from_transformers(theirs))
    ]


@given(text=st.text(max_size=30))
@example("a<|user|>b")
def test_encoding_equals_transformers(tiny_model_dir, text):
    for ours, theirs in both_ways(tiny_model_dir):
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(
            text, add_special_tokens=False
        )
        plain = text
        for token in theirs.added_tokens_decoder.values():
            if token.special:  # Hypothesis also draws texts from the code
                plain = plain.replace(token.content, "")
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == plain
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)


def test_special_tokens_and_sizes(tiny_model_dir):
    for ours, theirs in both_ways(tiny_model_dir):
        assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
        assert ours.vocab_size == len(theirs)
        assert Tokenizer.from_transformers(ours) is ours


def test_chat_has_one_bos_and_equals_transformers(tiny_model_dir):
    for ours, theirs in both_ways(tiny_model_dir):
        assert ours.apply_chat_template(CHAT) == theirs.apply_chat_template(
            CHAT, tokenize=False, add_generation_prompt=True
        )
        ids = ours.encode_chat(CHAT)
        assert ids == theirs.apply_chat_template(
            CHAT, add_generation_prompt=True, return_dict=False
        )
        assert ids.count(ours.bos_token_id) == 1
        assert ids[0] == ours.bos_token_id


@pytest.mark.parametrize("bos", [True, False, None])
@pytest.mark.parametrize("eos", [True, False, None])
def test_bos_and_eos_are_those_of_tokenizer_json_as_in_transformers(directory, bos, eos):
    flags = {"add_bos_token": bos, "add_eos_token": eos}
    edit(
        directory / "tokenizer_config.json",
        **{name: flag for name, flag in flags.items() if flag is not None},
    )
    theirs = AutoTokenizer.from_pretrained(directory)
    assert Tokenizer.from_dir(directory).encode("text") == theirs.encode("text")


def test_tokens_that_only_the_config_knows_are_added(directory):
    count = Tokenizer.from_dir(directory).vocab_size
    token = {
        "content": "<extra>",
        "special": True,
        "lstrip": False,
        "rstrip": False,
        "single_word": False,
        "normalized": False,
    }
    edit(directory / "tokenizer_config.json", added_tokens_decoder={str(count): token})
    assert Tokenizer.from_dir(directory).encode("<extra>", add_special_tokens=False) == [count]
    edit(directory / "tokenizer_config.json", added_tokens_decoder={str(count + 5): token})
    with pytest.raises(ModelFormatError, match="<extra>"):
        Tokenizer.from_dir(directory)


def test_thousands_of_tokens_are_added_at_once(directory):
    """Adding tokens one at a time would take time for all earlier ones each time."""
    count = Tokenizer.from_dir(directory).vocab_size
    texts = [f"<extra {index}>" for index in range(20_000)]
    listed = {str(count + index): {"content": text} for index, text in enumerate(texts)}
    edit(directory / "tokenizer_config.json", added_tokens_decoder=listed)
    ours = Tokenizer.from_dir(directory)
    assert [ours.codec.token_id(text) for text in texts] == list(range(count, count + len(texts)))


def test_truncation_and_padding_of_the_file_are_disabled(directory):
    path = directory / "tokenizer.json"
    fields = {
        "truncation": {
            "direction": "Right",
            "max_length": 4,
            "strategy": "LongestFirst",
            "stride": 0,
        },
        "padding": {
            "strategy": {"Fixed": 64},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<pad>",
        },
    }
    edit(path, **fields)
    assert len(Tokenizer.from_dir(directory).encode("x" * 20, add_special_tokens=False)) == 20


@pytest.mark.parametrize(
    ("file", "field"),
    [
        ("jinja", None),
        ("config", "one"),
        (
            "config",
            [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "one"}],
        ),
    ],
)
def test_the_chat_template_is_read_from_every_place(directory, file, field):
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    if file == "jinja":
        edit(directory / "tokenizer_config.json", chat_template="old")
        (directory / "chat_template.jinja").write_text("one")
    else:
        edit(directory / "tokenizer_config.json", chat_template=field)
    assert Tokenizer.from_dir(directory).apply_chat_template(CHAT) == "one"


def test_a_missing_chat_template_names_the_model(directory):
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    fields = json.loads((directory / "tokenizer_config.json").read_text())
    fields.pop("chat_template", None)
    (directory / "tokenizer_config.json").write_text(json.dumps(fields))
    with pytest.raises(RequestError, match=directory.name):
        Tokenizer.from_dir(directory).encode_chat(CHAT)


def test_missing_and_damaged_files_are_named(directory):
    for name in ("tokenizer_config.json", "tokenizer.json"):
        good = (directory / name).read_bytes()
        for bad in (good[: len(good) // 2], b"[]", b"\xff\xfe", b""):
            (directory / name).write_bytes(bad)
            assert_raises(ModelFormatError, name, Tokenizer.from_dir, directory)
        (directory / name).write_bytes(good)
    (directory / "tokenizer.json").unlink()
    assert_raises(ModelFormatError, r"tokenizer\.json is missing", Tokenizer.from_dir, directory)


@pytest.mark.parametrize("text", [3, None, b"bytes", ["list"], "\ud800"])
def test_invalid_text_is_refused(tiny_model_dir, text):
    with pytest.raises(RequestError):
        Tokenizer.from_dir(tiny_model_dir).encode(text)


class Letters:
    """Minimal tokenizer in which every letter is a token."""

    vocab_size = 26

    def encode(self, text):
        return [ord(char) - 97 for char in text]

    def decode(self, ids):
        return "".join(chr(97 + i) for i in ids)


class Spaced(Letters):
    def decode(self, ids):
        return " ".join(chr(97 + i) for i in ids)


def test_duck_typed_tokenizers_are_accepted():
    tokenizer = Tokenizer.from_transformers(Letters())
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.push(i) for i in (*tokenizer.encode("hey"), 26, -1)] == [
        "h",
        "e",
        "y",
        "",
        "",
    ]
    assert_raises(ConfigError, "Spaced", Tokenizer.from_transformers, Spaced())
    assert_raises(ConfigError, "object", Tokenizer.from_transformers, object())


def test_a_fast_tokenizer_is_copied(tiny_model_dir):
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tiny_model_dir / "tokenizer.json"))
    ours = Tokenizer.from_transformers(theirs)
    before = ours.encode("text")
    theirs.backend_tokenizer.enable_truncation(1)
    assert ours.encode("text") == before


def test_long_texts_have_the_same_tokens(tiny_model_dir):
    """Long texts use another call of the library, which releases the GIL."""
    tokenizer = Tokenizer.from_dir(tiny_model_dir)
    sentence = "Ein längerer Satz — mit 漢字 und 🙂.\n"
    text = sentence * 300
    for special in (True, False):
        ids = tokenizer.encode(text, special)
        start = 1 if special and ids[0] == tokenizer.bos_token_id else 0
        assert ids[start:] == tokenizer.encode(sentence, False) * 300
        assert tokenizer.decode(ids) == text
    with pytest.raises(RequestError):
        tokenizer.encode("\ud800" * 5000)


TOOLS = [
    {
        "type": "function",
        "function": {"name": "look_up", "description": "of <s> or </s>", "parameters": {}},
    }
]
SHOWS_TOOLS = (
    "{% if tools %}{{ '[T]' + tools | tojson }}{% endif %}{% for m in messages %}{{ '<' + m.role "
    "+ '>' }}{{- m.content or '' }}{% for call in m.tool_calls or [] %}{{ '<call>' + "
    "call.function | tojson + '</call>' }}{% endfor %}{% endfor %}{% if add_generation_prompt "
    "%}{{ '<assistant>' }}{% endif %}"
)
CALL_TEXT = '{"name": "look_up", "arguments": {"a": "</s>"}}'
CALLED = [
    {"role": "user", "content": "q"},
    {
        "role": "assistant",
        "tool_calls": [{"id": "1", "function": {"name": "look_up", "arguments": '{"a": "</s>"}'}}],
    },
]


def with_template(tiny_model_dir, template):
    tokenizer = Tokenizer.from_dir(tiny_model_dir)
    return Tokenizer(
        tokenizer.codec,
        name="made",
        special_tokens=tokenizer.special_tokens,
        chat_template=template,
    )


def test_tools_and_past_calls_are_rendered_without_special_tokens(tiny_model_dir):
    ours = with_template(tiny_model_dir, SHOWS_TOOLS)
    text = ours.apply_chat_template(CALLED, tools=TOOLS)
    assert text == f"[T]{json.dumps(TOOLS)}<user>q<assistant><call>{CALL_TEXT}</call><assistant>"
    ids = ours.encode_chat(CALLED, tools=TOOLS)
    assert ours.decode(ids, skip_special_tokens=False) == text
    assert not {ours.codec.token_id(special) for special in ours.codec.special_texts()[0]} & set(
        ids
    )
    with pytest.raises(RequestError, match="tool 0 must be a dict"):
        ours.encode_chat(CALLED, tools=["look_up"])
    with pytest.raises(RequestError, match="tools must be a list"):
        ours.encode_chat(CALLED, tools={"name": "look_up"})


def test_turn_format_is_read_from_the_template(tiny_model_dir):
    ours = with_template(tiny_model_dir, SHOWS_TOOLS)
    assert ours.turn_format.calls is not None
    assert (ours.turn_format.calls.trigger, ours.turn_format.shows_tools) == ("<call>", True)
    assert ours.turn_format is ours.turn_format
    bare = Tokenizer(ours.codec, name="made")
    with pytest.raises(RequestError, match="made has no chat template"):
        _ = bare.turn_format


def test_marker_ids_are_special_tokens():
    raw = RawTokenizer.from_file(str(DEMO / "tokenizer.json"))
    added = [
        ("<plain>", False),
        ("[plain]", False),
        ("<a b>", False),
        ("</x", False),
        ("[special]", True),
    ]
    raw.add_tokens([AddedToken(text, special=special, normalized=False) for text, special in added])
    ours = Tokenizer(FastCodec(raw), name="made")
    theirs = LLTokenizer(raw.to_str(), eos_token=raw.token_to_id("<|end|>"))
    for text in [text for text, _ in added] + ["<|user|>", "e"]:
        token_id = raw.token_to_id(text)
        assert token_id is not None
        assert ours.marker_id(text) == (token_id if theirs.is_special_token(token_id) else None)
    assert ours.marker_id("<nowhere>") is None
