"""Configs of Falcon-H1: layers with both KV and recurrent state, multipliers, and refusals."""

import pytest

from helpers.json_files import read_json
from helpers.models.tiny_models import save_tiny_model
from kvboost_edge.models.config.spec import describe_model
from kvboost_edge.models.families.layers import NO_FACTORS
from kvboost_edge.runners.native.select_native import native_kv_spec


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = save_tiny_model("falcon_h1", tmp_path_factory.mktemp("model"))
    return read_json(path / "config.json")


def test_each_layer_has_kv_and_a_state(config):
    spec = describe_model(config)
    assert [(layer.kv, layer.state, layer.owns_kv, layer.rope) for layer in spec.layers] == [
        (index, index, True, 0) for index in range(3)
    ]
    kv = native_kv_spec(spec, "int8", 16)
    assert (len(kv.layers), len(kv.states)) == (3, 3)


def test_multipliers_are_read(config):
    """The key multiplier scales the scores. Those of x, B and C are relative to z's, and the down
    multiplier is divided by the gate's.
    """
    spec = describe_model(config)
    factors = describe_model(config).factors
    assert spec.softmax_scale == pytest.approx(0.7 / 16**0.5)
    assert (spec.embedding_factor, spec.logit_factor) == (3.0, 0.5)
    assert (factors.attention, factors.attention_out, factors.mixer_out) == (1.2, 0.8, 0.6)
    assert (factors.mixer, factors.mixer_gates) == pytest.approx((1.5 * 0.7, 1.5 * 0.8))
    assert factors.mixer_conv == pytest.approx((1.3 / 0.7, 0.9 / 0.7, 1.1 / 0.7))
    assert (factors.mlp, factors.mlp_out) == pytest.approx((0.8, 1.3 / 0.8))
    plain = {key: value for key, value in config.items() if "multiplier" not in key}
    assert describe_model(plain).factors == NO_FACTORS


def test_derived_sizes(config):
    spec = describe_model(config)
    assert describe_model({**config, "mamba_d_head": "auto"}) == spec
    assert describe_model({**config, "mamba_d_ssm": None, "mamba_expand": 2}) == spec


@pytest.mark.parametrize(
    ("change", "norm", "groups"),
    [
        ({}, "none", 0),
        ({"mamba_rms_norm": True}, "gated_after", 2),
        ({"mamba_rms_norm": True, "mamba_norm_before_gate": False}, "gated_before", 2),
    ],
)
def test_the_mixers_norm_position(config, change, norm, groups):
    mixer = describe_model({**config, **change}).mixer
    assert mixer is not None
    assert (mixer.norm, mixer.norm_groups) == (norm, groups)
