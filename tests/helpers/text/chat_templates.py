"""Chat templates that write turns as well-known families do, reduced to the relevant parts."""

from __future__ import annotations

import functools
import json
from typing import Any

from helpers.text.gemma_templates import ESCAPED, GEMMA4
from helpers.text.hybrid_templates import LFM2, LFM2_UNSHOWN, QWEN35
from kvboost_edge.text.chat_template import ChatTemplate
from kvboost_edge.text.turns.format_detection import turn_format
from kvboost_edge.text.turns.formats import Tool, TurnFormat
from kvboost_edge.text.turns.keyword_calls import KEYWORD_CALLS, with_calls_written

_QWEN_TOOLS = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
{{- 'You may call these functions:\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}
{{- '\\n</tools>\\nAnswer with <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
"""
_RESULT = """\
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
"""

HERMES = (
    _QWEN_TOOLS
    + """\
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant' }}
{%- if m.content %}{{ '\\n' + m.content }}{% endif %}
{%- for call in m.tool_calls %}{% set call = call.function or call %}
{{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
{{- call.arguments | tojson }}{{ '}\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}
"""
    + _RESULT
    + """\
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
)

QWEN3 = (
    _QWEN_TOOLS
    + """\
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{%- set content = m.content if m.content is string else '' %}
{%- set thought = '' %}
{%- if m.reasoning_content is string %}{% set thought = m.reasoning_content %}
{%- elif '</think>' in content %}
{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last and (loop.last or thought) %}
{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
{%- else %}{{ content }}{% endif %}
{%- for call in m.tool_calls or [] %}
{%- if (loop.first and content) or not loop.first %}{{ '\\n' }}{% endif %}
{%- set call = call.function or call %}
{{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
{%- if call.arguments is string %}{{ call.arguments }}{% else %}{{ call.arguments | tojson }}{% endif %}
{{- '}\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}
"""
    + _RESULT
    + """\
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""
)

QWEN3_CODER = """\
{%- if tools %}{{ '<|im_start|>system\\n<tools>' }}
{%- for tool in tools %}{{ '\\n<function>\\n<name>' ~ tool.function.name ~ '</name>\\n' }}
{{- tool.function.parameters | tojson }}{{ '\\n</function>' }}{% endfor %}{{ '\\n</tools><|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' and m.tool_calls %}{{ '<|im_start|>assistant' }}
{%- if m.content is string and m.content | trim %}{{ '\\n' + m.content | trim + '\\n' }}{% endif %}
{%- for call in m.tool_calls %}{% set call = call.function or call %}
{{- '\\n<tool_call>\\n<function=' + call.name + '>\\n' }}
{%- for key, value in call.arguments | items %}{{ '<parameter=' + key + '>\\n' }}
{{- value if value is string else value | tojson }}{{ '\\n</parameter>\\n' }}{% endfor %}
{{- '</function>\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response>\\n<|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

LLAMA3 = """\
{{- bos_token }}{{ '<|start_header_id|>system<|end_header_id|>\\n\\nBe useful.<|eot_id|>' }}
{%- for m in messages %}
{%- if loop.first and tools %}{{ '<|start_header_id|>user<|end_header_id|>\\n\\nFunctions:\\n\\n' }}
{%- for tool in tools %}{{ tool | tojson(indent=4) }}{{ '\\n\\n' }}{% endfor %}{{ m.content | trim + '<|eot_id|>' }}
{%- elif 'tool_calls' in m %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set call = m.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson }}{{ '}<|eot_id|>' }}
{%- elif m.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + m.content | tojson + '<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""

MISTRAL_V3 = """\
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools and loop.index0 == 0 %}{{ '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST] ' + m.content + '[/INST]' }}
{%- elif m.tool_calls %}{{ '[TOOL_CALLS] [' }}
{%- for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}
{%- set text = call.function | tojson %}{{ text[:-1] + ', "id": "' + call.id + '"}' }}
{{- ', ' if not loop.last else ']' + eos_token }}{% endfor %}
{%- elif m.role == 'assistant' %}{{ ' ' + m.content | trim + eos_token }}
{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS] {"content": ' + m.content | tojson + '}[/TOOL_RESULTS]' }}
{%- endif %}{% endfor %}
"""

MISTRAL_V11 = """\
{{- bos_token }}
{%- if tools %}{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'assistant' %}{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}
{{- '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id + '[ARGS]' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}{% endfor %}
{{- eos_token }}
{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
{%- endif %}{% endfor %}
"""

DEEPSEEK = """\
{{- bos_token }}
{%- if tools %}{{ '## Tools\\n' }}{% for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<｜User｜>' + m.content }}
{%- elif m.role == 'assistant' and m.tool_calls %}
{{- '<｜Assistant｜>' + (m.content or '') }}
{%- for call in m.tool_calls %}
{{- '<｜tool▁calls▁begin｜>' if loop.first else '\\n' }}
{{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' }}
{{- call.function.arguments + '\\n```<｜tool▁call▁end｜>' }}{% endfor %}
{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
{%- elif m.role == 'assistant' %}
{%- set content = m.content.split('</think>')[-1] if '</think>' in m.content else m.content %}
{{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}
{%- elif m.role == 'tool' %}{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}
"""

GLM = """\
{{- '[gMASK]<sop>' }}
{%- if tools %}{{ '<|system|>\\n<tools>\\n' }}
{%- for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}{{ '</tools>' }}{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<|user|>\\n' + m.content }}
{%- elif m.role == 'assistant' %}{{ '<|assistant|>' }}
{%- if loop.index0 > ns.last and m.reasoning_content %}{{ '\\n<think>' + m.reasoning_content.strip() + '</think>' }}
{%- else %}{{ '\\n<think></think>' }}{% endif %}
{%- if m.content and m.content.strip() %}{{ '\\n' + m.content.strip() }}{% endif %}
{%- for call in m.tool_calls or [] %}{% set call = call.function or call %}
{{- '\\n<tool_call>' + call.name }}
{%- for key, value in call.arguments.items() %}
{{- '\\n<arg_key>' + key + '</arg_key>\\n<arg_value>' }}
{{- value if value is string else value | tojson }}{{ '</arg_value>' }}{% endfor %}{{ '\\n</tool_call>' }}{% endfor %}
{%- elif m.role == 'tool' %}{{ '<|observation|>\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""

GRANITE = """\
{%- if tools %}
{{- '<|start_of_role|>tools<|end_of_role|>' + tools | tojson(indent=4) + '<|end_of_text|>\\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' and m.tool_calls %}
{{- '<|start_of_role|>assistant<|end_of_role|>' + (m.content or '') + '<|tool_call|>[' }}
{%- for call in m.tool_calls %}
{{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}' }}
{{- ', ' if not loop.last else '' }}{% endfor %}{{ ']<|end_of_text|>\\n' }}
{%- else %}
{{- '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content + '<|end_of_text|>\\n' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}
"""

PHI4_MINI = """\
{%- if tools %}{{ '<|system|>You can use tools.<|tool|>' + tools | tojson + '<|/tool|><|end|>' }}{% endif %}
{%- for m in messages %}
{%- if m.tool_calls %}{{ '<|assistant|>' }}{{ '<|tool_call|>[' }}
{%- for call in m.tool_calls %}
{{- '{"type": "function", "name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}' }}
{{- ', ' if not loop.last else '' }}{% endfor %}{{ ']<|/tool_call|><|end|>' }}
{%- else %}{{ '<|' + m.role + '|>' + (m.content or '') + '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""

SMOLLM2 = """\
{%- for m in messages %}
{%- if loop.first and m.role != 'system' %}{{ '<|im_start|>system\\nBe helpful.<|im_end|>\\n' }}{% endif %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

PYTHON_LIKE = """\
{%- if tools %}{{ '<start>tools\\n' + tools | tojson + '<end>\\n' }}{% endif %}
{%- for m in messages %}{{ '<start>' + m.role + '\\n' + (m.content or '') }}
{%- for call in m.tool_calls or [] %}{{ 'call:' + call.function.name + '{' }}
{%- for key, value in call.function.arguments | items %}{{ key + ':<|"|>' + value + '<|"|>' }}{% endfor %}{{ '}' }}
{%- endfor %}{{ '<end>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start>assistant\\n' }}{% endif %}
"""

MINIMAX = """\
{%- if tools %}{{ '[s]' + tools | tojson + '[e]' }}{% endif %}
{%- for m in messages %}{{ '[b]' + m.role + '\\n' + (m.content or '') }}
{%- if m.tool_calls %}{{ '<mm:calls>' }}
{%- for call in m.tool_calls %}{{ '\\n<invoke name="' + call.function.name + '">' }}
{%- for key, value in call.function.arguments | items %}{{ '\\n<parameter name="' + key + '">' }}
{{- value if value is string else value | tojson }}{{ '</parameter>' }}{% endfor %}{{ '\\n</invoke>' }}{% endfor %}
{{- '\\n</mm:calls>' }}{% endif %}{{ '[e]' }}{% endfor %}
{%- if add_generation_prompt %}{{ '[b]assistant\\n' }}{% endif %}
"""

NUMBERED = """\
{%- if tools %}{{ '<|tools|>' + tools | tojson }}{% endif %}
{%- for m in messages %}{{ '<|' + m.role + '|>' + (m.content or '') }}
{%- if m.tool_calls %}{{ '<|calls_begin|>' }}
{%- for call in m.tool_calls %}{{ '<|call|>functions.' + call.function.name + ':' + loop.index0 | string + '<|args|>' }}
{{- call.function.arguments | tojson + '<|call_end|>' }}{% endfor %}{{ '<|calls_end|>' }}{% endif %}
{{- '<|end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""

CHANNELS = """\
{%- if tools %}{{ '<|start|>developer<|message|>' + tools | tojson + '<|end|>' }}{% endif %}
{%- set ns = namespace(name='') %}
{%- for m in messages %}
{%- if m.role == 'assistant' and m.tool_calls %}{% set call = m.tool_calls[0].function %}{% set ns.name = call.name %}
{%- if m.content and m.thinking %}{{ raise_exception('content or thinking in front of a call, not both') }}{% endif %}
{%- if m.content or m.thinking %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + (m.content or m.thinking) + '<|end|>' }}{% endif %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson + '<|call|>' }}
{%- elif m.role == 'assistant' %}
{%- if '<|channel|>final<|message|>' in m.content %}{{ raise_exception('a header in the content') }}{% endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
{%- elif m.role == 'tool' %}
{{- '<|start|>functions.' + ns.name + ' to=assistant<|channel|>commentary<|message|>' + m.content | tojson }}
{{- '<|end|>' }}
{%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}
"""

SWITCHED = (
    SMOLLM2
    + """\
{%- if add_generation_prompt and enable_thinking is defined and not enable_thinking %}
{{- '<think>\\n\\n</think>\\n' }}{% endif %}
"""
)

TEMPLATES = {
    "minimax": MINIMAX,
    "numbered": NUMBERED,
    "channels": CHANNELS,
    "switched": SWITCHED,
    "hermes": HERMES,
    "qwen3": QWEN3,
    "qwen3-coder": QWEN3_CODER,
    "llama3": LLAMA3,
    "mistral-v3": MISTRAL_V3,
    "mistral-v11": MISTRAL_V11,
    "deepseek": DEEPSEEK,
    "glm": GLM,
    "granite": GRANITE,
    "phi4-mini": PHI4_MINI,
    "smollm2": SMOLLM2,
    "python-like": PYTHON_LIKE,
    "lfm2": LFM2,
    "lfm2-unshown": LFM2_UNSHOWN,
    "qwen3.5": QWEN35,
    "gemma4": GEMMA4,
    "escaped": ESCAPED,
}
CALLING = [
    name for name in TEMPLATES if name not in ("smollm2", "switched", "python-like", "channels")
]

# Text before and after a message's calls.
ENDS = {
    **dict.fromkeys(
        ("hermes", "qwen3", "qwen3-coder", "glm", "qwen3.5"), ("<tool_call>", "</tool_call>")
    ),
    "llama3": ("{", "}"),
    "mistral-v3": ("[TOOL_CALLS]", "]"),
    "mistral-v11": ("[TOOL_CALLS]", "}"),
    "deepseek": ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    "granite": ("<|tool_call|>", "]"),
    "phi4-mini": ("<|tool_call|>", "<|/tool_call|>"),
    "minimax": ("<mm:calls>", "</mm:calls>"),
    "numbered": ("<|calls_begin|>", "<|calls_end|>"),
    "lfm2": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "gemma4": ("<|tool_call>", "<tool_call|>"),
    "escaped": ("<start_function_call>", "<end_function_call>"),
    "lfm2-unshown": ("<|tool_call_start|>", "<|tool_call_end|>"),
}
# The markers above and other texts that are special tokens if a vocabulary has them.
MARKERS = (
    *(
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "[CALL_ID]",
        "[ARGS]",
        "<｜tool▁calls▁begin｜>",
        "<|args|>",
    ),
    *("<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
    *("<arg_key>", "</arg_key>"),
    *(
        "<arg_value>",
        "</arg_value>",
        "<|tool_call|>",
        "<|/tool_call|>",
        "<think>",
        "</think>",
        "<|calls_end|>",
    ),
    *(
        "<|tool_call_start|>",
        "<|tool_call_end|>",
        "<|tool_call>",
        "<tool_call|>",
        '<|"|>',
        "<|channel>",
        "<channel|>",
    ),
)
TOOLS = [
    Tool(
        "get_weather",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer", "minimum": 0, "maximum": 99},
                "unit": {"type": "string", "enum": ["c", "f"]},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    ),
    Tool(
        "get",
        {
            "type": "object",
            "properties": {"at": {"$ref": "#/$defs/point"}},
            "required": ["at"],
            "additionalProperties": False,
            "$defs": {
                "point": {
                    "type": "object",
                    "properties": {"x": {"type": "integer", "minimum": -9, "maximum": 9}},
                    "required": ["x"],
                    "additionalProperties": False,
                }
            },
        },
    ),
    Tool("ping", {"type": "object", "properties": {}, "additionalProperties": False}),
]
Calls = list[tuple[str, dict[str, Any]]]


def written(name: str, calls: Calls) -> str:
    """Render a message's calls as the family's template does."""
    given = [
        {
            "id": f"idid{number:05}",
            "type": "function",
            "function": {
                "name": tool,
                "arguments": json.dumps(arguments) if name == "deepseek" else arguments,
            },
        }
        for number, (tool, arguments) in enumerate(calls)
    ]
    messages = [
        {"role": "user", "content": "What was asked"},
        {"role": "assistant", "content": "", "tool_calls": given},
    ]
    messages = (
        messages if format_of(name).shows_calls else with_calls_written(messages, KEYWORD_CALLS)
    )
    # The arguments may contain the question's text too, after its first occurrence.
    text = template(name).render(messages, add_generation_prompt=False)
    text = text.partition("What was asked")[2]
    begin, end = ENDS[name]
    return text[text.index(begin) : text.rindex(end) + len(end)]


@functools.cache
def template(name: str) -> ChatTemplate:
    return ChatTemplate(
        TEMPLATES[name], model_name=name, variables={"bos_token": "<s>", "eos_token": "</s>"}
    )


@functools.cache
def format_of(name: str) -> TurnFormat:
    return turn_format(template(name).render)
