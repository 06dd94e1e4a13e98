"""Mamba2's mixer against those of transformers: Granite 4, Nemotron-H and Falcon-H1, which have
different norms.
"""

import math

import numpy as np
import pytest
import torch
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1Config, FalconH1Mixer
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import (
    GraniteMoeHybridConfig,
    GraniteMoeHybridMambaLayer,
)
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHConfig, NemotronHMamba2Mixer

from helpers.kernels.mixer_cases import SSD_EPS, Ssd, SsdShape
from helpers.kernels.recurrent_cases import Piece, poisoned_pool

pytestmark = pytest.mark.usefixtures("one_torch_thread")

HIDDEN = 32
TOKENS = 70
_SIZES = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 1,
    "rms_norm_eps": SSD_EPS,
    "layer_norm_epsilon": SSD_EPS,
}
_MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 32,
    "mamba_expand": 2,
}
_NEMOTRON = {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 32}


def falcon(norm):
    config = FalconH1Config(
        **_SIZES,
        **_MAMBA,
        mamba_d_ssm=64,
        mamba_rms_norm=norm != "none",
        mamba_norm_before_gate=norm == "gated_after",
    )
    layer = FalconH1Mixer(config, 0)
    layer.mup_vector = torch.ones(
        1, 1, layer.in_proj.out_features
    )  # it multiplies rows, which the mixer does not do
    return layer, norm


LAYERS = {
    "Granite 4": lambda: (
        GraniteMoeHybridMambaLayer(
            GraniteMoeHybridConfig(
                **_SIZES, **_MAMBA, layer_types=["mamba"], time_step_limit=(0.2, 0.9)
            ),
            0,
        ),
        "gated_before",
    ),
    "Nemotron-H": lambda: (
        NemotronHMamba2Mixer(
            NemotronHConfig(**_SIZES, **_NEMOTRON, layers_block_type=["mamba"], time_step_min=0.1),
            0,
        ),
        "gated_before",
    ),
    "Falcon-H1, norm after the gate": lambda: falcon("gated_before"),
    "Falcon-H1, norm before it": lambda: falcon("gated_after"),
    "Falcon-H1 without a norm": lambda: falcon("none"),
}


def numbers(tensor):
    return np.ascontiguousarray(tensor.detach().numpy(), dtype=np.float32)


@pytest.mark.parametrize("name", LAYERS)
def test_ssd_layers_equal_transformers(name):
    torch.manual_seed(len(name))
    layer, norm = LAYERS[name]()
    with torch.no_grad():
        for key, parameter in layer.named_parameters():
            parameter.normal_(0.5 if "norm" in key else 0.0, 0.3 if "proj" in key else 1.0)
        hidden = torch.randn(1, TOKENS, HIDDEN)
        expected = numbers(layer(hidden))[0]
        projected = numbers(layer.in_proj(hidden))[0]
    limit = tuple(layer.time_step_limit)
    ssd = Ssd(SsdShape(2, 4, 32, 16, norm, limit))
    ssd.decay = -np.exp(numbers(layer.A_log))
    ssd.dt_bias = numbers(layer.dt_bias)
    ssd.skip = numbers(layer.D)
    ssd.weights = np.ascontiguousarray(numbers(layer.conv1d.weight)[:, 0].T)
    ssd.bias = numbers(layer.conv1d.bias)
    ssd.norm = None if norm == "none" else numbers(layer.norm.weight)
    z, mixed, steps = np.split(projected, [ssd.width, ssd.width + ssd.channels], axis=1)
    rows = np.concatenate([mixed, z, steps], axis=1)
    out = (
        ssd.run(rows, [Piece(TOKENS, -1, 0)], poisoned_pool(ssd.specs, 1))
        @ numbers(layer.out_proj.weight).T
    )
    assert np.linalg.norm(out - expected) <= 5e-6 * np.linalg.norm(expected)
    assert math.isinf(limit[1]) == (name != "Granite 4")
