"""Sandbox for chat templates that limits their access and their computation.

A template has no loader and no object that outlives the rendering. Before compilation, each loop,
macro and block gets a statement that counts a step of the rendering's budget. Expressions that
create or compare large values are wrapped in a call that measures them. Operators, filters, tests
and methods run through the functions of `template_bounds`.
"""

from __future__ import annotations

import datetime
import functools
import json
import types
from collections.abc import Callable, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils
import jinja2.visitor
from jinja2 import nodes
from markupsafe import Markup

from kvboost_edge.text.template_bounds import (
    BOUNDED_TESTS,
    OPERATORS,
    EscapeFormatter,
    Formatter,
    bounded_filter,
    bounded_test,
    check_call,
)
from kvboost_edge.text.template_budget import (
    ESCAPED,
    FEW_CHARS,
    RenderBudget,
    TemplateLimit,
    check_chars,
)

__all__ = ["MAX_SOURCE", "environment"]

MAX_SOURCE = 1 << 16
"""Maximum characters of a template. The longest known templates have 20,000."""
_FEW_ITEMS = 8  # items of a list literal; longer lists count a step
_DICT_NAMES = frozenset(dir(dict))
_LOOP_NAMES = frozenset({"depth", "depth0", "first", "index", "index0", "last", "length"})
_MAX_DATE = 1000  # characters of a date format

# Names of internal filters. They contain spaces, so no template's source can call them.
_STEP = "a step"
_PASS = "a step that is true"
_JOIN = "joined texts"
_READ = "read value"
_SEARCH = "searched value"
_MADE = "made value"
_KEY = "checked key"


class _Context(jinja2.runtime.Context):
    """Variables and budget of a rendering."""

    budget: RenderBudget

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.budget = RenderBudget()

    def derived(self, locals: dict[str, Any] | None = None) -> jinja2.runtime.Context:
        derived = super().derived(locals)
        assert isinstance(derived, _Context)
        derived.budget = self.budget
        return derived


# -- steps in the compiled template --


class _Stepping(jinja2.visitor.NodeTransformer):
    """Transformer that adds step counts and measurements to a parsed template.

    Args:
        escapes: whether parts of the template escape their output for HTML.
    """

    def __init__(self, *, escapes: bool) -> None:
        self._escapes = escapes

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        super().generic_visit(node, *args, **kwargs)
        if isinstance(node, nodes.Output) and not self._escapes:
            node.nodes = [_as_data(child) for child in node.nodes]
        _add_steps(node)
        if isinstance(node, nodes.Compare):
            _read_compared(node)
        elif isinstance(node, nodes.Concat):
            return _filtered(nodes.Tuple(node.nodes, "load", lineno=node.lineno), _JOIN, node)
        elif isinstance(node, nodes.Dict):
            for pair in node.items:
                if not isinstance(pair.key, nodes.Const):
                    pair.key = _filtered(pair.key, _KEY, node)
        if isinstance(node, nodes.Expr) and _makes_large(node):
            return _filtered(node, _MADE, node)
        return node


def _as_data(node: nodes.Expr) -> nodes.Expr:
    """Convert a constant text to template data, which is not measured at run time."""
    if isinstance(node, nodes.Const) and isinstance(node.value, str):
        return nodes.TemplateData(node.value, lineno=node.lineno)
    return node


def _add_steps(node: nodes.Node) -> None:
    """Insert a step at the start of each loop body, macro, block or branch.

    The step also counts the literal text that the body writes.
    """
    always = isinstance(node, (nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block))
    for field in ("body", "else_"):
        body = getattr(node, field, None)
        if isinstance(body, list) and (always or _chars_of(body)):
            step = _filtered(nodes.Const(_chars_of(body)), _STEP, node)
            body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
    if isinstance(node, nodes.For) and node.test is not None:
        step = _filtered(nodes.Const(0), _PASS, node)
        node.test = nodes.And(step, node.test, lineno=node.lineno)


def _read_compared(node: nodes.Compare) -> None:
    """Measure compared values, unless one of them is a short constant."""
    for operand in node.ops:
        searches = operand.op in ("in", "notin")
        if len(node.ops) == 1 and (
            _is_short(operand.expr) or (_is_short(node.expr) and not searches)
        ):
            break
        operand.expr = _read(operand.expr, _SEARCH if searches else _READ)
        node.expr = _read(node.expr, _READ)


def _makes_large(node: nodes.Expr) -> bool:
    """Return whether an expression may create a value of more than a few hundred bytes."""
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Slice)
    if isinstance(node, nodes.Tuple):
        return node.ctx == "load" and len(node.items) > _FEW_ITEMS
    return isinstance(node, (nodes.List, nodes.Dict)) and len(node.items) > _FEW_ITEMS


def _chars_of(body: Sequence[nodes.Node]) -> int:
    """Return the number of literal characters that these statements write."""
    return sum(
        len(child.data)
        for statement in body
        if isinstance(statement, nodes.Output)
        for child in statement.nodes
        if isinstance(child, nodes.TemplateData)
    )


def _is_short(node: nodes.Expr) -> bool:
    """Return whether an expression is a constant or a list of constants."""
    if isinstance(node, (nodes.List, nodes.Tuple)):
        return all(isinstance(item, nodes.Const) for item in node.items)
    return isinstance(node, nodes.Const)


def _read(node: nodes.Expr, name: str) -> nodes.Expr:
    is_read = isinstance(node, nodes.Const) or (
        isinstance(node, nodes.Filter) and node.name in (_READ, _SEARCH)
    )
    return node if is_read else _filtered(node, name, node)


def _filtered(value: nodes.Expr, name: str, place: nodes.Node) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None, lineno=place.lineno)


@jinja2.pass_context
def _step(context: _Context, num_chars: int) -> None:
    context.budget.step(num_chars)


@jinja2.pass_context
def _pass(context: _Context, _: int) -> bool:
    context.budget.step()
    return True


@jinja2.pass_context
def _join(context: _Context, values: tuple[Any, ...]) -> str:
    budget = context.budget
    budget.step()
    escapes = context.eval_ctx.autoescape
    num_chars = sum(map(budget.weigh, values))
    check_chars(num_chars * ESCAPED if escapes else num_chars)
    join = jinja2.runtime.markup_join if escapes else jinja2.runtime.str_join
    text: str = budget.keep(join(values))
    return text


@jinja2.pass_context
def _read_value(context: _Context, value: Any) -> Any:
    context.budget.step()
    context.budget.weigh(value)
    return value


@jinja2.pass_context
def _search(context: _Context, value: Any) -> Any:
    """Measure the container of an `in` test and return it.

    A dict is not measured, because the test only looks up a key.
    """
    context.budget.step()
    if isinstance(value, dict):
        return value
    context.budget.weigh(value)
    return value


@jinja2.pass_context
def _made(context: _Context, value: Any) -> Any:
    context.budget.step()
    return context.budget.keep(value)


@jinja2.pass_context
def _key(context: _Context, key: Any) -> Any:
    """Measure a dict key and return it, because hashing may read all its content."""
    context.budget.weigh(key)
    return key


@jinja2.pass_context
def _written(context: _Context, value: Any) -> str:
    """Convert an output value to text and count its characters."""
    budget = context.budget
    if type(value) is not str:
        budget.weigh(value)
        value = value if isinstance(value, str) else str(value)
    num_chars = len(value)
    if num_chars > FEW_CHARS:
        check_chars(num_chars)
    budget.write(num_chars * ESCAPED if context.eval_ctx.autoescape else num_chars)
    text: str = value
    return text


# -- filters and functions --


@jinja2.pass_context
def _sum(context: _Context, values: Any, attribute: Any = None, start: Any = 0) -> Any:
    """Add up values with the limited `+` operator, because the values may be lists."""
    if attribute is not None:
        values = context.environment.call_filter(
            "map", values, kwargs={"attribute": attribute}, context=context
        )
    for value in values:
        start = context.environment.call_binop(context, "+", start, value)  # type: ignore[attr-defined]
    return start


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's filter escapes HTML characters, which would change the prompt.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace, which additionally rejects names with a leading underscore."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a template may not set {name!r} on a namespace")
        super().__setitem__(name, value)


def _make_namespace(*args: Any, **kwargs: Any) -> _Namespace:
    names = dict(*args, **kwargs)
    for name in names:
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a template may not set {name!r} on a namespace")
    return _Namespace(names)


def _make_dict(*args: Any, **kwargs: Any) -> dict[str, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    if len(format) > _MAX_DATE:
        raise TemplateLimit(f"it uses a date format of more than {_MAX_DATE} characters")
    return datetime.datetime.now().strftime(format)


def _lipsum(*args: Any, **kwargs: Any) -> None:
    raise jinja2.TemplateError("lipsum() is not available in chat templates")


class _GenerationTag(jinja2.ext.Extension):
    """The tag `{% generation %}...{% endgeneration %}`, which marks model output for training.

    Its content is rendered unchanged.
    """

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration is an instance-typed set

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _call_macro(
    context: jinja2.runtime.Context,
    macro: jinja2.runtime.Macro,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call a macro as `Context.call` does, without its checks of the kind of callable."""
    kwargs.pop("_block_vars", None)
    kwargs.pop("_loop_vars", None)
    try:
        return macro(context.eval_ctx, *args, **kwargs)
    except StopIteration:
        return context.environment.undefined("a macro raised StopIteration")


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Environment that raises an error for unsafe attributes, where jinja2 would write nothing."""

    context_class = _Context
    intercepted_binops = frozenset(OPERATORS)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        escapes = template.find(nodes.EvalContextModifier) is not None
        _Stepping(escapes=escapes).visit(template)
        template.set_environment(self)
        return template

    def getattr(self, obj: Any, attribute: str) -> Any:
        # Fast paths with the results of Jinja's method, for the lookups of most templates.
        if type(obj) is dict and attribute not in _DICT_NAMES:
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        if type(obj) is jinja2.runtime.LoopContext and attribute in _LOOP_NAMES:
            try:
                return getattr(obj, attribute)
            except AttributeError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        raise jinja2.exceptions.SecurityError(
            f"access to {attribute!r} of a {type(obj).__name__} is unsafe"
        )

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, (tuple, frozenset)):
            RenderBudget().weigh(argument)
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if not isinstance(value, (types.BuiltinMethodType, types.MethodType)):
            return None
        owner = value.__self__
        name = value.__name__
        if not isinstance(owner, str) or name not in ("format", "format_map"):
            return None
        formatter = (
            EscapeFormatter(self, escape=owner.escape)
            if isinstance(owner, Markup)
            else Formatter(self)
        )

        def format(*args: Any, **kwargs: Any) -> str:
            if name == "format_map":
                (kwargs,) = args
                args = ()
            return type(owner)(formatter.vformat(owner, args, kwargs))

        return format

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        budget: RenderBudget = context.budget  # type: ignore[attr-defined]
        budget.step()
        if type(left) is str and type(right) is str and operator == "+":
            num_chars = len(left) + len(right)
            if num_chars < FEW_CHARS:
                return left + right
        return budget.keep(OPERATORS[operator](budget, left, right))

    def call(
        __self,  # noqa: N805 - a template's keywords may have any name
        __context: jinja2.runtime.Context,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        budget: RenderBudget = __context.budget  # type: ignore[attr-defined]
        budget.step()
        budget.read(len(args))
        if type(__obj) is jinja2.runtime.Macro:
            return budget.keep(_call_macro(__context, __obj, args, kwargs))
        args = check_call(budget, __obj, args, kwargs)
        return budget.keep(super().call(__context, __obj, *args, **kwargs))


@functools.cache
def environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Return the cached environment that compiles all chat templates."""
    made = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
        finalize=_written,
    )
    made.filters.update(tojson=_tojson, sum=_sum)
    for name, function in made.filters.items():
        made.filters[name] = bounded_filter(name, function)
    for name in BOUNDED_TESTS:
        made.tests[name] = bounded_test(name, made.tests[name])
    made.filters |= {
        _STEP: _step,
        _PASS: _pass,
        _JOIN: _join,
        _READ: _read_value,
        _SEARCH: _search,
        _MADE: _made,
        _KEY: _key,
    }
    made.globals.update(
        raise_exception=_raise_exception,
        strftime_now=_strftime_now,
        dict=_make_dict,
        namespace=_make_namespace,
        lipsum=_lipsum,
    )
    return made
