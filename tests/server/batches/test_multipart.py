"""Tests of multipart forms in pieces of any size, as clients send them, and of malformed forms."""

import random

import httpx
import pytest

from kvboost_edge.server.api_errors import ApiError
from kvboost_edge.server.batches.multipart import FormReader

TYPE = 'multipart/form-data; boundary="b-1"'


def body_of(*parts, end=b"--b-1--\r\n"):
    return b"".join(b"--b-1\r\n" + part + b"\r\n" for part in parts) + end


def part(name, content, extra=""):
    return f'Content-Disposition: form-data; name="{name}"{extra}\r\n\r\n'.encode() + content


FILE = part("file", b"x", '; filename="a.jsonl"')


def read(content_type, data, sizes=(1 << 20,)):
    found = bytearray()
    form = FormReader(content_type, found.extend)
    at = 0
    for size in sizes * (len(data) // min(sizes) + 1):
        form.feed(data[at : at + size])
        at += size
    form.end()
    return form, bytes(found)


@pytest.mark.parametrize("sizes", [(1,), (7,), (64,), (1, 100, 3)])
def test_httpx_uploads_are_parsed(sizes):
    content = random.Random(1).randbytes(3000) + b"\r\n--" + b"\r\n-\r\n--x" * 50
    request = httpx.Request(
        "POST",
        "http://localhost",
        data={"purpose": "batch", "expires_after[anchor]": "created_at", "ä": "ö" * 9},
        files={"file": ('a "name"/../ä.jsonl', content, "application/json")},
    )
    form, found = read(request.headers["content-type"], request.read(), sizes)
    assert found == content
    assert form.fields == {"purpose": "batch", "expires_after[anchor]": "created_at", "ä": "ö" * 9}
    assert form.filename == "a %22name%22/../ä.jsonl"


@pytest.mark.parametrize("content", [b"", b"\r\n", b"--b-1", b"\r\n--b-"])
def test_contents_that_resemble_a_boundary_are_kept(content):
    data = body_of(part("file", content, '; filename="a"'), part("purpose", b"batch"))
    form, found = read(TYPE, b"preamble\r\n" + data + b"epilogue", (1,))
    assert (found, form.fields) == (content, {"purpose": "batch"})


@pytest.mark.parametrize(
    ("content_type", "data", "message"),
    [
        ("application/json", b"{}", "multipart/form-data"),
        ("multipart/form-data", b"", "boundary"),
        (f"multipart/form-data; boundary={'x' * 201}", b"", "boundary"),
        (TYPE, b"", "ends before"),
        (TYPE, body_of(FILE, end=b""), "ends before"),
        (TYPE, body_of(part("purpose", b"batch")), "no file"),
        (TYPE, body_of(FILE, FILE), "two parts 'file'"),
        (TYPE, body_of(part("a", b""), part("a", b"")), "two parts 'a'"),
        (TYPE, body_of(part("a", b"x" * 9000)), "more than 8192 bytes"),
        (TYPE, body_of(b"A: " + b"x" * 9000 + b"\r\n\r\n"), "headers of a part"),
        (TYPE, body_of(b"A: b\r\n\r\nx"), "Content-Disposition"),
        (TYPE, body_of(b"Content-Disposition: form-data\r\n\r\nx"), "Content-Disposition"),
        (TYPE, body_of(*(part(f"{n}", b"") for n in range(17))), "more than 16 parts"),
        (TYPE, body_of(part("a", b"\xff")), "UTF-8"),
        (TYPE, b"--b-1x\r\n", "followed by other bytes"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_malformed_forms_are_refused(content_type, data, message):
    for sizes in ((1,), (1 << 20,)):
        with pytest.raises(ApiError, match=message) as caught:
            read(content_type, data, sizes)
        assert caught.value.status_code == 400


def test_an_upload_is_never_held_in_memory():
    largest = 0
    written = 0

    def write(data):
        nonlocal written
        written += len(data)

    form = FormReader(TYPE, write)
    form.feed(b"--b-1\r\n" + part("file", b"", '; filename="a"'))
    for _ in range(200):
        form.feed(b"y" * 10_000)
        largest = max(largest, len(form._buffer))
    form.feed(b"\r\n--b-1--")
    form.end()
    assert written == 2_000_000
    assert largest < 100
