"""Tests of texts that are cached at startup, and of the cache hits of later requests."""

import pytest

from helpers.engine.fake_runner import fake_engine
from helpers.server.live_servers import serving
from kvboost_edge.errors import ConfigError
from kvboost_edge.server.settings import tenant_of_key
from kvboost_edge.server.work.engine_warmup import prepare

SYSTEM = "You are the assistant of a library. Answer briefly, and name the shelf of each book. " * 4


def cached(client, path, **body):
    answer = client.post(path, json={"max_tokens": 1, "temperature": 0, **body})
    usage = answer.json()["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]


def chat(client, system, question):
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return cached(client, "/v1/chat/completions", messages=messages)


def test_a_warmed_system_message_is_a_full_hit_of_the_first_chat(demo_engine):
    keys = ("a" * 20, "b" * 20)
    tenants = [tenant_of_key(key) for key in keys]
    prepare(demo_engine, (), (), tenants, warm_systems=[SYSTEM])
    size = demo_engine.config.block_size
    with serving(demo_engine, api_keys=keys) as server:
        for key in keys:
            with server.client(headers={"x-api-key": key}) as client:
                first, _ = chat(client, SYSTEM, "Where is Emma?")
                again, total = chat(client, SYSTEM, "Which books are new?")
                other, _ = chat(client, f"Not so. {SYSTEM}", "Where is Emma?")
                raw, _ = cached(client, "/v1/completions", prompt=SYSTEM)
            assert first == again >= total - 3 * size > 0
            assert other < size
            assert raw == 0


def test_a_warmed_prompt_is_hit_by_completions_only(demo_engine):
    prompt = f"Once upon a time. {SYSTEM}"
    prepare(demo_engine, [prompt], (), [])
    with serving(demo_engine) as server, server.client() as client:
        found, total = cached(client, "/v1/completions", prompt=f"{prompt} The end")
        assert found >= total - 2 * demo_engine.config.block_size
        assert chat(client, prompt, "Where is Emma?")[0] == 0


def test_warm_system_needs_a_template_with_system_messages():
    with fake_engine() as engine, pytest.raises(ConfigError, match=r"--warm-system .* use --warm"):
        prepare(engine, (), (), (), warm_systems=[SYSTEM])
