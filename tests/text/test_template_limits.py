"""Tests of the bounds of chat templates in steps, time, output and memory. Within them templates
render as in Jinja.
"""

import time
import tracemalloc

import jinja2
import jinja2.sandbox
import pytest

from helpers.text.byte_level import byte_level
from helpers.text.chat_templates import TEMPLATES, TOOLS, template
from kvboost_edge.errors import ModelFormatError, RequestError
from kvboost_edge.text import template_budget
from kvboost_edge.text.chat_template import ChatTemplate
from kvboost_edge.text.codec import FastCodec
from kvboost_edge.text.template_budget import MAX_CHARS, MAX_SECONDS
from kvboost_edge.text.template_sandbox import MAX_SOURCE
from kvboost_edge.text.tokenizer import Tokenizer
from kvboost_edge.text.turns import format_detection

MESSAGES = [{"role": "user", "content": "Hello <b>"}]


def make(source):
    return ChatTemplate(source, model_name="tiny", variables={})


def nested(kind, then):
    """Return a template with a value that contains itself twice, repeatedly: small in memory, but
    endless to traverse.
    """
    pair = "[ns.{0}, ns.{0}]" if kind == "list" else "(ns.{0}, ns.{0})"
    grow = "".join(f"{{% set ns.{name} = {pair.format(name)} %}}" for name in "ab")
    return (
        "{% set ns = namespace(a=(1,), b=(1,)) %}{% for i in range(26) %}"
        + grow
        + "{% endfor %}"
        + then
    )


LOOPS = {
    "nested loops": "{% for a in range(2000) %}{% for b in range(2000) %}{% endfor %}{% endfor %}",
    "loops that pass nothing": (
        "{% for a in range(2000) %}{% for b in range(2000) if false %}{% endfor %}{% endfor %}"
    ),
    "recursion": (
        "{% macro m(n) %}{% for i in range(9) %}{% if n %}{{ m(n - 1) }}{% endif %}{% endfor %}"
        "{% endmacro %}{{ m(9) }}"
    ),
    "blocks": (
        "{% for i in range(2000) %}{% block b scoped %}{% for j in range(2000) %}{% endfor %}"
        "{% endblock %}{% endfor %}"
    ),
    "filters": "{% for i in range(99) %}{{ range(99999)|map('string')|list|length }}{% endfor %}",
}
TEXTS = {
    "repeated": "{{ ('a' * 20000000)|length }}",
    "repeated by a number first": "{{ (20000000 * 'a')|length }}",
    "doubled": (
        "{% set ns = namespace(a='ab') %}{% for i in range(25) %}{% set ns.a = ns.a + ns.a %}"
        "{% endfor %}{{ ns.a|length }}"
    ),
    "doubled with ~": (
        "{% set ns = namespace(a='ab') %}{% for i in range(25) %}{% set ns.a = ns.a ~ ns.a %}"
        "{% endfor %}{{ ns.a|length }}"
    ),
    "center": "{{ 'a'|center(20000000)|length }}",
    "method center": "{{ 'a'.center(20000000)|length }}",
    "method zfill": "{{ 'a'.zfill(20000000)|length }}",
    "method expandtabs": "{{ '\t'.expandtabs(tabsize=20000000)|length }}",
    "indent": "{{ ('a\n' * 5000)|indent(5000)|length }}",
    "indent by a text": "{{ ('a\n' * 5000)|indent('b' * 5000)|length }}",
    "replace": "{{ ('a' * 5000)|replace('a', 'b' * 5000)|length }}",
    "method replace": "{{ ('a' * 5000).replace('', 'b' * 5000)|length }}",
    "join": "{{ range(5000)|join('b' * 5000)|length }}",
    "join of a generator": "{{ range(5000)|map('string')|join('b' * 5000)|length }}",
    "method join": "{{ ('b' * 5000).join(['a'] * 5000)|length }}",
    "format width": "{{ '{:>20000000}'.format('a')|length }}",
    "format width in a field": "{{ '{:{}}'.format('a', 20000000)|length }}",
    "format_map": "{{ '{a:>20000000}'.format_map({'a': 1})|length }}",
    "format fields": "{{ ('{0}' * 5000).format('a' * 5000)|length }}",
    "percent width": "{{ ('%20000000s' % 'a')|length }}",
    "percent star": "{{ ('%*d' % (20000000, 1))|length }}",
    "percent name": "{{ ('%(a)20000000s' % {'a': 1})|length }}",
    "percent nested name": "{{ ('%((a))20000000s' % {'(a)': 1})|length }}",
    "percent fields": "{{ (('%(a)s' * 5000) % {'a': 'a' * 5000})|length }}",
    "filter format": "{{ '%20000000s'|format('a')|length }}",
    "tojson indent": "{{ [1]|tojson(indent=20000000)|length }}",
    "tojson separators": "{{ (range(5000)|list)|tojson(separators=('x' * 5000, ':'))|length }}",
    "written": "{% for i in range(20) %}{{ 'a' * 1000000 }}{% endfor %}",
    "written into a variable": (
        "{% set x = 'a' * 1000000 %}{% set y %}{% for i in range(99) %}{{ x }}{% endfor %}"
        "{% endset %}{{ y|length }}"
    ),
    "text of the template": (
        "{% set y %}{% for i in range(20000) %}{% if true %}" + "z" * 5000 + "{% endif %}"
        "{% endfor %}{% endset %}{{ y|length }}"
    ),
    "date": "{{ strftime_now('%Y' * 5000)|length }}",
    "escaped": "{{ ('&' * 4000000)|escape|length }}",
}
LISTS = {
    "repeated": "{{ ([1] * 300000)|length }}",
    "characters": "{{ ('a' * 300000)|list|length }}",
    "split": "{{ ('a ' * 300000).split()|length }}",
    "split at": "{{ ('a,' * 300000).split(sep=',')|length }}",
    "splitlines": "{{ ('a\n' * 300000).splitlines()|length }}",
    "batch": "{{ [1]|batch(300000, 'x')|list|length }}",
    "slice": "{{ [1]|slice(300000)|list|length }}",
    "sum": "{{ ([[1] * 1000] * 1000)|sum(start=[])|length }}",
}
NESTED = {
    "written": nested("list", "{{ ns.a }}"),
    "tojson": nested("list", "{{ ns.a|tojson|length }}"),
    "equal": nested("list", "{{ ns.a == ns.b }}"),
    "less": nested("list", "{{ ns.a < ns.b }}"),
    "in": nested("list", "{{ ns.a in [ns.b] }}"),
    "test in": nested("list", "{{ ns.a is in [ns.b] }}"),
    "index": nested("list", "{{ [ns.b].index(ns.a) }}"),
    "changed": nested("list", "{% for x in [ns.a, ns.b] %}{{ loop.changed(x) }}{% endfor %}"),
    "concatenated": nested("list", "{{ ('x' ~ ns.a)|length }}"),
    "percent": nested("list", "{{ ('%s' % [ns.a])|length }}"),
    "format": nested("list", "{{ '{}'.format(ns.a)|length }}"),
    "join": nested("list", "{{ ns.a|join|length }}"),
    "key": nested("tuple", "{{ {ns.a: 1}|length }}"),
    "looked up": nested("tuple", "{{ {1: 1}[ns.a] }}"),
    "get": nested("tuple", "{{ {1: 1}.get(ns.a) }}"),
    "unique": nested("tuple", "{{ [ns.a]|unique|list|length }}"),
    "namespace": nested("list", "{{ (ns ~ '')|length }}"),
    "dictsort by value": nested("list", "{{ {1: ns.a, 2: ns.b}|dictsort(by='value')|length }}"),
}
NUMBERS = {
    "power": "{{ (2 ** 100000) % 7 }}",
    "square": (
        "{% set ns = namespace(a=7) %}{% for i in range(9) %}{% set ns.a = ns.a * ns.a %}"
        "{% endfor %}{{ ns.a }}"
    ),
    "round": "{{ 1.5|round(400, 'ceil') }}",
}
SLOW = {
    "wordwrap": "{{ ('a' * 5000)|wordwrap(1)|length }}",
    "urlize": "{{ ('a.' * 5000)|urlize|length }}",
    "striptags": "{{ ('<!---->' * 5000)|striptags|length }}",
    "pprint": "{{ (range(9999)|list)|pprint|length }}",
}
BOMBS = {
    f"{kind}: {name}": source
    for kind, sources in {
        "loop": LOOPS,
        "text": TEXTS,
        "list": LISTS,
        "nested": NESTED,
        "number": NUMBERS,
        "slow": SLOW,
    }.items()
    for name, source in sources.items()
}


@pytest.mark.parametrize("name", BOMBS)
@pytest.mark.some(2)
def test_a_template_beyond_its_limits_is_refused(name):
    started = time.thread_time()
    with pytest.raises(RequestError, match="chat template of tiny exceeded its limits: it "):
        make(BOMBS[name]).render(MESSAGES)
    assert time.thread_time() - started < 2


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a'.encode() }}",
        "{{ 'a'.translate({97: 'b'}) }}",
        "{{ (1).to_bytes(9, 'big') }}",
        "{{ (''|safe).striptags() }}",
    ],
)
def test_unneeded_methods_are_refused(source):
    with pytest.raises(RequestError, match="tiny refused the messages: a template may not call"):
        make(source).render(MESSAGES)


@pytest.mark.parametrize("name", [name for name in TEXTS if "20000000" in TEXTS[name]])
def test_an_overlong_text_is_refused_before_it_is_built(name):
    compiled = make(TEXTS[name])
    with pytest.raises(RequestError):
        compiled.render(MESSAGES)
    tracemalloc.start()
    try:
        with pytest.raises(RequestError):
            compiled.render(MESSAGES)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1e6


KEPT = {
    "slices": "x[i:]",
    "concatenations": "x ~ i",
    "filters": "(' ' ~ x)|trim",
    "methods": "x.replace('a', 'b')",
    "lists": "[i] * 200000",
}


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.some(2)
def test_a_templates_memory_is_bounded(name):
    source = (
        "{% set x = 'a' * 4000000 %}{% set ns = namespace(l=[]) %}{% for i in range(100) %}"
        "{% set ns.l = ns.l + [VALUE] %}{% endfor %}"
    )
    compiled = make(source.replace("VALUE", KEPT[name]))
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match="it holds more than 128 MiB"):
            compiled.render(MESSAGES)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 256e6


def test_freed_texts_do_not_count():
    source = "{% set x = 'a' * 4000000 %}{% for i in range(100) %}{% set y = x ~ i %}{% endfor %}ok"
    assert make(source).render(MESSAGES) == "ok"


@pytest.mark.parametrize(
    ("seconds", "source"),
    [
        (
            MAX_SECONDS,
            "{% set x = 'a' * 9000000 %}{% set y = x ~ '' %}{% for i in range(99999) %}"
            "{% if x == y %}{% endif %}{% endfor %}",
        ),
        (0.2, "{% for i in range(99999) %}{{ range(99999)|sort|length }}{% endfor %}"),
        (
            0.2,
            "{% macro m() %}{{ varargs|length }}{% endmacro %}"
            "{% for i in range(99999) %}{{ m(*range(99999)) }}{% endfor %}",
        ),
    ],
)
@pytest.mark.some(2, 1)
def test_rendering_time_is_bounded(monkeypatch, seconds, source):
    """The default limit is one second; the cases use it or a smaller one."""
    assert MAX_SECONDS == 1
    monkeypatch.setattr(template_budget, "MAX_SECONDS", seconds)
    started = time.thread_time()
    with pytest.raises(RequestError, match=f"it takes more than {seconds:g} s"):
        make(source).render(MESSAGES)
    assert time.thread_time() - started < 2


def test_a_long_chat_is_within_the_limits():
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": f" Turn {i}. {'word ' * 90} "}
        for i in range(9_999)
    ]
    source = (
        "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
        "{% set content = m.content | trim %}{% if 'x>' in content %}"
        "{% set content = content.split('x>')[-1].lstrip('\n') %}{% endif %}"
        "{{ '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}{% endfor %}{{ ns.last }}"
    )
    expected = "".join(
        f"<|im_start|>{m['role']}\n{m['content'].strip()}<|im_end|>\n" for m in messages
    )
    assert make(source).render(messages) == expected + "9998"
    one = [{"role": "user", "content": "word " * 1_000_000}]
    assert make(source).render(one) == f"<|im_start|>user\n{'word ' * 999_999}word<|im_end|>\n0"
    assert len(one[0]["content"]) < MAX_CHARS


EXPRESSIONS = r"""
messages[0].content ~ 1 ~ none | 'a' + 'b' | [1] + [2] | (1, 2) + (3,) | 'ab' * 3 | 3 * [1]
7 // 2 | 7 % 4 | 2 ** 10 | 7 - 1.5 | 1 / 4 | -3 | 'a %s %03d' % ('b', 7) | '%(x)s' % {'x': [1]}
'%.2f%%' % 1.234 | '{} {x:>4}'.format(1, x='y') | '{a[b]}'.format_map({'a': {'b': 1}})
'a' in 'abc' | 1 in [1, 2] | 'k' in {'k': 1} | 1 not in (2, 3) | 1 < 2 <= 2 | 'b' > 'a' | [1] == [1]
'a,b'.split(',') | ' a b '.split() | 'a b c'.split(' ', 1) | 'a\nb'.splitlines() | 'x'.join(['a', 'b'])
'abc'[1:] | [1, 2, 3][::-1] | 'aXbX'.replace('X', '--') | 'a'.center(5) | '7'.zfill(3) | 'ab'.upper()
'a\tb'.expandtabs(4) | ' a '.strip() | 'abc'.startswith('a') | 'abc'.find('c') | 'aab'.count('a')
{'a': 1}.items()|list | {'b': 2}.get('b') | {'b': 2}.get('c', 3) | {'a': 1, 'b': 2}.values()|list
[1, 2, 1].index(2) | [1, 2, 1].count(1) | (2).bit_length() | (1.5).is_integer()
range(5)|sum | [[1], [2]]|sum(start=[]) | [{'n': 1}, {'n': 2}]|sum(attribute='n')
[3, 1, 2]|sort | [3, 1, 3]|unique|list | ['a', 'b']|join(', ') | [{'a': 1}]|map(attribute='a')|list
['a', 'b']|map('upper')|join | [1, 2, 3]|select('odd')|list | [1, none]|reject('none')|list
[{'r': 'u'}, {'r': 'a'}]|selectattr('r', 'equalto', 'u')|list | [{'r': 1}]|rejectattr('r', 'eq', 1)|list
[1, 2, 3]|batch(2, 0)|list | [1, 2, 3]|slice(2)|list | 'abc'|list | 'abc'|reverse | [1, 2]|last
[1, 2]|first | [1, 2]|length | {'b': 1, 'a': 2}|dictsort | {'a': 1}|items|list | 'a b'|title
[{'r': 'u', 'c': 1}]|groupby('r')|list | 'a b'|wordcount | 'a b c'|wordwrap(3) | 'abcdef'|truncate(4)
'a\nb'|indent(2) | 'a'|center(5) | 'aXb'|replace('X', '-') | '%s!'|format('a') | 'a'|default('b')
x|default('b') | 3.7|round | 3.14159|round(2) | '7'|int | '1.5'|float | -3|abs | [3, 1]|min | [3, 1]|max
'<b>'|escape | '<b>'|safe ~ '&' | ('<b>'|e) + '&' | 'a b'|urlencode | 'A'|lower | 'a'|capitalize
1000000|filesizeformat | '<b>x</b>'|striptags | {'a': 1}|xmlattr | ('x y'|attr('upper'))() | [1, 'a']|string
1 is odd | 'a' is string | x is defined | {} is mapping | 1 is in [1] | 'A' is upper | 2 is gt 1 | 1 is eq 1
{'b': {'x': 1}, 'A': 2}|dictsort | {'b': 1, 'A': 2}|dictsort(true) | {'a': 2, 'b': 1}|dictsort(by='value')
{'a': 2, 'b': 1}|dictsort(false, 'value', true) | {'b': [1], 'a': [2]}|dictsort(reverse=true)
{'a': 1}.a | {'a': 1}.b | {'a': 1}['a'] | {'items': 1}.items()|list | {'keys': 1}['keys'] | messages.a | 'a'.b
namespace(a=1).a | dict(a=1) | joiner(',')() | cycler(1, 2).next() | range(3)|list | x
""".strip()


@pytest.mark.parametrize(
    "expression", [one.strip() for line in EXPRESSIONS.splitlines() for one in line.split(" | ")]
)
def test_expressions_within_limits_equal_jinja(expression):
    plain = jinja2.sandbox.ImmutableSandboxedEnvironment()
    source = "{{ " + expression + " }}"
    expected = plain.from_string(source).render(messages=MESSAGES)
    assert make(source).render(MESSAGES) == expected


STATEMENTS = [
    "{% for a in [1, 2, 3] if a != 2 %}{{ loop.index }}{{ loop.last }}{{ a }}{% else %}none{% endfor %}",
    "{% for a in [] if a %}x{% else %}none{% endfor %}",
    "{% for a in [1, [2, [3]]] recursive %}{{ loop(a) if a is sequence else a }}{% endfor %}",
    "{% macro m(a, b=2) %}{{ a }}{{ b }}{{ varargs }}{% endmacro %}{{ m(1) }}{{ m(1, 2, 3) }}",
    "{% macro m() %}<{{ caller(1) }}>{% endmacro %}{% call(x) m() %}{{ x }}{% endcall %}",
    "{% macro m(a, b) %}{{ a }}{{ b }}{{ kwargs }}{% endmacro %}{{ m(b=1, a=2) }}{{ m(1, c=3) }}{{ m.name }}",
    "{% macro m(n) %}{{ n }}{{ m(n - 1) if n else '' }}{% endmacro %}{{ m(30) }}{{ m(2)|upper }}",
    "{% for a in 'abc' %}{{ loop.first }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.length }}{{ loop.previtem }}{{ loop.nothing }}{% endfor %}",
    "{% filter upper %}a{{ 'b' }}{% endfilter %}{% set x %}y{{ 1 }}{% endset %}{{ x }}",
    "{% set x | upper %}a{% endset %}{{ x }}{% with y = 2 %}{{ y }}{% endwith %}",
    "{% block a %}x{{ messages|length }}{% endblock %}{{ self.a() }}",
    "{% for a in 'ab' %}{% for b in range(2) %}{{ loop.changed(a) }}{{ loop.cycle(1, 2) }}{% endfor %}{% endfor %}",
    "{% autoescape true %}{{ '<b>' }}{{ '<' ~ 'b' }}<i>{% endautoescape %}{{ '<b>' }}",
    "{% if messages %}a{% elif x %}b{% else %}c{% endif %}{{ 'a' if x else 'b' }}{% raw %}{{ }}{% endraw %}",
    "{% set a, b = (1, 2) %}{{ a }}{{ b }}{% for k, v in {'x': 1}.items() %}{{ k }}{{ v }}{% endfor %}",
]


@pytest.mark.parametrize("source", STATEMENTS)
def test_statements_within_limits_equal_jinja(source):
    plain = jinja2.sandbox.ImmutableSandboxedEnvironment()
    assert make(source).render(MESSAGES) == plain.from_string(source).render(messages=MESSAGES)


@pytest.mark.parametrize("name", TEMPLATES)
def test_known_templates_render_as_in_jinja(name):
    """The expected text comes from Jinja in the same environment, without the bounds."""
    from transformers.utils.chat_template_utils import render_jinja_template

    given = {"tools": list(TOOLS_AS_JSON), "add_generation_prompt": True}
    try:
        expected = render_jinja_template(
            [MESSAGES], chat_template=TEMPLATES[name], bos_token="<s>", **given
        )[0][0]
    except jinja2.TemplateError:  # one that wants other messages
        with pytest.raises(RequestError):
            template(name).render(MESSAGES, **given)
        return
    ours = ChatTemplate(TEMPLATES[name], model_name="tiny", variables={"bos_token": "<s>"})
    assert ours.render(MESSAGES, **given) == expected


TOOLS_AS_JSON = [
    {
        "type": "function",
        "function": {"name": tool.name, "description": "It.", "parameters": tool.parameters},
    }
    for tool in TOOLS
]


@pytest.mark.parametrize(
    "source",
    [
        "x" * (MAX_SOURCE + 1),
        "{{ " + "(" * 9000 + "1" + ")" * 9000 + " }}",
        "{% for a in b %}" * 40 + "{% endfor %}" * 40,
        "{{ " + "9" * 9000 + " }}",
    ],
)
def test_a_template_that_fails_to_compile_names_the_model(source):
    with pytest.raises(ModelFormatError, match="the chat template of tiny"):
        make(source)


def test_a_template_that_fails_to_compile_is_tried_once(monkeypatch):
    codec = FastCodec(byte_level())
    tokenizer = Tokenizer(codec, name="tiny", chat_template="{% for %}")
    for _ in range(2):
        with pytest.raises(ModelFormatError, match="tiny is not valid"):
            tokenizer.apply_chat_template(MESSAGES)
        monkeypatch.setattr("kvboost_edge.text.tokenizer.ChatTemplate", None)


def test_a_long_template_error_is_truncated():
    with pytest.raises(RequestError) as caught:
        make("{{ raise_exception('no ' * 5000) }}").render(MESSAGES)
    assert 900 < len(str(caught.value)) < 1200


def test_format_detection_gives_up_on_a_slow_template(monkeypatch):
    monkeypatch.setattr(format_detection, "_SECONDS", 0.3)
    slow = make("{% for i in range(99999) %}{{ range(999)|sort|length }}{% endfor %}")
    started = time.thread_time()
    assert format_detection.turn_format(slow.render).calls is None
    assert time.thread_time() - started < 3


def test_format_detection_gives_up_on_a_verbose_template():
    wide = make("{{ '<a> ' * 1000000 }}{{ messages[0].content }}")
    started = time.thread_time()
    assert format_detection.turn_format(wide.render).reasoning is None
    assert time.thread_time() - started < 5
