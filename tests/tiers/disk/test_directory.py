"""The directory of a tier: its location, its permissions, and the message if it cannot be used."""

import errno
import json
import os
import stat
import time
from pathlib import Path

import pytest

from helpers.tiers.disk_cases import CAP, OTHER_SPACE, SPACE, chain, opened, read, space_dir, write
from helpers.tiers.disk_faults import FaultyFiles, fails
from kvboost_edge.errors import ConfigError
from kvboost_edge.tiers.disk.tier import DiskTier

posix = pytest.mark.skipif(os.name != "posix", reason="modes and links as POSIX has them")


@posix
def test_stored_files_are_private(tmp_path):
    before = os.umask(0)
    try:
        with opened(tmp_path / "new") as tier:
            write(tier, chain(40))
    finally:
        os.umask(before)
    root = tmp_path / "new"
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert stat.S_IMODE(space_dir(root).stat().st_mode) == 0o700
    files = list(space_dir(root).iterdir())
    assert len(files) > 6
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


@posix
def test_a_readable_directory_is_made_private(tmp_path):
    space_dir(tmp_path).mkdir(mode=0o755)
    with opened(tmp_path):
        assert stat.S_IMODE(space_dir(tmp_path).stat().st_mode) == 0o700


def test_the_description_is_stored_and_openings_are_counted(tmp_path):
    text = {"model": "wörld/7b", "kv_format": "int8", "block_size": 16}
    with opened(tmp_path, description=text):
        pass
    with opened(tmp_path, OTHER_SPACE):
        pass
    with opened(tmp_path):
        pass
    found = json.loads((space_dir(tmp_path) / "space.json").read_text(encoding="utf-8"))
    assert found == {**text, "used": 3}
    assert json.loads((space_dir(tmp_path, OTHER_SPACE) / "space.json").read_text())["used"] == 2


def test_a_missing_relative_directory_is_created(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with opened(Path("some/where")) as tier:
        write(tier, chain(3))
        monkeypatch.chdir("/")
        assert read(tier, chain(3)) == 3
        assert tier.directory == space_dir(tmp_path / "some" / "where")
    with opened(tmp_path / "some" / "where") as tier:
        assert read(tier, chain(3)) == 3


@posix
def test_the_cache_directory_may_be_a_symbolic_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with opened(tmp_path / "link") as first, opened(tmp_path / "real") as second:
        write(first, chain(3))
        assert read(second, chain(3)) == 3


@posix
def test_a_link_in_place_of_a_space_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "cache").mkdir()
    space_dir(tmp_path / "cache").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="symbolic link"):
        DiskTier.open(tmp_path / "cache", SPACE, max_bytes=CAP)
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_file_in_place_of_the_directory_is_refused_by_name(tmp_path, place):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="disk_cache_dir") as caught:
        DiskTier.open(tmp_path / place, SPACE, max_bytes=CAP)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@posix
@pytest.mark.skipif(
    not hasattr(os, "getuid") or os.getuid() != 0, reason="only root gives files away"
)
def test_a_directory_of_another_user_is_refused(tmp_path):
    space_dir(tmp_path).mkdir()
    os.chown(space_dir(tmp_path), 12345, 12345)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        DiskTier.open(tmp_path, SPACE, max_bytes=CAP)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_directory_that_cannot_be_created_is_refused_by_name(tmp_path, code):
    files = FaultyFiles(0, fails(code), names=("make_directory",))
    with pytest.raises(ConfigError, match=r"disk_cache_dir .* cannot be used"):
        DiskTier.open(tmp_path / "new", SPACE, max_bytes=CAP, files=files)


@pytest.mark.parametrize("name", ["lock", "make_private"])
def test_an_unwritable_directory_is_read_only(tmp_path, name):
    """The cases are a read-only mount and a file system without locks."""
    with opened(tmp_path) as tier:
        write(tier, chain(5))
    files = FaultyFiles(0, fails(errno.EROFS), names=(name,))
    with opened(tmp_path, files=files) as tier:
        assert read(tier, chain(5)) == 5
        assert write(tier, chain(6)) == 5
        assert "only read" in tier.stat().state
    with opened(tmp_path) as tier:
        assert tier.stat().writable


def test_usage_order_does_not_depend_on_clocks(tmp_path, monkeypatch):
    """File times in the future and a clock that runs backwards have no effect: the order of use is
    by number.
    """
    with opened(tmp_path) as tier:
        write(tier, chain(60))
    for number, path in enumerate(sorted(space_dir(tmp_path).iterdir())):
        os.utime(path, (4e9 - number, 4e9 - number))
    monkeypatch.setattr(time, "time", lambda: 0.0)
    with opened(tmp_path) as tier:
        assert read(tier, chain(60)) == 60
