"""Tests of the request history: it is bounded, separate for each tenant, and expires."""

import numpy as np
import pytest

from kvboost_edge.server.cache_report.recent_requests import (
    History,
    PromptField,
    PromptInputs,
    RequestRecord,
)


def record(name, ids, *, text=""):
    return RequestRecord(
        name, PromptInputs((PromptField("prompt", text),)), np.array(ids, np.int32), len(ids)
    )


def test_the_closest_record_has_the_longest_prefix_of_the_same_tenant_and_salt():
    history = History(60)
    long = list(range(500))
    for tenant, name, ids in (
        ("a", "near", [*long[:300], 7]),
        ("a", "nearer", [*long[:400], 7]),
        ("a", "other", [7, *long]),
        ("a", "equal", [*long[:400], 8]),
        ("b", "same", long),
    ):
        history.add(tenant, None, record(name, ids))
    mine = record("mine", long)
    history.add("a", None, mine)
    history.add("a", None, record("later", long))
    history_of = {
        salt: [(other.request_id, common) for other, common in history.closest("a", salt, mine)]
        for salt in (None, "salt")
    }
    assert history_of == {None: [("equal", 400), ("nearer", 400), ("near", 300)], "salt": []}


def test_a_dropped_record_is_not_compared_with_later_ones():
    history = History(60)
    history.add(None, None, record("earlier", range(30)))
    mine = record("mine", range(50))
    for one in (mine, record("later", range(50))):
        history.add(None, None, one)
    history.remove(None, mine)
    assert [other.request_id for other, _ in history.closest(None, None, mine)] == ["earlier"]


LONG = 3000  # tokens, in two chunks of 1,024 and a part


@pytest.mark.parametrize("first", [0, 1, 64, 1023, 1024, 1025, 2047, 2048, 2999])
def test_the_first_difference_is_found_at_any_position(first):
    ids = list(range(LONG))
    changed = [*ids[:first], -1, *ids[first + 1 :]]
    assert record("x", ids).common(record("y", changed)) == first
    assert record("x", ids).common(record("y", ids[:first])) == first
    assert record("x", ids[:first]).common(record("y", ids)) == first
    assert record("x", ids).common(record("y", ids)) == LONG
    # A later chunk is equal again.
    again = [*changed[:1024], *ids[1024:]]
    assert record("x", ids).common(record("y", again)) == (first if first < 1024 else LONG)


def test_prompts_are_compared_with_the_answers_of_earlier_requests():
    history = History(60)
    earlier = record("x", range(1000))
    history.add(None, None, earlier)
    history.extend(None, earlier, list(range(1000, 2500)))
    assert earlier.common(record("y", range(LONG))) == 2500
    assert earlier.common(record("y", [*range(2300), 7])) == 2300
    later = record("z", range(1000))
    later.append(np.arange(1000, 2500, dtype=np.int32))
    assert earlier.common(later) == 1000  # of the prompt only


def test_an_answer_extends_its_record():
    history = History(60)
    mine = record("mine", [1, 2])
    history.add(None, None, mine)
    before = history.nbytes
    history.extend(None, mine, [3, 4])
    assert (mine.ids.tolist(), mine.num_prompt, history.nbytes) == ([1, 2, 3, 4], 2, before + 8)
    history.extend(None, record("mine", [1]), [5])  # same name, but not the record in the history
    assert mine.ids.tolist() == [1, 2, 3, 4]


def test_the_history_is_bounded_and_its_bytes_are_exact():
    history = History(60, max_bytes=40_000, max_tenant_bytes=20_000)
    for number in range(200):
        made = record(str(number), list(range(number)), text="x" * number)
        history.add(f"tenant {number % 5}", None, made)
        history.extend(f"tenant {number % 5}", made, range(number % 7))
        kept = [one for tenant in range(5) for one in history.latest(f"tenant {tenant}")]
        assert history.nbytes == sum(one.nbytes for one in kept) <= 40_000 + made.nbytes
        assert history.find(f"tenant {number % 5}", str(number)) is made


def test_many_salts_of_one_tenant_share_its_limit():
    history = History(60, max_bytes=60_000, max_tenant_bytes=20_000)
    history.add("other", None, record("theirs", [1]))
    for number in range(1000):
        history.add("one", f"salt {number}", record(str(number), list(range(9))))
        history.add("one", "always", mine := record(f"mine {number}", list(range(99))))
        closest = history.closest("one", "always", mine)
        found = [(other.request_id, common) for other, common in closest[:1]]
        assert found == [(f"mine {number - 1}", 99)] * bool(number)
    assert history.find("other", "theirs") is not None
    kept = history.latest("one")
    assert sum(one.nbytes for one in kept) <= 20_000
    assert (history.find("one", "0"), history.find("one", "999")) == (None, kept[1])


def test_a_tenant_within_its_share_loses_nothing():
    history = History(60, max_bytes=40_000, max_tenant_bytes=20_000)
    for number in range(3):
        history.add("quiet", None, record(f"mine {number}", list(range(500))))
    for number in range(300):
        for loud in ("one", "two"):
            history.add(loud, None, record(f"{loud} {number}", list(range(500))))
    assert len(history.latest("quiet")) == 3
    assert history.nbytes <= 40_000
    assert all(history.find(loud, f"{loud} 299") for loud in ("one", "two"))


def test_a_request_too_large_to_keep_leaves_nothing_behind():
    history = History(60, max_tenant_bytes=2_000)
    history.add(None, None, record("large", list(range(1000))))
    assert (history.nbytes, history.latest(None)) == (0, [])


def test_records_expire_and_0_seconds_keeps_none():
    now = 1000.0
    history = History(10, clock=lambda: now)
    history.add("a", None, record("old", [1]))
    now = 1011.0
    history.add("b", None, record("new", [1]))
    assert history.find("a", "old") is None
    assert history.find("b", "new") is not None
    nothing = History(0)
    nothing.add("a", None, record("one", [1]))
    assert nothing.nbytes == 0


def test_the_number_of_records_is_bounded():
    history = History(60)
    for number in range(300):
        history.add(None, None, record(str(number), [number]))
    latest = history.latest(None)
    assert len(latest) == 256
    assert latest[0].request_id == "299" or latest[0].at == latest[-1].at
