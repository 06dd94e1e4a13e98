"""Configs of Nemotron-H: older names, layers with a single part each, and refusals."""

import math

import pytest

from helpers.json_files import read_json
from helpers.models.tiny_models import save_tiny_model
from kvboost_edge.models.config.spec import describe_model, may_keep_states
from kvboost_edge.runners.native.select_native import native_kv_spec


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """Configs as transformers writes them, by model name."""
    found = {}
    for name in ("nemotron_h", "nemotron_h-moe"):
        path = save_tiny_model(name, tmp_path_factory.mktemp("model"))
        found[name] = read_json(path / "config.json")
    return found


def test_each_layer_has_one_kind(configs):
    spec = describe_model(configs["nemotron_h"])
    assert [layer.kv for layer in spec.layers] == [-1, -1, 0, -1, -1]
    assert [layer.state for layer in spec.layers] == [0, -1, -1, 1, -1]
    assert [layer.intermediate_size for layer in spec.layers] == [0, 96, 0, 0, 96]
    assert [layer.rope for layer in spec.layers] == [-1] * 5
    assert (spec.first_shared, spec.activation, spec.eps) == (4, "relu2", 1e-5)
    kv = native_kv_spec(spec, "int8", 16)
    assert (len(kv.layers), len(kv.states)) == (1, 2)
    assert spec.mixer is not None
    assert (spec.mixer.norm, spec.mixer.norm_groups, spec.mixer.key_heads) == ("gated_before", 2, 2)


def test_expert_layers_have_only_a_shared_mlp(configs):
    spec = describe_model(configs["nemotron_h-moe"])
    assert [layer.intermediate_size for layer in spec.layers] == [0, 96, 0, 96, 0, 96, 0]
    assert spec.experts is not None
    assert spec.experts.sparse == (False, True, False, False, False, True, False)
    assert (spec.experts.score, spec.experts.renorm, spec.experts.scale) == ("sigmoid", "add", 2.5)


def test_older_keys_are_read(configs):
    for name, pattern in (("nemotron_h", "M-*M-"), ("nemotron_h-moe", "*EM-*EM")):
        config = dict(configs[name])
        spec = describe_model(configs[name])
        types = config.pop("layers_block_type")
        assert describe_model({**config, "layer_types": types}) == spec
        assert describe_model({**config, "hybrid_override_pattern": pattern}) == spec
        older = {"linear_attention": "mamba", "full_attention": "attention"}
        assert (
            describe_model({**config, "layers_block_type": [older.get(one, one) for one in types]})
            == spec
        )
        dim = config.pop("head_dim")
        assert (
            describe_model({**config, "layers_block_type": types, "attention_head_dim": dim})
            == spec
        )


def test_older_keys_of_mixer_sizes_are_read(configs):
    """If both are present, the older keys take precedence, as in transformers."""
    config = configs["nemotron_h"]
    newer = {
        "n_groups": 4,
        "conv_kernel": 3,
        "use_conv_bias": False,
        "time_step_limit": [0.01, 0.5],
    }
    older = {
        "mamba_n_groups": 4,
        "mamba_d_conv": 3,
        "mamba_conv_bias": False,
        "mamba_dt_limit": [0.01, 0.5],
    }
    assert (
        describe_model({**config, **older})
        == describe_model({**config, **newer})
        != describe_model(config)
    )


def test_only_time_step_limit_bounds_the_time_steps(configs):
    for limit, expected in ((None, (0.0, math.inf)), ([0.01, 0.5], (0.01, 0.5))):
        spec = describe_model(
            {**configs["nemotron_h"], "time_step_limit": limit, "time_step_min": 0.2}
        )
        assert spec.mixer is not None
        assert spec.mixer.time_limit == expected


def test_a_model_without_states_keeps_none(configs):
    assert may_keep_states(configs["nemotron_h"])
    assert not may_keep_states(
        {**configs["nemotron_h"], "layers_block_type": ["full_attention", "mlp"]}
    )
