"""Records of named sessions: stored ones are found, limits refuse, and neither damage nor names do
harm.
"""

import errno
import os

import pytest

from kvboost_edge.errors import CapacityError
from kvboost_edge.tiers.disk.session_records import Session, SessionStore
from kvboost_edge.tiers.disk.system_calls import Files

IDS = list(range(100, 140))
CONTENT = {"messages": [{"role": "user", "content": "grüße\n🙂"}], "tools": None}


class Clock:
    def __init__(self):
        self.now = 1_000_000.0

    def __call__(self):
        return self.now


def made(name, ids=IDS, *, clock=None, ttl=60.0, block_bytes=100, **more):
    return Session.of(
        name,
        "a model",
        ids,
        more.pop("content", CONTENT),
        block_size=16,
        block_bytes=block_bytes,
        ttl=ttl,
        now=(clock or Clock()).now,
        **more,
    )


@pytest.fixture(params=["disk", "memory"])
def directory(request, tmp_path):
    return tmp_path if request.param == "disk" else None


def test_sessions_are_stored_found_and_removed(directory):
    clock = Clock()
    store = SessionStore(directory, clock=clock)
    assert store.on_disk is (directory is not None)
    info, replaced = store.put("t", None, made("one", state_bytes=7))
    assert replaced is None
    found = store.find("t", None, "one")
    assert (found.token_ids, found.content, found.info) == (IDS, CONTENT, info)
    assert (info.num_tokens, info.kv_bytes, info.ttl) == (40, 2 * 100 + 7, 60.0)
    assert info.num_bytes == info.kv_bytes + info.record_bytes > info.kv_bytes + 4 * len(IDS)
    store.put("t", None, made("a second"))
    assert [one.name for one in store.all("t")] == ["a second", "one"]
    assert store.usage("t") == (2, sum(one.num_bytes for one in store.all("t")))
    assert store.remove("t", None, "one") == found
    assert store.remove("t", None, "one") is None
    assert store.find("t", None, "one") is None
    assert [one.name for one in store.all("t")] == ["a second"]


def test_sessions_are_isolated_by_tenant_and_salt(directory):
    store = SessionStore(directory, clock=Clock())
    for tenant, salt, ids in (("a", None, [1] * 20), ("b", None, [2] * 20), ("a", "s", [3] * 20)):
        store.put(tenant, salt, made("same", ids))
    assert store.find("a", None, "same").token_ids == [1] * 20
    assert store.find("b", None, "same").token_ids == [2] * 20
    assert store.find("a", "s", "same").token_ids == [3] * 20
    assert store.find(None, None, "same") is None
    assert [len(store.all("a")), len(store.all("a", "s")), len(store.all("a", "x"))] == [1, 1, 0]
    assert store.usage("a")[0] == 2
    assert store.remove("b", "s", "same") is None
    assert store.usage("a")[0] == 2


def test_the_number_of_sessions_is_limited_for_each_tenant(directory):
    store = SessionStore(directory, max_sessions=2, clock=Clock())
    for name in ("one", "two", "one"):  # a replacement needs no room
        store.put("t", None, made(name))
    with pytest.raises(CapacityError, match=r"2 sessions are stored.*max_sessions=2"):
        store.put("t", "salt", made("three"))
    with pytest.raises(CapacityError, match="max_sessions=2"):
        store.check("t", None, made("three"))
    assert store.usage("t")[0] == 2
    store.put("other", None, made("three"))


def test_the_bytes_of_sessions_are_limited_for_each_tenant(directory):
    size = SessionStore(None).put("t", None, made("one"))[0].num_bytes
    store = SessionStore(directory, max_bytes=2 * size + 10, clock=Clock())
    store.put("t", None, made("one"))
    store.put("t", None, made("two"))
    with pytest.raises(CapacityError, match=rf"other sessions take {2 * size}.*max_session_bytes"):
        store.put("t", None, made("six"))
    with pytest.raises(CapacityError, match="max_session_bytes"):
        store.put("t", None, made("one", block_bytes=200))
    assert store.usage("t") == (2, 2 * size)
    assert store.find("t", None, "one").info.kv_bytes == 200
    store.put("other", None, made("six"))


def test_sessions_expire_and_keep_their_creation_time(directory):
    clock = Clock()
    store = SessionStore(directory, max_sessions=1, clock=clock)
    store.put("t", None, made("one", clock=clock))
    began = clock.now
    clock.now += 50
    info, replaced = store.put("t", None, made("one", clock=clock))
    assert (replaced.info.name, replaced.info.expires) == ("one", began + 60)
    assert (info.created, info.expires) == (began, clock.now + 60)
    clock.now += 60
    assert store.find("t", None, "one") is None
    assert store.all("t") == []
    assert store.remove("t", None, "one") is None
    info, replaced = store.put("t", None, made("two", clock=clock))  # expired records take no room
    assert replaced is None
    assert info.created == clock.now
    clock.now += 60
    store.sweep()
    assert store.usage("t") == (0, 0)
    if directory is not None:
        assert [path for path in directory.rglob("*") if path.is_file()] == []


def test_sessions_are_shared_between_processes(tmp_path):
    clock = Clock()
    first, second = (SessionStore(tmp_path, clock=clock) for _ in range(2))
    first.put("t", None, made("one"))
    assert second.find("t", None, "one").token_ids == IDS
    second.remove("t", None, "one")
    assert first.all("t") == []


@pytest.mark.parametrize("name", ["../../etc/passwd", "a/b", "CON", "x" * 128, "\u202e", "%2e%2e"])
def test_names_and_texts_are_never_in_paths_and_files_are_private(tmp_path, name):
    store = SessionStore(tmp_path / "cache", clock=Clock())
    store.put("tenant-of-a-key", "salt-of-a-user", made(name))
    assert store.find("tenant-of-a-key", "salt-of-a-user", name).info.name == name
    paths = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(paths) == 1
    parts = paths[0].relative_to(tmp_path).parts
    assert parts[:2] == ("cache", "sessions")
    assert [len(part) for part in parts[2:]] == [64, 64 + len(".session")]
    assert b"salt-of-a-user" not in paths[0].read_bytes()
    if os.name == "posix":
        assert paths[0].stat().st_mode & 0o777 == 0o600
        assert paths[0].parent.stat().st_mode & 0o777 == 0o700


def test_a_damaged_record_counts_as_missing_and_can_be_replaced(tmp_path):
    store = SessionStore(tmp_path, clock=Clock())
    store.put("t", None, made("one"))
    [path] = tmp_path.rglob("*.session")
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        assert store.find("t", None, "one") is None
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert store.find("t", None, "one") is None
        assert len(store.all("t")) <= 1
    store.put("t", None, made("one"))
    assert path.read_bytes() == whole


def test_a_long_session_is_listed_with_its_size(tmp_path):
    store = SessionStore(tmp_path, clock=Clock())
    ids = list(range(50_000))
    info, _ = store.put("t", None, made("long", ids))
    assert info.record_bytes == next(tmp_path.rglob("*.session")).stat().st_size > 4 * len(ids)
    assert store.all("t") == [info]
    assert store.find("t", None, "long").token_ids == ids


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO])
def test_a_record_that_cannot_be_read_counts_as_missing(tmp_path, number):
    class Unreadable(Files):
        fails = True

        def read(self, handle, buffers, offset):
            if self.fails:
                raise OSError(number, os.strerror(number))
            return super().read(handle, buffers, offset)

    files = Unreadable()
    store = SessionStore(tmp_path, files=files, clock=Clock())
    store.put("t", None, made("one"))
    assert store.find("t", None, "one") is None
    assert store.all("t") == []
    files.fails = False
    assert store.find("t", None, "one").token_ids == IDS


def test_a_write_that_fails_leaves_the_old_record(tmp_path):
    class Full(Files):
        full = False

        def sync(self, handle):
            if self.full:
                raise OSError(28, "No space left on device")
            super().sync(handle)

    files = Full()
    store = SessionStore(tmp_path, files=files, clock=Clock())
    store.put("t", None, made("one"))
    files.full = True
    with pytest.raises(CapacityError, match="No space left on device; free space"):
        store.put("t", None, made("one", [5] * 40))
    assert store.find("t", None, "one").token_ids == IDS
    assert [path.suffix for path in tmp_path.rglob("*") if path.is_file()] == [".session"]


def test_two_processes_save_one_session_at_the_same_time(tmp_path):
    """The second process saves while the first one syncs its file."""

    class Slow(Files):
        def sync(self, handle):
            other.put("t", None, made("one", [5] * 40))
            super().sync(handle)

    other = SessionStore(tmp_path, clock=Clock())
    store = SessionStore(tmp_path, files=Slow(), clock=Clock())
    store.put("t", None, made("one"))
    assert other.find("t", None, "one").token_ids == IDS
    assert [path.suffix for path in tmp_path.rglob("*") if path.is_file()] == [".session"]


def test_a_link_in_place_of_the_directory_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "sessions").symlink_to(tmp_path / "elsewhere")
    store = SessionStore(tmp_path / "cache", clock=Clock())
    with pytest.raises(CapacityError, match="symbolic link; remove it"):
        store.put("t", None, made("one"))
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_leftovers_are_removed_and_foreign_files_kept(tmp_path):
    store = SessionStore(tmp_path, clock=Clock())
    store.put("t", None, made("one"))
    [path] = tmp_path.rglob("*.session")
    left = path.with_name(path.name + ".0123456789abcdef.new")
    foreign = path.with_name("notes.txt")
    for one in (left, foreign):
        one.write_bytes(b"x")
    assert len(store.all("t")) == 1
    assert left.exists()  # another process may be writing it
    os.utime(left, (0, 0))
    assert len(store.all("t")) == 1
    assert (left.exists(), foreign.exists()) == (False, True)
