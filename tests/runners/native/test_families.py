"""Every family of the native runner against transformers: with float32 weights, logits are within
1e-4 and greedy tokens equal.
"""

import pytest

from helpers.models.tiny_models import FAMILIES, build_tiny_model, save_tiny_model
from helpers.oracles.transformers_logits import assert_native_equals, driver_of
from kvboost_edge.errors import ConfigError, ModelFormatError, RequestError
from kvboost_edge.runners.native.runner import NativeRunner

pytestmark = pytest.mark.usefixtures("one_torch_thread")

NOT_KNOWN = ("stablelm", "starcoder2", "gpt_neox")
KNOWN = [name for name in FAMILIES if name not in NOT_KNOWN]
NEW_TOKENS = 24

VARIANTS = {
    "llama-odd": ("llama", {"hidden_size": 80, "intermediate_size": 104}),
    "llama-biases": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}},
    ),
    "phi3-partial": (
        "phi3",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1000.0,
                "partial_rotary_factor": 0.5,
            }
        },
    ),
    "llama-longrope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1000.0,
                "short_factor": [1.0 + 0.2 * i for i in range(8)],
                "long_factor": [4.0] * 8,
                "original_max_position_embeddings": 96,
            }
        },
    ),
    "phi3-longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 96,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1000.0,
                "short_factor": [1.0 + 0.2 * i for i in range(6)],
                "long_factor": [4.0] * 6,
                "partial_rotary_factor": 0.75,
            },
        },
    ),
    "exaone4-full": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "glm4-whole": (
        "glm4",
        {
            "attention_bias": False,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1000.0,
                "partial_rotary_factor": 1.0,
            },
        },
    ),
    "gemma4-experts": (
        "gemma4",
        {
            "enable_moe_block": True,
            "num_experts": 12,
            "top_k_experts": 3,
            "moe_intermediate_size": 64,
        },
    ),
    "granite_swa-thetas": ("granite_swa", {"layer_rope_theta": [1000.0, 0, 50.0, 1000.0]}),
    "granite_swa-odd": ("granite_swa", {"hidden_size": 80}),
    "granite_swa-nope": (
        "granite_swa",
        {"layer_rope_theta": [0, 0, 0, 0], "tie_word_embeddings": True},
    ),
    "ernie4_5_moe-end": ("ernie4_5_moe", {"moe_layer_end_index": 1}),
    "glm4_moe-groups": (
        "glm4_moe",
        {"attention_bias": False, "use_qk_norm": False, "n_group": 4, "topk_group": 2},
    ),
    "glm4_moe-shares": (
        "glm4_moe",
        {"norm_topk_prob": False, "first_k_dense_replace": 0, "tie_word_embeddings": True},
    ),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "qwen2_moe-window": (
        "qwen2_moe",
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "qwen3_moe-window": (
        "qwen3_moe",
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "smollm3-window": ("smollm3", {"sliding_window": 24}),
    "gemma3_text-cap": ("gemma3_text", {"final_logit_softcapping": 2.0}),
}


def _check(name, overrides, directory):
    save_tiny_model(name, directory, **overrides)
    assert_native_equals(build_tiny_model(name, **overrides), directory)


@pytest.mark.parametrize("name", KNOWN)
def test_family_equals_transformers(name, tmp_path):
    _check(name, {}, tmp_path)


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_equals_transformers(name, tmp_path):
    _check(*VARIANTS[name], tmp_path)


def test_longrope_uses_its_short_range(tmp_path, caplog):
    save_tiny_model("phi3", tmp_path, **VARIANTS["phi3-longrope"][1])
    runner = NativeRunner.from_dir(tmp_path, weights="int8")
    assert runner.info.max_context == 96
    assert (
        "the context is limited to 96 tokens, because RoPE of type 'longrope' changes"
        in caplog.text
    )
    runner.close()


@pytest.mark.parametrize("name", NOT_KNOWN)
def test_unknown_family_is_refused_by_name(name, tmp_path):
    save_tiny_model(name, tmp_path)
    with pytest.raises(ModelFormatError, match=f"{name}.*native"):
        NativeRunner.from_dir(tmp_path, weights="f32")


def test_misuse_is_refused(tmp_path):
    save_tiny_model("llama", tmp_path)
    with pytest.raises(ConfigError, match="int3"):
        NativeRunner.from_dir(tmp_path, weights="int3")
    runner = NativeRunner.from_dir(tmp_path, weights="int8")
    driver = driver_of(runner)
    with pytest.raises(RequestError, match="299"):
        driver.prefill(driver.open([1, 300]))
    runner.close()
