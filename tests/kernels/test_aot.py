"""Ahead-of-time compilation in child processes."""

import json
import logging
import os
import subprocess
import sys

import psutil
import pytest

from kvboost_edge.errors import BackendUnavailable
from kvboost_edge.kernels import aot
from kvboost_edge.kernels.entry import KernelEntry
from kvboost_edge.kernels.team import team_entries

# A separate process with a separate cache reports the kernels that it compiled itself, its
# progress, and the files on disk.
COMPILE = """
import json, sys
from pathlib import Path
from numba.core import event
from kvboost_edge.kernels import aot
from kvboost_edge.kernels.attention.storage import copy_entry
from kvboost_edge.kernels.team import team_entries
own, told = [], []
class Listener(event.Listener):
    def on_start(self, one):
        own.append(one.data["dispatcher"].__name__)
    def on_end(self, one):
        pass
event.register("numba:compile", Listener())
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
