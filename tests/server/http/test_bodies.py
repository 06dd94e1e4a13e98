"""Tests of bodies that arrive in pieces, without a socket: each piece is a separate message."""

import gzip
import json

import pytest

from helpers.server.live_servers import app_client
from kvboost_edge.server.app import create_app
from kvboost_edge.server.settings import ServerSettings


async def test_max_body_bytes_applies_to_chunked_bodies(tiny_engine):
    async def pieces():
        for _ in range(5):
            yield b" " * 5000

    app = create_app(tiny_engine, ServerSettings(max_body_bytes=20_000))
    async with app_client(app) as client:
        answer = await client.post("/v1/completions", content=pieces())
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
    assert app.state.kv.bodies.num_bytes == 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat", "/v1/files"])
async def test_a_compressed_body_is_refused(tiny_engine, path):
    body = gzip.compress(json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode())
    async with app_client(create_app(tiny_engine, ServerSettings())) as client:
        for encoding in ("gzip", "GZIP", "identity, zstd"):
            headers = {"content-encoding": encoding}
            answer = await client.post(path, content=body, headers=headers)
            assert (answer.status_code, answer.headers["accept-encoding"]) == (415, "identity")
            assert all(words in answer.text for words in ("Content-Encoding", encoding))


@pytest.mark.parametrize("encoding", ["identity", "Identity", ""])
async def test_an_uncompressed_body_may_say_so(tiny_engine, encoding):
    body = {"prompt": "x", "max_tokens": 1}
    async with app_client(create_app(tiny_engine, ServerSettings())) as client:
        answer = await client.post(
            "/v1/completions", json=body, headers={"content-encoding": encoding}
        )
    assert answer.status_code == 200, answer.text
