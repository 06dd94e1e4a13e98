"""Tests of samplers and limits of vLLM, llama.cpp and Ollama: each field reaches the engine, in
every API that has it.
"""

import pytest

from helpers.server.compat_apis import APIS
from kvboost_edge.engine.request.request import SamplingParams

# Request of llama.cpp's web page with all samplers set.
LLAMA_CPP = {
    "dynatemp_range": 0.2,
    "dynatemp_exponent": 1.5,
    "xtc_probability": 0.1,
    "xtc_threshold": 0.2,
    "typical_p": 0.9,
    "top_n_sigma": 2,
    "dry_multiplier": 0.8,
    "dry_base": 1.75,
    "dry_allowed_length": 3,
    "dry_penalty_last_n": 512,
    "dry_sequence_breakers": ["\n", "Human:"],
    "repeat_last_n": 64,
    "min_keep": 2,
    "mirostat": 0,
    "mirostat_tau": 4.0,
    "mirostat_eta": 0.2,
    "samplers": ["dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
}
VLLM = {"min_tokens": 3, "include_stop_str_in_output": True, "bad_words": ["rain", "snow"]}
# Fields of every API, with mirostat, which the request above leaves off.
COMMON = {
    "top_p": 0.8,
    "top_k": 7,
    "min_p": 0.25,
    "presence_penalty": 1.5,
    "frequency_penalty": 0.75,
    "seed": 11,
    "mirostat": 2,
    "mirostat_tau": 0.8,
    "mirostat_eta": 0.6,
}
BIASED = {"repetition_penalty": 2.0, "ignore_eos": True, "logit_bias": {"30": -50}}
OPENAI = ("/v1/completions", "/v1/chat/completions")
OLLAMA = ("/api/chat", "/api/generate")
PATHS = (*OPENAI, "/completion", *OLLAMA)
ASKED = [
    *((path, {**LLAMA_CPP, **VLLM}) for path in OPENAI),
    *((path, {**COMMON, **BIASED}) for path in OPENAI),
    ("/completion", LLAMA_CPP),
    ("/completion", {**COMMON, "repeat_penalty": 2.0, "ignore_eos": True}),
    *(
        (path, {**COMMON, "repeat_penalty": 2.0, "typical_p": 0.7, "repeat_last_n": 33})
        for path in OLLAMA
    ),
]


def placed(path, fields):
    return {"options": fields} if path.startswith("/api/") else fields


async def asked(app, path, fields):
    body = APIS[path].body(temperature=0.9, limit=20)
    for name, value in placed(path, fields).items():
        body[name] = {**body.get(name, {}), **value} if isinstance(value, dict) else value
    answer = await app.post(path, json={**body, "stream": False})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize(("path", "fields"), ASKED, ids=[path for path, _ in ASKED])
async def test_each_field_reaches_the_engine(app, speaker, submitted, path, fields):
    answer = await asked(app, path, fields)
    (params,) = submitted
    for name, value in fields.items():
        reached = getattr(params, {"repeat_penalty": "repetition_penalty"}.get(name, name))
        if name == "logit_bias":
            assert reached == {int(token): bias for token, bias in value.items()}
        else:
            assert reached == (tuple(value) if isinstance(value, list) else value), name
    if path == "/completion":
        shown = answer["generation_settings"]
        assert {name: shown[name] for name in fields} == fields


@pytest.mark.parametrize("path", PATHS)
async def test_without_sampler_fields_the_apis_own_defaults_apply(app, speaker, submitted, path):
    await asked(app, path, {})
    (params,) = submitted
    assert (params.typical_p, params.mirostat, params.xtc_probability) == (1.0, 0, 0.0)
    assert (params.mirostat_tau, params.mirostat_eta, params.xtc_threshold) == (5.0, 0.1, 0.1)
    assert (params.dry_multiplier, params.dry_base, params.dry_allowed_length) == (0.0, 1.75, 2)
    assert params.dry_sequence_breakers == ("\n", ":", '"', "*")
    assert (params.dynatemp_range, params.dynatemp_exponent) == (0.0, 1.0)
    assert not params.uses_chain
    assert params == SamplingParams.from_options(
        **{
            name: getattr(params, name)
            for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        },
        max_new_tokens=params.max_new_tokens,
    )


@pytest.mark.parametrize("path", OPENAI)
async def test_llama_cpp_sampler_letters_and_off_values(app, speaker, submitted, path):
    await asked(app, path, {"samplers": "edkypmxt", "top_n_sigma": -1, "dry_penalty_last_n": -1})
    (params,) = submitted
    assert params.samplers == (
        *("penalties", "dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"),
    )
    assert params.top_n_sigma == -1


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", OPENAI)
async def test_include_stop_str_in_output_keeps_the_stop_string(app, speaker, path, streams):
    speaker.text = "One END two END three"
    api = APIS[path]
    for fields, expected in (
        ({}, "One "),
        ({"include_stop_str_in_output": True}, "One END"),
        ({"include_stop_str_in_output": True, "min_tokens": 7}, "One END two END"),
        ({"min_tokens": 7}, "One END two "),
        ({"min_tokens": 6}, "One "),
    ):
        answer = await api.ask(app, {**api.body(stop=["END"]), **fields}, streams=streams)
        assert (api.said(answer).text, api.said(answer).reason) == (expected, "stop")


@pytest.mark.parametrize("path", OPENAI)
async def test_min_tokens_continues_past_the_end_token(app, speaker, path):
    api = APIS[path]
    usual = api.said(await api.ask(app, api.body()))
    longer = api.said(await api.ask(app, {**api.body(), "min_tokens": usual.output + 5}))
    assert usual.reason == "stop"
    assert longer.output > usual.output + 5
    assert longer.text.startswith(usual.text)


@pytest.mark.parametrize("path", OPENAI)
async def test_bad_words_are_not_generated(app, speaker, path):
    speaker.text = "A dry day."
    api = APIS[path]
    body = {**api.body(limit=30), "bad_words": ["dry"]}
    assert "dry" not in api.said(await api.ask(app, body)).text
