"""Tests of declared options: each value type, its bounds, and the message for a wrong value."""

import dataclasses
import enum

import numpy as np
import pytest

from kvboost_edge.config import EngineConfig
from kvboost_edge.engine.request.request import SamplingParams
from kvboost_edge.engine.request.terms import Terms
from kvboost_edge.options import check_options, option, option_of, options_of, read_bytes
from kvboost_edge.server.settings import ServerSettings


class Color(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    count: int = option(1, "A count", int, low=1)
    few: int = option(1, "A few", int, low=0, high=7)
    tiles: int = option(16, "Tiles", int, low=1, high=64, multiple=16)
    size: int | None = option(None, "A size", int, unit="bytes", low=1, unset="none")
    share: float = option(0.5, "A share", float, low=0, high=1, open_low=True)
    moment: float | None = option(None, "A time", float)
    switch: bool = option(False, "A switch", bool)
    maybe: bool | None = option(None, "A switch", bool)
    word: str = option("a", "A word", str, choices=("a", "b"))
    name: str | None = option(None, "A name", str)
    key: str | None = option(None, "A key", str, secret=True)
    color: Color | str = option(Color.RED, "A color", Color)
    other: object = option((), "Anything")
    plain: int = 3

    def __post_init__(self):
        check_options(self, LookupError)


@pytest.mark.parametrize(
    ("name", "given", "stored"),
    [
        ("count", np.int64(3), 3),
        ("count", 10**30, 10**30),
        ("few", 0, 0),
        ("few", 7, 7),
        ("tiles", 48, 48),
        ("size", 4e9, 4_000_000_000),
        ("size", None, None),
        ("size", "4e9", 4_000_000_000),
        ("size", "4_000", 4_000),
        ("size", "1GB", 1_000_000_000),
        ("size", "1g", 1_000_000_000),
        ("size", "1.5 kB", 1_500),
        ("size", "500M", 500_000_000),
        ("size", "8GiB", 8 * 2**30),
        ("size", "2Ki", 2048),
        ("size", "1T", 10**12),
        ("share", 1, 1.0),
        ("share", np.float32(0.5), 0.5),
        ("moment", -3, -3.0),
        ("maybe", None, None),
        ("word", "b", "b"),
        ("name", "x", "x"),
        ("color", "blue", Color.BLUE),
        ("other", [1], [1]),
    ],
)
def test_a_value_is_stored_in_its_declared_type(name, given, stored):
    found = getattr(Sample(**{name: given}), name)
    assert (found, type(found)) == (stored, type(stored))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("count", 0, "count=0 must be at least 1"),
        ("count", True, "count=True must be an integer"),
        ("count", 1.0, "count=1.0 must be an integer"),
        ("count", None, "count=None must be an integer"),
        ("count", np.array([2]), "count=array([2]) must be an integer"),
        ("few", 8, "few=8 must be in 0..7"),
        ("few", -1, "few=-1 must be in 0..7"),
        ("tiles", 24, "tiles=24 must be a multiple of 16, at most 64"),
        ("tiles", 80, "tiles=80 must be a multiple of 16, at most 64"),
        ("tiles", 0, "tiles=0 must be a multiple of 16, at most 64"),
        ("size", float("inf"), "size=inf must be a finite number of bytes"),
        ("size", 0.5, "size=0 must be at least 1"),
        ("size", "0GB", "size=0 must be at least 1"),
        *(
            ("size", text, f"size={text!r} must be a size in bytes, such as 500M, 1GB, 8GiB or 1e9")
            for text in ("much", "GB", "1.2.3GB", "1XB", "8iB", "1e400", "1GBps", "")
        ),
        ("share", 0, "share=0 must be in (0, 1]"),
        ("share", 1.5, "share=1.5 must be in (0, 1]"),
        ("share", float("nan"), "share=nan must be in (0, 1]"),
        ("share", "1", "share='1' must be a number"),
        ("moment", float("inf"), "moment=inf must be finite"),
        ("moment", 10**400, f"moment={10**400} must be finite"),
        ("switch", 1, "switch=1 must be True or False"),
        ("switch", None, "switch=None must be True or False"),
        ("maybe", 0, "maybe=0 must be True, False or None"),
        ("word", "c", "word='c' is not one of 'a', 'b'"),
        ("word", 3, "word=3 must be a string, one of 'a', 'b'"),
        ("name", 3, "name=3 must be a string or None"),
        ("key", ["hidden"], "key must be a string or None, not list"),
        ("color", "green", "color='green' is not one of 'red', 'blue'"),
        ("color", None, "color=None is not one of 'red', 'blue'"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(name, value, message):
    with pytest.raises(LookupError) as caught:
        Sample(**{name: value})
    assert caught.value.args == (message,)


@pytest.mark.parametrize("owner", [EngineConfig, SamplingParams, Terms, ServerSettings])
def test_defaults_are_valid_and_of_their_declared_types(owner):
    """`check_options` does not check defaults, so this test passes each one to its declared check."""
    for name, declared in options_of(owner).items():
        assert declared.checked(name, declared.default, ValueError) is declared.default, name


@pytest.mark.parametrize(
    ("default", "unit", "shown"),
    [
        (8 * 1024**2, "bytes", "8 MiB"),
        (100 * 10**9, "bytes", "100 GB"),
        (4 * 1024**3, "bytes", "4 GiB"),
        (1500, "bytes", "1500"),
        (0, "bytes", "0"),
        (None, "bytes", "none"),
        (30 * 86_400, "seconds", "2592000 (30 days)"),
        (90, "seconds", "90"),
        (0, "seconds", "0"),
        (2048, "tokens", "2048"),
    ],
)
def test_a_default_is_shown_with_its_unit(default, unit, shown):
    declared = dataclasses.replace(option_of(Sample, "size"), default=default, unit=unit)
    assert declared.shown_default == shown
    if unit == "bytes" and default is not None:
        assert read_bytes(shown) == default


def test_a_secret_is_not_shown():
    assert "hidden" not in repr(Sample(key="hidden"))


def test_only_declared_fields_are_options():
    assert list(options_of(Sample))[:2] == ["count", "few"]
    assert "plain" not in options_of(Sample)
    assert option_of(Sample, "few").default == 1
