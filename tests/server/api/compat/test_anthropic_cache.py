"""Tests of `cache_control`: the pinned prefix, the lifetime of a pin, and the reported usage."""

import time

import pytest

from helpers.server.compat_apis import APIS
from helpers.server.live_servers import app_client
from helpers.server.scripted_model import ASK, TEMPLATE, scripted
from helpers.server.scripted_model import TOOLS as FUNCTIONS
from kvboost_edge.server.app import create_app
from kvboost_edge.server.settings import ServerSettings

API = APIS["/v1/messages"]
TOOLS = API.tools(FUNCTIONS)
FIVE = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}
LONG = "You answer in few words, whatever is asked of you. " * 4


async def ask(app, *, streams=False, **more):
    return await API.ask(app, {**API.body(), **more}, streams=streams)


def block(text, mark=None):
    return {"type": "text", "text": text, **({} if mark is None else {"cache_control": mark})}


def pinned(engine):
    """Return the number of pinned tokens."""
    return engine.paged_stats()["pinned_blocks"] * engine.config.block_size


def ends(engine):
    """Return the seconds until each pin expires, in ascending order."""
    pins = engine._parts.manager.pins._pins.values()
    return sorted(
        round(until - time.monotonic(), -2) for pin in pins for until in pin.ends.values()
    )


@pytest.fixture(autouse=True)
def unpinned(spoken_engine):
    pins = spoken_engine._parts.manager.pins
    with spoken_engine._core.reading():
        pins.expire(time.monotonic() + 1e6)


async def test_nothing_is_pinned_without_cache_control(app, speaker, spoken_engine):
    usage = (await ask(app, system=LONG))["usage"]
    assert (usage["cache_creation_input_tokens"], usage["cache_read_input_tokens"]) == (0, 0)
    assert pinned(spoken_engine) == 0
    usage = (await ask(app, system=LONG))["usage"]
    assert usage["cache_read_input_tokens"] > 200
    assert usage["cache_creation_input_tokens"] == 0


PLACES = {
    "system": {"system": [block(LONG, FIVE), block("The date is Monday.")]},
    "message": {
        "system": LONG,
        "messages": [{"role": "user", "content": [block("And?", FIVE), block("The weather?")]}],
    },
    "earlier message": {
        "messages": [
            {"role": "user", "content": [block(LONG, FIVE)]},
            {"role": "assistant", "content": "Yes."},
            *ASK,
        ]
    },
    "last message": {"messages": [{"role": "user", "content": [block(LONG, FIVE)]}]},
    "whole": {"system": LONG, "cache_control": FIVE},
    "tools": {"tools": [*TOOLS[:1], {**TOOLS[1], "cache_control": FIVE}]},
    "result": {
        "messages": [
            *ASK,
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "a", "name": "clock", "input": {}}],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "a",
                        "content": LONG,
                        "cache_control": FIVE,
                    }
                ],
            },
        ],
        "tools": TOOLS,
    },
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("streams", [False, True])
async def test_cache_control_pins_and_counts_the_marked_prefix(
    app, speaker, spoken_engine, place, streams
):
    body = PLACES[place]
    counted = await app.post("/v1/messages/count_tokens", json={"messages": ASK, **body})
    total = counted.json()["input_tokens"]
    size = spoken_engine.config.block_size
    for is_second in (False, True):
        answer = await ask(app, streams=streams, **body)
        usage = answer["usage"]
        costs = answer["kvboost"]
        names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
        assert sum(usage[name] for name in names) == total
        assert pinned(spoken_engine) == costs["pinned_tokens"] > 100
        if is_second:
            assert usage["cache_read_input_tokens"] >= costs["pinned_tokens"] - 1
            assert usage["cache_creation_input_tokens"] <= size
        else:
            assert usage["cache_creation_input_tokens"] == costs["pinned_tokens"]
            assert (
                usage["cache_creation"]["ephemeral_5m_input_tokens"]
                == usage["cache_creation_input_tokens"]
            )
        assert ends(spoken_engine) == [300]
    if place in ("system", "message", "earlier message"):
        assert costs["pinned_tokens"] <= total - 16, "only the marked prefix may be pinned"


async def test_only_the_marked_prefix_is_pinned(app, speaker, spoken_engine):
    """The prefix stays a cache hit when the text after it changes, and survives a cache reset."""
    for day in ("Monday", "Tuesday"):
        system = [block(LONG, FIVE), block(f"It is {day}." * 20)]
        usage = (await ask(app, system=system))["usage"]
    assert 200 <= usage["cache_read_input_tokens"] <= len(LONG) + 32
    assert pinned(spoken_engine) <= len(LONG) + 16
    spoken_engine.reset_cache()
    assert (await ask(app, system=[block(LONG)]))["usage"]["cache_read_input_tokens"] >= 200 - 16
    marked = {"messages": [{"role": "system", "content": LONG}], "add_generation_prompt": False}
    assert (await app.post("/v1/unpin", json=marked)).json()["blocks_unpinned"] > 0
    assert pinned(spoken_engine) == 0


async def test_ttl_of_5m_and_1h_expire_separately(app, speaker, spoken_engine):
    messages = [{"role": "user", "content": [block("And the weather? " * 10, FIVE)]}]
    answer = await ask(app, system=[block(LONG, HOUR)], messages=messages)
    usage = answer["usage"]
    assert ends(spoken_engine) == [300, 3600]
    created = usage["cache_creation"]
    assert created["ephemeral_1h_input_tokens"] >= 192
    assert created["ephemeral_5m_input_tokens"] >= 144
    assert sum(created.values()) == usage["cache_creation_input_tokens"]
    with spoken_engine._core.reading():
        spoken_engine._parts.manager.pins.expire(time.monotonic() + 301)
    assert pinned(spoken_engine) == created["ephemeral_1h_input_tokens"]


async def test_requests_are_answered_when_the_pin_limit_is_reached(app, speaker, spoken_engine):
    for text in ("a", "b"):  # half of the 16384 tokens can be pinned
        answer = await ask(app, system=[block(text * 6000, FIVE)])
        assert answer["stop_reason"] == "end_turn"
        assert (answer["kvboost"]["pinned_tokens"] > 0) == (text == "a")
    assert pinned(spoken_engine) < 6100


async def test_a_tenant_pins_no_more_than_its_share(keyed_app, speaker, spoken_engine):
    """With two API keys, each tenant may pin a quarter of the pool."""
    found = []
    for key in ("first-key", "second-key"):
        keyed_app.headers["x-api-key"] = key
        for text in ("a", "b"):
            answer = await ask(keyed_app, system=[block(text * 3500, FIVE)])
            found.append(answer["kvboost"]["pinned_tokens"] > 0)
            assert answer["usage"]["cache_read_input_tokens"] <= 16
    assert found == [True, False, True, False]


async def test_a_small_pool_retains_instead_of_pinning(monkeypatch):
    """Half of this pool, if pinned, could leave too few blocks for a request that fills the
    context. The prefix is retained instead.
    """
    with scripted(monkeypatch, num_blocks=100, max_context=1500) as (engine, _):
        async with app_client(create_app(engine, ServerSettings(model_name="fake"))) as app:
            answer = await ask(app, system=[block(LONG, FIVE)])
            assert answer["kvboost"]["pinned_tokens"] == pinned(engine) == 0
            assert engine.paged_stats()["retained_blocks"] >= len(LONG) // 16
            for text in "abcdefgh":
                await ask(app, system=text * 1000)
            assert (await ask(app, system=LONG))["usage"]["cache_read_input_tokens"] >= len(LONG)


async def test_nothing_is_pinned_if_the_template_rejects_a_partial_conversation(
    app, speaker, spoken_engine, monkeypatch
):
    strict = (
        "{% if messages[-1].content != 'And the weather?' %}{{ raise_exception('no') }}{% endif %}"
        + TEMPLATE
    )
    tokenizer = spoken_engine.tokenizer
    tokenizer.turn_format  # noqa: B018 - derived before: it asks with messages of its own
    monkeypatch.setattr(tokenizer, "chat_template", strict)
    kept = vars(tokenizer).pop("_compiled", None)
    answer = await ask(app, system=[block(LONG, FIVE)])
    assert (answer["usage"]["cache_creation_input_tokens"], pinned(spoken_engine)) == (0, 0)
    vars(tokenizer)["_compiled"] = kept
