"""Tests of default sampling values: the rule is the same in every API."""

import dataclasses

import pytest

from helpers.server.compat_apis import APIS
from kvboost_edge.engine.engine import CPUPagedEngine
from kvboost_edge.engine.request.request import SamplingParams
from kvboost_edge.engine.request.sampling_defaults import DEFAULT_SAMPLING, SamplingDefaults

OF_MODEL = SamplingDefaults(temperature=0.6, top_p=0.8, top_k=20, min_p=0.01)
GREEDY = SamplingDefaults(temperature=0.0)
ENGINES = {"nothing named": DEFAULT_SAMPLING, "model's own": OF_MODEL, "greedy model": GREEDY}


@pytest.fixture(params=list(ENGINES))
def defaults(request, monkeypatch):
    """Sampling defaults of the served engine."""
    chosen = ENGINES[request.param]
    monkeypatch.setattr(CPUPagedEngine, "sampling_defaults", property(lambda self: chosen))
    return chosen


def sampled(params: SamplingParams):
    return {
        field.name: getattr(params, field.name) for field in dataclasses.fields(DEFAULT_SAMPLING)
    }


@pytest.mark.parametrize("path", APIS)
@pytest.mark.some(2)
async def test_the_models_sampling_defaults_apply_to_missing_fields(
    app, speaker, submitted, defaults, path
):
    api = APIS[path]
    await api.ask(app, api.body(temperature=None))
    (params,) = submitted
    assert sampled(params) == defaults.as_dict()
    assert params.samples == (defaults.temperature > 0)


@pytest.mark.parametrize("path", APIS)
@pytest.mark.some(3)
async def test_request_fields_override_the_models_defaults(app, speaker, submitted, defaults, path):
    api = APIS[path]
    await api.ask(app, api.body(temperature=0.9))
    (params,) = submitted
    assert sampled(params) == {**defaults.as_dict(), "temperature": 0.9}


async def test_every_endpoint_shows_the_effective_defaults(defaults, app, speaker):
    (listed,) = (await app.get("/v1/models")).json()["data"]
    assert listed["sampling"] == defaults.as_dict()
    props = (await app.get("/props")).json()["default_generation_settings"]["params"]
    llama = APIS["/completion"]
    whole = await llama.ask(app, llama.body(temperature=None))
    for shown in (props, whole["generation_settings"]):
        assert shown["repeat_penalty"] == defaults.repetition_penalty
        for name in ("temperature", "top_p", "top_k", "min_p"):
            assert shown[name] == getattr(defaults, name)
    body = {"input": "hello", "max_output_tokens": 16, "store": False}
    answer = (await app.post("/v1/responses", json=body)).json()
    assert (answer["temperature"], answer["top_p"]) == (defaults.temperature, defaults.top_p)
