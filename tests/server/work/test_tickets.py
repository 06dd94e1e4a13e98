"""A request's ticket, without a server: what it knows of the request before it is admitted."""

import pytest
from starlette.requests import Request

from kvboost_edge.server.work.admission import Ticket


def test_waiting_for_a_model_is_a_part_of_a_requests_time(live_server):
    """Else a request could take twice the time that --request-timeout gives it."""

    def deadline(**facts):
        request = Request({"type": "http", "kvboost": facts})
        state = live_server.state
        return Ticket(state.admission, state.metrics, request, 1, 1).deadline

    assert deadline() - deadline(load_wait_seconds=50.0) == pytest.approx(50, abs=5)
