"""Tests of log lines: one line per record, facts in fields, and no text of a client."""

import io
import json
import logging
import re

import pytest

from kvboost_edge.server.logs import configure_logging, log_facts
from kvboost_edge.server.settings import ServerSettings


@pytest.fixture
def lines(kept_logging):
    """Function `lines(**settings)` that configures logging and returns a function that returns the
    lines so far.
    """
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
    assert (fields["event"], fields["level"], fields["status"], fields["ms"]) == (
        "request",
        "info",
        200,
        1.5,
    )
    assert "absent" not in fields
    assert fields["time"].endswith("Z")


def test_package_warnings_are_log_lines(lines):
    """Warnings of the engine, which does not know the server, are logged. Its other records are for
    users of the library.
    """
    seen = lines(log_level="debug")
    engine = logging.getLogger("kvboost_edge.engine.engine")
    engine.warning("warm: the last %d tokens", 48)
    engine.info("computing")
    (line,) = map(json.loads, seen())
    assert (line["event"], line["level"]) == ("warm: the last 48 tokens", "warning")


def test_text_lines_are_key_value(lines):
    seen = lines(log_format="text")
    log_facts(logging.WARNING, "two words", route="/v1/models", odd='a"b=c', empty="")
    (line,) = seen()
    assert 'event="two words"' in line
    assert "route=/v1/models" in line
    assert r'odd="a\"b=c"' in line
    assert 'empty=""' in line


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_lines_are_plain_in_a_terminal_by_default(kept_logging):
    def written(stream, **settings):
        configure_logging(ServerSettings(**settings), stream)
        log_facts(logging.INFO, "two words", route="/v1/models", odd='a"b=c')
        log_facts(logging.WARNING, "exiting immediately")
        return stream.getvalue().splitlines()

    first, second = written(Terminal())
    assert re.fullmatch(r'\d\d:\d\d:\d\d two words route=/v1/models odd="a\\"b=c"', first)
    assert re.fullmatch(r"\d\d:\d\d:\d\d warning: exiting immediately", second)
    assert json.loads(written(Terminal(), log_format="json")[0])["event"] == "two words"
    assert json.loads(written(io.StringIO())[0])["event"] == "two words"
    assert 'event="two words"' in written(Terminal(), log_format="text")[0]


@pytest.mark.parametrize("style", ["json", "text", "auto"])
def test_a_line_cannot_be_forged(kept_logging, style):
    stream = Terminal()
    configure_logging(ServerSettings(log_format=style), stream)
    log_facts(logging.INFO, "request", path='x\n{"event": "forged"}\x1b[2J\u2028')
    log_facts(logging.INFO, "re\nquest\x1b[2J")
    assert len(stream.getvalue().splitlines()) == 2
    assert "\x1b" not in stream.getvalue()


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


def test_log_level_filters_lines(lines):
    seen = lines(log_level="error")
    log_facts(logging.INFO, "request")
    log_facts(logging.WARNING, "exiting immediately")
    assert seen() == []
    log_facts(logging.ERROR, "failure")
    assert len(seen()) == 1
