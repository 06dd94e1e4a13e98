"""Compile options that results and responsiveness depend on."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path

import pytest
from numba.core.caching import IndexDataCacheFile
from numba.core.dispatcher import Dispatcher

import kvboost_edge.kernels
from kvboost_edge.kernels import jit


def dispatchers() -> dict[str, Dispatcher]:
    modules = [
        importlib.import_module(info.name)
        for info in pkgutil.walk_packages(kvboost_edge.kernels.__path__, "kvboost_edge.kernels.")
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
    attend = dispatchers()["kvboost_edge.kernels.attention.attend.attend"]
    signature = attend.signatures[0] if attend.signatures else ()
    codegen = attend.targetctx.codegen()
    before = attend._cache._index_key(signature, codegen)
    assert attend._cache._index_key(signature, codegen) == before
    monkeypatch.setattr(jit, "_source_digest", lambda: "edited")
    assert attend._cache._index_key(signature, codegen) != before


@pytest.fixture
def files(tmp_path: Path) -> Callable[[], IndexDataCacheFile]:
    """Cache files of one function, as several processes open them."""
    return lambda: jit._NamedDataFile(str(tmp_path), "function-1.py311", "stamp")


def key(signature: str, digest: str = "sources") -> tuple[str, str]:
    return signature, digest


def test_a_process_killed_while_saving_leaves_nothing_that_runs(
    files: Callable[[], IndexDataCacheFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With numbers for names, the entry written first would name what an older version left under its number."""
    files().save(key("f(int)", "old"), "code of the old sources")
    for method in ("_save_data", "_save_index"):
        killed = files()
        monkeypatch.setattr(killed, method, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            killed.save(key("f(int)"), "code")
        assert files().load(key("f(int)")) is None
    files().save(key("f(int)"), "code")
    assert files().load(key("f(int)")) == "code"


def test_two_processes_saving_at_once_never_load_one_anothers_code(
    files: Callable[[], IndexDataCacheFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    late = files()
    monkeypatch.setattr(late, "_load_index", dict)  # it has looked before the other one saved
    files().save(key("f(int)"), "code of one")
    late.save(key("f(float)"), "code of the other")
    assert files().load(key("f(float)")) == "code of the other"
    assert files().load(key("f(int)")) in ("code of one", None)


def test_the_cache_keeps_every_signature_and_no_file_of_older_sources(
    files: Callable[[], IndexDataCacheFile], tmp_path: Path
) -> None:
    for signature in ("f(int)", "f(float)"):
        files().save(key(signature, "old"), "old " + signature)
    for signature in ("f(int)", "f(float)", "f(int)"):
        files().save(key(signature), signature)
    assert [files().load(key(signature)) for signature in ("f(int)", "f(float)")] == ["f(int)", "f(float)"]
    assert files().load(key("f(int)", "old")) is None
    assert len(list(tmp_path.glob("*.nbc"))) == 2


def test_kernels_are_cached_that_way() -> None:
    attend = dispatchers()["kvboost_edge.kernels.attention.attend.attend"]
    assert isinstance(attend._cache._cache_file, jit._NamedDataFile)


def test_the_first_kernel_that_is_not_found_compiled_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))
    told: list[str] = []
    try:
        jit.on_first_compilation(lambda: told.append("compiling"))
        one, other = (jit.kernel(lambda x, y=y: x + y) for y in (1, 2))
        assert (one(1), other(1)) == (2, 3)
        assert told == ["compiling"]
        jit.on_first_compilation(lambda: told.append("again"))
        jit.on_first_compilation(None)
        assert jit.kernel(lambda x: x)(1) == 1
        assert told == ["compiling"]
    finally:
        jit.on_first_compilation(None)
