"""Which replicas may be used while old ones go and new ones come; without Ray."""

from types import SimpleNamespace

import pytest

from kvboost_edge.errors import BackendUnavailable, ConfigError, KVBoostError
from kvboost_edge.serve_ray.replicas import Replicas
from kvboost_edge.serve_ray.watch.members import tell_members, usable_members, watch_members

OLD = {"model": "m", "root": "old"}
NEW = {"model": "m", "root": "new"}
OTHER = {"model": "x", "root": "new"}


@pytest.fixture
def replicas():
    handle = SimpleNamespace(options=lambda **_: None)
    found = Replicas(handle, "m")
    yield found
    found.close()


def test_new_settings_are_refused_beside_old_ones_and_used_once_those_are_gone(replicas):
    assert replicas.members_changed({"a": OLD, "b": OLD}) == {"a", "b"}
    assert replicas.members_changed({"b": OLD, "a2": NEW}) == {"b"}
    assert replicas.members_changed({"a2": NEW, "b2": NEW, "c": OTHER}) == {"a2", "b2"}
    assert replicas.members_changed({"a2": NEW, "d": OLD}) == {"a2"}
    assert replicas.members_changed({}) == frozenset()
    assert replicas.members_changed({"d": OLD}) == {"d"}


def test_a_server_waits_for_its_version_while_those_before_it_are_still_there(replicas):
    """All that there are have another model: wrong files, or a version that Ray is about to
    replace.
    """
    replicas.members_changed({"c": OTHER})
    with pytest.raises(ConfigError, match="replica c serves another model"):
        replicas.open(60)
    looks = []
    with pytest.raises(ConfigError, match="replica c serves another model"):
        replicas.open(60, lambda: looks.append(None) or len(looks) == 3)
    with pytest.raises(BackendUnavailable, match=r"within 0\.1 seconds"):
        replicas.open(0.1, lambda: False)


def test_nothing_starts_once_it_is_closed(replicas):
    async def work():
        return 3

    assert replicas.start(work()).result(timeout=60) == 3
    replicas.close()
    with pytest.raises(KVBoostError, match="closed"):
        replicas.start(work())


def test_who_was_there_before_anybody_watched_is_refused_all_the_same(replicas):
    tell_members("late", {"a": OLD, "c": OTHER})
    assert usable_members("late") == {"a", "c"}
    watch_members("late", replicas.members_changed)
    assert usable_members("late") == replicas.usable == {"a"}
    tell_members("late", {"a": OLD, "b": OLD, "c": OTHER})
    assert usable_members("late") == replicas.usable == {"a", "b"}
    watch_members("late", None)
    assert usable_members("late") == frozenset()


def test_one_that_went_is_not_asked(replicas):
    """It may go between the list of whom to ask and the question."""
    assert replicas.start(replicas._look_at("gone")).result(timeout=60) is None
