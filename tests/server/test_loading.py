"""What the server says while it loads a model."""

import logging

from helpers.clocks import give_clock
from kvboost_edge.server import __main__ as command


def test_packing_is_a_line_now_and_then(monkeypatch, caplog):
    now = [100.0]
    give_clock(monkeypatch, lambda: now[0], command)
    progress = command._log_packing()
    with caplog.at_level(logging.INFO):
        for done, seconds in ((1, 0.0), (10, 1.0), (25, 1.5), (30, 0.1), (80, 2.5), (100, 0.5)):
            now[0] += seconds
            progress(done * 10**7, 10**9)
    facts = [vars(record)["facts"] for record in caplog.records]
    assert facts == [{"percent": 25, "megabytes": 1000}, {"percent": 80, "megabytes": 1000}]
