"""Declarations of options: what a dataclass field accepts and the text shown for it.

`EngineConfig`, `SamplingParams`, `Terms` and `ServerSettings` declare each option once, as a field
made by `option`. Range checks, server flags, their help, HTTP bounds and
docs/reference/options.md read these declarations.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import enum
import functools
import math
import numbers
import operator
import re
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar, cast

from kvboost_edge.errors import RequestError

__all__ = [
    "Option",
    "as_float",
    "as_int",
    "check_options",
    "nearest",
    "option",
    "option_of",
    "options_of",
    "read_bytes",
    "refuse_unknown",
]

T = TypeVar("T")

# Names of other programs, and ours.
_ELSEWHERE = {
    **dict.fromkeys(("n_predict", "num_predict", "max_tokens"), ("max_new_tokens",)),
    **dict.fromkeys(
        ("c", "n_ctx", "num_ctx", "ctx_size", "context_length", "max_seq_len"),
        ("max_model_len", "ctx_size"),
    ),
    **dict.fromkeys(("n_threads", "num_thread"), ("threads", "num_threads")),
}


# A number with a unit; GB and G are the same, Gi and GiB too.
_SIZE = re.compile(
    r"(?P<number>[0-9.]+(?:e[0-9]+)?) ?(?P<unit>[kmgt])(?P<binary>i)?b?", re.IGNORECASE
)
_SIZE_WORDS = "a size in bytes, such as 500M, 1GB, 8GiB or 1e9"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option.

    Attributes:
        help: text of help and reference page, without default and unit.
        off: help of the flag that switches it off.
        kind: type of the value: int, float, bool, str, a StrEnum; object: its class checks it.
        group: heading in help and reference page.
        unit: of a number, such as tokens or seconds.
        low, high: bounds, allowed themselves; `open_low` excludes the lower one. Of a text: its
            length in characters.
        multiple: number that divides the value.
        choices: the texts allowed.
        unset: meaning of None.
        optional: None is allowed.
        flag: flags of the server command; "": one of the field's name; None: none.
        many: the flag may be repeated.
        read: turns a flag's text into the value; None: by `kind`.
        metavar: name of the value in help; "": by choices, unit and kind.
        advice: end of the message for a value of another type.
        secret: keeps the value out of messages and `repr`.
        default: value where none is given.
    """

    help: str
    off: str = ""
    kind: type = object
    group: str = ""
    unit: str = ""
    low: float | None = None
    high: float | None = None
    open_low: bool = False
    multiple: int | None = None
    choices: tuple[str, ...] = ()
    unset: str = ""
    optional: bool = False
    flag: str | None = ""
    many: bool = False
    read: Callable[[str], Any] | None = None
    metavar: str = ""
    advice: str = ""
    secret: bool = False
    default: Any = None

    def flags(self, name: str) -> tuple[str, ...]:
        """Return the flags of the option with this name; of a switch that is on, the one that
        switches it off.
        """
        prefix = "--no-" if self.kind is bool and self.default else "--"
        return tuple((self.flag or prefix + name.replace("_", "-")).split())

    @property
    def values(self) -> tuple[str, ...]:
        """The texts allowed, of a StrEnum too."""
        if issubclass(self.kind, enum.Enum):
            return tuple(one.value for one in self.kind)
        return self.choices

    @property
    def shown_default(self) -> str:
        """The default as it would be given, or the meaning of None."""
        if self.default is None or self.default == ():
            return self.unset
        if isinstance(self.default, tuple):
            return ",".join(self.default)
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    @property
    def allowed(self) -> str:
        """The values allowed; "" where its class checks them."""
        if self.values:
            return ", ".join(self.values)
        if self.kind is bool:
            return "true, false"
        if self.unit == "bytes":
            return f"size such as 500M, 1GB, 8GiB or 1e9, {self.describe()} (bytes)"
        if self.kind in (int, float):
            number = "integer" if self.kind is int else "number"
            unit = f" ({self.unit})" if self.unit else ""
            return f"{number}, {self.describe()}{unit}"
        return "text" if self.kind is str else ""

    def checked(self, name: str, value: Any, error: type[Exception]) -> Any:
        """Return the value in the declared type.

        Raises `error` with the name, the value and what is allowed.
        """
        if self.kind is object or (value is None and self.optional):
            return value
        if self.kind is bool:
            if not isinstance(value, bool):
                also = ", False or None" if self.optional else " or False"
                raise error(f"{name}={value!r} must be True{also}")
            return value
        if issubclass(self.kind, enum.Enum):
            return self._member(name, value, error)
        if self.kind is str:
            return self._text(name, value, error)
        if self.unit == "bytes":
            value = _as_bytes(name, value, error)
        number = (as_int if self.kind is int else as_float)(name, value, error)
        if not self._contains(number):
            raise error(f"{name}={value!r} must be {self.describe()}")
        return number

    def describe(self) -> str:
        """Describe the numbers allowed, as in "at least 1" or "in 0..100"."""
        show = (lambda bound: str(int(bound))) if self.kind is int else "{:g}".format
        if self.low is None:
            return "finite"
        if self.high is None:
            return f"at least {show(self.low)}"
        if self.multiple is not None:
            return f"a multiple of {self.multiple}, at most {show(self.high)}"
        if self.kind is int:
            return f"in {show(self.low)}..{show(self.high)}"
        return f"in {'(' if self.open_low else '['}{show(self.low)}, {show(self.high)}]"

    def _contains(self, number: float) -> bool:
        if self.low is None:
            return math.isfinite(number)
        above = number > self.low if self.open_low else number >= self.low
        divided = self.multiple is None or not number % self.multiple
        return above and (self.high is None or number <= self.high) and divided  # never NaN

    def _member(self, name: str, value: Any, error: type[Exception]) -> enum.Enum:
        kind = cast(type[enum.Enum], self.kind)
        try:
            return kind(value)
        except ValueError:
            self._refuse_choice(name, value, error, tuple(one.value for one in kind))

    def _text(self, name: str, value: Any, error: type[Exception]) -> str:
        if not isinstance(value, str):
            said = f"{name} " if self.secret else f"{name}={value!r} "
            also = f", not {type(value).__name__}" if self.secret else ""
            listed = f", one of {_listed(self.choices)}" if self.choices else ""
            also = f" or None{also}" if self.optional and not self.advice else also
            raise error(f"{said}must be a string{self.advice}{listed}{also}")
        if self.choices and value not in self.choices:
            self._refuse_choice(name, value, error, self.choices)
        if self.high is not None and not (self.low or 0) <= len(value) <= self.high:
            allowed = f"{self.low} to {self.high}" if self.low else f"at most {self.high}"
            raise error(f"{name} has {len(value)} characters; {allowed} are allowed")
        return value

    def _refuse_choice(
        self, name: str, value: Any, error: type[Exception], choices: tuple[str, ...]
    ) -> NoReturn:
        raise error(f"{name}={value!r} is not one of {_listed(choices)}") from None


def read_bytes(text: str) -> int:
    """Read a size: an integer, a number such as 4e9, or one with a unit such as 500M, 1GB or 8GiB.

    K, M, G and T are powers of 1000, Ki, Mi, Gi and Ti of 1024, each with or without B. Raises
    ValueError for anything else.
    """
    with contextlib.suppress(ValueError):
        return int(text)
    found = _SIZE.fullmatch(text)
    number = math.nan
    with contextlib.suppress(ValueError):
        if found is None:
            number = float(text)
        else:
            factor = 1024 if found["binary"] else 1000
            number = float(found["number"]) * factor ** (1 + "kmgt".index(found["unit"].lower()))
    if not math.isfinite(number):
        raise ValueError(f"{text!r} is not {_SIZE_WORDS}")
    return int(number)


def _as_bytes(name: str, value: Any, error: type[Exception]) -> Any:
    """Return a size in bytes as int; other types than text and float are left as they are."""
    if isinstance(value, str):
        try:
            value = read_bytes(value)
        except ValueError:
            raise error(f"{name}={value!r} must be {_SIZE_WORDS}") from None
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        raise error(f"{name}={value!r} must be a finite number of bytes")
    return int(value)


def _listed(choices: tuple[str, ...]) -> str:
    return ", ".join(map(repr, choices))


def option(default: T, help: str, kind: type = object, **more: Any) -> T:
    """Declare a dataclass field, with the other fields of `Option` as keywords."""
    more.setdefault("optional", default is None)
    declared = Option(help=help, kind=kind, default=default, **more)
    field: Any = dataclasses.field(
        default=default, repr=not declared.secret, metadata={"option": declared}
    )
    return cast(T, field)


@functools.cache
def options_of(cls: type) -> dict[str, Option]:
    """Return the options that a dataclass declares, by name, in order."""
    return {
        field.name: field.metadata["option"]
        for field in dataclasses.fields(cls)
        if "option" in field.metadata
    }


def option_of(cls: type, name: str) -> Option:
    """Return one option of a dataclass."""
    return options_of(cls)[name]


def check_options(instance: Any, error: type[Exception]) -> None:
    """Check every option of a frozen dataclass, and store its value in the declared type.

    Raises `error` for the first wrong one.
    """
    cls: type = type(instance)
    for name, declared in options_of(cls).items():
        value = getattr(instance, name)
        checked = declared.checked(name, value, error)
        if checked is not value:
            object.__setattr__(instance, name, checked)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name that is most likely meant, "" where none is close.

    Names of other programs count as ours; a beginning of a name comes before a similar name.
    """
    names = list(known)
    plain = name.lstrip("-").replace("-", "_")
    meant = _ELSEWHERE.get(plain, ())
    same = [one for one in names if one.lstrip("-").replace("-", "_") in meant]
    begun = [one for one in names if one.startswith(name)]
    close = difflib.get_close_matches(name, names, n=1)
    return next(iter([*same, *begun, *close]), "")


def refuse_unknown(
    what: str, names: Iterable[str], known: Iterable[str], error: type[Exception]
) -> None:
    """Raise `error` for the first of `names`, in alphabetical order, that is not in `known`.

    Args:
        what: kind of the names, for the message.
    """
    listed = list(known)
    unknown = sorted(set(names) - set(listed))
    if unknown:
        likely = nearest(unknown[0], listed)
        hint = f"did you mean {likely!r}? known" if likely else "known"
        raise error(f"unknown {what} {unknown[0]!r}; {hint} options: {', '.join(listed)}")


def as_int(name: str, value: object, error: type[Exception] = RequestError) -> int:
    """Return `value` as int.

    NumPy integers pass; booleans, floats and strings raise `error`.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise error(f"{name}={value!r} must be an integer")
    try:
        return operator.index(value)
    except TypeError:  # an array of one element has __index__ but is no integer
        raise error(f"{name}={value!r} must be an integer") from None


def as_float(name: str, value: object, error: type[Exception] = RequestError) -> float:
    """Return `value` as float.

    NumPy's scalars pass; booleans, strings and arrays raise `error`. An integer too large for a
    float counts as infinite.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise error(f"{name}={value!r} must be a number")
    try:
        return float(value)
    except OverflowError:
        return math.inf
