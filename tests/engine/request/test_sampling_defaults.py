"""Precedence of sampling values: the call's own, the option, the model's files, the built-in
defaults.
"""

import json
import logging
import shutil

import pytest

from helpers.gguf.writer import save_gguf
from kvboost_edge import CPUPagedEngine
from kvboost_edge.config import EngineConfig
from kvboost_edge.engine.request.request import SamplingParams
from kvboost_edge.engine.request.sampling_defaults import SamplingDefaults, sampling_defaults
from kvboost_edge.models.config.json_readers import generation_defaults
from kvboost_edge.models.locate import locate_model

CONFIG = {"model_type": "llama", "vocab_size": 100}


@pytest.mark.parametrize(
    ("model", "options", "expected"),
    [
        ({}, {}, SamplingDefaults(0.7, 0.95, 0, 0.05, 1.0)),
        ({"temperature": 0.6, "top_k": 20}, {}, SamplingDefaults(0.6, 0.95, 20, 0.05, 1.0)),
        ({"temperature": 0.6}, {"generation_config": "none"}, SamplingDefaults()),
        ({"temperature": 0.6}, {"default_temperature": 0.2}, SamplingDefaults(0.2)),
        (
            {"temperature": 0.6, "top_p": 0.5},
            {"generation_config": "none", "default_temperature": 0},
            SamplingDefaults(0.0),
        ),
    ],
)
def test_options_override_the_models_files(model, options, expected):
    assert sampling_defaults(model, EngineConfig(**options)) == expected


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ({}, {}),
        ({"temperature": 0.6, "top_p": 0.9, "top_k": 40, "min_p": 0.1}, None),
        ({"do_sample": True, "repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"do_sample": False, "top_p": 0.9}, {"top_p": 0.9, "temperature": 0.0}),
        ({"do_sample": None, "temperature": None}, {}),
    ],
)
def test_generation_config_sets_defaults(written, read, caplog):
    found = generation_defaults(CONFIG, written).sampling
    assert found == (written if read is None else read)
    assert not caplog.records


def test_a_gguf_file_sets_defaults(tmp_path):
    named = {"temp": 0.5, "top_k": 7, "top_p": 0.75, "min_p": 0.25}
    keys = {f"general.sampling.{name}": value for name, value in named.items()}
    path = save_gguf("llama", tmp_path, general=keys)
    with CPUPagedEngine.from_pretrained(path, max_cache_bytes=4_000_000) as engine:
        assert engine.sampling_defaults == SamplingDefaults(0.5, 0.75, 7, 0.25)


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1}, {"top_p": 0}, {"top_k": 1.5}, {"min_p": "x"}, {"top_p": True}]
)
def test_an_invalid_value_is_ignored_with_a_warning(wrong, caplog):
    with caplog.at_level(logging.WARNING):
        assert generation_defaults(CONFIG, wrong).sampling == {}
    assert next(iter(wrong)) in caplog.text


@pytest.mark.parametrize(
    ("given", "filled"),
    [
        ({}, None),
        ({"temperature": 0}, None),
        ({"temperature": 0, "top_p": 0.5, "seed": 3}, None),
        ({"do_sample": False, "temperature": 1.0}, None),
        ({"seed": 3}, (0.6, 0.8, 20)),
        ({"temperature": 1.0}, (1.0, 0.8, 20)),
        ({"top_k": 0}, (0.6, 0.8, 0)),
        ({"do_sample": True}, (0.6, 0.8, 20)),
    ],
)
def test_missing_values_are_filled_only_for_sampling_calls(given, filled):
    params = SamplingParams(**given)
    found = SamplingDefaults(0.6, 0.8, 20).fill_sampled(params)
    if filled is None:
        assert found == params
    else:
        assert (found.temperature, found.top_p, found.top_k) == filled
        assert found.samples


def test_sampling_options_override_a_greedy_default():
    greedy = SamplingDefaults(temperature=0.0)
    assert not greedy.fill(SamplingParams()).samples
    assert greedy.fill(SamplingParams(do_sample=True)).temperature == 0.7
    assert greedy.fill_sampled(SamplingParams(top_p=0.5)).temperature == 0.7


def test_a_models_defaults_apply_to_its_calls(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(locate_model("kvboost-edge/demo"), model)
    path = model / "generation_config.json"
    own = json.loads(path.read_text()) | {"do_sample": True, "temperature": 0.5, "top_k": 3}
    path.write_text(json.dumps(own))
    with CPUPagedEngine.from_pretrained(model, max_cache_bytes=4_000_000) as engine:
        assert engine.sampling_defaults == SamplingDefaults(temperature=0.5, top_k=3)
        named = {"temperature": 0.5, "top_p": 0.95, "top_k": 3, "min_p": 0.05, "seed": 11}
        alone = engine.generate("Once", 24, seed=11)
        assert alone.output_token_ids == engine.generate("Once", 24, **named).output_token_ids
        greedy = engine.generate("Once", 24)
        assert (
            greedy.output_token_ids == engine.generate("Once", 24, temperature=0).output_token_ids
        )
