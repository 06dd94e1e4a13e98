"""Tests of OpenAI's fields for the prompt cache: what they retain, for which tenant, and that keys
are never logged or stored.
"""

import io
import time

import pytest

from helpers.clocks import give_clock
from helpers.engine.fake_runner import fake_engine
from helpers.server.live_servers import app_client
from kvboost_edge.engine import core
from kvboost_edge.server.app import create_app
from kvboost_edge.server.logs import configure_logging
from kvboost_edge.server.settings import ServerSettings
from kvboost_edge.server.work import admission

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
PROMPT = "A text of 64 characters, which is four full blocks of the pool.."


@pytest.fixture
async def app():
    """Client of a server with 32 blocks. `app.engine` is the engine."""
    with fake_engine(num_blocks=32) as engine:
        served = create_app(
            engine, ServerSettings(api_keys=("one", "two"), admin_api_keys=("admin",))
        )
        async with app_client(served, "one") as client:
            client.engine = engine
            yield client


async def post(app, body, **headers):
    answer = await app.post(COMPLETIONS, json={"max_tokens": 2, **body}, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def cached(app, body):
    details = (await post(app, body))["usage"]["prompt_tokens_details"]
    return details["cached_tokens"]


async def scan(app, texts=15):
    for number in range(texts):
        await post(app, {"prompt": f"{number:04d}" * 16})


def num_retained(app):
    return app.engine.paged_stats()["retained_blocks"]


async def test_prompt_cache_key_retains_the_common_prefix(app):
    found = []
    for _ in range(3):
        found.append(await cached(app, {"prompt": PROMPT, "prompt_cache_key": "conversation"}))
        await scan(app)
    assert found == [0, 0, 63]
    assert num_retained(app) == 4
    shown = 'kvboost:retained_blocks{model_name="kvboost-edge"} 4.0'
    assert shown in (await app.get("/metrics", headers={"x-api-key": "admin"})).text


async def test_a_request_with_several_choices_counts_once(app):
    await post(app, {"prompt": [PROMPT, PROMPT], "n": 3, "prompt_cache_key": "k"})
    assert num_retained(app) == 0
    await post(app, {"prompt": PROMPT, "prompt_cache_key": "k"}, **{"x-api-key": "two"})
    assert num_retained(app) == 0, "equal cache keys of different API keys must not be shared"
    for key in ("", None):
        await post(app, {"prompt": PROMPT, "prompt_cache_key": key})
        assert num_retained(app) == 0
    await post(app, {"prompt": PROMPT, "prompt_cache_key": "k"})
    assert num_retained(app) == 4


async def test_retention_24h_expires_after_a_day(app, monkeypatch):
    began = time.monotonic()
    body = {"prompt": PROMPT, "prompt_cache_retention": "24h"}
    await post(app, body)
    await scan(app)
    assert num_retained(app) == 4
    assert await cached(app, {"prompt": PROMPT}) == 63
    ends = app.engine._parts.manager._uses.retained.values()
    assert all(began + 86400 <= end <= time.monotonic() + 86400 for end in ends)
    give_clock(monkeypatch, lambda: time.monotonic() + 86400, admission, core)
    await post(app, {"prompt": "x", "max_tokens": 1})
    assert num_retained(app) == 0


@pytest.mark.parametrize("retention", ["in_memory", "in-memory", None])
async def test_in_memory_retention_changes_nothing(app, retention):
    await post(app, {"prompt": PROMPT, "prompt_cache_retention": retention})
    assert num_retained(app) == 0


async def test_cache_keys_are_not_logged_or_shown_in_errors(app, kept_logging):
    stream = io.StringIO()
    secret = "the-name-of-a-user"
    configure_logging(ServerSettings(log_level="debug"), stream)
    await post(app, {"prompt": PROMPT, "prompt_cache_key": secret})
    for key in (secret * 100, [secret]):
        answer = await app.post(COMPLETIONS, json={"prompt": PROMPT, "prompt_cache_key": key})
        assert answer.status_code == 400
        assert secret not in answer.text
    assert stream.getvalue()
    assert secret not in stream.getvalue()


@pytest.mark.parametrize(
    ("field", "value", "calls"),
    [("prompt_cache_key", "k", 2), ("prompt_cache_retention", "24h", 1)],
)
async def test_chat_accepts_key_and_retention(tiny_app, tiny_engine, field, value, calls):
    message = {"role": "user", "content": f"Tell me of {field}, and tell it at some length. " * 3}
    for call in range(calls):
        before = tiny_engine.paged_stats()["retained_blocks"]
        answer = await tiny_app.post(
            CHAT, json={"messages": [message], "max_tokens": 1, field: value}
        )
        assert answer.status_code == 200, answer.text
        blocks = answer.json()["usage"]["prompt_tokens"] // tiny_engine.config.block_size
        found = tiny_engine.paged_stats()["retained_blocks"] - before
        assert (found > 0) == (call == calls - 1)
        assert found <= blocks
