"""Tests that the engine has every member that the server uses. Mypy checks the types in `__main__`."""

import ast
import inspect
from pathlib import Path

import pytest

from kvboost_edge import CPUPagedEngine
from kvboost_edge.server import engines
from kvboost_edge.server.engines import Engine, StatsProvider

ASKED = {
    name: member
    for kind in (Engine, StatsProvider)
    for name, member in vars(kind).items()
    if not name.startswith("_")
}
MEMBERS = list(ASKED)


def _parameters(function):
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("name", MEMBERS)
def test_the_engine_has_each_member_of_the_protocol(name):
    asked = ASKED[name]
    there = inspect.getattr_static(CPUPagedEngine, name)
    assert isinstance(there, property) == isinstance(asked, property)
    if not isinstance(asked, property):
        # The engine may accept more: keyword options instead of `sampling` and `terms`.
        given = [one for one in _parameters(there) if one[0] != "options"]
        assert given == [one for one in _parameters(asked) if one[0] != "options"]
    annotations = [item.fget if isinstance(item, property) else item for item in (asked, there)]
    returned = [
        function.__annotations__["return"].replace("Floats", "npt.NDArray[np.float32]")
        for function in annotations
    ]
    assert returned[0] == returned[1]


def test_the_server_uses_only_the_engine_protocol():
    server = Path(engines.__file__).parent
    used = {
        node.attr
        for path in server.rglob("*.py")
        if path.name
        not in (
            "__main__.py",
            "engine_warmup.py",
            "engines.py",
        )  # the first two create their own engine
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and (
            name := node.value.attr
            if isinstance(node.value, ast.Attribute)
            else getattr(node.value, "id", "")
        )
        and name in ("engine", "_engine")
    }
    used -= {"add_argument"}  # the name of a group of flags in flags.py
    used -= set(dir(dict))  # the engine's options, by name
    assert used <= set(MEMBERS), sorted(used - set(MEMBERS))
    assert set(MEMBERS) <= used | {"embed", "rerank"}, sorted(set(MEMBERS) - used)
