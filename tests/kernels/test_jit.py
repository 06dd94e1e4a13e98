"""Compile options that affect results and responsiveness."""

import ast
import importlib
import os
import pkgutil
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path

import pytest

import kvboost_edge.kernels
from kvboost_edge.kernels import code_cache, jit, sources


def kernels():
    """Return every kernel, under the first name found for it."""
    modules = [
        importlib.import_module(info.name)
        for info in pkgutil.walk_packages(kvboost_edge.kernels.__path__, "kvboost_edge.kernels.")
    ]
    found = {}
    for module in modules:
        for name, value in vars(module).items():
            if isinstance(value, jit.Kernel) and (
                value not in found or value.__module__ == module.__name__
            ):
                found[value] = f"{module.__name__}.{name}"
    return {name: value for value, name in found.items()}


@pytest.mark.parametrize("name", kernels())
def test_every_kernel_runs_without_the_gil_and_without_fast_math(name):
    options = kernels()[name].dispatcher.targetoptions
    assert options["nogil"] is True
    assert not options.get("fastmath", False)
    assert not options.get("parallel", False)
    assert options["error_model"] == "numpy"


def test_editing_any_kernel_source_invalidates_the_cache(monkeypatch):
    attend = kernels()["kvboost_edge.kernels.attention.float_attend.attend"].dispatcher
    signature = attend.signatures[0] if attend.signatures else ()
    codegen = attend.targetctx.codegen()
    before = attend._cache._index_key(signature, codegen)
    assert attend._cache._index_key(signature, codegen) == before
    monkeypatch.setattr(sources, "compiled_digest", lambda: "edited")
    assert attend._cache._index_key(signature, codegen) != before


def test_kernels_are_stored_apart_for_processors_that_hide_i8mm(monkeypatch):
    dispatcher = kernels()["kvboost_edge.kernels.attention.float_attend.attend"].dispatcher
    keys = []
    for reported in (False, True):
        monkeypatch.setattr(code_cache, "_reports_i8mm", lambda reported=reported: reported)
        keys.append(dispatcher._cache._index_key((), dispatcher.targetctx.codegen()))
    assert keys[0] != keys[1]


def test_kernels_made_by_one_factory_differ_in_name():
    """Otherwise their cache files, and their code in a linked library, would be confused."""
    names = [(kernel.__module__, kernel.__qualname__) for kernel in kernels().values()]
    assert sorted(names) == sorted(set(names))


FOLDER = Path(kvboost_edge.kernels.__file__).parent


def test_the_digest_of_the_sources_covers_the_folders_below(tmp_path):
    room = tmp_path / "kernels"
    shutil.copytree(FOLDER, room, ignore=shutil.ignore_patterns("__pycache__"))

    def digests():
        return sources.digest_of(room), sources.digest_of(room, sources.NOT_COMPILED)

    before = digests()
    assert before == (sources.source_digest(), sources.compiled_digest())
    for edited in (
        *("linear/weight_dot.py", "vectors.py", "attention/float_attend.py", "library.py"),
        "linear/grids.npz",
    ):
        path = room / edited
        data = path.read_bytes()
        path.write_bytes(data + b"\n")
        changed = [now != then for now, then in zip(digests(), before, strict=True)]
        assert changed == [True, edited != "library.py"], edited
        path.write_bytes(data)
    (room / "linear" / "weight_dot.py").rename(room / "quantized_kv" / "more.py")
    assert all(now != then for now, then in zip(digests(), before, strict=True))


def is_left_out(path):
    name = os.path.relpath(path, FOLDER).replace(os.sep, "/")
    return any(fnmatch(name, pattern) for pattern in sources.NOT_COMPILED)


def test_the_source_digest_covers_every_module_that_affects_code():
    """The only imports of uncovered modules are the cache of compiled kernels, the notice of
    compilation and the search for a library. All manifest fields that decide on a kernel's variant
    are part of the key.
    """
    assert {path.name for path in FOLDER.rglob("*.py") if is_left_out(path)} >= {
        "aot.py",
        "build.py",
        "code_cache.py",
        "library.py",
        "notices.py",
        "attention.py",
    }
    imported = set()
    for path in FOLDER.rglob("*.py"):
        for node in [] if is_left_out(path) else ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                names = [(alias.name, "") for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [(node.module, alias.name) for alias in node.names]
            else:
                continue
            for module, name in names:
                if module.startswith("kvboost_edge.kernels"):
                    place = FOLDER.joinpath(*module.split(".")[2:])
                    for found in (place.with_suffix(".py"), place / f"{name}.py"):
                        if is_left_out(found) and found.exists():
                            imported.add(f"{module.removeprefix('kvboost_edge.kernels.')}.{name}")
    assert imported == {
        "code_cache.cache_folder",
        "code_cache.cache_of",
        "library.kernel_library",
        "notices.on_first_compilation",
    }


MAKE_TWO = """
from kvboost_edge.kernels.jit import kernel, named_kernel
@kernel
def twice(x):
    return 2 * x
@kernel
def square(x):
    return x * x
def make(name, inner, add):
    @named_kernel(name)
    def made(x):
        return inner(x) + add
    return made
def run():
    made = [make("made_twice", twice, 1), make("made_square", square, 5)]
    print([one(3) for one in made], [sum(one.dispatcher.stats.cache_hits.values()) for one in made])
"""


def test_factory_made_kernels_are_loaded_from_the_cache(tmp_path):
    (tmp_path / "made.py").write_text(MAKE_TWO)
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": paths}
    command = [sys.executable, "-c", "import made; made.run()"]
    for hits in (0, 1):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == f"[7, 14] [{hits}, {hits}]"
    # The functions they call are part of their code.
    assert sorted(
        path.name.split(".")[1].partition("-")[0] for path in tmp_path.rglob("*.nbc")
    ) == [
        "made_square",
        "made_twice",
    ]


@pytest.fixture
def files(tmp_path):
    """Opener of the cache files of one function, as separate processes open them."""
    return lambda: code_cache._NamedDataFile(str(tmp_path), "function-1.py311", "stamp")


def key(signature, digest="sources"):
    return signature, digest


def test_a_kill_during_saving_leaves_no_stale_code(files, monkeypatch):
    """If files had numbers as names, an index entry written first would refer to an older version's
    file with the same number.
    """
    files().save(key("f(int)", "old"), "code of the old sources")
    for method in ("_save_data", "_save_index"):
        killed = files()
        monkeypatch.setattr(killed, method, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            killed.save(key("f(int)"), "code")
        assert files().load(key("f(int)")) is None
    files().save(key("f(int)"), "code")
    assert files().load(key("f(int)")) == "code"


def test_concurrent_writers_lose_no_code(files):
    """Each writer opens the files separately, as processes do, and saves another signature."""
    names = [f"f({number})" for number in range(12)]
    start = threading.Barrier(len(names))

    def save(name):
        mine = files()
        start.wait()
        mine.save(key(name), f"code of {name}")

    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(save, names))
    assert [files().load(key(name)) for name in names] == [f"code of {name}" for name in names]


def test_concurrent_processes_never_load_wrong_code(files, monkeypatch):
    late = files()
    monkeypatch.setattr(late, "_load_index", dict)  # it reads the index before the other one saves
    files().save(key("f(int)"), "code of one")
    late.save(key("f(float)"), "code of the other")
    assert files().load(key("f(float)")) == "code of the other"
    assert files().load(key("f(int)")) in ("code of one", None)


def test_the_cache_keeps_all_signatures_and_removes_older_files(files, tmp_path):
    for signature in ("f(int)", "f(float)"):
        files().save(key(signature, "old"), "old " + signature)
    for signature in ("f(int)", "f(float)", "f(int)"):
        files().save(key(signature), signature)
    assert [files().load(key(signature)) for signature in ("f(int)", "f(float)")] == [
        "f(int)",
        "f(float)",
    ]
    assert files().load(key("f(int)", "old")) is None
    assert len(list(tmp_path.glob("*.nbc"))) == 2


def test_files_of_older_versions_and_of_killed_processes_are_removed(tmp_path):
    """A kernel is in another line than in the older version."""

    def save(name):
        file = code_cache._NamedDataFile(str(tmp_path), name, "stamp")
        before = set(tmp_path.iterdir())
        file.save(key("f(int)"), "code")
        return set(tmp_path.iterdir()) - before

    save("module.function-1.py311")
    others = [save(f"module.{name}") for name in ("function_-1.py311", "function-1.py312")]
    old, new = (tmp_path / f"a-1.py311.nbi.tmp.{16 * letter}" for letter in "0f")
    for path in (old, new):
        path.write_text("unfinished")
    os.utime(old, (0, 0))
    mine = save("module.function-7.py311")
    assert set(tmp_path.iterdir()) == set().union(mine, *others, {new})
    assert len(mine) == 2


def test_kernels_use_this_cache():
    attend = kernels()["kvboost_edge.kernels.attention.float_attend.attend"]
    assert isinstance(attend.dispatcher._cache._cache_file, code_cache._NamedDataFile)


def test_the_first_compilation_is_reported_once(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))
    told = []
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
