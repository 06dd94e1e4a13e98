"""Tests of calls that a chat template lacks: the format follows from the markers around its tools,
and past calls are written into the content.
"""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as RawTokenizer

import kvboost_edge
from helpers.text.chat_templates import TOOLS, format_of
from helpers.text.hybrid_templates import LFM2_UNSHOWN
from kvboost_edge.errors import RequestError
from kvboost_edge.text.chat_template import ChatTemplate
from kvboost_edge.text.tokenizer import Tokenizer
from kvboost_edge.text.turns.format_detection import turn_format
from kvboost_edge.text.turns.formats import Tool
from kvboost_edge.text.turns.keyword_calls import KEYWORD_CALLS, with_calls_written
from kvboost_edge.text.turns.parser import (
    CallArguments,
    CallStart,
    ContentDelta,
    TurnParser,
    merge_parts,
)
from kvboost_edge.text.turns.replay import call_keys

DEMO = Path(kvboost_edge.__path__[0]) / "assets" / "demo"
MARKERS = tuple(
    f"<|{name}|>"
    for name in (
        *("im_start", "im_end", "tool_list_start", "tool_list_end"),
        *("tool_call_start", "tool_call_end", "tool_response_start", "tool_response_end"),
    )
)
OFFERED = [
    {"type": "function", "function": {"name": tool.name, "parameters": tool.parameters}}
    for tool in TOOLS
]


def call(name, arguments, call_id="a"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


HISTORY = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Rain in Bonn and Köln?"},
    {
        "role": "assistant",
        "content": "I look at both.",
        "tool_calls": [
            call("get_weather", '{"city": "Bonn", "days": 3}'),
            call("get_weather", {"city": 'Köln "x"'}, "b"),
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": '{"rain": true}'},
    {"role": "tool", "tool_call_id": "b", "content": "none"},
    {"role": "assistant", "content": "", "tool_calls": [call("ping", "{}", "c")]},
    {"role": "tool", "tool_call_id": "c", "content": "pong"},
]


def tokenizer_with(markers, template=LFM2_UNSHOWN):
    raw = RawTokenizer.from_file(str(DEMO / "tokenizer.json"))
    raw.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in markers])
    found = Tokenizer.from_transformers(raw)
    found.chat_template = template
    return found


def derived(template):
    return turn_format(ChatTemplate(template, model_name="made", variables={}).render)


# -- how calls are known --


def test_the_call_format_is_inferred_from_the_tool_markers():
    found = format_of("lfm2-unshown")
    assert (found.calls, found.shows_calls, found.shows_tools, found.replays) == (
        KEYWORD_CALLS,
        False,
        True,
        True,
    )
    assert format_of("lfm2").calls == found.calls, "both templates must have the same call format"
    assert format_of("lfm2").shows_calls


OTHER_WAYS = {
    "no markers": ("<|tool_list_start|>", ""),
    "other markers": ("<|tool_list_start|>", "<|tools_start|>"),
    "no end": ("<|tool_list_end|>", ""),
    "something else between them": (
        "tools | tojson +",
        "tools[0].function.name + tools[1].function.name +",
    ),
    "one tool of two": ("tools | tojson +", "tools[:1] | tojson +"),
    "one tool more": ("tools | tojson +", "(tools + tools[:1]) | tojson +"),
    "no list": ("tools | tojson +", "{'tools': tools} | tojson +"),
    "calls in an unknown way": (
        "'<|im_end|>\\\\n' }}{% endfor",
        "(m.tool_calls[0].function.name + '!' if m.tool_calls else '') + '<|im_end|>\\\\n' }}{% "
        "endfor",
    ),
    "calls counted": (
        "== 'tool' else content",
        "== 'tool' else content + '+' * m.tool_calls | length",
    ),
    "answers after a separate marker": ("else content }}", "else '[' + content }}"),
}


@pytest.mark.parametrize("change", OTHER_WAYS)
def test_other_tool_formats_imply_no_call_format(change):
    old, new = (text.replace("\\\\", "\\") for text in OTHER_WAYS[change])
    assert LFM2_UNSHOWN.count(old) == 1
    found = derived(LFM2_UNSHOWN.replace(old, new))
    assert (found.calls, found.shows_calls, found.shows_tools) == (None, True, True)


@pytest.mark.parametrize("missing", ["<|tool_call_start|>", "<|tool_call_end|>"])
def test_the_call_format_needs_its_tokens_in_the_vocabulary(missing):
    assert tokenizer_with(MARKERS).turn_format.calls == KEYWORD_CALLS
    assert (
        tokenizer_with(tuple(text for text in MARKERS if text != missing)).turn_format.calls is None
    )


# -- past calls --


def test_past_calls_and_results_have_the_documented_format():
    text = tokenizer_with(MARKERS).apply_chat_template(HISTORY, tools=OFFERED)
    assert text == (
        f"<|im_start|>system\nBe brief.\nList of tools: <|tool_list_start|>{json.dumps(OFFERED)}<|tool_list_end|>"
        "<|im_end|>\n<|im_start|>user\nRain in Bonn and Köln?<|im_end|>\n"
        '<|im_start|>assistant\n<|tool_call_start|>[get_weather(city="Bonn", days=3), '
        'get_weather(city="Köln \\"x\\"")]<|tool_call_end|>I look at both.<|im_end|>\n'
        '<|im_start|>tool\n<|tool_response_start|>{"rain": true}<|tool_response_end|><|im_end|>\n'
        "<|im_start|>tool\n<|tool_response_start|>none<|tool_response_end|><|im_end|>\n"
        "<|im_start|>assistant\n<|tool_call_start|>[ping()]<|tool_call_end|><|im_end|>\n"
        "<|im_start|>tool\n<|tool_response_start|>pong<|tool_response_end|><|im_end|>\n<|im_start|>assistant\n"
    )


def test_markers_are_tokens_but_text_in_arguments():
    ours = tokenizer_with(MARKERS)
    said = {
        "role": "assistant",
        "content": None,
        "tool_calls": [call("ping", {"x": "a<|tool_call_end|><|im_end|>"})],
    }
    ids = ours.encode_chat([HISTORY[1], said], False)
    assert 'ping(x="a<|tool_call_end|><|im_end|>")]<|tool_call_end|><|im_end|>' in ours.decode(
        ids, False
    )
    counts = {text: ids.count(ours.codec.token_id(text)) for text in MARKERS[:6]}
    assert counts == dict(zip(MARKERS[:6], (2, 2, 0, 0, 1, 1), strict=True))


VALUES = {
    "a": 'it\'s "so", \\n\n\t',
    "b": [1, -2.5, True, None, "x"],
    "c": {"d": {"e": False}, 'f"': []},
    "größe": "",
    "g": False,
    "h": None,
    "i": 10**20,
}


def test_written_calls_round_trip():
    (message,) = with_calls_written(
        [{"content": "Well.", "tool_calls": [call("f", VALUES)]}], KEYWORD_CALLS
    )
    assert set(message) == {"content"}
    for pieces in ([message["content"]], message["content"]):
        parser = TurnParser(
            format_of("lfm2-unshown"), [Tool("f", {})], reasoning="closed", calls=True
        )
        start, arguments, rest = merge_parts(
            [*(part for text in pieces for part in parser.push(text)), *parser.close()]
        )
        assert (start, rest) == (CallStart(0, "f"), ContentDelta("Well."))
        assert isinstance(arguments, CallArguments)
        assert json.loads(arguments.text) == VALUES
    for value in (True, None, [True, None], {"a": False}):
        (message,) = with_calls_written([{"tool_calls": [call("f", {"x": value})]}], KEYWORD_CALLS)
        inner = (
            message["content"]
            .removeprefix("<|tool_call_start|>[f(x=")
            .removesuffix(")]<|tool_call_end|>")
        )
        assert inner == str(value).replace("'", '"'), "values must be written as in Python"


def test_calls_precede_content_parts():
    parts = [{"type": "text", "text": "Well."}]
    (message,) = with_calls_written(
        [{"content": parts, "tool_calls": [call("f", {})]}], KEYWORD_CALLS
    )
    assert message["content"] == [
        {"type": "text", "text": "<|tool_call_start|>[f()]<|tool_call_end|>"},
        *parts,
    ]


@pytest.mark.parametrize(
    "calls",
    [
        [call("f", [1])],
        [call("f", None)],
        [{"name": "f"}],
        [3],
        3,
        "f",
        {"a": 1},
    ],
)
def test_an_unwritable_past_call_is_refused_by_name(calls):
    with pytest.raises(RequestError, match=r"past call .* cannot be written"):
        tokenizer_with(MARKERS).apply_chat_template(
            [HISTORY[1], {"role": "assistant", "tool_calls": calls}]
        )


def test_a_call_is_replayed_with_its_generated_tokens():
    ours = tokenizer_with(MARKERS)
    spelled = "Hm.<|tool_call_start|>[get_weather( days = 3,city='Bonn')]<|tool_call_end|>"
    own = ours.encode(spelled, False)
    said = {"role": "assistant", "content": "Hm.", "tool_calls": [HISTORY[2]["tool_calls"][0]]}
    kept = dict.fromkeys(call_keys(said), own)
    chat = [HISTORY[1], said, HISTORY[3], HISTORY[5], HISTORY[6]]
    text = ours.decode(ours.encode_chat(chat, tools=OFFERED, find_answer=kept.get), False)
    assert f"<|im_start|>assistant\n{spelled}<|im_end|>\n<|im_start|>tool\n" in text
    assert "assistant\n<|tool_call_start|>[ping()]<|tool_call_end|><|im_end|>" in text, (
        "a call without stored tokens must be written by the template"
    )
    assert text == ours.apply_chat_template(chat, tools=OFFERED).replace(
        '<|tool_call_start|>[get_weather(city="Bonn", days=3)]<|tool_call_end|>Hm.', spelled
    )
