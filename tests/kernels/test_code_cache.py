"""Files of compiled kernels: damaged, incompatible and untrusted ones are not used."""

import importlib
import os
import sys
from pathlib import Path

import pytest

from kvboost_edge.kernels.entry import KernelEntry
from kvboost_edge.kernels.jit import kernel
from kvboost_edge.kernels.signature import INT64


def add_three(number):
    return number + 3


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of compiled kernels."""
    # Numba reads the variable again when it has changed.
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path / "kernels"))
    return tmp_path / "kernels"


def opened():
    """Return a new entry of `add_three`, as another process opens it."""
    return KernelEntry(kernel(add_three), INT64, returns=INT64)


def compilations(entry):
    return sum(entry.kernel.dispatcher.stats.cache_misses.values())


DAMAGES = {
    "empty": lambda data: b"",
    "zeroed": lambda data: bytes(len(data)),
    "truncated": lambda data: data[: len(data) // 2],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
def test_a_damaged_file_is_replaced(suffix, damage, folder):
    opened().compile()
    [path] = folder.rglob(f"*.{suffix}")
    path.write_bytes(damage(path.read_bytes()))
    found = opened()
    assert found.is_ready == (suffix == "nbc")
    found.compile()
    assert found.kernel(4) == 7
    later = opened()
    assert later.is_ready
    later.compile()
    assert (compilations(found), compilations(later)) == (1, 0)


def test_a_damaged_file_is_missing_until_it_is_replaced(folder, caplog):
    opened().compile()
    [path] = folder.rglob("*.nbc")
    path.write_bytes(b"")
    missing = opened()
    dispatcher = missing.kernel.dispatcher
    assert dispatcher._cache.load_overload(missing.arguments, dispatcher.targetctx) is None
    assert not opened().is_ready
    assert path.name in caplog.text


def test_an_index_with_types_of_another_version_is_replaced(folder, tmp_path, monkeypatch):
    """The types of a key are loaded before the version of the sources can be compared."""
    (tmp_path / "older_version.py").write_text("class Kind:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    kind = importlib.import_module("older_version").Kind()
    opened().kernel.dispatcher._cache._cache_file.save((kind, "old sources"), "code")
    (tmp_path / "older_version.py").unlink()
    monkeypatch.delitem(sys.modules, "older_version")
    found = opened()
    assert not found.is_ready
    found.compile()
    assert opened().is_ready


def test_files_are_on_disk_before_they_are_renamed(folder, monkeypatch):
    """Otherwise a power failure could leave files without their contents."""
    synced, renamed = set(), []
    sync, replace = os.fsync, os.replace

    def noting_sync(handle):
        sync(handle)
        status = os.fstat(handle)
        synced.add((status.st_ino, status.st_size))

    def noting_replace(source, target):
        status = os.stat(source)
        renamed.append(((status.st_ino, status.st_size), str(target)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noting_sync)
    monkeypatch.setattr(os, "replace", noting_replace)
    opened().compile()
    assert sorted(target.rpartition(".")[2] for _, target in renamed) == ["nbc", "nbi"]
    assert {file for file, _ in renamed} <= synced


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no permissions")
@pytest.mark.parametrize(
    ("mode", "below", "is_used"),
    [
        (0o700, 0o755, True),
        (0o775, 0o775, True),
        (0o1777, 0o755, True),
        (0o777, 0o755, False),
        (0o755, 0o777, False),
        (0o1777, 0o1777, False),
    ],
)
def test_a_folder_that_all_users_can_write_to_is_not_used(mode, below, is_used, folder, caplog):
    opened().compile()
    [inner] = folder.iterdir()
    folder.chmod(mode)
    inner.chmod(below)
    assert opened().is_ready == is_used
    used = Path(opened().kernel.dispatcher._cache.cache_path)
    assert (used == inner) == is_used
    assert caplog.text.count("other users can change") == 1 - is_used
    unsafe = folder if mode == 0o777 else inner
    assert caplog.text.count(f"Use `chmod o-w {unsafe}`") == 1 - is_used


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no permissions")
@pytest.mark.parametrize("which", ["folder", "folder below"])
def test_a_folder_of_another_user_is_not_used(which, folder, monkeypatch, caplog):
    opened().compile()
    [inner] = folder.iterdir()
    owned = folder if which == "folder" else inner
    if os.getuid() == 0:
        os.chown(owned, 12345, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    assert not opened().is_ready
    assert f"can change {folder}" in caplog.text
    assert "chmod" not in caplog.text
    assert f"a new one below {folder}" in caplog.text


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no permissions")
@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_new_folder_below_a_folder_of_all_users_is_used(mode, folder, monkeypatch, caplog):
    folder.mkdir()
    folder.chmod(mode)
    if os.getuid() == 0:
        os.chown(folder, 12345, -1)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(folder / "own"))
    monkeypatch.setattr("numba.config.CACHE_DIR", str(folder / "own"))
    opened().compile()
    assert opened().is_ready
    assert Path(opened().kernel.dispatcher._cache.cache_path).parent == folder / "own"
    assert "NUMBA_CACHE_DIR" not in caplog.text


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no permissions")
def test_new_folders_cannot_be_written_to_by_other_users(folder):
    before = os.umask(0)
    try:
        opened().compile()
    finally:
        os.umask(before)
    assert opened().is_ready
