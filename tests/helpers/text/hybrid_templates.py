"""Chat templates that write turns as LFM2.5, LFM2 and Qwen3.5 do, reduced to the relevant parts."""

from __future__ import annotations

LFM2 = """\
{%- macro value_of(value) -%}
{%- if value is string %}{{ "'" + value + "'" }}{% elif value is mapping %}{{ value | tojson }}
{%- else %}{{ value | string }}{% endif %}{% endmacro -%}
{{- bos_token }}
{%- if tools %}{{ '<|im_start|>system\\nList of tools: ' + tools | tojson + '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + (m.content or '') }}
{%- if m.tool_calls %}{{ '<|tool_call_start|>[' }}
{%- for call in m.tool_calls %}{{ call.function.name + '(' }}
{%- for key, value in call.function.arguments.items() %}{{ key + '=' + value_of(value) }}
{{- ', ' if not loop.last else '' }}{% endfor %}{{ ')' }}{{ ', ' if not loop.last else '' }}{% endfor %}
{{- ']<|tool_call_end|>' }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

LFM2_UNSHOWN = """\
{{- bos_token }}
{%- set words = messages[0].content if messages[0].role == 'system' else '' %}
{%- if tools %}{% set words = words + ('\\n' if words else '') + 'List of tools: <|tool_list_start|>' %}
{%- set words = words + tools | tojson + '<|tool_list_end|>' %}{% endif %}
{%- if words %}{{ '<|im_start|>system\\n' + words + '<|im_end|>\\n' }}{% endif %}
{%- for m in messages if m.role != 'system' %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- set content = m.content if m.content is string else m.content | tojson %}
{{- '<|tool_response_start|>' + content + '<|tool_response_end|>' if m.role == 'tool' else content }}
{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

QWEN35 = """\
{%- if tools %}{{ '<|im_start|>system\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}{{ '\\n</tools><|im_end|>\\n' }}{% endif %}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}
{%- set content = (m.content or '') | trim %}
{%- if loop.index0 > ns.last %}{{ '<think>\\n' + (m.reasoning_content or '') | trim + '\\n</think>\\n\\n' }}{% endif %}
{{- content }}
{%- for call in m.tool_calls or [] %}{% set call = call.function or call %}
{%- if not loop.first %}{{ '\\n' }}{% elif content %}{{ '\\n\\n' }}{% endif %}
{{- '<tool_call>\\n<function=' + call.name + '>\\n' }}
{%- for key, value in call.arguments | items %}{{ '<parameter=' + key + '>\\n' }}
{{- value if value is string else value | tojson }}{{ '\\n</parameter>\\n' }}{% endfor %}
{{- '</function>\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}
{%- else %}{{ '<think>\\n' }}{% endif %}{% endif %}
"""
