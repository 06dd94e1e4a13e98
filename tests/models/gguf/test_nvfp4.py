"""Factors of NVFP4 tensors in GGUF files, which are tensors of their own."""

import numpy as np
import pytest

from helpers.distance import distance
from helpers.gguf.types import dequantized
from helpers.gguf.writer import save_gguf, write_gguf
from helpers.models.tiny_checkpoints import save_tiny_checkpoint
from helpers.oracles.bit_cases import logits_in_any_pass
from kvboost_edge.errors import ModelFormatError
from kvboost_edge.kernels.reference.weights import unpack_rows
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.gguf.file import read_gguf
from kvboost_edge.models.packed.pack_plan import PackEntry
from kvboost_edge.models.packed.stream import pack_stream

SIZES = {"hidden_size": 64, "moe_intermediate_size": 64, "num_experts": 3, "num_hidden_layers": 1}
EXPERT = "model.layers.0.mlp.experts.2.up_proj.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"


def _numbers(*values):
    return np.array(values, np.float32)


def _floats(path, name):
    """Return a tensor without its factor."""
    tensor = read_gguf(path).tensors[name]
    raw = np.fromfile(path, np.uint8)[tensor.start : tensor.stop]
    return dequantized("NVFP4", raw.reshape(-1, tensor.shape[-1] // 64 * 36)).reshape(tensor.shape)


def test_factors_belong_to_a_tensor_or_to_an_expert(tmp_path):
    (tmp_path / "model").mkdir()
    factors = {
        "blk.0.attn_q.weight.scale": _numbers(0.3),
        "blk.0.ffn_up_exps.scale": _numbers(2.0, 3.0, 0.7),
        "blk.0.ffn_up_exps.input_scale": _numbers(9.0, 9.0, 9.0),
        "output.scale": _numbers(1.5),
    }
    path = write_gguf(
        save_tiny_checkpoint("qwen3_moe", tmp_path / "model", **SIZES),
        tmp_path / "m.gguf",
        kind="NVFP4",
        more=factors,
    )
    with Checkpoint.open(path).open_source() as source:
        for name, stored, factor in (
            (QUERY, _floats(path, "blk.0.attn_q.weight"), 0.3),
            (EXPERT, _floats(path, "blk.0.ffn_up_exps.weight")[2], 0.7),
            ("lm_head.weight", _floats(path, "output.weight"), 1.5),
            (EXPERT.replace("up", "down"), _floats(path, "blk.0.ffn_down_exps.weight")[2], 1.0),
        ):
            wanted = stored * np.float32(factor)
            np.testing.assert_array_equal(source.rows(name, 3, 30), wanted[3:30])
            rows = len(wanted)
            ((_, packed),) = pack_stream([PackEntry("m", "nvfp4", ((name, rows),), 64)], source, 1)
            found = unpack_rows(packed, rows, 64, "nvfp4")
            # The factor is multiplied by the scales, and not by the weights.
            np.testing.assert_allclose(found, wanted, rtol=2**-22)
        assert not any("scale" in name for name in source.names())


def test_logits_with_factors_are_close_to_floats(tmp_path):
    names = [f"blk.{layer}.ffn_{part}" for layer in range(2) for part in ("gate", "up", "down")]
    path = save_gguf(
        "llama",
        tmp_path,
        {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": 32},
        kind="NVFP4",
        more={f"{name}.scale": _numbers(0.5 + index / 4) for index, name in enumerate(names)},
    )
    assert distance(*logits_in_any_pass(path)) <= 5e-2


def test_factors_of_activations_may_be_infinite(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 32}
    unused = {
        "blk.0.attn_q.input_scale": _numbers(np.inf),
        "output.weight.input_scale": _numbers(np.nan),
    }
    path = save_gguf("llama", tmp_path, sizes, kind="NVFP4", more=unused)
    Checkpoint.open(path).summary()


@pytest.mark.parametrize(
    ("kind", "more", "message"),
    [
        (
            "NVFP4",
            {"blk.0.attn_q.scale": _numbers(1, 1)},
            r"factor of 'blk.0.attn_q.weight' .* 1 n",
        ),
        (
            "NVFP4",
            {"blk.0.attn_x.scale": _numbers(1)},
            "attn_x.scale' is not supported for the arch",
        ),
        (
            "NVFP4",
            {"blk.0.attn_norm.scale": _numbers(1)},
            r"\(F32\); factors must be F32 with 1 num",
        ),
        ("Q4_0", {"output.scale": _numbers(1)}, r"'output.weight' \(Q4_0\); factors must be"),
        (
            "NVFP4",
            {"output.scale": _numbers(1), "output.weight.scale": _numbers(1)},
            "is a second factor of 'output.weight'",
        ),
        ("NVFP4", {"output.scale": _numbers(np.nan)}, "output.scale' .F32. holds NaN"),
    ],
)
def test_unusable_factors_are_refused_by_name(kind, more, message, tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 32}
    path = save_gguf("llama", tmp_path, sizes, kind=kind, more=more)
    with pytest.raises(ModelFormatError, match=message):
        Checkpoint.open(path).summary()
