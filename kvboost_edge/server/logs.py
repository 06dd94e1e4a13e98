"""Structured logging as JSON, as key=value pairs, or as plain lines in a terminal.

Prompts, answers and keys are never logged. For exceptions, only the type and source line are
logged, because messages of libraries may quote client input.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, TextIO

from kvboost_edge.server.settings import ServerSettings

__all__ = ["LOGGER_NAME", "configure_logging", "failure_place", "is_watched", "log_facts"]

LOGGER_NAME = "kvboost_edge.server"
_PACKAGE = "kvboost_edge"
_LOGGERS = (_PACKAGE, LOGGER_NAME, "uvicorn.error")


class _JsonLines(logging.Formatter):
    """Formatter that writes one JSON object per line.

    Control characters are escaped, which keeps input from forging log lines.
    """

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(_fields(record), ensure_ascii=True, default=str)


class _Plain(logging.Formatter):
    """Formatter for a terminal that writes the time of day, the event and its facts."""

    def format(self, record: logging.LogRecord) -> str:
        fields = _fields(record)
        event = fields.pop("event")
        level = fields.pop("level")
        del fields["time"]
        facts = [f"{name}={_plain(value)}" for name, value in fields.items()]
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        severe = [f"{level}:"] if record.levelno > logging.INFO else []
        return " ".join([clock, *severe, _printable(event), *facts])


class _KeyValues(logging.Formatter):
    """Formatter that writes `key=value` pairs.

    Values with spaces, quotes or control characters are quoted as JSON.
    """

    def format(self, record: logging.LogRecord) -> str:
        return " ".join(f"{name}={_plain(value)}" for name, value in _fields(record).items())


def configure_logging(settings: ServerSettings, stream: TextIO | None = None) -> None:
    """Write the logs of the server and uvicorn, and the package's warnings, to `stream`.

    Args:
        settings: settings with log level and format.
        stream: destination; None for standard error.
    """
    stream = sys.stderr if stream is None else stream
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_formatter(settings, stream))
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(settings.log_level.upper())
    package = logging.getLogger(_PACKAGE)
    package.setLevel(max(package.level, logging.WARNING))


def is_watched(settings: ServerSettings, stream: TextIO | None = None) -> bool:
    """Return whether log lines go to a terminal."""
    return settings.log_format == "auto" and (sys.stderr if stream is None else stream).isatty()


def _formatter(settings: ServerSettings, stream: TextIO) -> logging.Formatter:
    if is_watched(settings, stream):
        return _Plain()
    return _KeyValues() if settings.log_format == "text" else _JsonLines()


def log_facts(level: int, event: str, **facts: Any) -> None:
    """Log an event with its facts. Facts that are None are left out."""
    logger = logging.getLogger(LOGGER_NAME)
    if logger.isEnabledFor(level):
        logger.log(
            level, event, extra={"facts": {name: v for name, v in facts.items() if v is not None}}
        )


def failure_place(error: BaseException) -> str:
    """Return the file, line and function where an exception was raised."""
    place = "unknown"
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        place = f"{code.co_filename.rsplit('/', 1)[-1]}:{trace.tb_lineno} {code.co_name}"
        trace = trace.tb_next
    return place


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    fields: dict[str, Any] = {
        "time": f"{stamp}.{int(record.msecs):03d}Z",
        "level": record.levelname.lower(),
        "event": record.getMessage().strip(),
        **getattr(record, "facts", {}),
    }
    if record.exc_info and record.exc_info[1] is not None:
        fields["error"] = type(record.exc_info[1]).__name__
        fields["place"] = failure_place(record.exc_info[1])
    return fields


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _plain(value: Any) -> str:
    text = str(value)
    return text if text and text.isprintable() and not set(text) & set(' "=') else json.dumps(text)
