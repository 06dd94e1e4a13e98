"""Declarations of options: the accepted values of a dataclass field, and its help text.

`EngineConfig`, `SamplingParams`, `Terms` and `ServerSettings` declare each option once, as a field
made by `option`. Range checks, server flags, their help, HTTP bounds and docs/reference/options.md
use these declarations.
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

# Options of other programs, and their names here.
_ELSEWHERE = {
    **dict.fromkeys(("n_predict", "num_predict", "max_tokens"), ("max_new_tokens",)),
    **dict.fromkeys(
        ("c", "n_ctx", "num_ctx", "ctx_size", "context_length", "max_seq_len"),
        ("max_model_len", "ctx_size"),
    ),
    **dict.fromkeys(("n_threads", "num_thread"), ("threads", "num_threads")),
}


# A number with a unit. GB and G are equal, and so are GiB and Gi.
_SIZE = re.compile(
    r"(?P<number>[0-9.]+(?:e[0-9]+)?) ?(?P<unit>[kmgt])(?P<binary>i)?b?", re.IGNORECASE
)
_SIZE_WORDS = "a size in bytes, such as 500M, 1GB, 8GiB or 1e9"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """The declaration of an option.

    Attributes:
        help: Help text, without default and unit.
        off: Help text of the flag that turns it off.
        kind: Type of the value: int, float, bool, str or a StrEnum; object if its class checks it.
        group: Heading in the help.
        unit: Unit of a number, such as tokens or seconds.
        low: Smallest value; for a text, its smallest length in characters.
        high: Largest value; for a text, its largest length in characters.
        open_low: True if `low` itself is not allowed.
        multiple: The value must be a multiple of this number.
        choices: The allowed texts.
        unset: Meaning of None.
        optional: True if None is allowed.
        flag: Flags of the server command; "" for one with the field's name, None for no flag.
        many: True if the flag may be repeated.
        read: Parses a flag's text; None to parse by `kind`.
        metavar: Name of the value in the help; "" to derive it from choices, unit and kind.
        advice: End of the message for a value of another type.
        secret: True to keep the value out of messages and `repr`.
        default: Default value.
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
        """Return the flags of the option; for a switch that is on, the one that turns it off."""
        prefix = "--no-" if self.kind is bool and self.default else "--"
        return tuple((self.flag or prefix + name.replace("_", "-")).split())

    @property
    def values(self) -> tuple[str, ...]:
        """The allowed texts, including those of a StrEnum."""
        if issubclass(self.kind, enum.Enum):
            return tuple(one.value for one in self.kind)
        return self.choices

    @property
    def shown_default(self) -> str:
        """The default as a user would write it, or the meaning of None."""
        if self.default is None or self.default == ():
            return self.unset
        if isinstance(self.default, tuple):
            return ",".join(self.default)
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    @property
    def allowed(self) -> str:
        """The allowed values; "" if the option's class checks them."""
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
        return "string" if self.kind is str else ""

    def checked(self, name: str, value: Any, error: type[Exception]) -> Any:
        """Return the value in the declared type.

        Raises `error` with the name, the value and the allowed values.
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
        """Return the range of a number, as in "at least 1" or "in 0..100"."""
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
        return above and (self.high is None or number <= self.high) and divided  # False for NaN

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
    """Parse a size: an integer, a number such as 4e9, or one with a unit such as 500M, 1GB or 8GiB.

    K, M, G and T are powers of 1000; Ki, Mi, Gi and Ti are powers of 1024. Both may be followed by
    B. Raises ValueError for other texts.
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
    """Return a text or float as a number of bytes; leave other types unchanged."""
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
    """Declare a dataclass field. `more` are further fields of `Option`."""
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

    Raises `error` for the first invalid one.
    """
    cls: type = type(instance)
    for name, declared in options_of(cls).items():
        value = getattr(instance, name)
        checked = declared.checked(name, value, error)
        if checked is not value:
            object.__setattr__(instance, name, checked)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name that is most likely meant; "" if none is close.

    Names of other programs are translated. A prefix of a name is preferred over a similar name.
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
        what: Kind of the names, for the message.
        names: The names to check.
        known: The known names.
        error: The exception's class.
    """
    listed = list(known)
    unknown = sorted(set(names) - set(listed))
    if unknown:
        likely = nearest(unknown[0], listed)
        hint = f"did you mean {likely!r}? known" if likely else "known"
        raise error(f"unknown {what} {unknown[0]!r}; {hint} options: {', '.join(listed)}")


def as_int(name: str, value: object, error: type[Exception] = RequestError) -> int:
    """Return `value` as int.

    Accepts NumPy integers. Raises `error` for booleans, floats and strings.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise error(f"{name}={value!r} must be an integer")
    try:
        return operator.index(value)
    except TypeError:  # an array of one element has __index__, but is not an integer
        raise error(f"{name}={value!r} must be an integer") from None


def as_float(name: str, value: object, error: type[Exception] = RequestError) -> float:
    """Return `value` as float.

    Accepts NumPy scalars. Raises `error` for booleans, strings and arrays. An integer too large for
    a float becomes infinite.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise error(f"{name}={value!r} must be a number")
    try:
        return float(value)
    except OverflowError:
        return math.inf
