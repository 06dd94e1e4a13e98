"""Stall detection of an engine, with a clock and figures set by the test."""

from kvboost_edge.serve_ray.watch.stall_detection import Stillness, major_faults


def test_a_stall_is_work_without_progress_or_cpu_time():
    watch = Stillness()
    assert watch.look((1,), True, 0.0, 0.0) == 0.0
    # Nothing advances, and next to nothing is computed.
    assert [watch.look((1,), True, 0.01 * now, float(now)) for now in (2, 4, 60)] == [
        2.0,
        4.0,
        60.0,
    ]
    # A slow step: no figure advances, but the processor works.
    assert watch.look((1,), True, 30.0, 62.0) == 0.0
    assert watch.look((1,), True, 31.9, 64.0) == 0.0
    # The processor stops.
    assert watch.look((1,), True, 32.0, 74.0) == 10.0
    # A figure advances.
    assert watch.look((2,), True, 32.0, 76.0) == 0.0
    # Without work, nothing needs to advance.
    assert watch.look((2,), False, 32.0, 500.0) == 0.0
    assert watch.look((2,), True, 32.0, 501.0) == 1.0


def test_a_resumed_process_restarts_the_stall_timer():
    """No check ran meanwhile, so the engine may not have had any time to run."""
    watch = Stillness()
    assert [watch.look((1,), True, 0.0, now) for now in (10.0, 40.0, 100.0)] == [0.0, 30.0, 90.0]
    assert [watch.look((1,), True, 0.0, now) for now in (700.0, 702.0, 760.0)] == [0.0, 2.0, 60.0]


def test_major_page_faults_are_counted():
    first = major_faults()
    assert 0 <= first <= major_faults()
