"""Pytest plugin that selects the tests which a busy machine could break: those marked `alone` or
`cluster`, and those that start a process.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

TESTS = str(Path(__file__).parents[1])
MARKS = ("alone", "cluster")
# Names that a function uses when it starts a process.
STARTERS = {"subprocess", "Popen", "multiprocessing", "sync_playwright"}


def pytest_collection_modifyitems(config, items):
    """Deselect the tests that load cannot break."""
    chosen = [item for item in items if any(map(item.get_closest_marker, MARKS)) or starts(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
    items[:] = chosen


def starts(item) -> bool:
    """Return whether a test, a fixture that it asks for, or a function of the tests that they call
    starts a process.
    """
    fixtures = item._fixtureinfo.name2fixturedefs
    asked = {name for mark in item.iter_markers("usefixtures") for name in mark.args}
    left = [item.function, *_functions(fixtures, asked)]
    seen = set()
    while left:
        function = inspect.unwrap(left.pop())
        if function in seen or not isinstance(function, FunctionType):
            continue
        seen.add(function)
        names = set(_names(function.__code__))
        if names & STARTERS or {"os", "fork"} <= names:
            return True
        left += _called(function, names)
        left += _functions(fixtures, inspect.signature(function).parameters)
    return False


def _functions(fixtures: dict, names: Iterable[str]) -> list[Callable]:
    """Return the functions of the fixtures with these names."""
    return [defined.func for name in names for defined in fixtures.get(name, ())]


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names that code and the functions in it use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _called(function: FunctionType, names: set[str]) -> Iterator[Callable]:
    """Yield the functions of the tests, and the methods of their classes and objects, that `names`
    refer to.
    """
    for name in names:
        value = function.__globals__.get(name)
        if isinstance(value, ModuleType) and _is_of_tests(value):
            values = [vars(value).get(attribute) for attribute in names]
        else:
            values = [value]
        for one in values:
            kind = one if inspect.isclass(one) else type(one)
            if isinstance(one, FunctionType):
                if _is_of_tests(inspect.unwrap(one)):
                    yield one
            elif _is_of_tests(kind):
                yield from (method for method in vars(kind).values() if callable(method))


def _is_of_tests(value: Callable | ModuleType) -> bool:
    try:
        return inspect.getfile(value).startswith(TESTS)
    except TypeError:
        return False
