"""Tests with 756 generated requests that no well-behaved client sends.

The server answers each without a 5xx and without hanging, and a canary completion never changes.
"""

from __future__ import annotations

import json
import random
import re
import time
import urllib.parse

import pytest

from helpers.server.api_bodies import ASKED, GENERATING, MODEL, READ, asked, error_text, said
from helpers.server.live_servers import raw_answer, serving, wait_until

NUM_CASES = 252  # one of each kind for each path
CANARY = {
    "model": MODEL,
    "prompt": "The capital of France",
    "max_tokens": 12,
    "temperature": 0,
    "logprobs": 3,
}
PATHS = tuple(ASKED)


class Drawn(random.Random):
    """Random generator of one case; `path` is the route that the case targets."""

    path: str


Case = tuple[str, bytes, bool]  # kind, bytes to send, whether the client closes immediately


@pytest.fixture(scope="module")
def server(demo_engine):
    """Server with short deadlines, so that an incomplete request ends within a second."""
    settings = {
        "header_seconds": 0.3,
        "body_seconds": 0.3,
        "keep_alive_seconds": 1,
        "max_body_bytes": 300_000,
    }
    with serving(demo_engine, **settings) as server:
        yield server


def post(path, body, *headers):
    """Return a POST request with a well-formed head and any body; the server closes after its
    response.
    """
    head = [
        b"POST " + path.encode() + b" HTTP/1.1",
        b"Host: localhost",
        b"Content-Type: application/json",
    ]
    return (
        b"\r\n".join(
            [*head, b"Connection: close", b"Content-Length: %d" % len(body), *headers, b"", b""]
        )
        + body
    )


def bad_utf8(rng):
    parts = (
        b"\xff",
        b"\xc0\x80",
        b"\xed\xa0\x80",
        b"\xf5\x80\x80\x80",
        b"\xe2\x82",
        b"\x80",
        b"\xfe\xff",
        b"\x00",
    )
    garbage = b"".join(rng.choices(parts, k=rng.randint(1, 9)))
    path = rng.path
    whole = json.dumps(asked(path, "TEXT", user="TEXT")).encode()
    field = rng.choice((b"prompt", b"model", b"user", garbage))
    bodies = (
        b'{"model": "kvboost-edge/demo", "' + field + b'": "' + garbage + b'"}',
        whole.replace(b"TEXT", garbage),
    )
    return post(path, rng.choice(bodies))


def surrogates(rng):
    text = "".join(
        f"\\u{rng.choice((0xD800, 0xDFFF, 0xDC00, 0x0, 0xFFFF)):04x}"
        for _ in range(rng.randint(1, 5))
    )
    path = rng.path
    return post(path, json.dumps(asked(path, "TEXT")).replace("TEXT", text).encode())


def deep(rng):
    depth = rng.choice((500, 5_000, 100_000))
    opening, closing = rng.choice(((b"[", b"]"), (b'{"a":', b"}")))
    depth = min(depth, 290_000 // (len(opening) + len(closing)))
    body = opening * depth + b"1" + closing * rng.choice((depth, 0))
    path = rng.path
    # The value replaces the text, a field that accepts any value, or the whole body.
    fields = (
        "tools",
        "metadata",
        "chat_template_kwargs",
        "options",
        "format",
        "input_schema",
        "json_schema",
        "text",
    )
    beside = (
        json.dumps({**asked(path, "x"), rng.choice(fields): "THIS"})
        .encode()
        .replace(b'"THIS"', body)
    )
    inside = json.dumps(asked(path, "THIS")).encode().replace(b'"THIS"', body)
    return post(path, rng.choice((inside, beside, body)))


def odd_numbers(rng):
    number = rng.choice(
        ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" * 400, "1" * 5000, "-0", "0.1e-400")
    )
    fields = (
        "temperature",
        "top_p",
        "max_tokens",
        "seed",
        "n",
        "logprobs",
        "priority",
        "stop_token_ids",
        "model",
    )
    fields += (
        "n_predict",
        "num_ctx",
        "budget_tokens",
        "dimensions",
        "top_n",
        "tokens",
        "max_output_tokens",
        "ttl",
    )
    path = rng.path
    field = rng.choice(fields)
    more = (
        {"options": {field: "THIS"}} if path in ("/api/chat", "/api/generate") else {field: "THIS"}
    )
    return post(path, json.dumps({**asked(path, "a"), **more}).replace('"THIS"', number).encode())


def duplicates(rng):
    path = rng.path
    whole = asked(path, "a", model=MODEL, stream=False)
    field = rng.choice(list(whole))
    values = rng.sample(
        ['"a"', "1", "null", "[]", "{}", "true", f'"{MODEL}"', json.dumps(whole[field])], 3
    )
    members = ", ".join(f'"{field}": {value}' for value in values)
    return post(path, f"{json.dumps(whole)[:-1]}, {members}}}".encode())


def not_json(rng):
    path = rng.path
    whole = json.dumps(asked(path, "a")).encode()
    body = rng.choice(
        (b"", b" ", b"null", b"0", b'"text"', b"[]", b"{}", whole[: rng.randrange(len(whole))])
    )
    return post(path, body + rng.choice((b"", b"\0", b"}", b"//")))


def chunk_bombs(rng):
    head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" % rng.path.encode()
    head += b"Transfer-Encoding: chunked\r\n\r\n"
    chunks = (
        b"1\r\nx\r\n" * rng.choice((10, 20_000)) + b"0\r\n\r\n",
        b"FFFFFFFFFFFFFFFF\r\n",
        b"F" * 30 + b"\r\nx",
        b"5;" + b"a=b;" * 2000 + b"\r\nhello\r\n0\r\n\r\n",
        b"5\r\nhel",
        b"5\r\nhelloXX0\r\n\r\n",
        b"-1\r\n\r\n",
        b"0x5\r\nhello\r\n0\r\n\r\n",
        b"0\r\n" + b"X: y\r\n" * 3000 + b"\r\n",
        b"%x\r\n" % 400_000 + b"y" * 400_000 + b"\r\n0\r\n\r\n",
    )
    return head + rng.choice(chunks)


def smuggling(rng):
    inner = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    lengths = (
        b"Content-Length: 4",
        b"Content-Length: %d" % len(inner),
        b"Content-Length: 0",
        b"content-length:\t3",
    )
    codings = (
        b"Transfer-Encoding: chunked",
        b"Transfer-Encoding: identity",
        b"Transfer-Encoding: xchunked",
        b"Transfer-Encoding: chunked, chunked",
        b"Transfer-Encoding:\x0bchunked",
        b"Transfer-Encoding\t: chunked",
        b" Transfer-Encoding: chunked",
        b"X: y\nTransfer-Encoding: chunked",
    )
    headers = rng.choice(
        ([rng.choice(lengths), rng.choice(codings)], rng.sample(lengths, 2), rng.sample(codings, 2))
    )
    rng.shuffle(headers)
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n" + b"\r\n".join(headers)
    return head + b"\r\n\r\n" + rng.choice((b"0\r\n\r\n", b"5c\r\n", b"")) + inner


def bad_lines(rng):
    lines = (
        b"GET",
        b"GET  / HTTP/1.1",
        b"GET / HTTP/9.9",
        b"GET / HTTP/1.1 extra",
        b"get\x00 / HTTP/1.1",
        b"GET /\xc3\xa9 HTTP/1.1",
        b"GET /%ff%00%2e%2e HTTP/1.1",
        b"GET /" + b"a" * rng.choice((10_000, 20_000, 70_000)) + b" HTTP/1.1",
        b"POST http://localhost/v1/models HTTP/1.1",
        b"CONNECT localhost:1 HTTP/1.1",
        b"OPTIONS * HTTP/1.1",
        b"M" * 3000 + b" / HTTP/1.1",
        bytes(rng.randrange(256) for _ in range(60)),
        b"",
    )
    return rng.choice(lines) + b"\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def bad_headers(rng):
    headers = (
        b"X: " + b"a" * rng.choice((5_000, 20_000, 100_000)),
        b"\r\n".join(b"X-%d: y" % i for i in range(rng.choice((50, 120, 3000)))),
        b"no colon",
        b": no name",
        b"X: a\r\n folded",
        b"X\xff: y",
        b"X: \x01\x02",
        b"Host: other",
        b"Expect: 100-continue",
        b"Expect: nonsense",
        b"Content-Encoding: gzip",
        b"Content-Type: "
        + rng.choice(
            (b"text/plain", b"multipart/form-data", b"application/xml; charset=\xff", b"")
        ),
        b"Authorization: Bearer \xff\x00",
        b"Accept: " + b"*/*," * 1000,
        b"Range: bytes=0-1,2-3,-9",
        b"If-None-Match: " + b'W/"a",' * 500,
    )
    start = rng.choice(
        (
            b"GET / HTTP/1.1",
            b"GET /health HTTP/1.1",
            b"POST /tokenize HTTP/1.1\r\nContent-Length: 0",
        )
    )
    return (
        start + b"\r\nHost: localhost\r\nConnection: close\r\n" + rng.choice(headers) + b"\r\n\r\n"
    )


def early_close(rng):
    path = rng.choice(list(GENERATING))
    body = asked(
        path, "The capital of France", tokens=rng.choice((1, 500)), stream=rng.choice((True, False))
    )
    whole = post(path, json.dumps(body).encode())
    return whole[: rng.choice((rng.randrange(1, len(whole)), len(whole)))]


def template_names(rng):
    names = (
        "self",
        "messages",
        "variables",
        "raise_exception",
        "namespace",
        "loop",
        "bos_token",
        "range",
        "cls",
        "a",
    )
    values = (1, "x", True, "\ud800", None, [], {"a": 1}, 1e308, "x" * 5000, "{{ self }}")
    variables = {name: rng.choice(values) for name in rng.sample(names, rng.randint(1, 4))}
    path = rng.choice(
        (
            "/v1/chat/completions",
            "/v1/responses",
            "/apply-template",
            "/tokenize",
            "/v1/warm",
            "/v1/unpin",
        )
    )
    body = {"messages": said("a")} if path in ("/tokenize", "/v1/unpin") else ASKED[path]("a")
    return post(path, json.dumps({**body, "chat_template_kwargs": variables}).encode())


def odd_targets(rng):
    """Return a request without a useful body whose names and query do not exist."""
    path, method = rng.choice([read for read in READ if not read[0].startswith("/static/")])
    names = (
        "x",
        "last",
        "%00",
        "%ff%fe",
        "..%2f..%2fetc",
        "resp_" + "0" * 48,
        "a" * 300,
        "%F0%9F%8C%A7",
        "{id}",
        "''",
    )
    target = re.sub(r"\{.*?\}", lambda _: rng.choice(names), path)
    queries = (
        "",
        "?limit=NaN",
        "?limit=-1",
        "?limit=" + "9" * 400,
        "?order=up",
        "?after=%ff",
        "?stream=1",
        "?" + "a&" * 999,
    )
    body = rng.choice((b"", b"{", b"[" * 5000))
    head = (
        f"{method} {target}{rng.choice(queries)} HTTP/1.1\r\nHost: localhost\r\nConnection: "
        "close\r\n"
    )
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


def pipelined(rng):
    parts = [b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"] * rng.randint(1, 30)
    parts += [
        post("/tokenize", b'{"prompt": "a"}').replace(b"Connection: close\r\n", b"")
    ] * rng.randint(0, 5)
    rng.shuffle(parts)
    return b"".join(parts) + rng.choice(
        (b"garbage\r\n\r\n", b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    )


KINDS = (
    *(bad_utf8, surrogates, deep, odd_numbers, duplicates, not_json),
    *(
        chunk_bombs,
        smuggling,
        bad_lines,
        bad_headers,
        early_close,
        pipelined,
        template_names,
        odd_targets,
    ),
)


def cases(count):
    """Return cases of each kind in turn, for each path in turn, from a fixed seed."""
    made = []
    for index in range(count):
        kind = KINDS[index % len(KINDS)]
        rng = Drawn(index)
        rng.path = PATHS[index // len(KINDS) % len(PATHS)]
        made.append((kind.__name__, kind(rng), kind is early_close))
    return made


def send(server, data, close):
    with server.connect(timeout=10) as sock:
        try:
            sock.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            return b""  # rejected before everything was sent
        return b"" if close else raw_answer(sock)


def canary(server):
    with server.client() as client:
        answer = client.post("/v1/completions", json=CANARY)
    assert answer.status_code == 200
    return answer.json()["choices"]


NO_HTTP = ("smuggling", "bad_lines", "bad_headers", "pipelined", "early_close")


def told_as(kind, data, body):
    """Return the path whose API defines the error format; "/" (OpenAI's format) for input that is
    not HTTP.
    """
    path = re.match(rb"(?:GET|POST|DELETE) (/[^ ?]*)[ ?]", data)
    unread = path is None or (kind in NO_HTTP and "param" in body.decode())
    return "/" if unread else urllib.parse.unquote(path.group(1).decode())


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [1, pytest.param(3, marks=pytest.mark.full)])
def test_malformed_requests_do_not_affect_the_server(server, scale, rounds):
    expected = canary(server)
    statuses = {}
    slowest = 0.0
    for index, (kind, data, close) in enumerate(
        cases(scale(rounds * NUM_CASES, 30 * NUM_CASES)), start=1
    ):
        started = time.monotonic()
        answer = send(server, data, close)
        slowest = max(slowest, time.monotonic() - started)
        found = [int(status) for status in re.findall(rb"^HTTP/1\.1 (\d{3})", answer, re.MULTILINE)]
        assert all(status < 500 or status in (501, 505) for status in found), (
            kind,
            data[:300],
            answer[:600],
        )
        assert close or found or not answer, (kind, data[:300], answer[:300])
        for part in answer.split(b"HTTP/1.1 ")[1:]:
            head, _, body = part.partition(b"\r\n\r\n")
            if int(head[:3]) >= 400 and body:
                assert error_text(told_as(kind, data, body), body), (kind, part[:300])
        statuses.setdefault(kind, set()).update(found)
        if index % 100 == 0:
            assert canary(server) == expected, f"the canary changed after {index} cases"
    assert slowest < 5, "a request hung"
    assert all(statuses[kind.__name__] for kind in KINDS if kind is not early_close)
    wait_until(server.idle, "the server to be idle")
    wait_until(lambda: not server.server.server_state.connections, "all connections to be closed")
    server.engine._scheduler.manager.check_invariants([])


def test_a_smuggled_request_is_never_answered(server):
    for index in range(60):
        data = smuggling(Drawn(1000 + index))
        answer = send(server, data, close=False)
        first = answer.partition(b"\r\n\r\n")[0].lower()
        both = (
            b"content-length" in data.split(b"\r\n\r\n")[0].lower()
            and b"chunked" in data.split(b"\r\n\r\n")[0].lower()
        )
        if both:
            assert re.search(rb'"object": ?"list"', answer) is None, (data, answer)
            assert first.startswith((b"http/1.1 4", b"http/1.1 501"))
