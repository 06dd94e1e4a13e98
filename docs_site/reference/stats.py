"""Page of the keys in `paged_stats()` and `cache_stats()`, docs/reference/stats.md.

The page is generated from the docstrings of these functions.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from docs_site.reference.tables import table
from kvboost_edge.engine import stats
from kvboost_edge.tiers.base import TierStats

__all__ = ["attributes", "attributes_of", "described_keys", "stats_page"]

_HEAD = """# Engine statistics

`engine.paged_stats()` and `engine.cache_stats()` return dictionaries of figures. Over HTTP,
`/v1/stats` returns them as JSON, and [`/metrics`](metrics.md) most of them for Prometheus.
"""
_PAGES: tuple[tuple[str, Callable[..., Any]], ...] = (
    ("paged_stats()", stats.paged_stats),
    ("cache_stats()", stats.cache_stats),
)


class _Section(NamedTuple):
    title: str
    entries: dict[str, str]


def stats_page() -> str:
    """Return the page, with a table for each section of each docstring and one for `TierStats`."""
    parts = [_HEAD]
    for name, function in _PAGES:
        parts.append(f"\n## `{name}`\n")
        for section in _sections(function):
            title, _, note = section.title.partition(", ")
            text = f"{_code(note)}.\n\n" if note else ""
            parts.append(f"\n### {title}\n\n{text}{_meanings('key', section.entries)}")
    fields = _meanings("field", attributes(TierStats))
    parts.append(f"\n## Fields of a tier\n\nEach value of `tiers` is a `TierStats`.\n\n{fields}")
    return "".join(parts)


def described_keys(function: Callable[..., Any]) -> dict[str, str]:
    """Return the keys that a function's docstring describes, with their meanings."""
    return {key: text for section in _sections(function) for key, text in section.entries.items()}


def _meanings(column: str, entries: dict[str, str]) -> str:
    return table((column, "meaning"), [(f"`{key}`", _code(text)) for key, text in entries.items()])


def _sections(function: Callable[..., Any]) -> list[_Section]:
    """Return the sections of a docstring.

    A section is a line that ends in a colon, followed by indented entries.
    """
    found: list[_Section] = []
    key = ""
    for line in inspect.cleandoc(function.__doc__ or "").splitlines():
        if entry := re.match(r" {4}(\w+): (.*)", line):
            key = entry[1]
            found[-1].entries[key] = entry[2]
        elif line.startswith(" " * 8) and found and key:
            found[-1].entries[key] += " " + line.strip()
        elif re.fullmatch(r"\S.*:", line):
            found.append(_Section(line.rstrip(":"), {}))
            key = ""
    return [section for section in found if section.entries]


def attributes(cls: type) -> dict[str, str]:
    """Return the fields that a class's docstring describes, with their meanings."""
    return attributes_of(cls.__doc__ or "")


def attributes_of(docstring: str) -> dict[str, str]:
    """Return the entries of the section Attributes. Several names may share an entry."""
    text = inspect.cleandoc(docstring).partition("Attributes:\n")[2].split("\n\n")[0]
    found: dict[str, str] = {}
    for entry in re.split(r"\n(?= {4}\S)", text.rstrip()):
        names, _, meaning = entry.strip().partition(": ")
        for name in names.split(", "):
            found[name] = " ".join(meaning.split())
    return found


def _code(text: str) -> str:
    """Return a text with key names formatted as code and a capital first letter."""
    text = re.sub(r"(?<![`\w])[a-z]+(?:_[a-z]+)+\*?(?![`\w])", lambda name: f"`{name[0]}`", text)
    return text[:1].upper() + text[1:]
