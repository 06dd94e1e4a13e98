"""Tests of `kvboost-edge ps`, which lists the loaded models of a server."""

import datetime

from helpers.engine.fake_runner import fake_engine
from helpers.server.live_servers import serving
from kvboost_edge.cli.servers.ps import _until


def test_loaded_models_are_listed(answered, printed):
    with fake_engine() as engine, serving(engine, model_name="fake") as server:
        (row,) = answered("ps", "--url", server.base_url)
        assert row["name"] == "fake:latest"
        shown = printed("ps", "--url", server.base_url).out
        assert "fake:latest" in shown
        assert "never" in shown


def test_the_remaining_time_is_shown_in_words():
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=60.4)
    later = soon + datetime.timedelta(minutes=9)
    assert _until({"expires_at": soon.isoformat()}) == "in 60 s"
    assert _until({"expires_at": later.isoformat()}) == "in 10 min"
    assert _until({"expires_at": "soon"}) == ""
