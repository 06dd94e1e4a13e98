"""Lines of a batch's input file, checked and ordered by common prefix."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["ENDPOINTS", "BatchLine", "LineProblem", "by_prefix", "read_bodies", "read_lines"]

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
_MAX_ID = 512  # characters of a custom_id
_MAX_PROBLEMS = 50
# Fields of a body in the order in which chat templates put them into the prompt.
_PROMPT_FIELDS = ("tools", "instructions", "messages", "prompt", "input")
_PIECE = 256  # characters that are compared at once
_PIECE_DIGEST = 6  # bytes


class BatchLine(NamedTuple):
    """A line of an input file.

    Attributes:
        number: number of the line, from 1.
        custom_id: the client's id.
        url: path of the route.
        start: position in the file.
        size: number of bytes.
        prefix: digests of the pieces of the prompt.
    """

    number: int
    custom_id: str
    url: str
    start: int
    size: int
    prefix: bytes


class LineProblem(NamedTuple):
    """A reason why an input file is refused."""

    code: str
    line: int
    message: str
    param: str | None = None


def read_lines(
    path: Path, endpoint: str | None, max_lines: int, max_line_bytes: int
) -> tuple[list[BatchLine], list[LineProblem]]:
    """Check the lines of a file. Blank lines are skipped.

    Args:
        path: the file, in JSON Lines.
        endpoint: path that all lines must name; None for any of `ENDPOINTS`.
        max_lines: maximum number of lines.
        max_line_bytes: maximum size of a line.

    Returns:
        The lines in the order of the file, and the problems, of which at most 50 are listed.

    Raises:
        OSError: the file cannot be read.
    """
    lines: list[BatchLine] = []
    problems: list[LineProblem] = []
    numbers: dict[str, int] = {}
    start = 0
    with open(path, "rb") as file:
        for number, text in enumerate(_pieces(file, max_line_bytes), 1):
            if len(problems) >= _MAX_PROBLEMS:
                break
            begun, start = start, start + len(text)
            if not text.strip():
                continue
            if len(lines) == max_lines:
                message = f"the file has more than {max_lines} lines; split it into several batches"
                problems.append(LineProblem("too_many_lines", number, message))
                break
            found = (
                _line(number, text, begun, endpoint)
                if len(text) <= max_line_bytes
                else LineProblem(
                    "line_too_long", number, f"the line has more than {max_line_bytes} bytes"
                )
            )
            if isinstance(found, LineProblem):
                problems.append(found)
                if found.code == "line_too_long":
                    break
                continue
            if (earlier := numbers.setdefault(found.custom_id, number)) != number:
                message = f"the custom_id is the same as in line {earlier}; give each line another"
                problems.append(LineProblem("duplicate_custom_id", number, message, "custom_id"))
            lines.append(found)
    if not lines and not problems:
        message = "the file has no lines; write one request in each line"
        problems.append(LineProblem("empty_file", 1, message))
    return lines, problems


def by_prefix(lines: list[BatchLine]) -> list[BatchLine]:
    """Return the lines in an order that puts prompts with a common prefix next to each other.

    Lines for one route and model stay together.
    """
    return sorted(lines, key=lambda line: (line.url, line.prefix, line.number))


def read_bodies(
    path: Path, lines: list[BatchLine]
) -> Generator[tuple[BatchLine, dict[str, Any]], None, None]:
    """Yield each line with the body of its request. Raises OSError."""
    with open(path, "rb") as file:
        for line in lines:
            file.seek(line.start)
            body: dict[str, Any] = json.loads(file.read(line.size))["body"]
            yield line, body


def _pieces(file: Any, most: int) -> Iterator[bytes]:
    """Yield the lines of a file, each cut after `most` bytes and one."""
    while text := file.readline(most + 1):
        yield text


def _line(number: int, text: bytes, start: int, endpoint: str | None) -> BatchLine | LineProblem:
    def problem(code: str, message: str, param: str | None = None) -> LineProblem:
        return LineProblem(code, number, message, param)

    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return problem("invalid_json_line", "the line is not valid JSON; write one object per line")
    if not isinstance(value, dict):
        return problem("invalid_json_line", "the line is not a JSON object")
    unknown = sorted(set(value) - {"custom_id", "method", "url", "body"})
    if unknown:
        return problem("unknown_field", f"the field {unknown[0][:80]!r} is unknown", "custom_id")
    name = value.get("custom_id")
    if not isinstance(name, str) or not 1 <= len(name) <= _MAX_ID or not name.isprintable():
        message = f"custom_id must be a printable string of 1..{_MAX_ID} characters"
        return problem("invalid_custom_id", message, "custom_id")
    if value.get("method", "POST") != "POST":
        return problem("invalid_method", "method must be 'POST'", "method")
    url = value.get("url")
    allowed = ENDPOINTS if endpoint is None else (endpoint,)
    if not isinstance(url, str) or url not in allowed:
        return problem("invalid_url", f"url must be {' or '.join(allowed)}", "url")
    body = value.get("body")
    if not isinstance(body, dict):
        return problem("invalid_body", "body must be a JSON object with a request", "body")
    if body.get("stream"):
        message = "stream is not supported in a batch; leave it out"
        return problem("stream_unsupported", message, "body")
    return BatchLine(number, name, url, start, len(text), _prefix(body))


def _prefix(body: dict[str, Any]) -> bytes:
    """Return digests of the model and of each piece of a prompt, from its start.

    Prompts with a common prefix have a common prefix of digests, which take little memory.
    """
    model = json.dumps(body.get("model"))
    text = "\0".join(
        json.dumps(body.get(name), ensure_ascii=False) for name in _PROMPT_FIELDS if name in body
    )
    pieces = (text[at : at + _PIECE] for at in range(0, len(text), _PIECE))
    return b"".join(map(_digest, (model, *pieces)))


def _digest(text: str) -> bytes:
    data = text.encode(errors="surrogatepass")
    return hashlib.blake2b(data, digest_size=_PIECE_DIGEST).digest()
