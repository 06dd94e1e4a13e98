"""Tests of chat templates: they render as in transformers and cannot leave the sandbox."""

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from kvboost_edge.errors import ModelFormatError, RequestError
from kvboost_edge.text.chat_template import ChatTemplate

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Grüße <b> & 'quotes'"},
    {"role": "assistant", "content": "Hi"},
    {"role": "user", "content": [{"type": "text", "text": "part"}]},
]
TEMPLATES = {
    "chatml": (
        "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\\n' + (m['content'] if "
        "m.content is string else m.content[0].text) + '<|im_end|>' + '\\n'}}{% endfor %}{% if "
        "add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "bos, namespace and loop controls": (
        "{{ bos_token }}\n{% set ns = namespace(last='') %}\n"
        "  {% for m in messages %}\n{% if loop.index > 2 %}{% break %}{% endif %}\n{% set "
        "ns.last = m.role %}\n"
        "{{ m.content | trim }}\n{% endfor %}\n{{ ns.last }}{{ eos_token }}"
    ),
    "tojson": "{{ messages | tojson }}|{{ messages[1] | tojson(indent=2) }}|"
    "{{ {'b': 1, 'a': '<é>'} | tojson(sort_keys=true) }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.role }};{% endgeneration %}{% endfor %}",
    "tools": (
        "{% if tools %}{{ tools[0].function.name }}{% endif %}{{ extra | default('none') }}{{ "
        "dict(a=1) }}"
    ),
}


def make(source):
    return ChatTemplate(
        source, model_name="tiny", variables={"bos_token": "<s>", "eos_token": "</s>"}
    )


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False])
def test_rendered_chats_equal_transformers(name, prompt):
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    truth, _ = render_jinja_template(
        [MESSAGES],
        tools=tools,
        chat_template=TEMPLATES[name],
        add_generation_prompt=prompt,
        bos_token="<s>",
        eos_token="</s>",
        extra="more",
    )
    ours = make(TEMPLATES[name]).render(
        MESSAGES, tools=tools, add_generation_prompt=prompt, variables={"extra": "more"}
    )
    assert ours == truth[0]


@pytest.mark.parametrize(
    "name",
    [
        *(
            "self",
            "messages",
            "tools",
            "add_generation_prompt",
            "bos_token",
            "unknown_token",
            "loop",
            "caller",
        ),
        *(
            "range",
            "namespace",
            "raise_exception",
            "strftime_now",
            "dict",
            "lipsum",
            "_private",
            "a b",
            "",
        ),
    ],
)
def test_reserved_variable_names_are_refused(name):
    with pytest.raises(RequestError, match="reserved name"):
        make("{{ messages }}").render(MESSAGES, variables={name: 1})


def test_parameter_names_may_be_variables():
    source = "{{ source }}{{ variables }}{{ template_name }}{{ environment }}{{ args }}"
    names = ("source", "variables", "template_name", "environment", "args")
    assert make(source).render(MESSAGES, variables=dict.fromkeys(names, "v")) == "vvvvv"


def test_strftime_now_returns_the_date():
    assert len(make("{{ strftime_now('%Y-%m-%d') }}").render(MESSAGES)) == 10


REFUSED = [
    "{{ ''.__class__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__'].mro() }}",
    "{{ (''|attr('__class__')).mro() }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='x') }}",
    "{{ strftime_now.__globals__['datetime'] }}",
    "{{ self.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% set ns = namespace(__class__=1) %}{{ ns }}",
    "{% set ns = namespace() %}{% set ns.__class__ = dict %}{{ ns }}",
    "{{ range(100000000) | list }}",
    "{{ raise_exception('roles must alternate') }}",
    "{{ 1 // 0 }}",
    "{{ messages[99].content.x.y }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
]


@pytest.mark.parametrize("source", REFUSED)
def test_template_attacks_and_failures_are_request_errors(source):
    before = [dict(message) for message in MESSAGES]
    with pytest.raises(RequestError, match="tiny"):
        make(source).render(MESSAGES)
    assert before == MESSAGES


def test_messages_are_copied():
    class Sly(str):
        secret = "leaked"

    assert (
        make("{{ messages[0].content.secret }}|").render([{"role": "user", "content": Sly("x")}])
        == "|"
    )


def test_broken_template_names_the_model():
    with pytest.raises(ModelFormatError, match="tiny"):
        make("{% for %}")


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hello",
        {"role": "user", "content": "x"},
        ["hello"],
        [{"content": "x"}],
        [{"role": 3, "content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": [{"type": object()}]}],
        None,
    ],
)
def test_invalid_messages_are_refused(messages):
    with pytest.raises(RequestError):
        make("{{ messages }}").render(messages)


def test_deep_messages_are_refused():
    deep = "x"
    for _ in range(200):
        deep = [deep]
    with pytest.raises(RequestError, match="nested"):
        make("{{ messages }}").render([{"role": "user", "content": deep}])
