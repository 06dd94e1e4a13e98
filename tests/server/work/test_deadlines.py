"""Tests of the deadlines of admitted requests, without a server."""

import pytest
from starlette.requests import Request

from kvboost_edge.server.work.admission import Admission


def test_the_deadline_includes_the_wait_for_a_model(live_server):
    """Otherwise a request could take twice as long as --request-timeout allows."""

    def deadline(**facts):
        request = Request({"type": "http", "kvboost": facts})
        state = live_server.state
        return Admission(state.admission, state.metrics, request, 1, 1).deadline

    assert deadline() - deadline(load_wait_seconds=50.0) == pytest.approx(50, abs=5)
