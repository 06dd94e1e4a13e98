"""transformers' own layers on the stand-in for an Apple GPU. Every operator of a whole pass, from
token ids to logits, is in torch's table for MPS, and the results equal the CPU's.
"""

from unittest import mock

import numpy as np
import pytest
import torch

from helpers.backends.fake_mps import DEVICE, FakeMps, counting, fake_device, place, recorded
from helpers.distance import distance
from helpers.models.tiny_models import FAMILIES, build_tiny_model
from helpers.runners.paged_driver import PagedDriver
from kvboost_edge.backends.torch_backend import TorchBackend
from kvboost_edge.errors import ModelFormatError
from kvboost_edge.runners.torch.runner import TorchRunner

pytestmark = pytest.mark.usefixtures("one_torch_thread")

TOKENS = np.random.default_rng(5).integers(0, 256, 40)


@pytest.fixture(autouse=True)
def on_the_fake_device():
    available = mock.patch.object(torch.backends.mps, "is_available", return_value=True)
    with torch.inference_mode(), fake_device(), counting(), available:
        yield


def on_device(family, dtype=torch.float32):
    model = build_tiny_model(family).to(dtype)
    place(model)
    return TorchRunner(model)


def passed(runner, device=DEVICE):
    """Return the logits of a prompt computed in chunks, after also decoding a token."""
    assert runner.device == device
    driver = PagedDriver(runner, TorchBackend(runner.info.kv_spec, 8, device=device))
    sequence = driver.open(TOKENS.tolist())
    logits = driver.prefill(sequence, 17)
    driver.decode([sequence], [logits[-1]], 2)
    driver.backend.close()
    return logits


def error(logits, family):
    """Return the distance from the CPU's logits in float32."""
    wanted = TorchRunner(build_tiny_model(family)).eager_logits(TOKENS)
    return distance(logits, wanted)


# The stand-in does not support sorting tokens by expert and dividing integer positions. Together
# these families use all other operators.
OPERATORS = (
    "llama",
    "qwen3",
    "gemma2",
    "gemma4",
    "gemma4-wide",
    "phi3",
    "glm4",
    "granite_swa",
    "granitemoehybrid",
    "stablelm",
    "starcoder2",
    "gpt_neox",
)
AMPLIFYING = ("gemma4-wide",)
NOT_ON_THE_DOUBLE = (
    "olmoe",
    "ernie4_5_moe",
    "glm4_moe",
    "granitemoe",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "ministral3",
    "gemma4-moe",
    "gpt_oss",
)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in OPERATORS else pytest.mark.full)
        for name in FAMILIES
        if name not in NOT_ON_THE_DOUBLE
    ],
)
@pytest.mark.some(3)
def test_a_whole_pass_uses_supported_operators(family):
    recorded.clear()
    logits = passed(on_device(family))
    assert {"embedding", "bmm", "index.Tensor"} <= recorded
    assert recorded & {"linear", "addmm"}
    # The norms of some models amplify rounding with depth: on the CPU, chunks alone are as far from
    # the whole.
    own = (
        error(passed(TorchRunner(build_tiny_model(family)), "cpu"), family)
        if family in AMPLIFYING
        else 0.0
    )
    assert error(logits, family) < max(1e-5, 2 * own)
    assert own < 2e-5


def test_half_precision_runs_on_the_fake_device():
    assert 1e-5 < error(passed(on_device("llama", torch.float16)), "llama") < 1e-2


@pytest.mark.parametrize(
    ("planted", "message"),
    [
        (lambda hidden: hidden.double().float(), "float64, which Apple GPUs do not support"),
        (torch.special.airy_ai, "special_airy_ai.* none for MPS"),
        (
            lambda hidden: hidden.transpose(1, 2).contiguous().transpose(1, 2),
            "linear reads strided memory",
        ),
    ],
    ids=["float64", "an operator without a kernel", "strides"],
)
def test_an_unsupported_layer_is_detected(planted, message):
    model = build_tiny_model("llama")
    place(model)
    norm = model.model.layers[1].input_layernorm
    norm.register_forward_hook(lambda module, given, hidden: planted(hidden))
    with pytest.raises(ModelFormatError, match=message):
        TorchRunner(model)


def test_weights_are_on_the_device():
    model = build_tiny_model("llama")
    place(model)
    assert all(isinstance(weight, FakeMps) for weight in [*model.parameters(), *model.buffers()])
