"""Tests of literal text in a Lark grammar, which matches only itself."""

import functools

import pytest
from llguidance import LLMatcher, LLTokenizer

import kvboost_edge
from kvboost_edge.text.turns.formats import ID_SLOT
from kvboost_edge.text.turns.lark import Lark, escaped


@functools.cache
def vocabulary():
    return LLTokenizer(f"{kvboost_edge.__path__[0]}/assets/demo/tokenizer.json")


def takes(grammar, text):
    matcher = LLMatcher(vocabulary(), LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = vocabulary().tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


ASCII = "".join(map(chr, range(1, 128)))


@pytest.mark.parametrize(
    "text", [ASCII, "a/b", "\\d\\<b\\>", "<｜tool▁calls▁begin｜>", "é🙂", "[a-z]{2}(?s:.*)", "a\nb"]
)
def test_escaped_text_matches_only_itself(text):
    grammar = f"%llguidance {{}}\nstart: /{escaped(text)}/\n"
    assert takes(grammar, text)
    assert not takes(grammar, text + "x")
    assert not takes(grammar, text[:-1])


def test_literals_allow_white_space_ids_and_special_tokens():
    lark = Lark(lambda text: {"<|user|>": 4, "<|end|>": 2}.get(text))
    lark.add("start", lark.literal(f"[<|user|>\n x:{ID_SLOT}y\n</a> <|user|>"))
    for text in ("[", "[ ", "[\n"):
        with_special = [
            *vocabulary().tokenize_str(text),
            4,
            *vocabulary().tokenize_str(" x:a-9_y</a>"),
            4,
        ]
        matcher = LLMatcher(vocabulary(), LLMatcher.grammar_from_lark(lark.text()), log_level=0)
        assert (matcher.try_consume_tokens(with_special) == len(with_special)) == (text == "[")
    assert lark.literal("a<|user|>b") == ["a", 4, "b"]
    assert lark.literal("") == []


def test_text_ends_at_the_first_marker():
    for marker, special in (("</think>", None), ("<|user|>", 4)):
        lark = Lark(lambda text, special=special: special if text == "<|user|>" else None)
        text = lark.terminal("ANY", "(?s:.*)")
        lark.add("start", [lark.up_to("first", text, marker), "x"])
        assert takes(lark.text(), f"a</thin <|use {marker}x")
        assert not takes(lark.text(), f"a{marker}b{marker}x")
        assert not takes(lark.text(), f"a{marker}")


def test_a_terminal_excludes_given_texts():
    lark = Lark(lambda _: None)
    lark.add("start", [lark.terminal("SOME", "(?s:.*)", without=["(?s:.*)no(?s:.*)", "x(?s:.*)"])])
    for text, wanted in (
        ("yes", True),
        ("a no b", False),
        ("n o", True),
        ("xa", False),
        ("ax", True),
        ("", True),
    ):
        assert takes(lark.text(), text) == wanted
