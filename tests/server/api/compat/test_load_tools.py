"""Tests with recorded requests of load generators, whose responses are parsed as those programs do.

The requests were recorded in November 2026 from `bench serve` of vLLM 0.33.0, guidellm 0.8.1,
llama-benchy 0.4.0 and lm-eval 0.4.13.
"""

import json

import numpy as np
import pytest

MODEL = "tiny"
TEXT = "1 0 m0 Finish medical want almost away until. Its culture song reveal return finally."
LENGTH = 8
VLLM_OPTIONS = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
GUIDELLM_OPTIONS = {
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "ignore_eos": True,
}
STREAMS = {
    "vllm": (
        "/v1/completions",
        {
            "model": MODEL,
            "prompt": TEXT,
            "repetition_penalty": 1.0,
            "max_tokens": LENGTH,
            "logprobs": None,
            **VLLM_OPTIONS,
        },
    ),
    "vllm chat": (
        "/v1/chat/completions",
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": [{"type": "text", "text": TEXT}]}],
            "max_completion_tokens": LENGTH,
            **VLLM_OPTIONS,
        },
    ),
    "guidellm": (
        "/v1/completions",
        {"model": MODEL, **GUIDELLM_OPTIONS, "max_tokens": LENGTH, "prompt": TEXT},
    ),
    "guidellm chat": (
        "/v1/chat/completions",
        {
            "model": MODEL,
            **GUIDELLM_OPTIONS,
            "max_completion_tokens": LENGTH,
            "messages": [{"role": "user", "content": [{"type": "text", "text": TEXT}]}],
        },
    ),
    "llama-benchy": (
        "/v1/chat/completions",
        {
            "model": MODEL,
            "messages": [
                {"role": "system", "content": TEXT},
                {"role": "user", "content": "The metal of Zimis tent is chrome."},
            ],
            "max_tokens": LENGTH,
            "stream": True,
            "return_token_ids": True,
            "stream_options": {"include_usage": True},
            "min_tokens": LENGTH,  # --exact-tg
            "ignore_eos": True,
        },
    ),
}


async def chunks_of(app, path, body):
    answer = await app.post(path, json=body)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("tool", STREAMS)
async def test_a_stream_ends_with_usage_for_load_tools(tiny_app, tool):
    path, body = STREAMS[tool]
    chunks = await chunks_of(tiny_app, path, body)
    assert [chunk["choices"] for chunk in chunks].count([]) == 1
    usage = chunks[-1]["usage"]
    assert usage["completion_tokens"] == LENGTH
    assert usage["total_tokens"] == usage["prompt_tokens"] + LENGTH
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("tool", ["guidellm", "guidellm chat"])
async def test_continuous_usage_grows_with_each_chunk(tiny_app, tool):
    path, body = STREAMS[tool]
    *chunks, last = await chunks_of(tiny_app, path, body)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == LENGTH
    for chunk in chunks:
        usage = chunk["usage"]
        assert usage["prompt_tokens"] == last["usage"]["prompt_tokens"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


async def test_each_choice_has_its_own_usage(tiny_app):
    path, body = STREAMS["guidellm"]
    body = {**body, "prompt": [TEXT, "Another"], "n": 2, "temperature": 1.0}
    *chunks, last = await chunks_of(tiny_app, path, body)
    ends = {
        chunk["choices"][0]["index"]: chunk["usage"]
        for chunk in chunks
        if chunk["choices"][0]["finish_reason"]
    }
    assert [ends[index]["completion_tokens"] for index in range(4)] == [LENGTH] * 4
    assert ends[0]["prompt_tokens"] == ends[1]["prompt_tokens"] > ends[2]["prompt_tokens"]
    assert last["usage"]["completion_tokens"] == 4 * LENGTH


async def test_token_ids_of_each_chunk_for_llama_benchy(tiny_app):
    path, body = STREAMS["llama-benchy"]
    chunks = await chunks_of(tiny_app, path, body)
    pieces = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    assert sum(len(piece.get("token_ids") or []) for piece in pieces) == LENGTH


async def test_lm_eval_logprobs_of_a_continuation(tiny_app, tiny_engine):
    prompt = tiny_engine.tokenizer.encode("The colour of Darur Fugo is blue.")
    body = {
        "model": MODEL,
        "prompt": [prompt],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    answer = await tiny_app.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    found = choice["logprobs"]
    # Lm-eval reads the part of the continuation, without the one generated token.
    start = len(prompt) - 4
    values = found["token_logprobs"][start:-1]
    tops = found["top_logprobs"][start:-1]
    assert len(values) == 4
    logits = tiny_engine.logits(prompt)
    for offset, (value, top) in enumerate(zip(values, tops, strict=True)):
        row = logits[start + offset - 1].astype(np.float64)
        expected = row[prompt[start + offset]] - np.logaddexp.reduce(row)
        assert value == pytest.approx(expected, abs=1e-4)
        assert max(top.values()) >= value


async def test_lm_eval_generates_until_a_stop_string(tiny_app):
    body = {
        "prompt": [[67, 102, 65]],
        "model": MODEL,
        "max_tokens": 8,
        "temperature": 0,
        "stop": ["."],
        "seed": 1234,
    }
    answer = await tiny_app.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert "." not in choice["text"]
