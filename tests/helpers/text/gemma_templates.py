"""Chat templates that write calls in the Gemma tool-call format of Gemma 4 and FunctionGemma,
reduced to the relevant parts.
"""

from __future__ import annotations

_VALUE = """\
{%- macro value_of(value) -%}
{%- if value is none %}null{% elif value is string %}{{ 'QUOTE' + value + 'QUOTE' }}
{%- elif value is boolean %}{{ 'true' if value else 'false' }}
{%- elif value is mapping %}{{ '{' }}
{%- for key, one in value | dictsort %}{{ key }}:{{ value_of(one) }}{{ ',' if not loop.last else '' }}{% endfor %}
{{- '}' }}
{%- elif value is sequence %}{{ '[' }}
{%- for one in value %}{{ value_of(one) }}{{ ',' if not loop.last else '' }}{% endfor %}{{ ']' }}
{%- else %}{{ value }}{% endif %}
{%- endmacro -%}
"""

GEMMA4 = (
    _VALUE.replace("QUOTE", '<|"|>')
    + """\
{{- bos_token }}
{%- if tools or enable_thinking %}{{ '<|turn>system\\n' }}{{ '<|think|>\\n' if enable_thinking else '' }}
{%- for tool in tools or [] %}{{ '<|tool>declaration:' + tool.function.name + value_of(tool.function) + '<tool|>' }}
{%- endfor %}{{ '<turn|>\\n' }}{% endif %}
{%- set ns = namespace(last=-1, role='', result=false) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{% if m.role != 'tool' %}{% set at = loop.index0 %}{% set ns.result = false %}
{%- if not (m.role == 'assistant' and ns.role == 'assistant') %}
{{- '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}{% endif %}
{%- if m.reasoning_content and at > ns.last %}
{{- '<|channel>thought\\n' + m.reasoning_content + '\\n<channel|>' }}{% endif %}
{%- for call in m.tool_calls or [] %}
{%- set given = call.function.arguments %}
{{- '<|tool_call>call:' + call.function.name }}
{{- '{' + given + '}' if given is string else value_of(given) }}{{ '<tool_call|>' }}{% endfor %}
{%- set behind = namespace(tools=true) %}
{%- for r in messages[at + 1:] if m.tool_calls %}
{%- if r.role != 'tool' %}{% set behind.tools = false %}{% elif behind.tools %}{% set ns.result = true %}
{%- set of = namespace(name='unknown') %}
{%- for call in m.tool_calls if call.id == r.tool_call_id %}{% set of.name = call.function.name %}{% endfor %}
{{- '<|tool_response>response:' + of.name + '{value:' + value_of(r.content) + '}<tool_response|>' }}
{%- endif %}{% endfor %}
{{- (m.content or '') | trim }}
{%- if m.tool_calls and not ns.result %}{{ '<|tool_response>' }}{% set ns.result = true %}
{%- elif not ns.result %}{{ '<turn|>\\n' }}{% endif %}
{%- set ns.role = m.role %}{% endif %}{% endfor %}
{%- if add_generation_prompt and not ns.result %}{{ '<|turn>model\\n' }}{% endif %}
"""
)

ESCAPED = (
    _VALUE.replace("QUOTE", "<escape>")
    + """\
{{- bos_token }}
{%- if tools %}{{ '<start_of_turn>developer\\n' }}
{%- for tool in tools %}{{ '<start_function_declaration>' + value_of(tool.function) + '<end_function_declaration>' }}
{%- endfor %}{{ '<end_of_turn>\\n' }}{% endif %}
{%- for m in messages %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + (m.content or '') }}
{%- for call in m.tool_calls or [] %}
{{- '<start_function_call>call:' + call.function.name + value_of(call.function.arguments) + '<end_function_call>' }}
{%- endfor %}{{ '<end_of_turn>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
"""
)
