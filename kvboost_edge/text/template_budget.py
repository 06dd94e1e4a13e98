"""Budget for rendering a chat template: steps, CPU time, characters and memory.

A template comes with the model's files and is not trusted. Steps are counted. Values are measured
before they are created, because Python cannot abort an operation that has begun.
"""

from __future__ import annotations

import sys
import time
import types
from collections.abc import Iterator, Sequence
from typing import Any

import jinja2
import jinja2.utils

__all__ = [
    "ESCAPED",
    "FEW_CHARS",
    "MAX_CHARS",
    "MAX_ITEMS",
    "MAX_SECONDS",
    "MAX_STEPS",
    "MeasuredItems",
    "RenderBudget",
    "TemplateLimit",
    "check_chars",
    "check_items",
    "parts_of",
]

MAX_CHARS = 1 << 24
"""Maximum characters of a prompt and of each intermediate text."""
MAX_SECONDS = 1.0
"""Maximum CPU time of a rendering in seconds."""
MAX_STEPS = 1 << 20
"""Maximum loop iterations, operations and calls. 10,000 messages take about 300,000."""
MAX_ITEMS = 1 << 18
"""Maximum items of a list."""
ESCAPED = 6
"""Maximum characters that one character becomes when escaped for HTML."""
FEW_CHARS = 50
"""Length in characters below which the step limit also bounds the memory of texts."""
_MAX_WRITTEN = 1 << 26  # characters written in total, including to variables and by macros
_MAX_PARTS = 1 << 19  # values nested in one value, including itself
_MAX_HELD = 1 << 27  # bytes of values that the template created and still references
_SWEEP = 1 << 25  # bytes created between two sweeps, which drop unreferenced values
_SMALL = 256  # bytes; the step limit also bounds the memory of smaller values
_LOOK_STEPS = 256  # steps between two checks of the clock
_LOOK_WORK = 1 << 20  # characters read or written between two checks of the clock

_SCALARS = frozenset({int, float, bool, type(None)})
_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))
_WALKED: tuple[type, ...] = (list, tuple, set, frozenset, range, *_VIEWS)


class TemplateLimit(jinja2.TemplateRuntimeError):
    """Rendering that exceeds its budget. The message begins with "it", the template."""


def check_chars(num_chars: int) -> None:
    if num_chars > MAX_CHARS:
        raise TemplateLimit(f"it creates a text of more than {MAX_CHARS} characters")


def check_items(num_items: int) -> None:
    if num_items > MAX_ITEMS:
        raise TemplateLimit(f"it creates a list of more than {MAX_ITEMS} items")


class RenderBudget:
    """Remaining budget of one rendering."""

    __slots__ = ("_ends", "_held", "_look_at", "_made", "_steps", "_work", "_write_at", "_written")

    def __init__(self) -> None:
        self._steps = MAX_STEPS
        self._look_at = MAX_STEPS - _LOOK_STEPS
        self._work = 0
        self._written = 0
        self._write_at = _LOOK_WORK
        self._made = 0
        # Entry 0 is a probe: its reference count is that of a value which nothing else references.
        self._held: dict[int, Any] = {0: []}
        # CPU time rather than wall time, so a busy machine rejects the same templates as an idle
        # one.
        self._ends = time.thread_time() + MAX_SECONDS

    def step(self, num_chars: int = 0) -> None:
        """Count one step of the template, and the characters that it writes."""
        self._steps -= 1
        if self._steps <= self._look_at:
            self._look()
        if num_chars:
            self.write(num_chars)

    def read(self, num_chars: int) -> None:
        """Count characters that an operation reads."""
        self._work += num_chars
        if self._work > _LOOK_WORK:
            self._look()

    def write(self, num_chars: int) -> None:
        """Count characters that the template writes to the prompt or to a variable."""
        self._written += num_chars
        if self._written > self._write_at:
            if self._written > _MAX_WRITTEN:
                raise TemplateLimit(f"it writes more than {_MAX_WRITTEN} characters")
            self._write_at = self._written + _LOOK_WORK
            self._look()

    def keep(self, value: Any) -> Any:
        """Count the memory of a value that the template created, and return the value.

        A generator is returned as `MeasuredItems`.
        """
        kind = type(value)
        if (kind is str and len(value) < FEW_CHARS) or kind in _SCALARS:
            return value
        if kind is types.GeneratorType:
            return MeasuredItems(self, value)
        size = sys.getsizeof(value)
        if size > _SMALL:
            if isinstance(value, str):
                check_chars(len(value))
            elif isinstance(value, (list, tuple, dict, set)):
                check_items(len(value))
            self._held[id(value)] = value
            self._made += size
            self.read(size)
            if self._made > _SWEEP:
                self._sweep()
        return value

    def weigh(self, value: Any) -> int:
        """Return the number of characters and nested values in a value.

        A value that occurs repeatedly counts each time.
        """
        if isinstance(value, str):
            num_chars = len(value)
            self.read(num_chars)
            return num_chars
        if type(value) in _SCALARS:
            return 1
        num_chars = 0
        num_parts = 1
        waiting = [value]
        while waiting:
            value = waiting.pop()
            if isinstance(value, str):
                num_chars += len(value)
                continue
            if type(value) in _SCALARS:
                continue
            inner = parts_of(value)
            num_parts += len(inner)
            if num_parts > _MAX_PARTS:
                raise TemplateLimit(f"it uses a value with more than {_MAX_PARTS} nested values")
            waiting += inner
        check_chars(num_chars)
        self.read(num_chars + num_parts)
        return num_chars + num_parts

    def _look(self) -> None:
        if self._steps < 0:
            raise TemplateLimit(f"it takes more than {MAX_STEPS} steps")
        self._look_at = self._steps - _LOOK_STEPS
        self._work = 0
        if time.thread_time() > self._ends:
            raise TemplateLimit(f"it takes more than {MAX_SECONDS:g} s of CPU time")

    def _sweep(self) -> None:
        """Drop unreferenced values; raise TemplateLimit if the others exceed the memory limit."""
        self._made = 0
        alone = 0
        num_bytes = 0
        for key in list(self._held):
            value = self._held[key]
            count = sys.getrefcount(value)
            alone = alone or count
            if count > alone:
                num_bytes += sys.getsizeof(value)
            elif key:
                del self._held[key]
        if num_bytes > _MAX_HELD:
            raise TemplateLimit(f"it holds more than {_MAX_HELD >> 20} MiB of values")


def parts_of(value: Any) -> Sequence[Any]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, jinja2.utils.Namespace):
        return (object.__getattribute__(value, "_Namespace__attrs"),)
    items: Any = value if isinstance(value, _WALKED) else ()
    return tuple(items)


class MeasuredItems:
    """Iterator over a generator that counts a step per item and measures the items."""

    __slots__ = ("_budget", "_items", "_num_items", "_weight")

    def __init__(self, budget: RenderBudget, items: Iterator[Any]) -> None:
        self._budget = budget
        self._items = items
        self._num_items = 0
        self._weight = 0

    def __iter__(self) -> MeasuredItems:
        return self

    def __next__(self) -> Any:
        value = next(self._items)
        self._budget.step()
        self._num_items += 1
        check_items(self._num_items)
        self._weight += self._budget.weigh(value)
        if self._weight > _MAX_WRITTEN:
            raise TemplateLimit(f"it reads more than {_MAX_WRITTEN} characters from a generator")
        return self._budget.keep(value)
