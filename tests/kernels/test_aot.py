"""Ahead-of-time compilation in child processes."""

import json
import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import kvboost_edge
from helpers.kernels.own_compilations import LIST_OWN
from kvboost_edge.errors import BackendUnavailable
from kvboost_edge.kernels import aot
from kvboost_edge.kernels.entry import KernelEntry
from kvboost_edge.kernels.team import team_entries

PATIENCE = 300.0

# A separate process with a separate cache reports the kernels that it compiled itself, its
# progress, and the files on disk.
COMPILE = (
    LIST_OWN
    + """
import json, sys
from pathlib import Path
from kvboost_edge.kernels import aot
from kvboost_edge.kernels.attention.storage import copy_entry
from kvboost_edge.kernels.team import team_entries
told = []
def tell(done, total):
    told.append([done, total])
    if done == int(sys.argv[2]):
        raise KeyboardInterrupt
aot.on_compiling(tell)
if sys.argv[1] == "0":
    sys.executable = ""
try:
    aot.compile_ahead([*team_entries, copy_entry], int(sys.argv[1]))
except KeyboardInterrupt:
    pass
print(json.dumps([own, told, sorted(path.name for path in Path(aot.cache_path()).parent.glob("*/*.nbc"))]))
"""
)


def compiled(cache, children, stop_at=-1):
    """Compile with this number of child processes; 0 means that none can be started."""
    command = [sys.executable, "-c", COMPILE, str(children), str(stop_at)]
    environment = os.environ | {"NUMBA_CACHE_DIR": str(cache), "KVBOOST_EDGE_KERNELS": "none"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_child_processes_compile_everything(tmp_path):
    own, told, files = compiled(tmp_path / "two", 2)
    assert own == []
    assert told == [[0, 3], [1, 3], [2, 3], [3, 3]]
    assert len(files) == 3
    assert compiled(tmp_path / "two", 2) == [[], [], files]
    alone, told, same = compiled(tmp_path / "none", 0)
    assert {"_wait_for", "_look_out", "_copy"} <= set(alone)
    assert told[-1] == [3, 3]
    assert same == files


def test_an_interrupted_compilation_is_completed_later(tmp_path):
    own, told, files = compiled(tmp_path, 1, stop_at=1)
    assert (own, told[-1]) == ([], [1, 3])
    assert 1 <= len(files) < 3
    own, told, files = compiled(tmp_path, 2)
    assert own == []
    assert told[0][1] <= 2
    assert len(files) == 3


@pytest.mark.parametrize("printed", ["a line of Numba", "part of a line"])
def test_a_child_may_print(printed, tmp_path):
    """What is printed is no answer, even if it is printed before the child's own code runs."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "KVBOOST_EDGE_KERNELS": "none"}
    if printed == "part of a line":
        (tmp_path / "sitecustomize.py").write_text(f"print({printed!r}, end='', flush=True)")
        environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *sys.path])
    else:
        environment["NUMBA_DEBUG_CACHE"] = "1"
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, "2", "-1"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE,
    )
    own, told, files = json.loads(done.stdout.splitlines()[-1].removeprefix(printed))
    assert (own, told[-1], len(files)) == ([], [3, 3], 3)


def test_a_child_imports_nothing_from_the_current_directory(tmp_path, monkeypatch):
    for name in ("numpy", "queue", "numba"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('from the current directory')")
    monkeypatch.chdir(tmp_path)
    child = aot.Child([aot._MODULE])
    try:
        child.compile(team_entries[0].name)
    finally:
        child.end()


def test_a_child_imports_modules_from_this_process_s_folders(tmp_path, monkeypatch):
    (tmp_path / "other_child.py").write_text(
        "import sys\n"
        "from kvboost_edge.kernels.aot import Answers\n"
        "answers = Answers()\n"
        "for line in sys.stdin:\n"
        "    answers.give(line.strip())\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    # Python's imports ignore entries that are not strings.
    monkeypatch.setattr(sys, "path", [tmp_path / "a_path", *sys.path, None])
    child = aot.Child(["other_child"])
    try:
        child.compile("some_module:kernel")
    finally:
        child.end()


# The largest file of machine code has more bytes than this, and the log has fewer.
FULL = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not limit the size of files")
def test_a_full_disk_moves_compilation_to_this_process(tmp_path):
    command = [sys.executable, "-c", FULL + COMPILE, "2", "-1"]
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "KVBOOST_EDGE_KERNELS": "none"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    own, told, files = json.loads(done.stdout)
    assert {"_wait_for", "_look_out", "_copy"} <= set(own)
    assert told == [[0, 3], [1, 3], [2, 3], [3, 3]]
    assert files == []
    [warning] = [line for line in done.stderr.splitlines() if "compiled in this process" in line]
    assert "cannot store machine code" in warning
    assert done.stderr.count("Free space there") == 2  # once in a child, once in this process


@pytest.fixture
def missing(monkeypatch):
    """A kernel entry that is reported as not compiled."""
    monkeypatch.setattr(KernelEntry, "is_ready", False)
    return team_entries[0]


def test_a_failed_child_is_reported_with_its_kernel(missing, monkeypatch):
    monkeypatch.setattr(aot, "_MODULE", "kvboost_edge.kernels.nowhere")
    before = set(psutil.Process().children())
    with pytest.raises(
        BackendUnavailable,
        match=r"kernel kvboost_edge\.kernels\.team:_wait_for exited with 1.*nowhere",
    ):
        aot.compile_ahead([missing], 2)
    assert set(psutil.Process().children()) <= before


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no signals")
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("SIGKILL", r"signal 9 \(SIGKILL\), perhaps because the system ran out of memory"),
        ("SIGSEGV", r"signal 11: no output$"),
    ],
)
def test_a_killed_child_is_reported_with_the_signal(name, reason):
    child = aot.Child([aot._MODULE])
    try:
        child._process.send_signal(getattr(signal, name))
        with pytest.raises(BackendUnavailable, match=rf"kernel a:b was ended by {reason}"):
            child.compile("a:b")
    finally:
        child.end()


def test_an_interrupt_leaves_no_process(missing):
    before = set(psutil.Process().children())

    def tell(done, total):
        raise KeyboardInterrupt

    aot.on_compiling(tell)
    try:
        with pytest.raises(KeyboardInterrupt):
            aot.compile_ahead([missing], 2)
    finally:
        aot.on_compiling(None)
    assert set(psutil.Process().children()) <= before


@pytest.mark.parametrize("executable", ["", "/nowhere/python"])
def test_compilation_falls_back_to_this_process_with_a_log_line(
    executable, missing, monkeypatch, caplog
):
    monkeypatch.setattr(sys, "executable", executable)
    with caplog.at_level(logging.INFO, "kvboost_edge"):
        aot.compile_ahead([missing], 2)
    assert "compiled in this process" in caplog.text
    assert "1 kernels for this machine in this process" in caplog.text


# A process reports the folder of compiled kernels, the kernels that it compiled itself, and whether
# one was missing on disk.
COPY = (
    LIST_OWN
    + """
import json, logging, sys
from kvboost_edge.kernels import aot
from kvboost_edge.kernels.attention.storage import copy_entry
logging.basicConfig(level="INFO", format="%(levelname)s %(message)s")
told = []
aot.on_compiling(lambda done, total: told.append(done))
aot.compile_ahead([copy_entry], 1)
assert copy_entry.address
print(json.dumps([aot.cache_path(), "_copy" in own, bool(told)]))
"""
)


@pytest.fixture(scope="module")
def locked_package(tmp_path_factory):
    """A folder with a copy of the package, whose folders of kernels take no cache files.

    Files block the way, because a superuser can write to read-only folders.
    """
    room = tmp_path_factory.mktemp("locked")
    source = Path(kvboost_edge.__file__).parent
    package = room / source.name
    shutil.copytree(source, package, ignore=shutil.ignore_patterns("__pycache__"))
    for path in {each.parent for each in (package / "kernels").rglob("*.py")}:
        (path / "__pycache__").write_text("in the way")
    return room


@pytest.fixture
def copied(locked_package, tmp_path):
    """Function that runs COPY with this cache directory, where Numba can write to no folder.

    Returns what it reports, and its log.
    """
    blocked = tmp_path / "a-file"
    blocked.write_text("in the way")
    work = tmp_path / "work"
    work.mkdir()

    def run(cache, *folders, home=True):
        dropped = {"NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "HOME"}
        environment = {name: value for name, value in os.environ.items() if name not in dropped}
        homes = {"HOME": str(blocked), "XDG_CACHE_HOME": str(blocked)} if home else {}
        paths = os.pathsep.join(map(str, [locked_package, *folders, *sys.path]))
        environment |= homes | {"PYTHONPATH": paths, "KVBOOST_EDGE_KERNELS": "none"}
        done = subprocess.run(
            [sys.executable, "-c", COPY],
            env=environment | {"KVBOOST_EDGE_CACHE": str(cache)},
            cwd=work,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert list(work.iterdir()) == []
        return json.loads(done.stdout), done.stderr

    return run


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has another folder for Numba")
def test_kernels_go_to_the_cache_directory_if_numba_has_no_folder(copied, tmp_path):
    cache = tmp_path / "cache"
    (folder, *compiled), log = copied(cache)
    assert compiled == [False, True]
    assert Path(folder).parent == cache / "compiled"
    assert stat.S_IMODE((cache / "compiled").stat().st_mode) == 0o700
    assert len(list(cache.glob("compiled/*/*.nbc"))) == 1
    assert "WARNING" not in log
    assert "later runs load them from disk" in log
    assert copied(cache)[0] == [folder, False, False]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has another folder for Numba")
@pytest.mark.parametrize("trusted", [False, True])
def test_a_process_without_any_folder_compiles_kernels_itself(copied, tmp_path, trusted):
    """Neither a directory that cannot be created nor one that others can write to is used."""
    cache = tmp_path / "a-file" / "cache"
    if not trusted:
        cache = tmp_path / "cache"
        (cache / "compiled").mkdir(parents=True)
        (cache / "compiled").chmod(0o777)
    found, log = copied(cache)
    assert found == [None, True, True]
    [warning] = [line for line in log.splitlines() if "WARNING" in line]
    assert "KVBOOST_EDGE_CACHE" in warning
    assert "NUMBA_CACHE_DIR" in warning
    assert str(cache) in warning
    assert "later runs compile them again" in log
    assert list(tmp_path.rglob("*.nbc")) == []


@pytest.mark.skipif(sys.platform == "win32", reason="pwd is a module of POSIX systems")
def test_kernels_go_to_the_cache_directory_of_a_user_without_a_home(copied, tmp_path):
    nobody = tmp_path / "nobody"
    nobody.mkdir()
    # Child processes import this module, too.
    (nobody / "sitecustomize.py").write_text(
        "import pwd\ndef unknown(uid):\n    raise KeyError(uid)\npwd.getpwuid = unknown\n"
    )
    (folder, *compiled), log = copied(tmp_path / "cache", nobody, home=False)
    assert compiled == [False, True]
    assert Path(folder).parent == tmp_path / "cache" / "compiled"
    assert "WARNING" not in log
