"""The usable replicas while old ones stop and new ones start, without Ray."""

import re
from types import SimpleNamespace

import pytest

from kvboost_edge import __version__
from kvboost_edge.errors import BackendUnavailable, ConfigError, KVBoostError
from kvboost_edge.serve_ray.replicas import Replicas
from kvboost_edge.serve_ray.watch.members import tell_members, usable_members, watch_members

OLD = {"version": __version__, "model": "m", "root": "old"}
NEW = {"version": __version__, "model": "m", "root": "new"}
OTHER = {"version": __version__, "model": "x", "root": "new"}


@pytest.fixture
def replicas():
    handle = SimpleNamespace(options=lambda **_: None)
    found = Replicas(handle, "m")
    yield found
    found.close()


def test_new_settings_are_used_only_after_the_old_replicas_are_gone(replicas):
    assert replicas.members_changed({"a": OLD, "b": OLD}) == {"a", "b"}
    assert replicas.members_changed({"b": OLD, "a2": NEW}) == {"b"}
    assert replicas.members_changed({"a2": NEW, "b2": NEW, "c": OTHER}) == {"a2", "b2"}
    assert replicas.members_changed({"a2": NEW, "d": OLD}) == {"a2"}
    assert replicas.members_changed({}) == frozenset()
    assert replicas.members_changed({"d": OLD}) == {"d"}


def test_a_server_waits_while_replicas_of_another_version_exist(replicas):
    """All existing replicas have another model: the files are wrong, or Ray is about to replace the
    version.
    """
    replicas.members_changed({"c": OTHER})
    with pytest.raises(ConfigError, match="replica c serves another model"):
        replicas.open(60)
    looks = []
    with pytest.raises(ConfigError, match="replica c serves another model"):
        replicas.open(60, lambda: looks.append(None) or len(looks) == 3)
    with pytest.raises(BackendUnavailable, match=r"within 0\.1 seconds"):
        replicas.open(0.1, lambda: False)


@pytest.mark.parametrize("version", [{"version": "0.9.0"}, {}], ids=["older", "unnamed"])
def test_replicas_of_another_package_version_are_refused(replicas, version):
    other = {"model": "m", "root": "old", **version}
    assert replicas.members_changed({"a": other, "b": OLD}) == {"b"}
    assert replicas.members_changed({"a": other}) == frozenset()
    found = (
        f"replica a runs kvboost-edge {version.get('version')}, but the server runs {__version__}; "
    )
    with pytest.raises(ConfigError, match=re.escape(found)):
        replicas.open(60)


def test_a_closed_pool_starts_no_work(replicas):
    async def work():
        return 3

    assert replicas.start(work()).result(timeout=60) == 3
    replicas.close()
    with pytest.raises(KVBoostError, match="closed"):
        replicas.start(work())


def test_incompatible_replicas_are_refused_before_the_watch_starts(replicas):
    tell_members("late", {"a": OLD, "c": OTHER})
    assert usable_members("late") == {"a", "c"}
    watch_members("late", replicas.members_changed)
    assert usable_members("late") == replicas.usable == {"a"}
    tell_members("late", {"a": OLD, "b": OLD, "c": OTHER})
    assert usable_members("late") == replicas.usable == {"a", "b"}
    watch_members("late", None)
    assert usable_members("late") == frozenset()


def test_a_removed_replica_is_not_asked(replicas):
    """A replica may be removed between the list of replicas and the question."""
    assert replicas.start(replicas._look_at("gone")).result(timeout=60) is None
