"""Whole models in the quantized formats of GGUF, including widths that are not multiples of 256."""

import logging

import numpy as np
import pytest

from helpers.distance import distance
from helpers.gguf.types import dequantized
from helpers.gguf.writer import WIDE, iq4_xs, q4_k_m, save_gguf
from helpers.models.packed_files import file_plan
from helpers.oracles.bit_cases import logits_in_any_pass
from kvboost_edge import CPUPagedEngine
from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.gguf.blocks import BLOCKS, quant_rows_of
from kvboost_edge.models.gguf.file import read_gguf
from kvboost_edge.models.gguf.source import GgufSource
from kvboost_edge.models.packed.pack_plan import plan_bytes
from kvboost_edge.runners.native.runner import NativeRunner

# gpt-oss is 2880 wide: 90 groups of 32, which is not a multiple of 256.
ODD = {"hidden_size": 2880, "intermediate_size": 352, "num_hidden_layers": 1, "head_dim": 32}
UP = "model.layers.0.mlp.up_proj.weight"


def _instead(name):
    """Return the type that llama.cpp's quantizer uses instead of IQ4_XS, Q5_K and Q6_K if columns
    are not multiples of 256.
    """
    return {"IQ4_XS": "IQ4_NL", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}[iq4_xs(name)]


def _fives(name):
    """Return the corresponding type for Q4_K_M."""
    return "Q8_0" if iq4_xs(name) == "Q6_K" else "Q5_0"


def _beside_eights(name):
    """Combine MXFP4 with Q8_0, as gpt-oss files do."""
    return "MXFP4" if "ffn" in name else "Q8_0"


def _all(name):
    """Combine in one matrix tables of two kinds, int4 codes and a block format."""
    if "attn" in name:
        return {"attn_q": "IQ4_NL", "attn_k": "MXFP4", "attn_v": "Q6_K"}.get(
            name.split(".")[2], "IQ4_XS"
        )
    return {"ffn_gate": "MXFP4", "ffn_up": "Q4_0"}.get(name.rsplit(".", 2)[-2], "IQ4_NL")


def _low(name):
    """Combine formats of 1, 2 and 4 bits in one matrix."""
    if "attn" in name:
        return {"attn_k": "TQ1_0", "attn_v": "Q4_0"}.get(name.split(".")[2], "Q2_0")
    return {"ffn_gate": "Q1_0", "ffn_up": "TQ2_0"}.get(name.rsplit(".", 2)[-2], "TQ1_0")


def _ternary(name):
    """Use more bits for the embedding and the head, as llama.cpp's quantizer does."""
    return {"token_embd.weight": "Q4_K", "output.weight": "Q6_K"}.get(name, "TQ2_0")


def _q2_k(name):
    """Return the type that llama.cpp's Q2_K gives a tensor of a model whose query heads share keys:
    values and some other matrices have more bits.
    """
    kinds = {"attn_v": "Q4_K", "attn_output": "Q3_K", "ffn_down": "Q3_K", "output.weight": "Q6_K"}
    return next((kind for part, kind in kinds.items() if part in name), "Q2_K")


def _iq2_xs(name):
    """Return a lattice type, or the type that llama.cpp's IQ2_XS takes instead of it."""
    if name in ("token_embd.weight", "output.weight"):
        return {"token_embd.weight": "IQ3_S", "output.weight": "Q5_K"}[name]
    if "attn_v" in name or "attn_output" in name:
        return "IQ3_XXS" if "output" in name else "Q4_K"
    return "IQ2_S" if name.startswith("blk.0.ffn_down") else "IQ2_XS"


def _iq1_m(name):
    """Return a type as in llama.cpp's IQ1_M, which has more bits for some matrices, with IQ1_S for
    a part of the MLPs.
    """
    kinds = {"token_embd": "IQ2_S", "attn_v": "Q4_K", "attn_output": "IQ2_XXS", "ffn_down": "IQ1_S"}
    return next((kind for part, kind in kinds.items() if part in name), "IQ1_M")


CASES = {
    "IQ1_M": (_iq1_m, WIDE),
    "IQ2_XXS": ("IQ2_XXS", WIDE),
    "IQ2_XS": (_iq2_xs, WIDE),
    "IQ3_XXS": ("IQ3_XXS", WIDE),
    "IQ3_S": ("IQ3_S", WIDE),
    "Q4_0": ("Q4_0", WIDE),
    "Q4_1": ("Q4_1", WIDE),
    "Q5_0": ("Q5_0", WIDE),
    "Q5_1": ("Q5_1", WIDE),
    "Q8_0": ("Q8_0", WIDE),
    "Q4_K_M": (q4_k_m, WIDE),
    "Q5_K": ("Q5_K", WIDE),
    "NVFP4": ("NVFP4", {**WIDE, "intermediate_size": 576}),
    "IQ4_NL": ("IQ4_NL", WIDE),
    "MXFP4": ("MXFP4", WIDE),
    "Q2_K": (_q2_k, WIDE),
    "Q3_K": ("Q3_K", WIDE),
    "IQ4_XS": (iq4_xs, WIDE),
    "all": (_all, WIDE),
    "TQ2_0": (_ternary, WIDE),
    "Q1_0": ("Q1_0", WIDE),
    "Q2_0": ("Q2_0", WIDE),
    "Q2_0_g128": ("Q2_0_g128", WIDE),
    "low": (_low, WIDE),
    "IQ4_XS, 2880 wide": (_instead, ODD),
    "Q4_K_M, 2880 wide": (_fives, ODD),
    "MXFP4 and Q8_0, 2880 wide": (_beside_eights, ODD),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["llama", "qwen2"])
@pytest.mark.some(3)
def test_logits_are_bit_equal_in_any_pass_and_close_to_floats(name, case, tmp_path):
    """Models with and without biases give equal bits for prompts in one pass and in pieces. The
    float weights are those of the package, see test_blocks.
    """
    kind, sizes = CASES[case]
    path = save_gguf(name, tmp_path, sizes, kind=kind)
    found, exact = logits_in_any_pass(path)
    assert distance(found, exact) <= (3e-2 if case == "Q4_K_M" else 5e-2)


@pytest.mark.parametrize(
    ("case", "expected", "most"),
    [
        (
            "Q4_K_M",
            {
                "embed": "q6k",
                "qkv": "q4k",
                "qkv+1": "q6k",
                "out": "q4k",
                "gate_up": "q4k",
                "down": "q4k",
                "head": "q6k",
            },
            1.03,
        ),
        (
            "IQ4_NL",
            {"embed": "int4t", "qkv": "int4t", "out": "int4t", "gate_up": "int4t", "head": "int4t"},
            1.01,
        ),
        ("NVFP4", {"embed": "nvfp4", "qkv": "nvfp4", "gate_up": "nvfp4", "down": "nvfp4"}, 1.03),
        ("MXFP4", {"embed": "int4t", "qkv": "int4t", "gate_up": "int4t", "down": "int4t"}, 1.07),
        (
            "Q2_K",
            {
                "embed": "q2k",
                "qkv": "q2k",
                "qkv+1": "q4k",
                "out": "q3k",
                "gate_up": "q2k",
                "down": "q3k",
                "head": "q6k",
            },
            1.02,
        ),
        (
            "IQ2_XS",
            {
                "embed": "iq3s",
                "qkv": "iq2xs",
                "qkv+1": "q4k",
                "out": "iq3xxs",
                "gate_up": "iq2xs",
                "down": "iq2s",
                "head": "q5k",
            },
            1.05,
        ),
        (
            "IQ1_M",
            {
                "embed": "iq2s",
                "qkv": "iq1m",
                "qkv+1": "q4k",
                "out": "iq2xxs",
                "gate_up": "iq1m",
                "down": "iq1s",
            },
            1.05,
        ),
        ("IQ2_XXS", {"embed": "iq2xxs", "qkv": "iq2xxs", "gate_up": "iq2xxs"}, 1.07),
        ("IQ3_S", {"embed": "iq3s", "qkv": "iq3s", "gate_up": "iq3s", "head": "iq3s"}, 1.01),
        ("Q3_K", {"embed": "q3k", "qkv": "q3k", "gate_up": "q3k", "down": "q3k"}, 1.05),
        (
            "IQ4_XS",
            {"embed": "q6k", "qkv": "int4t", "qkv+1": "q5k", "gate_up": "int4t", "down": "q5k"},
            1.05,
        ),
        (
            "all",
            {"qkv": "int4t", "qkv+1": "q6k", "out": "int4t", "gate_up": "int4t", "down": "int4t"},
            1.05,
        ),
        (
            "TQ2_0",
            {
                "embed": "q4k",
                "qkv": "int2-g256",
                "out": "int2-g256",
                "gate_up": "int2-g256",
                "head": "q6k",
            },
            1.03,
        ),
        ("Q1_0", {"embed": "int1-g128", "qkv": "int1-g128", "head": "int1-g128"}, 1.01),
        ("Q2_0", {"embed": "int2-g64", "qkv": "int2-g64", "head": "int2-g64"}, 1.01),
        ("Q2_0_g128", {"embed": "int2-g64", "qkv": "int2-g64", "head": "int2-g64"}, 1.06),
        (
            "low",
            {"qkv": "int4", "out": "int2-g64", "gate_up": "int2-g64", "down": "int2-g256"},
            1.39,
        ),
        (
            "IQ4_XS, 2880 wide",
            {
                "embed": "int8",
                "qkv": "int8",
                "out": "int4t",
                "gate_up": "int4t",
                "down": "int5-asym",
            },
            1.14,
        ),
        (
            "Q4_K_M, 2880 wide",
            {"embed": "int8", "qkv": "int5", "out": "int5", "gate_up": "int5", "down": "int5"},
            1.01,
        ),
        ("MXFP4 and Q8_0, 2880 wide", {"qkv": "int8", "gate_up": "int4t", "down": "int4t"}, 1.03),
    ],
)
def test_packed_formats_of_a_file(case, expected, most, tmp_path):
    """Each matrix has the expected packed format, and the total size is limited relative to the
    file's.
    """
    kind, sizes = CASES[case]
    path = save_gguf("llama", tmp_path, sizes, kind=kind)
    plan = file_plan(path)
    kinds = {entry.name.removeprefix("layer0."): entry.kind for entry in plan}
    assert {name: kinds[name] for name in expected} == expected
    assert plan_bytes(plan) <= most * Checkpoint.open(path).summary().nbytes


@pytest.mark.parametrize(
    "kind",
    [
        *("IQ4_NL", "IQ4_XS", "MXFP4", "Q2_K", "Q3_K", "IQ2_S", "IQ3_XXS", "Q1_0", "Q2_0", "TQ1_0"),
        *("NVFP4", "IQ1_S", "IQ1_M", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16"),
    ],
)
def test_rows_are_read_in_transformers_order(kind, tmp_path):
    """In a family with reordered rows, floats and codes of any row range correspond."""
    path = save_gguf("llama", tmp_path, WIDE, kind=kind)
    name = "model.layers.1.self_attn.k_proj.weight"
    header = read_gguf(path)
    tensor = header.tensors["blk.1.attn_k.weight"]
    raw = np.frombuffer(path.read_bytes()[tensor.start : tensor.stop], np.uint8).reshape(
        tensor.shape[0], -1
    )
    raw = raw.reshape(len(raw) // 64, 32, 2, -1).swapaxes(1, 2).reshape(raw.shape)
    expected = dequantized(kind, raw)
    with GgufSource(header) as source:
        assert (source.kind(name), source.type_of(name)) == (BLOCKS[kind].kind, kind)
        np.testing.assert_array_equal(source.rows(name), expected)
        for start, stop in ((0, 128), (5, 70), (127, 128)):
            np.testing.assert_array_equal(source.rows(name, start, stop), expected[start:stop])
            if BLOCKS[kind].kind is None:
                continue
            rows = source.quant_rows(name, start, stop)
            same = quant_rows_of(kind, raw[start:stop])
            np.testing.assert_array_equal(rows.codes, same.codes)
            np.testing.assert_array_equal(rows.scales, same.scales)
            assert (rows.table is None) == (not BLOCKS[kind].kind.startswith("int4t"))
            if rows.table is not None:
                wide = rows.scales.astype(np.float32).repeat(32, axis=1)
                np.testing.assert_allclose(
                    wide * rows.table[rows.codes], expected[start:stop], rtol=2**-10, atol=1e-9
                )


def test_an_engine_logs_its_weight_formats(tmp_path, caplog):
    path = save_gguf("llama", tmp_path, WIDE, kind=iq4_xs)
    with (
        caplog.at_level(logging.INFO, "kvboost_edge"),
        CPUPagedEngine.from_pretrained(path, num_blocks=32) as engine,
    ):
        prompt = list(range(40, 80))
        cold = engine.logits(prompt)
        np.testing.assert_array_equal(engine.logits(prompt, start=39), cold[-1:])
    assert "runner native (int4t+q5k+q6k)" in caplog.text
    assert "become 0" not in caplog.text


@pytest.fixture
def mxfp4(tmp_path):
    return save_gguf("llama", tmp_path, WIDE, kind="MXFP4")


def _with_exponent(path, exponent):
    """Change the scale of block 300 of a tensor, whose weights are not all zero."""
    with GgufSource(read_gguf(path)) as source:
        tensor = source._tensor(UP)
    data = bytearray(path.read_bytes())
    at = tensor.start + 300 * 17
    data[at : at + 17] = bytes([exponent, *[0x21] * 16])
    path.write_bytes(data)
    return path


def test_too_large_mxfp4_scales_are_refused_by_name(mxfp4):
    path = _with_exponent(mxfp4, 144)
    with pytest.raises(
        ModelFormatError,
        match=rf"{UP}' \(MXFP4\) has scales above 65504, the limit of 'int4t', in rows 0 to .*set weights='f32' or 'bf16'",
    ):
        NativeRunner.from_dir(path, weights="auto")
    for weights in ("f32", "bf16"):
        NativeRunner.from_dir(path, weights=weights).close()
    NativeRunner.from_dir(_with_exponent(path, 143), weights="auto").close()


def test_mxfp4_weights_rounded_to_zero_are_logged_once(mxfp4, caplog):
    path = _with_exponent(mxfp4, 103)
    with caplog.at_level(logging.WARNING, "kvboost_edge"):
        NativeRunner.from_dir(path, weights="auto").close()
    (line,) = [
        record.getMessage() for record in caplog.records if "become 0" in record.getMessage()
    ]
    assert f"tensor '{UP}' has weights below 4e-07" in line
    caplog.clear()
    with caplog.at_level(logging.WARNING, "kvboost_edge"):
        NativeRunner.from_dir(_with_exponent(path, 104), weights="auto").close()
    assert "become 0" not in caplog.text
