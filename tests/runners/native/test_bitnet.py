"""BitNet checkpoints against transformers' ternary layers, with and without the 8-bit activations
that transformers quantizes per token.
"""

import contextlib
import json
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from transformers import BitNetQuantConfig

from helpers.distance import distance
from helpers.models.bitnet_files import LAYOUTS, make_bitnet
from helpers.models.tiny_models import build_tiny_model, save_tiny_model
from helpers.random_ids import random_ids
from helpers.runners.logits import dense_logits, native_logits

with mock.patch.object(
    torch, "compile", lambda function: function
):  # so that no compiler is needed
    from transformers.integrations import bitnet

pytestmark = pytest.mark.usefixtures("one_torch_thread")

IDS = random_ids(60, 7)


@contextlib.contextmanager
def float_activations():
    """Disable the quantization of inputs in transformers' layers."""
    with (
        mock.patch.object(bitnet.BitLinear, "activation_quant", lambda self, x: (x, 1.0)),
        mock.patch.object(bitnet, "ActQuant", SimpleNamespace(apply=lambda x: x)),
    ):
        yield


def _ternary_model(family, directory):
    """Return transformers' model with the ternary layers that the directory's config requests."""
    settings = json.loads((directory / "config.json").read_text())["quantization_config"]
    settings.pop("quant_method")
    model = build_tiny_model(family)
    bitnet.replace_with_bitnet_linear(model, ["lm_head"], BitNetQuantConfig(**settings))
    tensors = load_file(directory / "model.safetensors")
    if settings.get("linear_class"):
        tensors = {
            name: bitnet.unpack_weights(tensor, torch.float32)
            if tensor.dtype == torch.uint8
            else tensor
            for name, tensor in tensors.items()
        }
    model.load_state_dict(tensors, assign=True)
    return model.eval()


@pytest.mark.parametrize(
    ("family", "layout"), [*(("bitnet", layout) for layout in LAYOUTS), ("llama", "bitlinear")]
)
def test_logits_equal_those_of_ternary_layers(family, layout, tmp_path):
    """With 8-bit activations, both differ little from floats and from each other."""
    save_tiny_model(family, tmp_path)
    make_bitnet(tmp_path, layout)
    model = _ternary_model(family, tmp_path)
    theirs = dense_logits(model, IDS)
    with float_activations():
        exact = dense_logits(model, IDS)
    assert distance(native_logits(tmp_path, "f32", IDS), exact) <= 1e-4
    ours = native_logits(tmp_path, "auto", IDS)
    # Measured 1.7e-2, 1.8e-2 and 2.4e-2 for models of the family, and 8e-3, 6e-3 and 1e-2 for
    # Llama.
    assert distance(ours, exact) <= 2e-2
    assert distance(theirs, exact) <= 2e-2
    assert distance(ours, theirs) <= 3e-2
