"""Tests of `kvboost-edge warm`: afterwards all full blocks of a recorded request's prompt are
cached.
"""

import json

import pytest

from helpers.engine.fake_runner import fake_engine
from helpers.server.live_servers import serving
from helpers.server.scripted_model import TEMPLATE

BLOCK = 16
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("map", "clock")
]
RECORDED = {
    "model": "fake",
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0.7,
    "max_tokens": 3,
    "tool_choice": "auto",
    "user": "me",
    "tools": TOOLS,
    "chat_template_kwargs": {"enable_thinking": False},
    "messages": [
        {"role": "system", "content": "You are a coder."},
        {"role": "user", "content": "Read the file."},
    ],
}


@pytest.fixture
def server():
    with fake_engine(num_blocks=256, max_context=2000) as engine:
        engine.tokenizer.chat_template = TEMPLATE
        with serving(engine, model_name="fake") as server:
            yield server


def asked(server):
    """Return the number of prompt tokens of the recorded request and how many of them were cached."""
    body = {name: item for name, item in RECORDED.items() if not name.startswith("stream")}
    with server.client() as client:
        usage = client.post("/v1/chat/completions", json=body).json()["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def test_a_warmed_request_hits_all_full_blocks(server, tmp_path, printed, answered):
    file = tmp_path / "agent.json"
    file.write_text(json.dumps(RECORDED))
    command = ["warm", "--from-request", file, "--url", server.base_url]
    warmed = answered(*command)
    tokens, cached = asked(server)
    assert tokens == warmed["token_count"]
    assert cached == min(tokens // BLOCK * BLOCK, tokens - 1)
    assert "pinned" not in printed(*command).out
    out = printed(*command, "--pin", "--ttl", "60").out
    assert out.startswith(f"{tokens} prompt tokens are cached, ")
    pinned = tokens // BLOCK * BLOCK
    assert 0 < pinned < tokens
    assert out.endswith(f"; {pinned} tokens are pinned for 60 s\n")
    assert printed(*command, "--pin").out.endswith(f"; {pinned} tokens are pinned\n")
    assert server.engine.paged_stats()["pinned_blocks"] == tokens // BLOCK


@pytest.mark.parametrize(
    "more",
    [
        {"min_tokens": 2, "bad_words": ["a"], "ignore_eos": True},
        {"guided_json": {"type": "object"}},
        {"reasoning_budget": 5, "return_token_ids": True},
        {"speculative.n_max": 0, "dry_multiplier": 0.5},
    ],
    ids=lambda more: next(iter(more)),
)
def test_fields_about_the_answer_are_ignored(server, more):
    with server.client() as client:
        plain, given = (client.post("/v1/warm", json={**RECORDED, **one}) for one in ({}, more))
    assert given.status_code == 200, given.text
    assert given.json()["token_count"] == plain.json()["token_count"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read"),
        ("{", "is not JSON"),
        ("[]", "object with messages"),
        ('{"prompt": "a"}', "messages"),
    ],
)
def test_an_invalid_request_file_is_refused_by_name(tmp_path, text, said, printed):
    file = tmp_path / "agent.json"
    if text is not None:
        file.write_text(text)
    error = printed("warm", "--from-request", file, "--url", "http://127.0.0.1:9", code=2).err
    assert said in error
    assert "agent.json" in error
