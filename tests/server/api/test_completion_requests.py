"""Tests of /v1/completions with OpenAI's client, against the engine's own output."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import openai
import pytest

MODEL = "kvboost-edge/demo"
PROMPT = "The water mill of the old town"


def test_text_and_token_ids_equal_the_engine(client, live_server):
    expected = live_server.engine.generate(PROMPT, max_new_tokens=12)
    ids = live_server.engine.tokenizer.encode(PROMPT)
    for prompt in (PROMPT, ids):
        answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=12, temperature=0)
        assert answer.object == "text_completion"
        assert answer.id.startswith("cmpl-")
        assert answer.model == MODEL
        assert answer.system_fingerprint
        choice = answer.choices[0]
        assert (choice.text, choice.finish_reason, choice.index) == (
            expected.output_text,
            expected.finish_reason,
            0,
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(ids)
        assert answer.usage.completion_tokens == expected.generated_tokens
        assert answer.usage.total_tokens == len(ids) + expected.generated_tokens


def test_max_tokens_defaults_to_16(client):
    answer = client.completions.create(model=MODEL, prompt=PROMPT, extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    assert answer.choices[0].finish_reason == "length"


def test_several_prompts_and_choices_in_order(client, live_server):
    prompts = [PROMPT, "A festival of", "The river"]
    answer = client.completions.create(
        model=MODEL, prompt=prompts, n=2, max_tokens=6, temperature=0
    )
    expected = [
        live_server.engine.generate(prompt, max_new_tokens=6).output_text for prompt in prompts
    ]
    assert [choice.text for choice in answer.choices] == [
        text for text in expected for _ in range(2)
    ]
    assert [choice.index for choice in answer.choices] == list(range(6))
    ids = [live_server.engine.tokenizer.encode(prompt) for prompt in prompts]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(map(len, ids))
    by_ids = client.completions.create(model=MODEL, prompt=ids, max_tokens=6, temperature=0)
    assert [choice.text for choice in by_ids.choices] == expected


def test_a_seed_reproduces_answers_and_its_choices_differ(client, live_server):
    options = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 1.5, "seed": 7}
    first, second = (client.completions.create(n=3, **options) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in second.choices]
    assert len(set(texts)) > 1
    for choice, text in enumerate(texts):
        alone = live_server.engine.generate(
            PROMPT, max_new_tokens=12, temperature=1.5, seed=7 + choice
        )
        assert alone.output_text == text


def test_best_of_takes_the_highest_mean_logprob(client, live_server):
    answer = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=8,
        temperature=1.5,
        seed=3,
        best_of=5,
        n=2,
        logprobs=0,
    )
    runs = [
        live_server.engine.generate(
            PROMPT, max_new_tokens=8, temperature=1.5, seed=3 + i, logprobs=0
        )
        for i in range(5)
    ]
    means = [np.mean([token.logprob for token in run.logprobs]) for run in runs]
    order = sorted(range(5), key=lambda i: -means[i])[:2]
    assert [choice.text for choice in answer.choices] == [runs[i].output_text for i in order]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == sum(run.generated_tokens for run in runs)


def test_logprobs_are_the_models_own(client, live_server):
    engine = live_server.engine
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=5, temperature=0, logprobs=3
    )
    expected = engine.generate(PROMPT, max_new_tokens=5, logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs == pytest.approx(
        [token.logprob for token in expected.logprobs], abs=1e-5
    )
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens) == expected.output_text
    assert logprobs.top_logprobs is not None
    for top, token in zip(logprobs.top_logprobs, expected.logprobs, strict=True):
        assert list(top.values()) == pytest.approx([logprob for _, logprob in token.top], abs=1e-5)
    starts = np.cumsum([0, *map(len, logprobs.tokens)])[:-1]
    assert logprobs.text_offset == starts.tolist()


def test_echo_with_logprobs_scores_the_prompt(client, live_server):
    engine = live_server.engine
    ids = engine.tokenizer.encode(PROMPT)
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=0, echo=True, logprobs=1
    )
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason) == (PROMPT, "length")
    logits = engine.logits(ids).astype(np.float64)
    norm = (
        logits
        - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
        - logits.max(1, keepdims=True)
    )
    expected = [norm[i, ids[i + 1]] for i in range(len(ids) - 1)]
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-4)
    assert choice.logprobs.text_offset is not None
    assert choice.logprobs.text_offset[:2] == [0, 0], "the BOS token must have no text"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0
    longer = client.completions.create(
        model=MODEL, prompt=ids, max_tokens=3, echo=True, temperature=0
    )
    shown = engine.tokenizer.decode(ids, skip_special_tokens=False)
    assert longer.choices[0].text == shown + engine.generate(ids, max_new_tokens=3).output_text


def test_each_choice_echoes_its_own_prompt(client):
    prompts = ["The first prompt", "Another one"]
    answer = client.completions.create(model=MODEL, prompt=prompts, n=2, max_tokens=1, echo=True)
    echoed = [prompt for prompt in prompts for _ in range(2)]
    for choice, prompt in zip(answer.choices, echoed, strict=True):
        assert choice.text.startswith(prompt)


def test_stop_token_ids_end_the_answer(client, live_server):
    whole = live_server.engine.generate(PROMPT, max_new_tokens=12)
    token = whole.output_token_ids[3]
    by_token = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=12,
        temperature=0,
        extra_body={"stop_token_ids": [token]},
    )
    expected = live_server.engine.generate(PROMPT, max_new_tokens=12, stop_token_ids=[token])
    assert by_token.choices[0].text == expected.output_text


def test_an_answer_reports_cached_tokens_timings_and_miss_reason(client, live_server):
    prompt = "A sentence that no other test has, about the number 8141. " * 8
    tokens = len(live_server.engine.tokenizer.encode(prompt))
    block = live_server.engine.config.block_size

    def ask(**extra):
        answer = client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=4, temperature=0, extra_body=extra
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.model_extra is not None
        cached = answer.usage.prompt_tokens_details.cached_tokens
        assert cached is not None
        return cached, answer.model_extra["timings"], answer.model_extra["kvboost"]

    cold, timings, ours = ask()
    assert (cold, ours["miss_reason"], ours["hit_tokens"]) == (0, "first_seen", {"pool": 0})
    assert (timings["cache_n"], timings["prompt_n"], timings["predicted_n"]) == (0, tokens, 4)
    full = (tokens - 1) // block * block
    warm, timings, ours = ask()
    assert (warm, ours["miss_reason"], ours["hit_tokens"]) == (full, "tail", {"pool": full})
    assert (timings["cache_n"], timings["prompt_n"]) == (full, tokens - full)
    assert timings["prompt_ms"] > 0
    assert timings["predicted_per_second"] == pytest.approx(4e3 / timings["predicted_ms"], rel=0.01)
    assert ours["ttft_ms"] <= ours["total_ms"]
    bypassed, _, ours = ask(cache_prompt=False)
    assert (bypassed, ours["miss_reason"], ours["mode"]) == (0, "bypassed", "baseline")
    salted, _, ours = ask(cache_salt="grain")
    assert (salted, ours["miss_reason"]) == (0, "first_seen"), "another salt must not share blocks"
    assert ask(cache_salt="grain")[0] == full


def test_choices_share_the_prompt_in_flight(client, live_server):
    prompt = "Another sentence that is all its own, about the number 2718. " * 8
    before = live_server.engine.paged_stats()
    answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=2, n=4, temperature=0)
    after = live_server.engine.paged_stats()
    assert answer.usage is not None
    tokens = answer.usage.prompt_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert after["hit_tokens"] - before["hit_tokens"] >= 3 * (tokens // 16 - 1) * 16
    assert answer.model_extra is not None
    assert answer.model_extra["timings"]["prompt_n"] < 2 * tokens


def test_return_token_ids_returns_token_ids(client, live_server):
    answer = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=6,
        temperature=0,
        extra_body={"return_token_ids": True},
    )
    expected = live_server.engine.generate(PROMPT, max_new_tokens=6).output_token_ids
    assert answer.choices[0].model_extra == {"token_ids": list(expected)}


def test_openai_client_raises_its_own_exceptions(client):
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-4", prompt="x")
    assert missing.value.code == "model_not_found"
    assert missing.value.request_id
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=MODEL, prompt="x", suffix="y")
    assert bad.value.param == "suffix"
    assert "use /infill, or put the model's infill tokens into the prompt" in bad.value.message
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt="x", max_tokens=100_000)
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "max_tokens")
    with pytest.raises(openai.BadRequestError) as longer:
        client.completions.create(model=MODEL, prompt=[5] * 3000, max_tokens=1)
    assert (longer.value.code, longer.value.param) == ("context_length_exceeded", "prompt")


def test_parallel_requests_equal_single_ones(client, live_server):
    prompts = [f"{PROMPT} number {i}" for i in range(12)]

    def ask(prompt):
        return (
            client.completions.create(model=MODEL, prompt=prompt, max_tokens=8, temperature=0)
            .choices[0]
            .text
        )

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, prompts))
    assert answers == [
        live_server.engine.generate(prompt, max_new_tokens=8).output_text for prompt in prompts
    ]
    assert live_server.engine.paged_stats()["used_blocks"] == 0


async def test_metrics_count_a_prompt_once_and_measure_from_arrival(
    tiny_app, tiny_engine, monkeypatch
):
    """The prompt of three sequences is computed once, by the first one. The total time includes the
    time of a slow tokenizer.
    """
    prompt = "A mill stands by the river, and its wheel turns day and night. " * 5
    tokens = len(tiny_engine.tokenizer.encode(prompt))
    codec = tiny_engine.tokenizer.codec
    encode = codec.encode
    decoded = []
    monkeypatch.setattr(codec, "encode", lambda *args: time.sleep(0.05) or encode(*args))
    decode = codec.decode
    monkeypatch.setattr(
        codec, "decode", lambda ids, skip: decoded.append(len(ids)) or decode(ids, skip)
    )
    body = {"prompt": prompt, "n": 3, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    started = time.perf_counter()
    answer = (await tiny_app.post("/v1/completions", json=body)).json()
    seconds = time.perf_counter() - started
    timings = answer["timings"]
    ours = answer["kvboost"]
    usage = answer["usage"]
    assert timings["cache_n"] + timings["prompt_n"] == usage["prompt_tokens"] == tokens
    assert timings["cache_n"] == usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert timings["predicted_n"] == usage["completion_tokens"] == 12
    assert timings["prompt_per_second"] == pytest.approx(
        tokens * 1e3 / timings["prompt_ms"], rel=0.01
    )
    parts = [ours[f"{name}_ms"] for name in ("tokenize", "queue", "lookup", "prefill", "decode")]
    assert sum(parts) == pytest.approx(ours["total_ms"], abs=0.01)
    assert 50 <= ours["tokenize_ms"] < ours["ttft_ms"] < ours["total_ms"] <= seconds * 1e3
    assert tokens not in decoded, "the prompt must not be decoded without a request for its text"
