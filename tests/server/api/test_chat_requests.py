"""Tests of /v1/chat/completions with OpenAI's client, against the engine's own output."""

import pytest

MODEL = "kvboost-edge/demo"
MESSAGES = [
    {"role": "system", "content": "Answer in one sentence."},
    {"role": "user", "content": "What grinds the corn?"},
]


def test_an_answer_equals_the_engines(client, live_server):
    expected = live_server.engine.generate(MESSAGES, max_new_tokens=12)
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=12, temperature=0
    )
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    message = answer.choices[0].message
    assert (message.role, message.content, message.refusal) == (
        "assistant",
        expected.output_text,
        None,
    )
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == expected.prompt_tokens
    assert answer.usage.completion_tokens == expected.generated_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens is not None


@pytest.mark.slow
def test_without_max_tokens_an_answer_may_fill_the_context(client, live_server):
    expected = live_server.engine.generate(MESSAGES, max_new_tokens=None)
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0)
    assert answer.choices[0].message.content == expected.output_text
    limited = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, max_completion_tokens=3
    )
    assert limited.usage is not None
    assert (limited.usage.completion_tokens, limited.choices[0].finish_reason) == (3, "length")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 2},
        # The fields that llama.vim sends to prepare the cache for a chat.
        {
            "extra_body": {
                "n_predict": 0,
                "samplers": ["min_p"],
                "response_fields": [""],
                "cache_prompt": True,
                "id_slot": 0,
            }
        },
    ],
    ids=["max_tokens", "choices", "llama.vim"],
)
def test_zero_tokens_compute_the_prompt_into_the_cache(client, live_server, fields):
    live_server.engine.reset_cache()
    limit = {} if "extra_body" in fields else {"max_tokens": 0}
    told = []
    for given in ({**limit, **fields}, {"max_tokens": 4, "temperature": 0}):
        messages = [MESSAGES[0], {"role": "user", "content": "corn " * 40}]
        answer = client.chat.completions.create(model=MODEL, messages=messages, **given)
        told.append(answer)
    for choice in told[0].choices:
        assert (choice.message.content, choice.finish_reason) == ("", "length")
    assert told[0].usage.completion_tokens == 0
    assert told[1].usage.prompt_tokens_details.cached_tokens >= 32


def test_several_choices_at_temperature_0_and_above(client):
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=8, temperature=0, n=3
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) == 1
    options = {
        "model": MODEL,
        "messages": MESSAGES,
        "max_tokens": 12,
        "temperature": 1.5,
        "seed": 5,
        "n": 3,
    }
    first, second = (client.chat.completions.create(**options) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices]
    assert len(set(texts)) > 1


def test_logprobs_with_bytes(client, live_server):
    expected = live_server.engine.generate(MESSAGES, max_new_tokens=6, logprobs=2)
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=6, temperature=0, logprobs=True, top_logprobs=2
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert len(content) == expected.generated_tokens
    for shown, token in zip(content, expected.logprobs, strict=True):
        assert shown.logprob == pytest.approx(token.logprob, abs=1e-5)
        assert [top.logprob for top in shown.top_logprobs] == pytest.approx(
            [p for _, p in token.top], abs=1e-5
        )
        assert shown.bytes is not None
        assert bytes(shown.bytes).decode("utf-8", "replace") == shown.token
    text = b"".join(bytes(shown.bytes or ()) for shown in content)
    assert text.decode().startswith(expected.output_text)
    plain = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=2, logprobs=True
    )
    assert plain.choices[0].logprobs is not None
    assert plain.choices[0].logprobs.content is not None
    assert all(token.top_logprobs == [] for token in plain.choices[0].logprobs.content)
