"""Tests of the `kvboost` object in requests and responses.

Non-prefix KV reuse must be requested, is labelled, and never counts as an exact hit.
"""

import asyncio
import base64
import dataclasses
import json
import random
import re
import threading
from pathlib import Path
from typing import get_args

import pytest

from helpers.engine.fake_runner import expected_tokens, fake_engine, runner_of
from helpers.server.live_servers import app_client
from kvboost_edge.config import EngineConfig, GenerationMode, RecomputeStrategy
from kvboost_edge.engine.request.results import GenerationResult
from kvboost_edge.engine.request.terms import Terms
from kvboost_edge.engine.stats import BLOCK_SPAN
from kvboost_edge.errors import RequestError
from kvboost_edge.server.api.bounds import BOUNDS
from kvboost_edge.server.api.schemas.cache_use import CacheUse
from kvboost_edge.server.api.schemas.chat import ChatRequest
from kvboost_edge.server.app import create_app
from kvboost_edge.server.response_types import Costs
from kvboost_edge.server.settings import ServerSettings

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hello"}]
REUSE = {"mode": "chunk_kv_reuse"}


def document(number, length):
    return random.Random(number).choices(range(256), k=length)


HEAD = document(0, 32)
ONE = document(1, 64)
TWO = document(2, 64)
FIRST = HEAD + ONE + TWO
OTHER_ORDER = HEAD + TWO + ONE


@pytest.fixture
async def app():
    """Client of a fake engine with two API keys. `app.engine` is the engine."""
    with fake_engine() as engine:
        served = create_app(
            engine, ServerSettings(api_keys=("one", "two"), admin_api_keys=("admin",))
        )
        async with app_client(served, "one") as client:
            client.engine = engine
            yield client


async def post(app, prompt, kvboost=None, key="one", **body):
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, **body}
    if kvboost is not None:
        body["kvboost"] = kvboost
    answer = await app.post(COMPLETIONS, json=body, headers={"x-api-key": key})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def refused(app, path, body):
    """Check that a request gets status 400; return the parameter and the message of the error."""
    answer = await app.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error["param"], error["message"]


async def metric(app, name):
    text = (await app.get("/metrics", headers={"x-api-key": "admin"})).text
    [value] = [line.rsplit(" ", 1)[1] for line in text.splitlines() if line.startswith(name)]
    return float(value)


async def test_an_approximate_answer_reports_its_mode_and_reused_tokens(app):
    plain = (await post(app, FIRST))["kvboost"]
    assert (plain["mode"], plain["approximate"]) == ("prefix_cache", False)
    assert (plain["reused_span_tokens"], plain["recomputed_tokens"]) == (0, 0)
    computed = runner_of(app.engine).computed
    answer = await post(app, OTHER_ORDER, REUSE, return_token_ids=True)
    assert answer["choices"][0]["token_ids"] == expected_tokens(OTHER_ORDER, 4)
    told = answer["kvboost"]
    usage = answer["usage"]
    timings = answer["timings"]
    assert (told["mode"], told["approximate"]) == ("chunk_kv_reuse", True)
    assert told["reused_span_tokens"] > 64
    assert told["recomputed_tokens"] > 0
    assert (
        usage["prompt_tokens_details"]["cached_tokens"]
        == sum(told["hit_tokens"].values())
        == timings["cache_n"]
        == 32
    )
    assert (
        timings["prompt_n"]
        == 160 - 32 - told["reused_span_tokens"]
        == runner_of(app.engine).computed - computed - 3
    )
    phases = ("tokenize", "queue", "lookup", "load", "probe", "repair", "prefill", "decode")
    assert sum(told[f"{name}_ms"] for name in phases) == pytest.approx(told["total_ms"], abs=0.01)
    assert told["repair_ms"] > 0
    spent = told["probe_ms"] + told["repair_ms"] + told["prefill_ms"]
    assert timings["prompt_ms"] == pytest.approx(spent, abs=0.01)


async def test_answers_are_exact_by_default(app):
    await post(app, FIRST)
    for asked in (None, {}, {"mode": None}, {"mode": "prefix_cache"}):
        told = (await post(app, HEAD + TWO[:50] + ONE, asked))["kvboost"]
        assert (told["mode"], told["approximate"], told["reused_span_tokens"]) == (
            "prefix_cache",
            False,
            0,
        )
    told = (await post(app, FIRST, {"mode": "baseline"}))["kvboost"]
    assert (told["mode"], told["hit_tokens"]) == ("baseline", {"pool": 0})


async def test_the_recompute_strategy_is_chosen_per_request(app):
    await post(app, FIRST)
    shared = {}
    for strategy in ("none", "selective", "cacheblend"):
        asked = {
            **REUSE,
            "recompute_strategy": strategy,
            "recompute_overlap": 32,
            "recompute_ratio": 0.5,
        }
        shared[strategy] = (await post(app, OTHER_ORDER, asked))["kvboost"]
    told = shared["none"]  # the last token of a prompt is always computed
    assert (told["reused_span_tokens"], told["recomputed_tokens"], told["probe_ms"]) == (127, 0, 0)
    assert shared["none"]["reused_span_tokens"] > shared["selective"]["reused_span_tokens"]
    assert (
        shared["selective"]["reused_span_tokens"] > shared["cacheblend"]["reused_span_tokens"] > 0
    )
    assert shared["cacheblend"]["probe_ms"] > 0
    # KV that the strategy computes before the first span is exact and is cached.
    names = ("reused_span_tokens", "recomputed_tokens")
    found = {
        told["hit_tokens"]["pool"] + sum(told[name] for name in names) for told in shared.values()
    }
    assert found == {159}
    asked = {**REUSE, "recompute_strategy": "query", "recompute_overlap": 0, "recompute_ratio": 0.5}
    told = (await post(app, document(8, 32) + TWO + ONE, asked))["kvboost"]
    assert told["probe_ms"] > 0
    assert min(told["reused_span_tokens"], told["recomputed_tokens"]) >= 48


async def test_streams_and_several_choices_report_reuse_at_the_end(app):
    await post(app, FIRST)
    body = {"prompt": OTHER_ORDER, "max_tokens": 4, "stream": True, "kvboost": REUSE, "n": 2}
    lines = (await app.post(COMPLETIONS, json=body)).text.splitlines()
    chunks = [
        json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")
    ]
    told = chunks[-1]["kvboost"]
    assert (told["mode"], told["approximate"]) == ("chunk_kv_reuse", True)
    assert 64 < told["reused_span_tokens"] < 128, "a prompt with several choices must count once"
    batch = (await post(app, [document(9, 20), OTHER_ORDER], REUSE))["kvboost"]
    assert (batch["mode"], batch["approximate"], batch["reused_span_tokens"] > 0) == (
        "chunk_kv_reuse",
        True,
        True,
    )


async def test_reuse_never_crosses_api_keys(app):
    await post(app, FIRST, key="two")
    told = (await post(app, OTHER_ORDER, REUSE))["kvboost"]
    assert (told["mode"], told["approximate"], told["reused_span_tokens"]) == (
        "prefix_cache",
        False,
        0,
    )
    salted = (await post(app, HEAD + ONE[:50] + TWO, REUSE, cache_salt="other"))["kvboost"]
    assert salted["reused_span_tokens"] == 0
    for path in ("/metrics", "/v1/stats", "/v1/blocks"):
        assert (await app.get(path)).status_code == 403


async def test_statistics_separate_span_reuse_from_prefix_hits(app):
    await post(app, FIRST)
    told = (await post(app, OTHER_ORDER, REUSE))["kvboost"]
    await post(app, FIRST, {"mode": "baseline"})
    reused = told["reused_span_tokens"]
    assert await metric(app, "kvboost:reused_span_tokens_total") == reused > 0
    assert await metric(app, "kvboost:recomputed_tokens_total") == told["recomputed_tokens"] > 0
    assert await metric(app, "kvboost:probe_seconds_total") == pytest.approx(
        told["probe_ms"] / 1e3, abs=1e-6
    )
    for mode in GenerationMode:
        labels = f'{{mode="{mode.value}",model_name="kvboost-edge"}}'
        assert await metric(app, f"kvboost:requests_total{labels}") == 1
    assert (
        await metric(app, "vllm:prompt_tokens_cached_total")
        == await metric(app, "vllm:prefix_cache_hits_total")
        == 32
    )
    assert await metric(app, "vllm:prefix_cache_queries_total") == 320
    stats = (await app.get("/v1/stats", headers={"x-api-key": "admin"})).json()
    assert stats["pool"]["span_tokens"] == reused
    assert stats["cache"]["approximate_hits"] == reused // 16
    assert stats["throughput"]["prompt_tokens_total"] == 3 * 160 - 32 - reused
    blocks = (await app.get("/v1/blocks", headers={"x-api-key": "admin"})).json()
    assert (blocks["span_tokens"], blocks["recent_span_tokens"]) == (reused, reused)
    assert blocks["hit_rate"] == 32 / 320
    assert blocks["counts"]["span"] == 0


async def test_the_block_map_shows_blocks_reused_at_another_position(app):
    await post(app, FIRST)
    began = threading.Event()
    go = threading.Event()

    def hold(batch):
        began.set()
        assert go.wait(30)

    runner_of(app.engine).on_forward = hold
    answer = asyncio.create_task(post(app, OTHER_ORDER, REUSE))
    assert await asyncio.to_thread(began.wait, 30)
    blocks = (await app.get("/v1/blocks", headers={"x-api-key": "admin"})).json()
    go.set()
    assert (await answer)["kvboost"]["approximate"]
    states = base64.b64decode(blocks["states"])
    assert blocks["counts"]["span"] == states.count(BLOCK_SPAN) > 4
    assert sum(blocks["counts"].values()) == blocks["num_blocks"]


async def test_options_that_need_an_exact_kv_cache_are_refused(app):
    for more, word in (
        ({"logprobs": 1, "max_tokens": 2}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens=0"),
    ):
        body = {"prompt": "a", "echo": True, **more}
        param, message = await refused(app, COMPLETIONS, {**body, "kvboost": REUSE})
        assert (param, word in message) == ("kvboost", True)
        assert (await app.post(COMPLETIONS, json={**body, "kvboost": {}})).status_code == 200
    assert (
        await app.post(COMPLETIONS, json={"prompt": "a", "echo": True, "kvboost": REUSE})
    ).status_code == 200
    for cache_prompt, mode in (
        (False, "chunk_kv_reuse"),
        (False, "prefix_cache"),
        (True, "baseline"),
    ):
        body = {"prompt": "a", "cache_prompt": cache_prompt, "kvboost": {"mode": mode}}
        param, message = await refused(app, COMPLETIONS, body)
        assert (param, mode in message) == ("cache_prompt", True)


async def test_a_runner_without_support_gives_its_reason(app):
    runner_of(app.engine).moved_keys_refusal = "this runner cannot; use another one"
    param, message = await refused(app, COMPLETIONS, {"prompt": "a", "kvboost": REUSE})
    assert param == "kvboost"
    assert "this runner cannot; use another one" in message
    assert (await post(app, "a", {"mode": "prefix_cache"}))["kvboost"]["mode"] == "prefix_cache"


async def test_chat_reuse_with_a_real_model(tiny_app, tiny_engine):
    one = "The first of the notes tells of boats. " * 3
    two = "Another note knows of lakes and hills. " * 3
    told = []
    before = tiny_engine.paged_stats()["span_tokens"]
    for text, use in ((one + two, {}), (two + one, REUSE), (two + one, {"mode": "baseline"})):
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2, "kvboost": use}
        answer = await tiny_app.post(CHAT, json=body)
        assert answer.status_code == 200, answer.text
        told.append(answer.json()["kvboost"])
    assert [(each["mode"], each["approximate"]) for each in told] == [
        ("prefix_cache", False),
        ("chunk_kv_reuse", True),
        ("baseline", False),
    ]
    spans = tiny_engine.paged_stats()["span_tokens"] - before
    assert spans == told[1]["reused_span_tokens"] > 16


def test_bounds_and_names_equal_the_engines():
    literals = {
        name: CacheUse.model_fields[name].annotation for name in ("mode", "recompute_strategy")
    }
    for name, values in (("mode", GenerationMode), ("recompute_strategy", RecomputeStrategy)):
        assert set(get_args(get_args(literals[name])[0])) == {one.value for one in values}
    for name in ("recompute_overlap", "recompute_ratio"):
        high = int(BOUNDS[name].high)
        assert getattr(Terms(**{name: high}), name) == high
        with pytest.raises(RequestError):
            Terms(**{name: high + 1})


def test_the_documentation_lists_all_modes_and_strategies():
    text = (Path(__file__).parents[3] / "docs" / "chunk_reuse.md").read_text(encoding="utf-8")
    [body] = re.findall(r"-d '(.*)'", text)
    ChatRequest.model_validate_json(body).check_together()
    fields = {
        name
        for line in text.split("| result |")[1].split("\n\n")[0].splitlines()[2:]
        for name in cells(line, 0)
    }
    assert {"mode", "approximate", "reused_span_tokens", "probe_ms"} <= fields
    known = {field.name for field in dataclasses.fields(GenerationResult)} | set(
        vars(GenerationResult)
    )
    assert fields <= known
    assert {"mode", "approximate", "reused_span_tokens", "recomputed_tokens", "hit_tokens"} <= set(
        Costs.__annotations__
    )
    defaults = EngineConfig()
    assert f"`recompute_overlap` ({defaults.recompute_overlap})" in text
    assert f"(`recompute_ratio`, {defaults.recompute_ratio:g})" in text
    assert f"`min_chunk_tokens` ({defaults.min_chunk_tokens})" in text
    assert f'| `"{defaults.recompute_strategy}"`, the default |' in text


def cells(line, column):
    """Return the names in one cell of a table row."""
    return re.findall(r"`(\w+)`", line.split("|")[column + 1])
