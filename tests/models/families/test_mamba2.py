"""Sizes of Mamba2's mixers: which are supported, which the kernels require, and refusals that name
the key.
"""

import math

import pytest

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.families.ssm import MAMBA_KEYS, ssd_mixer, ssd_names, time_limit_of
from kvboost_edge.runners.native.buffer_sizes import MixerSizes
from kvboost_edge.runners.native.select_native import state_spec

TINY = {
    "mamba_n_heads": 48,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
}


def test_granites_mixer_has_the_published_sizes():
    mixer = ssd_mixer(TINY, MAMBA_KEYS, "gated_before")
    assert (mixer.kind, mixer.taps, mixer.channels) == ("ssd", 3, 3328)
    assert (mixer.key_heads, mixer.value_heads, mixer.key_dim, mixer.value_dim) == (1, 48, 128, 64)
    assert (mixer.norm, mixer.norm_groups, mixer.time_limit) == ("gated_before", 1, (0.0, math.inf))
    spec = state_spec(mixer)
    assert (spec.tail_bytes, spec.nbytes - spec.tail_bytes) == (39 << 10, 1536 << 10)
    sizes = MixerSizes.of(mixer)
    assert (sizes.projected, sizes.gates, sizes.mixed, sizes.key) == (
        3328 + 3072 + 48,
        3328 + 3072,
        3072,
        128,
    )


def test_norm_groups_follow_the_config():
    config = {**TINY, "mamba_n_groups": 8}
    assert ssd_mixer(config, MAMBA_KEYS, "gated_after").norm_groups == 8
    assert ssd_mixer(config, MAMBA_KEYS, "none").norm_groups == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mamba_n_groups": 5}, "mamba_n_heads=48 is not a multiple of mamba_n_groups=5"),
        ({"mamba_d_head": 24}, "mamba_d_head=24 must be a multiple of 16"),
        ({"mamba_d_state": 40}, "mamba_d_state=40 must be a multiple of 16"),
        ({"mamba_d_state": 4096}, "mamba_d_state=4096 exceeds 256"),
        ({"mamba_d_conv": 17}, "mamba_d_conv=17 exceeds 16"),
        ({"mamba_d_conv": 1}, "mamba_d_conv"),
        ({"mamba_n_heads": 0}, "mamba_n_heads"),
        ({"mamba_n_heads": 3, "mamba_d_head": 16}, "48 must be a multiple of 32"),
    ],
)
def test_unsupported_sizes_are_refused_by_key(change, message):
    with pytest.raises(ModelFormatError, match=message):
        ssd_mixer({**TINY, **change}, MAMBA_KEYS, "gated_before")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"channels": 3344}, "3344 channels"),
        ({"key_heads": 5, "channels": 3072 + 1280}, "not a multiple of 5"),
        ({"norm": "before"}, "'before' is not one of"),
        ({"norm_groups": 5}, "in 5 norm groups"),
        ({"time_limit": (1.0, 0.5)}, r"limits \(1\.0, 0\.5\)"),
    ],
)
def test_contradictory_mixers_are_refused(change, message):
    mixer = ssd_mixer(TINY, MAMBA_KEYS, "gated_before")._replace(**change)
    with pytest.raises(ModelFormatError, match=message):
        MixerSizes.of(mixer)


def test_time_step_limits_are_read():
    assert time_limit_of({}) == time_limit_of({"time_step_limit": None}) == (0.0, math.inf)
    assert time_limit_of({"time_step_limit": [0.001, 0.5]}) == (0.001, 0.5)
    assert time_limit_of({"dt": (0, math.inf)}, "dt") == (0.0, math.inf)
    assert time_limit_of({"time_step_limit": [0.0, {"__float__": "Infinity"}]}) == (0.0, math.inf)
    for bad in (
        [0.5, 0.1],
        [-1, 1],
        [1],
        "0,1",
        [0, None],
        [math.inf, math.inf],
        [0, math.nan],
        [True, 2],
        [0, {}],
    ):
        with pytest.raises(ModelFormatError, match="time_step_limit"):
            time_limit_of({"time_step_limit": bad})


def test_tensor_names_omit_missing_parts():
    normed = ssd_mixer(TINY, MAMBA_KEYS, "gated_before")
    assert ssd_names("mamba", normed, conv_bias=True).norm == "mamba.norm.weight"
    assert ssd_names("mixer", normed, conv_bias=True).conv_bias == "mixer.conv1d.bias"
    names = ssd_names("mixer", ssd_mixer(TINY, MAMBA_KEYS, "none"), conv_bias=False)
    assert (names.norm, names.conv_bias) == ("", "")
