"""Compile options that results and responsiveness depend on."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
from numba.core.dispatcher import Dispatcher

import kvboost_edge.kernels
from kvboost_edge.kernels import jit


def dispatchers() -> dict[str, Dispatcher]:
    modules = [
        importlib.import_module(f"kvboost_edge.kernels.{info.name}")
        for info in pkgutil.iter_modules(kvboost_edge.kernels.__path__)
    ]
    return {
        f"{module.__name__}.{name}": value
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, Dispatcher) and value.__module__ == module.__name__
    }


@pytest.mark.parametrize("name", dispatchers())
def test_every_kernel_runs_without_the_gil_and_without_fast_math(name: str) -> None:
    options = dispatchers()[name].targetoptions
    assert options["nogil"] is True
    assert not options.get("fastmath", False)
    assert not options.get("parallel", False)
    assert options["error_model"] == "numpy"


def test_compiled_code_does_not_outlive_an_edit_of_any_kernel_source(monkeypatch: pytest.MonkeyPatch) -> None:
    (attend,) = [value for name, value in dispatchers().items() if name.endswith(".attend")]
    signature = attend.signatures[0] if attend.signatures else ()
    codegen = attend.targetctx.codegen()
    before = attend._cache._index_key(signature, codegen)
    assert attend._cache._index_key(signature, codegen) == before
    monkeypatch.setattr(jit, "_source_digest", lambda: "edited")
    assert attend._cache._index_key(signature, codegen) != before
