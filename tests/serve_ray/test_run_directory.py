"""The files of a server's own Ray: their directory, its permissions, and the removal of those that
a killed server left.
"""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvboost_edge.errors import ConfigError
from kvboost_edge.host.atomic_files import open_unfinished
from kvboost_edge.serve_ray import run_directory
from kvboost_edge.serve_ray.run_directory import ray_directory

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="files are not locked there")


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """Path of the in-memory directory, which does not exist yet. The "disk" next to it is the
    directory for temporary files; their paths are longer than sockets allow.
    """
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(run_directory, "MEMORY_PLACE", str(tmp_path / "memory"))
    monkeypatch.setattr(run_directory, "_MEMORY_BYTES", 0)
    monkeypatch.setattr(run_directory, "_MOST_SOCKET_PATH", 500)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "disk"))
    return tmp_path / "memory"


def test_the_directory_is_in_memory_if_there_is_space(memory, monkeypatch):
    disk = memory.parent / "disk"
    with ray_directory() as found:
        assert Path(found).parents[1] == disk  # the in-memory directory does not exist
    memory.mkdir()
    with ray_directory() as found:
        assert Path(found).parents[1] == memory
    monkeypatch.setattr(run_directory, "_MEMORY_BYTES", shutil.disk_usage(memory).total + 1)
    with ray_directory() as found:
        assert Path(found).parents[1] == disk
    assert not [*memory.iterdir(), *disk.iterdir()]


def test_the_directory_is_private(memory):
    memory.mkdir()
    with ray_directory() as found:
        os.chmod(found, 0o777)
        assert Path(found).parent.stat().st_mode & 0o777 == 0o700


def test_a_path_too_long_for_sockets_is_refused(memory, monkeypatch):
    """The message gives the longest possible path."""
    disk = memory.parent / "disk"
    monkeypatch.setattr(run_directory, "_MOST_SOCKET_PATH", len(str(disk)) + 200)
    own = len(f"/{run_directory._prefix()}/r") + run_directory._RANDOM
    longest = run_directory._MOST_SOCKET_PATH - run_directory._SESSION_PATH - own
    fits, too_long = (disk / ("x" * (longest - len(str(disk)) - 1 + more)) for more in (0, 1))
    for path in (fits, too_long):
        path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(fits))
    with ray_directory() as found:
        assert len(found) + run_directory._SESSION_PATH == run_directory._MOST_SOCKET_PATH
    monkeypatch.setattr(tempfile, "tempdir", str(too_long))
    with (
        pytest.raises(ConfigError, match=rf"at most {longest} characters\); set TMPDIR"),
        ray_directory(),
    ):
        pass
    assert not [*too_long.iterdir()]


def test_paths_in_memory_fit_a_socket_address():
    assert (
        len(f"/dev/shm/{run_directory._prefix()}/r")
        + run_directory._RANDOM
        + run_directory._SESSION_PATH
        <= 107
    )


def test_files_of_a_killed_server_are_removed_by_the_next(memory):
    """The files of a running server and foreign files stay."""
    memory.mkdir()
    other = memory / f"{run_directory._prefix()}somebody"
    other.mkdir()
    program = (
        "import sys, tempfile\n"
        "from kvboost_edge.serve_ray import run_directory\n"
        "run_directory.MEMORY_PLACE, run_directory._MEMORY_BYTES, run_directory._MOST_SOCKET_PATH = "
        "sys.argv[1], 0, 500\n"
        "with run_directory.ray_directory() as found:\n"
        "    open(found + '/prompt', 'w').close()\n"
        "    print(found, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", program, str(memory)], **pipes) as process:
        left = Path(process.stdout.readline().strip())
        with ray_directory() as found:
            assert (left / "prompt").exists()  # its server is running
        process.kill()
        process.wait(timeout=60)
    assert (left / "prompt").exists()
    with ray_directory() as found:
        assert {other, Path(found).parent} == set(memory.iterdir())


def left_behind(place):
    """Create a directory as a killed server leaves it."""
    left = place / f"{run_directory._prefix()}left"
    (left / "r").mkdir(parents=True)
    open_unfinished(left).close()
    return left


def test_directories_of_another_machine_are_kept(memory, monkeypatch):
    """The locks of another machine may not be visible here."""
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(platform, "node", lambda: "another machine")
        theirs = left_behind(memory)
    own = left_behind(memory)
    with ray_directory():
        assert not own.exists()
        assert theirs.exists()


def test_a_failed_removal_is_retried(memory, monkeypatch):
    """Any later server may retry, because the lock file, which shows that no server lives there, is
    removed last.
    """
    memory.mkdir()

    def keep_inner(path, **options):
        """Keep the directory, as if Ray's files in it were held open."""
        for one in path.glob(".new-*"):
            one.unlink()

    with monkeypatch.context() as held:
        held.setattr(shutil, "rmtree", keep_inner)
        with ray_directory() as found:
            left = Path(found).parent
        assert left.exists()
        with ray_directory():
            assert left.exists()
    with ray_directory():
        assert not left.exists()
