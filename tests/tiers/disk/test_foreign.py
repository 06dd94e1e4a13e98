"""Foreign files in the tier's directory: they are never followed, written to, deleted or counted,
and they do no harm.
"""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from helpers.tiers.disk_cases import (
    CAP,
    SPACE,
    chain,
    opened,
    present,
    read,
    segments,
    space_dir,
    write,
)
from helpers.tiers.disk_faults import FaultyFiles
from kvboost_edge.cli.app import run
from kvboost_edge.errors import ConfigError
from kvboost_edge.tiers.disk.survey import find_spaces
from kvboost_edge.tiers.disk.system_calls import Files
from kvboost_edge.tiers.disk.tier import DiskTier

pytestmark = pytest.mark.skipif(os.name != "posix", reason="links and pipes as POSIX has them")

BLOCKS = chain(40)  # three segments
LATER = chain(20, 5)  # two more
SECRET = b"nobody's business" * 1000
FOREIGN = "ab" * 32
"""A name as a space has it, and as many a store of other programs has."""


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    directory = tmp_path_factory.mktemp("sound")
    with opened(directory) as tier:
        write(tier, BLOCKS)
    return directory


@pytest.fixture
def root(sound, tmp_path, monkeypatch):
    """Copy of a tier of three segments, with a file outside that must not be touched."""
    monkeypatch.setenv("KVBOOST_EDGE_CACHE", str(tmp_path / "cache"))
    shutil.copytree(sound, tmp_path / "cache" / "blocks")
    (tmp_path / "secret").write_bytes(SECRET)
    return tmp_path / "cache" / "blocks"


def put(path, kind, secret):
    """Replace a file of the tier by a link, a pipe or a directory."""
    if path.exists():
        path.unlink()
    if kind == "link":
        path.symlink_to(secret)
    elif kind == "dangling link":
        path.symlink_to(secret.with_name("not there"))
    elif kind == "hard link":
        os.link(secret, path)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
        (path / "file").write_bytes(SECRET)


KINDS = ("link", "dangling link", "hard link", "pipe", "directory")
NAMES = (
    *("lock", "order", "order.new", "space.json", "space.json.new", "00000001.kvs", "00000001.kvx"),
    *("00000004.kvs", "00000004.kvx", "00000004.kvx.new"),
)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.some(7)
def test_foreign_entries_in_place_of_files_are_not_followed(root, kind, name):
    secret = root.parents[1] / "secret"
    put(space_dir(root) / name, kind, secret)
    stores = name != "lock" or kind in ("hard link", "pipe")
    for _ in range(2):
        with opened(root) as tier:
            assert len(present(tier, BLOCKS)) >= 25
            assert write(tier, LATER) == (len(LATER) if stores else 0), tier.stat().state
            assert stores or ("lock" in tier.stat().state and "only read" in tier.stat().state)
    for action in ("status", "list", "verify"):
        assert run(["cache", action]) == 0
    # Files that cannot be locked stay and are reported. All others are removed, except foreign
    # ones.
    assert run(["cache", "clear", "--yes"]) == (0 if stores else 1)
    left = {path.name for path in space_dir(root).iterdir()} if space_dir(root).exists() else set()
    assert left <= {name} if stores else len(segments(root)) == 3
    assert secret.read_bytes() == SECRET
    assert not secret.with_name("not there").exists()
    if kind == "directory":
        assert (space_dir(root) / name / "file").read_bytes() == SECRET


def test_a_fifo_as_a_description_does_not_block(root):
    (root / FOREIGN).mkdir()
    os.mkfifo(root / FOREIGN / "space.json")
    with opened(root) as tier:
        assert read(tier, BLOCKS) == len(BLOCKS)
    assert run(["cache", "status"]) == 0


def test_new_segments_skip_existing_names(root):
    for number in (4, 5, 7):
        put(space_dir(root) / f"{number:08x}.kvs", "link", root.parents[1] / "secret")
    with opened(root) as tier:
        assert write(tier, chain(40, 6)) == 40
        assert read(tier, chain(40, 6)) == 40
    assert [path.name[7] for path in segments(root) if not path.is_symlink()] == [
        "1",
        "2",
        "3",
        "6",
        "8",
        "9",
    ]


def test_foreign_files_and_directories_are_neither_counted_nor_deleted(root, capsys):
    mine = {root / "notes.txt", space_dir(root) / "notes.txt", space_dir(root) / "00000001.kvs.bak"}
    mine |= {
        root / FOREIGN / "data",
        root / ("cd" * 32),
        space_dir(root) / "folder" / "00000001.kvs",
    }
    mine |= {root / "11111111.kvs", root.parent / "packed" / "old.kvpack" / "data"}
    for path in mine:
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(SECRET)
    links = {
        root / ("ef" * 32),
        root.parent / "packed" / "link.kvpack",
        root.parent / "packed" / "gone.kvpack",
    }
    for path in links:
        path.symlink_to(root.parents[1] / ("nowhere" if "gone" in path.name else FOREIGN))
    (root.parents[1] / FOREIGN).mkdir()
    before = {path: path.stat().st_mtime_ns for path in (root / FOREIGN, root.parents[1] / FOREIGN)}
    held = sum(path.stat().st_size for path in segments(root))
    with opened(root) as tier:
        assert read(tier, BLOCKS) == len(BLOCKS)
    capsys.readouterr()
    assert run(["cache", "list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["path"] for row in found["rows"]] == [str(space_dir(root))]
    assert found["bytes"] == held
    for argv in (
        ["status"],
        ["verify"],
        ["prune", "--max-disk-bytes", "0"],
        ["prune", "--older-than", "0"],
        ["clear", "--yes"],
    ):
        assert run(["cache", *argv]) == 0, argv
    assert {path.read_bytes() for path in mine} == {SECRET}
    assert all(path.is_symlink() for path in links)
    assert {path: path.stat().st_mtime_ns for path in before} == before, (
        "no file may be left, not even a lock"
    )
    assert sorted(path.name for path in space_dir(root).iterdir()) == [
        "00000001.kvs.bak",
        "folder",
        "notes.txt",
    ]


def test_a_space_that_cannot_be_removed_does_not_block_others(root, capsys):
    with opened(root, bytes(32)) as tier:
        write(tier, BLOCKS)
    put(space_dir(root) / "lock", "directory", root)
    assert run(["cache", "clear", "--json", "--yes"]) == 1
    said = capsys.readouterr()
    rows = {Path(row["path"]).name: row for row in json.loads(said.out)["rows"]}
    assert rows[bytes(32).hex()]["removed"]
    assert not rows[SPACE.hex()]["removed"]
    assert "lock" in rows[SPACE.hex()]["error"]
    assert "some entries could not be removed" in said.err
    assert not space_dir(root, bytes(32)).exists()


class Unreadable(FaultyFiles):
    """Spaces of another user in a directory that several users write to."""

    def sizes(self, directory):
        if directory.name != SPACE.hex():
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(directory))
        return super().sizes(directory)


def test_unreadable_spaces_are_skipped(root):
    with opened(root, bytes(32)) as tier:
        write(tier, BLOCKS)
    with opened(root, files=Unreadable()) as tier:
        assert write(tier, LATER) == len(LATER), tier.stat().state
    DiskTier.open(
        root, SPACE, files=Unreadable()
    ).close()  # opening still determines the default cap
    assert [space.path for space in find_spaces(root, Unreadable())] == [space_dir(root)]


@pytest.mark.parametrize(
    "text",
    [
        '{"used": %s}' % ("9" * 4300),
        '{"used": 1e400}',
        '{"model": "\\ud800"}',
        "[" * 100_000,
        '{"model": "\\u001b[31m"}',
    ],
    ids=["a number of 4300 digits", "infinity", "a lone surrogate", "nested", "an escape"],
)
def test_invalid_descriptions_do_not_prevent_opening_or_listing(root, text, capsys):
    (space_dir(root) / "space.json").write_text(text)
    with opened(root) as tier:
        assert read(tier, BLOCKS) == len(BLOCKS)
    (space_dir(root) / "space.json").write_text(text)
    for action in ("list", "status"):
        assert run(["cache", action]) == 0
        assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["order", "space.json", "00000002.kvx", "00000002.kvs"])
def test_a_huge_sparse_file_is_not_scanned(root, name):
    os.truncate(space_dir(root) / name, 1 << 40)
    if name.endswith("kvs"):
        (space_dir(root) / "00000002.kvx").unlink()
    with opened(root) as tier:
        assert len(present(tier, BLOCKS)) >= 25
        assert write(tier, LATER) == len(LATER)
        assert sum(path.stat().st_size for path in segments(root)) <= CAP


def test_the_last_segment_number_only_ends_storing(root):
    """No tier would find segments with higher numbers."""
    shutil.copy(space_dir(root) / "00000001.kvs", space_dir(root) / "7fffffff.kvs")
    shutil.copy(
        space_dir(root) / "00000001.kvs", space_dir(root) / "ffffffff.kvs"
    )  # no valid segment name
    for _ in range(2):
        with opened(root) as tier:
            assert len(present(tier, BLOCKS)) >= 25
            assert write(tier, LATER) == 0
            assert "cache clear" in tier.stat().state
    assert len(list(space_dir(root).glob("?????????.kvs"))) == 0


@pytest.mark.parametrize("place", ["a\0b", "~nobody-of-this-name/blocks", "x" * 300, "\ud800"])
def test_an_impossible_directory_name_is_a_one_line_error(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="disk_cache_dir") as caught:
        DiskTier.open(place, SPACE, max_bytes=CAP)
    assert "\n" not in str(caught.value)


class KeepsFiles(Files):
    """Directory in which files can be created but not deleted (chattr +a)."""

    def __init__(self):
        self.keeps = False

    def unlink(self, path):
        if self.keeps and path.suffix == ".kvs":
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))
        super().unlink(path)


def test_the_cap_holds_if_deleting_fails(tmp_path):
    files = KeepsFiles()
    now = [0.0]

    def on_disk():
        return sum(path.stat().st_size for path in segments(tmp_path))

    options = {"files": files, "clock": lambda: now[0]}
    with opened(tmp_path, **options) as tier:
        write(tier, chain(600))
        files.keeps = True
        for seed in range(1, 5):
            write(tier, chain(300, seed))
            now[0] += 60
            assert on_disk() <= CAP
        assert "not permitted" in tier.stat().state
        files.keeps = False
        assert write(tier, chain(300, 7)) == 300
        assert tier.stat().state == ""
        assert on_disk() <= CAP


def leftovers(directory):
    return (path.name for path in space_dir(directory).iterdir() if path.suffix in (".new", ".kvx"))


def test_leftovers_of_a_crash_are_removed(root):
    for name in (
        "00000002.kvx.new",
        "0000000a.kvx",
        "0000000b.kvx.new",
        "order.new",
        "space.json.new",
    ):
        (space_dir(root) / name).write_bytes(bytes(100))
    with opened(root):
        pass
    assert sorted(leftovers(root)) == ["00000001.kvx", "00000002.kvx", "00000003.kvx"]
