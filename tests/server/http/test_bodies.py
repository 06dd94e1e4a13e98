"""Tests of bodies that arrive in pieces, without a socket: each piece is a separate message."""

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
