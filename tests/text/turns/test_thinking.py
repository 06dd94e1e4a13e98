"""Tests of the start and end of reasoning, token by token, and of the tokens that end it, in every
format.
"""

import pytest
from tokenizers import AddedToken, decoders

from helpers.text.byte_level import byte_level
from helpers.text.chat_templates import CHANNELS, QWEN3, SMOLLM2, TEMPLATES
from helpers.text.hybrid_templates import QWEN35
from kvboost_edge.errors import RequestError
from kvboost_edge.text.tokenizer import Tokenizer
from kvboost_edge.text.turns.thinking import ReasoningTracker, reasoning_end, reasoning_state

GRANITE = TEMPLATES["qwen3"].replace("think>", "reason>")
CUT = TEMPLATES["smollm2"].replace("m.content", "m.content.split('</think>')[-1]")
OPENS = QWEN3.replace(
    "{{ '<|im_start|>assistant\\n' }}\n{%- if enable_thinking",
    "{{ '<|im_start|>assistant\\n<think>\\n' }}\n{%- if enable_thinking",
)
MARKED = {  # template, markers, whitespace around the closing marker
    "qwen3": (QWEN3, "<think>", "</think>", "\n", "\n\n"),
    "qwen3.5": (QWEN35, "<think>", "</think>", "\n", "\n\n"),
    "opens": (OPENS, "<think>", "</think>", "\n", "\n\n"),
    "other words": (GRANITE, "<reason>", "</reason>", "\n", "\n\n"),
    "gemma": (TEMPLATES["gemma4"], "<|channel>thought", "<channel|>", "\n", ""),
    "switched": (TEMPLATES["switched"], "<think>", "</think>", "\n", "\n"),
    "only cut": (CUT, "<think>", "</think>", "", ""),
}
ASK = [{"role": "user", "content": "Why?"}]


def tokenizer(template, markers=()):
    raw = byte_level()
    raw.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in markers])
    found = Tokenizer.from_transformers(raw)
    found.chat_template = template
    return found


@pytest.mark.parametrize("name", MARKED)
@pytest.mark.parametrize("special", [False, True], ids=["letters", "tokens"])
def test_the_closing_marker_uses_the_models_tokens(name, special):
    template, opener, closer, before, behind = MARKED[name]
    first = opener.removesuffix("thought")
    words = tokenizer(template, (first, closer) if special else ())
    end = reasoning_end(words)
    assert words.decode(end.closing, False) == before + closer + behind
    assert words.decode(end.marker, False) == closer
    assert words.decode(end.behind, False) == behind
    assert len(end.marker) == (1 if special else len(closer))
    ids = [words.codec.token_id(marker) for marker in (first, closer)]
    assert list(end.barred) == (ids if special else [])
    assert end.barred_after is None
    for message, ended in (("So <|im_end|>.", "So <|im_end|>." + before), ("So.\n", "So.\n")):
        found = reasoning_end(words, message)
        assert words.decode(found.with_message, False) == ended + closer + behind
        assert found.closing == end.closing == end.with_message


def test_channels_end_with_the_start_of_the_next_message():
    markers = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
    words = tokenizer(CHANNELS, markers)
    end = reasoning_end(words, "So.")
    assert words.decode(end.with_message, False) == "So.<|end|><|start|>assistant"
    assert words.decode(end.barred, False) == "a"  # of "analysis"
    assert end.barred_after == words.codec.token_id("<|channel|>")
    assert reasoning_end(tokenizer(CHANNELS)).barred == ()


@pytest.mark.parametrize("template", [None, SMOLLM2, TEMPLATES["llama3"]])
def test_a_budget_needs_reasoning_markers(template):
    with pytest.raises(RequestError, match="reasoning_budget needs the markers"):
        reasoning_end(tokenizer(template))


def test_a_tokenizer_that_decodes_whole_texts_is_refused():
    raw = byte_level()
    raw.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    words = Tokenizer.from_transformers(raw)
    words.chat_template = QWEN3
    with pytest.raises(RequestError, match="decodes token by token"):
        reasoning_end(words)


TURNS = [  # state, text, the part of it that is reasoning
    ("opened", "abc</think>def", "abc"),
    ("opened", "\n\nabc\n</think>\n\ndef", "\n\nabc\n"),
    ("opened", "</think>def", ""),
    ("opened", "<think>abc</think>def", "<think>abc"),
    ("possible", "<think>abc</think>def", "abc"),
    ("possible", "\n<think>\nabc</think>def <think>ghi</think>", "\nabc"),
    ("possible", "abc<think>def</think>", ""),
    ("possible", "<thinks>abc</think>", ""),
]


@pytest.mark.parametrize(("state", "text", "thought"), TURNS)
@pytest.mark.parametrize("special", [False, True], ids=["letters", "tokens"])
def test_each_token_is_inside_reasoning_or_not(state, text, thought, special):
    words = tokenizer(QWEN3, ("<think>", "</think>") if special else ())
    tracker = ReasoningTracker(words, words.turn_format, state)
    assert tracker.inside == (state == "opened")
    inside = []
    for token_id in words.encode(text, False):
        before = tracker.inside
        tracker.push(token_id)
        inside += [words.decode([token_id], False)] * (before and tracker.inside)
    assert "".join(inside).removesuffix("</think"[: len("".join(inside)) - len(thought)]) == thought
    assert tracker.answered == (not tracker.inside)


def test_reasoning_in_channels_is_tracked():
    words = tokenizer(
        CHANNELS, ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>")
    )
    text = (
        "<|channel|>analysis<|message|>ab<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "cd<|end|><|start|>assistant<|channel|>analysis<|message|>ef<|end|><|start|>assistant"
        "<|channel|>final<|message|>gh"
    )
    tracker = ReasoningTracker(words, words.turn_format, "possible")
    inside = []
    for token_id in words.encode(text, False):
        before = tracker.inside
        tracker.push(token_id)
        inside += [words.decode([token_id], False)] * (before and tracker.inside)
    assert "".join(inside) == "abef"


@pytest.mark.parametrize("name", ["qwen3", "gemma"])
def test_calls_within_reasoning_are_tracked(name):
    template, opener, closer, *_ = MARKED[name]
    call = (
        '<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>'
        if name == "qwen3"
        else "<|tool_call>call:a{}<tool_call|>"
    )
    words = tokenizer(template)
    tracker = ReasoningTracker(words, words.turn_format, "possible")
    states = ""
    for token_id in words.encode(f"{opener}\nab{call}cd{call}ef{closer}{call}", False):
        tracker.push(token_id)
        states += "c" if tracker.in_call else "-"
    begin = len("<tool_call>" if name == "qwen3" else "<|tool_call>") - 1
    length = len(call) - begin - 1
    one = "-" * begin + "c" * length + "-"
    front = "-" * len(f"{opener}\nab")
    behind = "-" * len(f"ef{closer}{call}")
    assert states == f"{front}{one}--{one}{behind}"


def test_the_reasoning_state_follows_from_the_prompt():
    words = tokenizer(OPENS)
    prompt = words.encode_chat(ASK)
    assert reasoning_state(words, prompt) == "opened"
    assert reasoning_state(words, prompt[: -len("<think>\n")]) == "possible"
    assert reasoning_state(words, [*prompt, *words.encode("\n</think>\n", False)]) == "closed"
