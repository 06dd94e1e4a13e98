"""Log lines: one a record, facts in fields, nothing of a client's text."""

from __future__ import annotations

import io
import json
import logging

import pytest

from kvboost_edge.server.logs import configure_logging, log_facts
from kvboost_edge.server.settings import ServerSettings


@pytest.fixture
def lines(kept_logging):
    """`lines(**settings)` configures logging and returns a function that gives the lines so far."""
    stream = io.StringIO()

    def configure(**settings):
        configure_logging(ServerSettings(**settings), stream)
        return lambda: stream.getvalue().splitlines()

    return configure


def test_json_lines_hold_the_facts(lines):
    seen = lines()
    log_facts(logging.INFO, "request", status=200, ms=1.5, absent=None)
    (line,) = seen()
    fields = json.loads(line)
    assert (fields["event"], fields["level"], fields["status"], fields["ms"]) == ("request", "info", 200, 1.5)
    assert "absent" not in fields
    assert fields["time"].endswith("Z")


def test_text_lines_are_key_value(lines):
    seen = lines(log_format="text")
    log_facts(logging.WARNING, "two words", route="/v1/models", odd='a"b=c', empty="")
    (line,) = seen()
    assert 'event="two words"' in line
    assert "route=/v1/models" in line
    assert r'odd="a\"b=c"' in line
    assert 'empty=""' in line


@pytest.mark.parametrize("style", ["json", "text"])
def test_a_line_cannot_be_forged(lines, style):
    seen = lines(log_format=style)
    log_facts(logging.INFO, "request", path='x\n{"event": "forged"}\x1b[2J\u2028')
    assert len(seen()) == 1
    assert "\x1b" not in seen()[0]


def test_an_exception_shows_type_and_place_only(lines):
    seen = lines()
    try:
        raise ValueError("the client's secret")
    except ValueError:
        logging.getLogger("uvicorn.error").exception("failed")
    fields = json.loads(seen()[0])
    assert fields["error"] == "ValueError"
    assert fields["place"].startswith("test_logs.py:")
    assert "secret" not in seen()[0]


def test_the_level_decides(lines):
    seen = lines(log_level="error")
    log_facts(logging.INFO, "request")
    log_facts(logging.WARNING, "exiting at once")
    assert seen() == []
    log_facts(logging.ERROR, "failure")
    assert len(seen()) == 1
