"""Limits for the operators, methods, filters and tests that a chat template calls.

Each function measures its arguments and rejects a call whose result would be too large.
"""

from __future__ import annotations

import operator
import re
import string
import types
from collections.abc import Callable
from typing import Any

import jinja2
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils
from markupsafe import Markup

from kvboost_edge.text.template_budget import (
    ESCAPED,
    MAX_CHARS,
    MAX_ITEMS,
    RenderBudget,
    TemplateLimit,
    check_chars,
    check_items,
    parts_of,
)

__all__ = [
    "BOUNDED_TESTS",
    "OPERATORS",
    "EscapeFormatter",
    "Formatter",
    "bounded_filter",
    "bounded_test",
    "check_call",
]

_MAX_FORMAT = 1 << 16  # characters of a format string
_MAX_SLOW = 1 << 12  # characters of input to filters that take quadratic time
_MAX_INDENT = 32
_MAX_BITS = 64  # bits of an integer
_MAX_DIGITS = 300  # decimal places that a number is rounded to


# -- operators --


def _add(budget: RenderBudget, left: Any, right: Any) -> Any:
    if type(left) is str and type(right) is str:
        check_chars(len(left) + len(right))
    elif isinstance(left, str) and isinstance(right, str):
        check_chars((len(left) + len(right)) * _factor(left, right))
    elif isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        check_items(len(left) + len(right))
    else:
        _check_numbers(left, right)
    return left + right


def _multiply(budget: RenderBudget, left: Any, right: Any) -> Any:
    for value, count in ((left, right), (right, left)):
        if isinstance(value, str) and isinstance(count, int):
            check_chars(len(value) * max(count, 0))
        elif isinstance(value, (list, tuple)) and isinstance(count, int):
            check_items(len(value) * max(count, 0))
    _check_numbers(left, right)
    return left * right


def _power(budget: RenderBudget, left: Any, right: Any) -> Any:
    _check_numbers(left, right)
    if (
        isinstance(left, int)
        and isinstance(right, int)
        and left.bit_length() * right > 16 * _MAX_BITS
    ):
        raise TemplateLimit(f"it computes a power of more than {16 * _MAX_BITS} bits")
    return left**right


def _modulo(budget: RenderBudget, left: Any, right: Any) -> Any:
    if isinstance(left, str):
        _check_percent(budget, left, right)
    else:
        _check_numbers(left, right)
    return left % right


def _subtract(budget: RenderBudget, left: Any, right: Any) -> Any:
    budget.weigh(left)
    budget.weigh(right)
    _check_numbers(left, right)
    return left - right


def _divided(divide: Callable[[Any, Any], Any]) -> Callable[[RenderBudget, Any, Any], Any]:
    def apply(budget: RenderBudget, left: Any, right: Any) -> Any:
        _check_numbers(left, right)
        return divide(left, right)

    return apply


OPERATORS: dict[str, Callable[[RenderBudget, Any, Any], Any]] = {
    "+": _add,
    "*": _multiply,
    "**": _power,
    "%": _modulo,
    "-": _subtract,
    "/": _divided(operator.truediv),
    "//": _divided(operator.floordiv),
}


def _check_numbers(*values: Any) -> None:
    for value in values:
        if isinstance(value, int) and value.bit_length() > _MAX_BITS:
            raise TemplateLimit(f"it calculates with numbers of more than {_MAX_BITS} bits")


def _factor(*texts: Any) -> int:
    """Return how many characters one character may become: text joined to HTML is escaped."""
    return ESCAPED if any(isinstance(text, Markup) for text in texts) else 1


_PERCENT = re.compile(r"%(?:\([^()]{0,200}\))?[#0\- +]*(\*|\d*)(?:\.(\*|\d*))?")


def _check_percent(budget: RenderBudget, text: str, values: Any) -> None:
    """Limit the result of `text % values`."""
    _check_format(text)
    weight = budget.weigh(values)
    num_chars = len(text)
    for found in _PERCENT.finditer(text):
        if text[found.end() : found.end() + 1] == "(" or "*" in found.groups(""):
            raise TemplateLimit(
                "it formats text with a nested name or a width given by an argument"
            )
        num_chars += weight + sum(_size(digits) for digits in found.groups(""))
        check_chars(num_chars * _factor(text))


def _check_format(text: str) -> None:
    if len(text) > _MAX_FORMAT:
        raise TemplateLimit(f"it uses a format string of more than {_MAX_FORMAT} characters")


def _size(digits: str) -> int:
    return int(digits) if 0 < len(digits) < 10 else MAX_CHARS * len(digits)


# -- methods --

_STR_METHODS = frozenset(
    "capitalize casefold center count endswith expandtabs find index isalnum isalpha isascii "
    "isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper join "
    "ljust lower lstrip partition removeprefix removesuffix replace rfind rindex rjust rpartition "
    "rsplit rstrip split splitlines startswith strip swapcase title upper zfill".split()
)
_METHODS: dict[type, frozenset[str]] = {
    dict: frozenset({"copy", "fromkeys", "get", "items", "keys", "values"}),
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
    int: frozenset({"bit_count", "bit_length", "conjugate", "is_integer"}),
    float: frozenset({"as_integer_ratio", "conjugate", "hex", "is_integer"}),
}
_CALLED = (
    jinja2.Undefined,
    jinja2.runtime.BlockReference,
    jinja2.runtime.LoopContext,
    jinja2.runtime.Macro,
)
_HELPERS = (jinja2.runtime.LoopContext, jinja2.utils.Cycler, jinja2.utils.Joiner)


def check_call(
    budget: RenderBudget, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """Limit the result of a call and return its positional arguments.

    Arguments for `str.join` are returned as a list, because measuring consumes a generator.
    """
    if isinstance(function, _CALLED):
        return args  # calls only the template's code, which is limited itself
    for value in (*args, *kwargs.values()):
        budget.weigh(value)
    owner = getattr(function, "__self__", None)
    name = getattr(function, "__name__", "")
    is_method = isinstance(function, (types.BuiltinMethodType, types.MethodType))
    if is_method and isinstance(owner, str):
        if name in _STR_METHODS:
            budget.read(len(owner))
            check = _STR_CHECKS.get(name)
            return args if check is None else check(budget, owner, *args, **kwargs)
    elif is_method and isinstance(owner, _HELPERS):
        return args
    elif is_method:
        known = [names for kind, names in _METHODS.items() if isinstance(owner, kind)]
        if known and name in known[0]:
            if name in ("count", "index"):
                budget.weigh(owner)
            return args
    elif isinstance(function, (types.FunctionType, *_HELPERS)) or function in _HELPERS:
        return args
    kind = type(function if owner is None else owner).__name__
    raise jinja2.exceptions.SecurityError(f"a template may not call {name!r} of a {kind}")


def _check_width(budget: RenderBudget, text: str, width: Any, *rest: Any) -> tuple[Any, ...]:
    check_chars(width if isinstance(width, int) else 0)
    return (width, *rest)


def _check_expandtabs(
    budget: RenderBudget, text: str, *args: Any, tabsize: int = 8
) -> tuple[Any, ...]:
    size = args[0] if args else tabsize
    check_chars(len(text) + text.count("\t") * (size if isinstance(size, int) else 0))
    return args


def _check_replace(
    budget: RenderBudget, text: str, old: Any, new: Any, *rest: Any, **kwargs: Any
) -> tuple[Any, ...]:
    if isinstance(old, str) and isinstance(new, str):
        added = text.count(old) * max(0, len(new) - len(old))
        check_chars((len(text) + added) * _factor(text, new))
    return (old, new, *rest)


def _check_joined(budget: RenderBudget, text: str, values: Any) -> tuple[Any, ...]:
    return (_joined(budget, values, text),)


def _joined(budget: RenderBudget, values: Any, between: str) -> list[Any]:
    """Return the values as a list if the joined text is within the limit."""
    items = _listed(values)
    num_chars = budget.weigh(items) + len(items) * len(between)
    check_chars(num_chars * _factor(between, *items))
    return items


def _listed(values: Any) -> list[Any]:
    if isinstance(values, str):
        check_items(len(values))
    return list(values)


def _check_split(budget: RenderBudget, text: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    separator = args[0] if args else kwargs.get("sep")
    most = args[1] if len(args) > 1 else kwargs.get("maxsplit", -1)
    if len(text) > MAX_ITEMS and not (isinstance(most, int) and 0 <= most < MAX_ITEMS):
        if isinstance(separator, str):
            check_items(text.count(separator) + 1)
        else:
            check_items(len(text.split(None, MAX_ITEMS)))
    return args


def _check_lines(budget: RenderBudget, text: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    check_items(_num_lines(text))
    return args


def _num_lines(text: str) -> int:
    """Return an upper bound of the number of lines in a text."""
    return 1 + sum(map(text.count, "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"))


_STR_CHECKS: dict[str, Callable[..., tuple[Any, ...]]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _check_width),
    **dict.fromkeys(("split", "rsplit"), _check_split),
    "expandtabs": _check_expandtabs,
    "join": _check_joined,
    "replace": _check_replace,
    "splitlines": _check_lines,
}


class _Counting(string.Formatter):
    """Formatter mix-in that limits the length of the result before it is created."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._budget = RenderBudget()
        self._num_chars = 0

    def vformat(self, text: str, args: Any, kwargs: Any) -> str:
        _check_format(text)
        return super().vformat(text, args, kwargs)

    def convert_field(self, value: Any, conversion: Any) -> Any:
        self._count(self._budget.weigh(value))
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> Any:
        self._count(sum(map(_size, re.findall("[0-9]+", format_spec))))
        return super().format_field(value, format_spec)

    def _count(self, num_chars: int) -> None:
        self._num_chars += num_chars
        check_chars(self._num_chars)


class Formatter(_Counting, jinja2.sandbox.SandboxedFormatter):
    """`str.format` with a limited result."""


class EscapeFormatter(_Counting, jinja2.sandbox.SandboxedEscapeFormatter):
    """`Markup.format` with a limited result."""


# -- filters and tests --

# Filters that do not read the contents of a value, except the items of a generator.
_SHALLOW = frozenset(
    "attr batch count d default first items last length list map random reject rejectattr reverse "
    "safe select selectattr slice".split()
)
_SLOW = {
    **dict.fromkeys(("pprint", "striptags", "urlize", "wordwrap", "xmlattr"), _MAX_SLOW),
    **dict.fromkeys(("title", "urlencode", "wordcount"), 1 << 20),
}
_SORTING = frozenset({"dictsort", "groupby", "sort"})
BOUNDED_TESTS = frozenset(
    "!= < <= == > >= eq equalto ge greaterthan gt in le lessthan lower lt ne upper".split()
)


def bounded_filter(name: str, function: Any) -> Callable[..., Any]:
    """Wrap a filter to count a step, measure its arguments and limit its result."""
    check = _FILTER_CHECKS.get(name)
    most = _SLOW.get(name)
    read = _READ_PARTS.get(name)
    given = _given_of(function)

    @jinja2.pass_context
    def bounded(context: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = context.budget
        budget.step()
        if name not in _SHALLOW:
            weight = budget.weigh(read(value, *args, **kwargs) if read is not None else value)
            for argument in (*args, *kwargs.values()):
                weight += budget.weigh(argument)
            if most is not None and weight > most:
                raise TemplateLimit(f"it passes more than {most} characters to the filter {name!r}")
            if name in _SORTING:
                budget.read(16 * weight)
        if check is not None:
            value = check(budget, value, *args, **kwargs)
        return budget.keep(function(*given(context), value, *args, **kwargs))

    return bounded


def bounded_test(name: str, function: Any) -> Callable[..., Any]:
    """Wrap a test to count a step and measure the values that it compares."""
    given = _given_of(function)

    @jinja2.pass_context
    def bounded(context: Any, value: Any, *args: Any) -> Any:
        budget = context.budget
        budget.step()
        budget.weigh(value)
        for argument in args:
            if not (name == "in" and isinstance(argument, dict)):
                budget.weigh(argument)
        return function(*given(context), value, *args)

    return bounded


def _given_of(function: Any) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function of the context that gives the arguments before the filtered value."""
    wanted = getattr(function, "jinja_pass_arg", None)
    if wanted is None:
        return lambda context: ()
    return {
        "context": lambda context: (context,),
        "eval_context": lambda context: (context.eval_ctx,),
        "environment": lambda context: (context.environment,),
    }[wanted.name]


def _sorted_keys(
    value: Any, case_sensitive: bool = False, by: str = "key", reverse: bool = False
) -> Any:
    """Return the part of a dict that `dictsort` compares."""
    return list(value) if isinstance(value, dict) and by == "key" else value


_READ_PARTS: dict[str, Callable[..., Any]] = {"dictsort": _sorted_keys}
"""Functions of a filter's arguments that return the part of the value that the filter reads."""


def _check_listed(budget: RenderBudget, value: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(value, str):
        check_items(len(value))
    return value


def _check_center(budget: RenderBudget, value: Any, width: Any = 80) -> Any:
    check_chars(width if isinstance(width, int) else 0)
    return value


def _check_indent(
    budget: RenderBudget, value: Any, width: Any = 4, first: bool = False, blank: bool = False
) -> Any:
    text = str(value)
    unit = len(width) if isinstance(width, str) else int(width)
    check_chars((len(text) + _num_lines(text) * unit) * _factor(text, width))
    return value


def _check_batch(budget: RenderBudget, value: Any, linecount: Any, fill_with: Any = None) -> Any:
    check_items(linecount if isinstance(linecount, int) else 0)
    return value


def _check_format_filter(budget: RenderBudget, value: Any, *args: Any, **kwargs: Any) -> Any:
    _check_percent(budget, str(value), kwargs or args)
    return value


def _check_join_filter(
    budget: RenderBudget, value: Any, d: Any = "", attribute: Any = None
) -> list[Any]:
    return _joined(budget, value, str(d))


def _check_replace_filter(
    budget: RenderBudget, value: Any, old: Any, new: Any, count: Any = None
) -> Any:
    _check_replace(budget, str(value), str(old), str(new))
    return value


def _check_escape(budget: RenderBudget, value: Any) -> Any:
    if isinstance(value, str):
        check_chars(len(value) * ESCAPED)
    return value


def _check_round(
    budget: RenderBudget, value: Any, precision: Any = 0, method: str = "common"
) -> Any:
    _check_numbers(value)
    if isinstance(precision, int) and abs(precision) > _MAX_DIGITS:
        raise TemplateLimit(f"it rounds to more than {_MAX_DIGITS} decimal places")
    return value


def _check_tojson(
    budget: RenderBudget,
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> Any:
    unit = len(indent) if isinstance(indent, str) else int(indent or 0)
    if unit > _MAX_INDENT or (separators is not None and len("".join(separators)) > _MAX_INDENT):
        raise TemplateLimit(
            f"it writes JSON with an indent or separators of more than {_MAX_INDENT} characters"
        )
    if unit:
        check_chars(_indented(value, unit))
    return value


def _indented(value: Any, unit: int) -> int:
    """Estimate how many characters the indentation adds to JSON."""
    num_chars = 0
    depth = 1
    level = [value]
    while level:
        level = [part for value in level for part in parts_of(value)]
        num_chars += len(level) * unit * depth
        depth += 1
    return num_chars


_FILTER_CHECKS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("groupby", "list", "slice", "sort"), _check_listed),
    **dict.fromkeys(("e", "escape", "forceescape"), _check_escape),
    "batch": _check_batch,
    "center": _check_center,
    "format": _check_format_filter,
    "indent": _check_indent,
    "join": _check_join_filter,
    "replace": _check_replace_filter,
    "round": _check_round,
    "tojson": _check_tojson,
}
