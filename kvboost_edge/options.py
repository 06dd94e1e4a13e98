"""Declarations of options: allowed values, defaults and help texts of dataclass fields.

`EngineConfig`, `SamplingParams`, `Terms` and `ServerSettings` declare each option once, as a field
created by `option`. The range checks, the server's flags and help, the limits in HTTP requests, and
docs/reference/options.md are all derived from these declarations.
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

# Option names of other programs, and the equivalent names here.
_ELSEWHERE = {
    **dict.fromkeys(("n_predict", "num_predict", "max_tokens"), ("max_new_tokens",)),
    **dict.fromkeys(
        ("c", "n_ctx", "num_ctx", "ctx_size", "context_length", "max_seq_len"),
        ("max_model_len", "ctx_size"),
    ),
    **dict.fromkeys(("n_threads", "num_thread"), ("threads", "num_threads")),
}


# A number with a unit. The final B is optional, so GB equals G and GiB equals Gi.
_SIZE = re.compile(
    r"(?P<number>[0-9.]+(?:e[0-9]+)?) ?(?P<unit>[kmgt])(?P<binary>i)?b?", re.IGNORECASE
)
_DAY_SECONDS = 86_400
_SIZE_WORDS = "a size in bytes, such as 500M, 1GB, 8GiB or 1e9"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """Declaration of an option.

    Attributes:
        help: Help text without default and unit.
        off: Help text of the flag that turns the option off.
        kind: Type of the value: int, float, bool, str or a StrEnum. Use object if the class checks
            the value itself.
        group: Heading in the help.
        unit: Unit of a number, such as tokens or seconds.
        low: Minimum of a number, or minimum length of a string in characters.
        high: Maximum of a number, or maximum length of a string in characters.
        open_low: Whether `low` itself is excluded.
        multiple: Number that the value must be a multiple of.
        choices: Allowed strings.
        unset: Meaning of None.
        optional: Whether None is allowed.
        flag: Flags of the server command. "" derives the flag from the field's name, and None means
            that there is no flag.
        many: Whether the flag may be repeated.
        read: Function that parses the flag's text. By default, `kind` parses it.
        metavar: Placeholder for the value in the help. "" derives it from choices, unit and kind.
        advice: End of the error message for a value of another type.
        secret: Whether to keep the value out of messages and `repr`.
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
        """Return the flags of the option. For a switch that is on by default, they turn it off."""
        prefix = "--no-" if self.kind is bool and self.default else "--"
        return tuple((self.flag or prefix + name.replace("_", "-")).split())

    @property
    def values(self) -> tuple[str, ...]:
        """Allowed strings, including those of a StrEnum."""
        if issubclass(self.kind, enum.Enum):
            return tuple(one.value for one in self.kind)
        return self.choices

    @property
    def shown_default(self) -> str:
        """The default as a user would write it, or the meaning of None."""
        if self.default is None or self.default == ():
            return self.unset
        if isinstance(self.default, tuple):
            return ",".join(one.encode("unicode_escape").decode() for one in self.default)
        if self.unit == "bytes":
            return _size_words(self.default)
        if self.unit == "seconds" and self.default and not self.default % _DAY_SECONDS:
            return f"{self.default:.0f} ({self.default // _DAY_SECONDS:.0f} days)"
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    @property
    def placeholder(self) -> str:
        """Placeholder for the value in help texts, or "" for a switch."""
        if self.kind is bool:
            return ""
        choices = f"{{{','.join(self.values)}}}" if self.values else ""
        unit = self.unit.upper() or ("N" if self.kind in (int, float) else "TEXT")
        return self.metavar or choices or unit

    @property
    def allowed(self) -> str:
        """Description of the allowed values, or "" if the option's class checks them."""
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

    def parsed(self, text: str) -> Any:
        """Parse the text of a flag.

        Raises:
            ValueError: The text is not a value of the option's type.
        """
        if self.read is not None:
            return self.read(text)
        if self.kind is int and self.unit == "bytes":
            return read_bytes(text)
        if self.kind not in (int, float):
            return text
        try:
            return self.kind(text)
        except ValueError:
            example = " such as 4096" if self.unit == "tokens" else ""
            number = "a whole number" if self.kind is int else "a number"
            raise ValueError(f"{text!r} is not {number}{example}") from None

    def checked(self, name: str, value: Any, error: type[Exception]) -> Any:
        """Check a value and return it in the declared type.

        Args:
            name: Name of the option.
            value: Value to check.
            error: Exception class to raise for an invalid value.
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
        """Describe the range of a number, such as "at least 1" or "in 0..100"."""
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
        # the comparisons are false for NaN
        return above and (self.high is None or number <= self.high) and divided

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


def _size_words(nbytes: int) -> str:
    """Format a size so that `read_bytes` returns it, with the largest unit that divides it."""
    for power, letter in ((4, "T"), (3, "G"), (2, "M"), (1, "K")):
        for base, unit in ((1024, "iB"), (1000, "B")):
            if nbytes and not nbytes % base**power:
                return f"{nbytes // base**power} {letter}{unit}"
    return str(nbytes)


def read_bytes(text: str) -> int:
    """Parse a size in bytes, such as 4096, 4e9, 500M, 1GB or 8GiB.

    K, M, G and T are powers of 1000. Ki, Mi, Gi and Ti are powers of 1024. A final B is optional.

    Raises:
        ValueError: The text is not a size.
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
    """Convert a string or float to a number of bytes. Other types are returned unchanged."""
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
    """Declare an option as a dataclass field. `more` sets further attributes of `Option`."""
    more.setdefault("optional", default is None)
    declared = Option(help=help, kind=kind, default=default, **more)
    field: Any = dataclasses.field(
        default=default, repr=not declared.secret, metadata={"option": declared}
    )
    return cast(T, field)


@functools.cache
def options_of(cls: type) -> dict[str, Option]:
    """Return the options of a dataclass by name, in the order of declaration."""
    return {
        field.name: field.metadata["option"]
        for field in dataclasses.fields(cls)
        if "option" in field.metadata
    }


def option_of(cls: type, name: str) -> Option:
    """Return an option of a dataclass by name."""
    return options_of(cls)[name]


def check_options(instance: Any, error: type[Exception]) -> None:
    """Check every option of a frozen dataclass and convert its value to the declared type.

    Raises `error` for the first invalid option.
    """
    cls: type = type(instance)
    for name, declared in options_of(cls).items():
        value = getattr(instance, name)
        if value is declared.default:  # most options of a request; a default needs no check
            continue
        checked = declared.checked(name, value, error)
        if checked is not value:
            object.__setattr__(instance, name, checked)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name that the caller probably meant, or "" if none is similar.

    Names from other programs are translated. A known name with this prefix is preferred to a
    similar one.
    """
    names = {one.lstrip("-").replace("-", "_"): one for one in known}
    plain = name.lstrip("-").replace("-", "_")
    meant = _ELSEWHERE.get(plain, ())
    same = [one for one in names if one in meant]
    begun = [one for one in names if one.startswith(plain)]
    close = difflib.get_close_matches(plain, names, n=1)
    found = next(iter([*same, *begun, *close]), "")
    return names.get(found, "")


def refuse_unknown(
    what: str, names: Iterable[str], known: Iterable[str], error: type[Exception]
) -> None:
    """Raise `error` for the alphabetically first name that is not known.

    Args:
        what: Kind of the names, such as "option", for the message.
        names: Names to check.
        known: Known names.
        error: Exception class.
    """
    listed = list(known)
    unknown = sorted(set(names) - set(listed))
    if unknown:
        likely = nearest(unknown[0], listed)
        hint = f"did you mean {likely!r}? known" if likely else "known"
        raise error(f"unknown {what} {unknown[0]!r}; {hint} options: {', '.join(listed)}")


def as_int(name: str, value: object, error: type[Exception] = RequestError) -> int:
    """Convert a Python or NumPy integer to int.

    Raises `error` for booleans, floats and strings.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise error(f"{name}={value!r} must be an integer")
    try:
        return operator.index(value)
    except TypeError:  # a one-element array has __index__, but is not an integer
        raise error(f"{name}={value!r} must be an integer") from None


def as_float(name: str, value: object, error: type[Exception] = RequestError) -> float:
    """Convert a Python or NumPy number to float.

    Raises `error` for booleans, strings and arrays. An integer that is too large for a float
    becomes infinity.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise error(f"{name}={value!r} must be a number")
    try:
        return float(value)
    except OverflowError:
        return math.inf
