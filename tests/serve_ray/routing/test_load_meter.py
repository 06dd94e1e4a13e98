"""The measurements of a replica: exact counts of queues, and speeds close to the real ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvboost_edge.errors import ConfigError
from kvboost_edge.serve_ray.routing.cache_records import Place
from kvboost_edge.serve_ray.routing.load_meter import Meter


def meter(seconds_per_token=1e-3):
    return Meter(seconds_per_token=seconds_per_token, step_tokens=512, max_running=8)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["begin", "first", "end"]), st.integers(0, 5), st.integers(1, 900)
        )
    )
)
def test_queues_are_counted_for_any_sequence_of_events(steps):
    """First tokens and ends of requests that never began, or second ones, have no effect. A request
    that begins twice counts once.
    """
    measured = meter()
    queued = {}
    running = set()
    for now, (what, request, tokens) in enumerate(steps):
        if what == "begin":
            measured.begin(request, tokens, now)
            queued[request] = tokens
            running.discard(request)
        elif what == "first":
            measured.first_token(request, now)
            if queued.pop(request, None) is not None:
                running.add(request)
        elif what == "end":
            measured.end(request, now, 5)
            queued.pop(request, None)
            running.discard(request)
        report = measured.report(now, free_blocks=3)
        assert (report.queued_tokens, report.num_waiting) == (sum(queued.values()), len(queued))
        assert (report.num_running, report.free_blocks, report.serial) == (len(running), 3, now)
        assert (report.decode_seconds == 0) or running


def test_queueing_time_is_excluded_from_the_speed():
    """Ten prompts arrive at once and are computed one after another at 2 ms per token. Waiting does
    not count as computing.
    """
    measured = meter(seconds_per_token=50e-3)
    for number in range(10):
        measured.begin(number, 4000, 100.0)
    for number in range(10):
        measured.first_token(number, 100.0 + 8.0 * (number + 1))
    assert measured.report(200.0, free_blocks=0).seconds_per_token == pytest.approx(2e-3, rel=0.2)


def test_a_cancelled_prompt_is_not_measured():
    measured = meter()
    measured.begin("a", 100_000, 0.0)
    measured.end("a", 1.0)
    assert measured.report(2.0, free_blocks=0).seconds_per_token == pytest.approx(1e-3)
    measured.begin("b", 10_000, 0.0)
    measured.first_token("b", 11.0)
    assert measured.report(12.0, free_blocks=0).seconds_per_token == pytest.approx(1e-3, rel=0.01)


def test_decode_time_is_measured():
    measured = meter()
    for number in range(50):
        measured.begin(number, 10, 10.0 * number)
        measured.first_token(number, 10.0 * number + 1)
        measured.end(number, 10.0 * number + 5, 101)
    assert measured.report(600.0, free_blocks=0).decode_seconds == 0
    measured.begin("last", 10, 600.0)
    measured.first_token("last", 601.0)
    report = measured.report(602.0, free_blocks=0, is_draining=True)
    assert report.decode_seconds == pytest.approx(4 / 100)
    assert report.answer_seconds == pytest.approx(4.0)
    assert report.is_draining


@pytest.mark.parametrize(
    "wrong", [{"seconds_per_token": 0.0}, {"step_tokens": 0}, {"max_running": 0}], ids=str
)
def test_invalid_values_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Meter(**{"seconds_per_token": 1e-3, "step_tokens": 512, "max_running": 8, **wrong})


def test_tier_reads_are_measured_separately_from_prefill():
    """A request that is read from a tier does not measure the speed of computing. Tokens from disk
    measure the disk; a replica without a server ignores those of a server.
    """
    measured = Meter(
        seconds_per_token=1e-3, step_tokens=512, max_running=8, tiers={Place.DISK: 1e-5}
    )
    before = measured.report(0.0, free_blocks=1)
    assert (before.disk_token_seconds, before.shared_token_seconds) == (pytest.approx(1e-5), 0.0)
    measured.begin("read", 16, 0.0, restored_tokens=5000)
    measured.first_token("read", 4.0)
    assert measured.report(4.0, free_blocks=1).seconds_per_token == before.seconds_per_token
    for _ in range(40):
        measured.restored(Place.DISK, 5000, 1.0)
        measured.restored(Place.SHARED, 5000, 9.0)
        measured.restored(Place.DISK, 0, 50.0)
    after = measured.report(5.0, free_blocks=1)
    assert after.disk_token_seconds == pytest.approx(1 / 5000, rel=0.05)
    assert after.shared_token_seconds == 0.0
