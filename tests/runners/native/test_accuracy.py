"""Quantized models against float64 arithmetic on the same quantized weights: the error of int8
activations.
"""

import numpy as np
import pytest
import torch

from helpers.models.tiny_models import build_tiny_model, save_tiny_model
from helpers.pairwise import each_once
from helpers.random_ids import random_ids
from helpers.runners.logits import dense_logits, native_logits
from kvboost_edge.kernels.linear.weights import pack_rows
from kvboost_edge.kernels.reference.weights import unpack_rows


def _as_quantized(weight, kind):
    """Return the values that the packed form of a matrix represents."""
    return unpack_rows(pack_rows(weight, kind), *weight.shape, kind).astype(np.float64)


# Measured 2e-3 to 1.75e-2. These models are made sharp, so rounding shows more than in real ones.
LIMIT = 2e-2
# Families with a norm after attention and MLP, which amplifies the rounding of small results:
# measured 2.0e-2, 2.7e-2 and 4.4e-2, and 3.8e-2 and 4.1e-2 with one more layer. With 16-bit inputs
# in every matrix they have 7e-4 to 2e-3, see benchmarks/LOG.md.
LIMITS = {
    "gemma2": 2.5e-2,
    "olmo2": 3e-2,
    "gemma3": 5e-2,
    "olmo3": 4.5e-2,
    "exaone4": 4.5e-2,
    "gemma4": 5e-2,
    "gemma4-wide": 5e-2,
}
# With all layers of these tiny models the error would be 0.18, because their norms amplify rounding
# from layer to layer. gemma3 with as many layers has 0.09.
_SHORT = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
OVERRIDES = {"gemma4": {**_SHORT, "num_kv_shared_layers": 2}, "gemma4-wide": _SHORT}
FAMILIES = [
    "llama",
    "llama-llama3rope",
    "llama-yarn",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "phi3",
    "granite",
    "smollm3",
    "ernie4_5",
    "glm4",
    "granite_swa",
    "granitemoehybrid",
    "ministral3",
    "hunyuan_v1_dense",
    "bitnet",
]
MIXTURES = ["qwen3_moe", "qwen2_moe", "olmoe", "mixtral", "granitemoe", "ernie4_5_moe", "glm4_moe"]
_ROUTERS = (
    "mlp.gate.weight",
    "router.weight",
    "shared_expert_gate.weight",
    "e_score_correction_bias",
)  # stays in floats


@pytest.mark.parametrize(
    ("family", "weights"),
    each_once([*FAMILIES, *LIMITS, *MIXTURES], ["int8", "int4", "int4-asym"]),
)
@pytest.mark.some(3)
def test_logits_are_close_to_float64(family, weights, tmp_path):
    overrides = OVERRIDES.get(family, {})
    save_tiny_model(family, tmp_path, **overrides)
    model = build_tiny_model(family, **overrides).double()
    parameters = dict(model.named_parameters())  # of tied parameters only the first name
    for name, parameter in parameters.items():
        if parameter.dim() == 3:  # experts
            wide = parameter.detach().float().numpy()
            parameter.data = torch.from_numpy(
                np.stack([_as_quantized(one, weights) for one in wide])
            )
        elif (
            parameter.dim() == 2
            and "embed_tokens_per_layer" not in name
            and not name.endswith(_ROUTERS)
        ):
            outer = name.startswith(("model.embed", "model.per_layer", "lm_head"))
            values = _as_quantized(parameter.detach().float().numpy(), "int8" if outer else weights)
            parameter.data = torch.from_numpy(values.copy())
    model.set_attn_implementation("eager")
    if family in MIXTURES:
        model.set_experts_implementation("eager")  # other implementations do not accept float64
    ids = random_ids(60, 7)
    exact = dense_logits(model, ids)
    logits = native_logits(tmp_path, weights, ids, len(ids))
    off, size = (np.linalg.norm(values, axis=-1) for values in (logits - exact, exact))
    if family in MIXTURES:
        # If rounding flips a near tie in a router, a token goes to another expert with an equally
        # large share, which affects later tokens. Measured 1.8e-3 to 1.9e-2, and 3.2e-2 for an
        # early token.
        assert np.median(off / size) <= 2 * LIMIT
    else:
        assert np.linalg.norm(off) <= LIMITS.get(family, LIMIT) * np.linalg.norm(size)
