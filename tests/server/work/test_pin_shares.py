"""Tests of pins by API key: each pins its own share, by weight, and learns nothing about the other
keys' pins.
"""

from helpers.engine.fake_runner import fake_engine
from helpers.server.live_servers import app_client
from kvboost_edge.server.app import create_app
from kvboost_edge.server.settings import ServerSettings

KEYS = ("first", "second weight=2", "third")  # of 16 blocks: 4, 8, 4


async def warm(app, key, text):
    headers = {"Authorization": f"Bearer {key}"}
    async with app_client(app) as client:
        answer = await client.post("/v1/warm", json={"text": text, "pin": True}, headers=headers)
    return answer.status_code, answer.json()


async def test_one_key_cannot_use_another_keys_pin_share():
    with fake_engine(num_blocks=32) as engine:
        app = create_app(engine, ServerSettings(api_keys=KEYS))
        assert (await warm(app, "first", "a" * 64))[0] == 200
        status, alone = await warm(app, "first", "b" * 16)
        assert (status, alone["error"]["code"]) == (400, "capacity_exceeded")
        assert (await warm(app, "second", "c" * 128))[0] == 200
        assert (await warm(app, "third", "d" * 64))[0] == 200
        assert engine.paged_stats()["pinned_blocks"] == 16
        assert await warm(app, "first", "b" * 16) == (400, alone), (
            "the refusal must not depend on pins of other keys"
        )
        assert "share of max_pinned_blocks is 4" in alone["error"]["message"]


async def test_a_single_key_may_use_the_whole_pin_limit():
    with fake_engine(num_blocks=32) as engine:
        app = create_app(engine, ServerSettings(api_keys=KEYS[:1]))
        assert (await warm(app, "first", "a" * 256))[0] == 200
        _, refused = await warm(app, "first", "b" * 16)
        assert (
            "the limit is max_pinned_blocks=16 of the 32 blocks in the pool"
            in refused["error"]["message"]
        )
