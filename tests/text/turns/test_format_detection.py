"""Tests of the detection of a family's chat format from its template alone."""

import pytest

from helpers.text.chat_templates import TEMPLATES, format_of, template
from kvboost_edge.text.chat_template import ChatTemplate
from kvboost_edge.text.turns.format_detection import turn_format
from kvboost_edge.text.turns.formats import ID_SLOT, ReasoningFormat

THINK = ReasoningFormat("<think>", "</think>")
CODER = {
    "kind": "tagged",
    "before": "<tool_call>\n<function=",
    "between": ">",
    "argument_before": "\n<parameter=",
    "value_before": ">\n",
    "argument_after": "\n</parameter>",
    "after": "\n</function>\n</tool_call>",
}
LFM2 = {
    "kind": "keyword",
    "trigger": "<|tool_call_start|>",
    "opening": "<|tool_call_start|>[",
    "separator": ", ",
    "closing": "]<|tool_call_end|>",
    "parallel": True,
}
CALLS = {
    "hermes": {
        "kind": "json",
        "trigger": "<tool_call>",
        "members": ("name", "arguments"),
        "parallel": True,
    },
    "qwen3": {
        "kind": "json",
        "trigger": "<tool_call>",
        "members": ("name", "arguments"),
        "separator": "\n",
    },
    "qwen3-coder": CODER,
    "llama3": {"kind": "json", "trigger": "", "arguments_key": "parameters", "parallel": False},
    "mistral-v3": {
        "kind": "json",
        "trigger": "[TOOL_CALLS]",
        "opening": "[TOOL_CALLS] [",
        "separator": ", ",
        "closing": "]",
        "id_key": "id",
    },
    "mistral-v11": {
        "kind": "named_json",
        "before": "[TOOL_CALLS]",
        "between": f"[CALL_ID]{ID_SLOT}[ARGS]",
    },
    "deepseek": {
        "kind": "named_json",
        "trigger": "<｜tool▁calls▁begin｜>",
        "opening": "<｜tool▁calls▁begin｜>",
        "before": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        "between": "\n```json\n",
        "after": "\n```<｜tool▁call▁end｜>",
        "closing": "<｜tool▁calls▁end｜>",
        "arguments_as_text": True,
    },
    "glm": {
        "kind": "tagged",
        "before": "<tool_call>",
        "between": "",
        "argument_before": "\n<arg_key>",
        "value_before": "</arg_key>\n<arg_value>",
        "argument_after": "</arg_value>",
        "after": "\n</tool_call>",
    },
    "granite": {
        "kind": "json",
        "trigger": "<|tool_call|>",
        "opening": "<|tool_call|>[",
        "closing": "]",
    },
    "phi4-mini": {"kind": "json", "closing": "]<|/tool_call|>", "constants": {"type": "function"}},
    "minimax": {
        "kind": "tagged",
        "opening": "<mm:calls>\n",
        "before": '<invoke name="',
        "closing": "</mm:calls>",
        "after": "\n</invoke>\n",
    },
    "qwen3.5": CODER,
    "lfm2": LFM2,
    "gemma4": {
        "kind": "braced",
        "trigger": "<|tool_call>",
        "opening": "",
        "before": "<|tool_call>call:",
        "separator": "",
        "after": "<tool_call|>",
        "closing": "",
        "quote": '<|"|>',
        "parallel": True,
        "arguments_as_text": False,
        "result_opening": "<|tool_response>",
    },
    "escaped": {
        "kind": "braced",
        "before": "<start_function_call>call:",
        "after": "<end_function_call>",
        "quote": "<escape>",
        "result_opening": "",
    },
    "lfm2-unshown": LFM2,
    "numbered": {
        "kind": "named_json",
        "between": f":{ID_SLOT}<|args|>",
        "closing": "<|calls_end|>",
    },
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_read_from_the_template(name):
    calls = format_of(name).calls
    assert calls is not None
    assert {key: getattr(calls, key) for key in CALLS[name]} == CALLS[name]


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name not in (*CALLS, "channels")])
def test_an_unknown_call_format_is_none(name):
    assert format_of(name).calls is None


@pytest.mark.parametrize("name", TEMPLATES)
def test_reasoning_is_read_from_the_template(name):
    analysis = ReasoningFormat("<|channel|>analysis<|message|>", "<|end|>")
    wanted = {
        "qwen3": THINK,
        "deepseek": THINK,
        "glm": THINK,
        "switched": THINK,
        "channels": analysis,
        "qwen3.5": THINK,
        "gemma4": ReasoningFormat("<|channel>thought", "<channel|>"),
    }
    assert format_of(name).reasoning == wanted.get(name)


@pytest.mark.parametrize("name", TEMPLATES)
def test_shows_tools_is_detected(name):
    assert format_of(name).shows_tools == (name not in ("smollm2", "switched"))


def test_answers_are_replayable_without_a_prefix():
    cannot = {name for name in TEMPLATES if not format_of(name).replays}
    assert cannot == {"mistral-v3", "channels"}, (
        "only the formats that write a prefix cannot be replayed"
    )


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        (
            "{{ m.thinking and '[THINK]' + m.thinking + '[/THINK]' or '' }}{{ m.content }}",
            ("[THINK]", "[/THINK]"),
        ),
        ("{{ m.content.split('</think>')[-1] }}", ("<think>", "</think>")),
        ("{{ m.reasoning and 'so: ' + m.reasoning or '' }}{{ m.content }}", None),
        ("{{ m.content }}", None),
    ],
)
def test_reasoning_has_many_forms(source, wanted):
    text = "{% for m in messages %}<{{ m.role }}>" + source + "{% endfor %}"
    found = turn_format(ChatTemplate(text, model_name="made", variables={}).render)
    assert found.reasoning == wanted


def test_a_template_that_always_fails_has_no_format():
    found = turn_format(
        ChatTemplate("{{ raise_exception('no') }}", model_name="made", variables={}).render
    )
    assert (found.calls, found.reasoning, found.shows_tools, found.replays) == (
        None,
        None,
        False,
        False,
    )


def test_the_reasoning_state_follows_from_the_prompt():
    asked = [{"role": "user", "content": "q"}]
    qwen = format_of("qwen3")
    deepseek = format_of("deepseek")
    assert qwen.reasoning_after(template("qwen3").render(asked)) == "possible"
    without = template("qwen3").render(asked, variables={"enable_thinking": False})
    assert qwen.reasoning_after(without) == "closed"
    assert deepseek.reasoning_after(template("deepseek").render(asked)) == "opened"
    assert format_of("hermes").reasoning_after("x<think>\n") == "closed"


@pytest.mark.parametrize(
    ("shown", "preserves"),
    [
        ("preserve_thinking", True),
        ("loop.last or preserve_thinking", True),
        ("true", False),
        ("loop.last", False),
    ],
)
def test_a_variable_that_preserves_reasoning_is_detected(shown, preserves):
    source = (
        "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content and ("
        + shown
        + ") %}<think>"
        "{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]<think>{% endif %}"
    )
    assert (
        turn_format(ChatTemplate(source, model_name="x", variables={}).render).preserves
        == preserves
    )


def test_mirrored_reasoning_markers_are_detected():
    source = (
        "{% for m in messages %}<|turn>{{ m.role }}\n{{ m.content }}<turn|>{% endfor %}"
        "{% if add_generation_prompt %}<|turn>assistant\n"
        "{% if not enable_thinking %}<|channel>thought\n<channel|>{% endif %}{% endif %}"
    )
    made = ChatTemplate(source, model_name="made", variables={})
    found = turn_format(made.render)
    asked = [{"role": "user", "content": "q"}]
    assert found.reasoning == ("<|channel>thought", "<channel|>")
    assert found.replays
    assert found.reasoning_after(made.render(asked)) == "closed"
    assert (
        found.reasoning_after(made.render(asked, variables={"enable_thinking": True})) == "possible"
    )
    assert found.reasoning_after("<|turn>assistant\n<|channel>thought\n") == "opened"
