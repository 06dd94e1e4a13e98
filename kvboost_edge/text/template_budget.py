"""Budget of a chat template's rendering: steps, CPU time, characters and memory.

A template comes with a model's file and is not trusted. Its steps are counted. Values are measured
before they are made, because Python cannot end an operation that has begun.
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
"""Limit of characters of a prompt and of each intermediate text."""
MAX_SECONDS = 1.0
"""Limit of CPU seconds of a rendering."""
MAX_STEPS = 1 << 20
"""Limit of loop iterations, operations and calls; 10,000 messages take about 300,000."""
MAX_ITEMS = 1 << 18
"""Limit of items of a list."""
ESCAPED = 6
"""Most characters that one character becomes when escaped for HTML."""
FEW_CHARS = 50
"""Length up to which a text's memory is bounded by the number of steps."""
_MAX_WRITTEN = 1 << 26  # characters, including those written to variables and by macros
_MAX_PARTS = 1 << 19  # of a value and its content
_MAX_HELD = 1 << 27  # bytes of values that the template made and still references
_SWEEP = 1 << 25  # bytes made between two sweeps of dropped values
_SMALL = 256  # bytes; smaller values are bounded by the number of steps
_LOOK_STEPS = 256  # steps between two checks of the clock
_LOOK_WORK = 1 << 20  # characters read or written between them

_SCALARS = frozenset({int, float, bool, type(None)})
_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))
_WALKED: tuple[type, ...] = (list, tuple, set, frozenset, range, *_VIEWS)


class TemplateLimit(jinja2.TemplateRuntimeError):
    """Error of a rendering that exceeds its budget."""


def check_chars(num_chars: int) -> None:
    if num_chars > MAX_CHARS:
        raise TemplateLimit(f"it makes a text of more than {MAX_CHARS} characters")


def check_items(num_items: int) -> None:
    if num_items > MAX_ITEMS:
        raise TemplateLimit(f"it makes a list of more than {MAX_ITEMS} items")


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
        # The first entry shows the reference count of a value that nothing else references.
        self._held: dict[int, Any] = {0: []}
        # CPU time, not wall time: a busy machine refuses the same templates as an idle one.
        self._ends = time.thread_time() + MAX_SECONDS

    def step(self) -> None:
        """Take a step."""
        self._steps -= 1
        if self._steps <= self._look_at:
            self._look()

    def read(self, num_chars: int) -> None:
        """Count characters that an operation reads."""
        self._work += num_chars
        if self._work > _LOOK_WORK:
            self._look()

    def write(self, num_chars: int) -> None:
        """Count characters that the template writes, into the prompt or a variable."""
        self._written += num_chars
        if self._written > self._write_at:
            if self._written > _MAX_WRITTEN:
                raise TemplateLimit(f"it writes more than {_MAX_WRITTEN} characters")
            self._write_at = self._written + _LOOK_WORK
            self._look()

    def keep(self, value: Any) -> Any:
        """Count the memory of a value that the template made; return the value."""
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
        """Return the number of characters and parts of a value, each counted as often as it
        occurs.
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
                raise TemplateLimit(f"it makes a value of more than {_MAX_PARTS} parts")
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
            raise TemplateLimit(f"it takes more than {MAX_SECONDS:g} s")

    def _sweep(self) -> None:
        """Forget values without other references; raise TemplateLimit if too much remains."""
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
            raise TemplateLimit(f"it holds more than {_MAX_HELD >> 20} MB")


def parts_of(value: Any) -> Sequence[Any]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, jinja2.utils.Namespace):
        return (object.__getattribute__(value, "_Namespace__attrs"),)
    items: Any = value if isinstance(value, _WALKED) else ()
    return tuple(items)


class MeasuredItems:
    """Iterator over a generator's items; each takes a step and is weighed."""

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
            raise TemplateLimit(f"it goes through more than {_MAX_WRITTEN} characters")
        return self._budget.keep(value)
