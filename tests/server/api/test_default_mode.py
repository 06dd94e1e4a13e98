"""Tests of the server's default mode: its scope, the labels of approximate responses, and requests
that need exact KV anyway.
"""

import json
import random
from contextlib import asynccontextmanager

import pytest

from helpers.engine.fake_runner import expected_tokens, fake_engine, runner_of
from helpers.server.live_servers import app_client
from kvboost_edge.config import GenerationMode
from kvboost_edge.server.app import create_app
from kvboost_edge.server.settings import ServerSettings

COMPLETIONS = "/v1/completions"
HEAD, ONE, TWO = (
    random.Random(number).choices(range(256), k=length)
    for number, length in enumerate((32, 64, 64))
)
FIRST = HEAD + ONE + TWO
OTHER_ORDER = HEAD + TWO + ONE
NOTES = ("The first of the notes tells of boats. " * 6, "Another one knows of lakes. " * 6)


@asynccontextmanager
async def app_of(engine, mode):
    async with app_client(create_app(engine, ServerSettings(mode=mode)), None) as client:
        yield client


@pytest.fixture
def engine():
    with fake_engine() as engine:
        yield engine


async def asked(app, path, **body):
    answer = await app.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def completed(app, prompt, **body):
    answer = await asked(
        app, COMPLETIONS, prompt=prompt, **{"max_tokens": 4, "temperature": 0, **body}
    )
    told = answer["kvboost"]
    return told["mode"], answer["usage"].get("approximate"), answer["usage"]


async def test_an_approximate_default_is_labelled(engine):
    async with app_of(engine, "chunk_kv_reuse") as app:
        (model,) = (await app.get("/v1/models")).json()["data"]
        assert (model["mode"], model["approximate"]) == ("chunk_kv_reuse", True)
        assert (await completed(app, FIRST))[:2] == ("prefix_cache", False)
        assert (await completed(app, OTHER_ORDER))[:2] == ("chunk_kv_reuse", True)
        asked = {"recompute_strategy": "none"}
        assert (await completed(app, OTHER_ORDER, kvboost=asked))[:2] == ("chunk_kv_reuse", True)
        for chosen in ({"kvboost": {"mode": "prefix_cache"}}, {"cache_prompt": False}):
            mode, approximate, _ = await completed(app, HEAD + TWO[:50] + ONE, **chosen)
            assert (mode in ("prefix_cache", "baseline"), approximate) == (True, False)


async def test_cached_token_counts_exclude_approximate_reuse(engine):
    """llama.cpp's route and the metrics count exact hits only. Reused span tokens are reported
    separately.
    """
    async with app_of(engine, "chunk_kv_reuse") as app:
        await completed(app, FIRST)
        body = {"prompt": OTHER_ORDER, "n_predict": 4, "temperature": 0}
        answer = await asked(app, "/completion", **body)
        assert answer["kvboost"]["reused_span_tokens"] > 64
        assert answer["tokens_cached"] == answer["timings"]["cache_n"] == len(HEAD)
        figures = (await app.get("/metrics")).text.splitlines()
        name = "vllm:prompt_tokens_cached_total"
        [value] = [line.rsplit(" ", 1)[1] for line in figures if line.startswith(name)]
        assert float(value) == len(HEAD)


async def test_an_exact_default_labels_only_approximate_answers(engine):
    async with app_of(engine, "prefix_cache") as app:
        (model,) = (await app.get("/v1/models")).json()["data"]
        assert (model["mode"], model["approximate"]) == ("prefix_cache", False)
        assert (await completed(app, FIRST))[:2] == ("prefix_cache", None)
        reuse = {"mode": "chunk_kv_reuse"}
        assert (await completed(app, OTHER_ORDER, kvboost=reuse))[:2] == ("chunk_kv_reuse", True)


async def test_an_engine_with_wide_arithmetic_is_labelled():
    with fake_engine(arithmetic="wide") as engine:
        async with app_of(engine, "prefix_cache") as app:
            (model,) = (await app.get("/v1/models")).json()["data"]
            assert (model["approximate"], model["approximations"]) == (True, ["wide_arithmetic"])
            answer = await asked(app, COMPLETIONS, prompt=FIRST, max_tokens=2)
            told = answer["kvboost"]
            assert (told["mode"], told["approximate"]) == ("prefix_cache", True)
            assert told["approximations"] == ["wide_arithmetic"]
            assert answer["usage"]["approximate"] is True


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"max_tokens": 2}),
        ("/v1/messages", {"max_tokens": 2}),
        ("/v1/responses", {"max_output_tokens": 16}),
    ],
)
async def test_every_usage_is_labelled(tiny_engine, path, body):
    key = "input" if path == "/v1/responses" else "messages"
    async with app_of(tiny_engine, "chunk_kv_reuse") as app:
        labels = []
        for text in (NOTES[0] + NOTES[1], NOTES[1] + NOTES[0]):
            message = {"role": "user", "content": text}
            answer = await asked(app, path, model="kvboost-edge", **{key: [message]}, **body)
            labels.append(answer["usage"]["approximate"])
        streamed = await app.post(
            path,
            json={
                "model": "kvboost-edge",
                key: [{"role": "user", "content": "x" + NOTES[1] + NOTES[0]}],
                "stream": True,
                **({"stream_options": {"include_usage": True}} if "chat" in path else {}),
                **body,
            },
        )
    assert labels == [False, True]
    events = [
        json.loads(line.removeprefix("data: "))
        for line in streamed.text.splitlines()
        if line.startswith("data: {")
    ]
    usages = [
        found
        for one in events
        if (found := one.get("usage") or one.get("response", {}).get("usage")) is not None
    ]
    assert usages[-1]["approximate"] is True


async def test_options_that_need_an_exact_kv_cache_disable_reuse(engine):
    async with app_of(engine, "chunk_kv_reuse") as app:
        await completed(app, FIRST)
        for exact in ({"echo": True, "logprobs": 1}, {"echo": True, "max_tokens": 0}):
            assert (await completed(app, OTHER_ORDER, **exact))[:2] == ("prefix_cache", False)
            refused = await app.post(
                COMPLETIONS,
                json={"prompt": OTHER_ORDER, **exact, "kvboost": {"mode": "chunk_kv_reuse"}},
            )
            assert refused.status_code == 400


async def test_cache_control_uses_the_exact_mode(tiny_engine):
    block = {"type": "text", "text": NOTES[0], "cache_control": {"type": "ephemeral"}}
    async with app_of(tiny_engine, "chunk_kv_reuse") as app:
        answer = await asked(
            app,
            "/v1/messages",
            model="kvboost-edge",
            max_tokens=2,
            messages=[{"role": "user", "content": [block]}],
        )
    assert answer["kvboost"]["mode"] == "prefix_cache"


async def test_the_default_mode_may_be_baseline(engine):
    async with app_of(engine, "baseline") as app:
        (model,) = (await app.get("/v1/models")).json()["data"]
        assert (model["mode"], model["approximate"]) == ("baseline", False)
        for _ in range(2):
            mode, label, usage = await completed(app, FIRST)
            assert (mode, label) == ("baseline", None)
            assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        for cached in (0, 159):
            mode, _, usage = await completed(app, FIRST, cache_prompt=True)
            assert (mode, usage["prompt_tokens_details"]["cached_tokens"]) == (
                "prefix_cache",
                cached,
            )


@pytest.mark.parametrize("default", ["baseline", "prefix_cache"])
async def test_recompute_options_are_refused_without_chunk_reuse(engine, default):
    async with app_of(engine, default) as app:
        body = {"prompt": FIRST, "kvboost": {"recompute_overlap": 8}}
        refused = await app.post(COMPLETIONS, json=body)
    assert refused.status_code == 400
    assert "kvboost.recompute_overlap needs kvboost.mode 'chunk_kv_reuse'" in refused.text


async def test_a_model_that_refuses_the_default_is_exact(engine):
    runner_of(engine).moved_keys_refusal = "this runner cannot"
    async with app_of(engine, "chunk_kv_reuse") as app:
        (model,) = (await app.get("/v1/models")).json()["data"]
        assert (model["mode"], model["approximate"]) == ("prefix_cache", False)
        answer = await asked(
            app, COMPLETIONS, prompt=FIRST, max_tokens=4, temperature=0, return_token_ids=True
        )
    assert answer["choices"][0]["token_ids"] == expected_tokens(FIRST, 4)
    assert answer["kvboost"]["mode"] == GenerationMode.PREFIX_CACHE
