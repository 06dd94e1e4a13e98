"""Tensors streamed into packed entries: unchanged quantized ones, mixed formats in one matrix, and
weights that no format can represent.
"""

from pathlib import Path

import numpy as np
import pytest

from helpers.distance import distance
from helpers.kernels.weight_formats import BLOCKS, PACKED, random_blocks
from helpers.raising import assert_raises
from kvboost_edge.errors import ConfigError, ModelFormatError
from kvboost_edge.kernels.linear.k_blocks import pack_blocks
from kvboost_edge.kernels.linear.weight_formats import FORMATS
from kvboost_edge.kernels.linear.weights import PackedRows, pack_rows
from kvboost_edge.kernels.reference.weights import unpack_rows
from kvboost_edge.models.config.spec import describe_model
from kvboost_edge.models.gguf.blocks import dequantize, quant_rows_of
from kvboost_edge.models.packed.pack_plan import (
    VECTOR,
    WEIGHT_FORMATS,
    PackEntry,
    check_tensors,
    is_quantized,
    pack_plan,
    plan_bytes,
    plan_label,
)
from kvboost_edge.models.packed.stream import EntryRows, pack_stream, packing_bytes, pieces_of
from kvboost_edge.models.weights.weight_source import QuantRows, WeightSource

TYPES = {"q2k": "Q2_K", "q3k": "Q3_K", "q4k": "Q4_K", "q5k": "Q5_K", "q6k": "Q6_K"}
TYPES |= {"iq1s": "IQ1_S", "iq2xs": "IQ2_XS", "iq3s": "IQ3_S"}
CONFIG = {
    "model_type": "llama",
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


class Stored(WeightSource):
    """Tensors in memory; those in `quantized` are stored in that format."""

    def __init__(self, tensors, quantized=None):
        self.tensors = tensors
        self.quantized = quantized or {}

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        pass

    def names(self):
        return {*self.tensors, *self.quantized}

    def shape(self, name):
        if name not in self.quantized:
            return self.tensors[name].shape
        kind = self.quantized[name].kind
        codes = self.quantized[name].codes
        if kind in BLOCKS:
            return len(codes), codes.shape[1] // FORMATS[kind].block_bytes * 256
        return codes.shape

    def rows(self, name, start=0, stop=None):
        found = _floats(self.quantized[name]) if name in self.quantized else self.tensors[name]
        return found[start:stop]

    def kind(self, name):
        return self.quantized[name].kind if name in self.quantized else None

    def quant_rows(self, name, start, stop):
        found = self.quantized[name]
        minima = None if found.minima is None else found.minima[start:stop]
        return found._replace(
            codes=found.codes[start:stop], scales=found.scales[start:stop], minima=minima
        )

    def file_of(self, name):
        return Path("some.file")

    def type_of(self, name):
        return self.kind(name) or "F32"


def _floats(stored):
    if stored.kind in BLOCKS:
        return dequantize(TYPES[stored.kind], stored.codes)
    inputs = stored.codes.shape[1]
    values = FORMATS[stored.kind].values
    if stored.table is not None:
        signed = stored.table[stored.codes].astype(np.float32)
    elif values:
        signed = np.array(values, np.float32)[stored.codes] * np.float32(stored.factor)
    else:
        signed = stored.codes.astype(np.float32) - FORMATS[stored.kind].offset
    each = FORMATS[stored.kind].scale_inputs
    back = signed * stored.scales.astype(np.float32).repeat(each, 1)[:, :inputs]
    return (
        back
        if stored.minima is None
        else back - stored.minima.astype(np.float32).repeat(32, 1)[:, :inputs]
    )


def _quant(kind, rows, inputs, seed=0):
    rng = np.random.default_rng(seed)
    form = FORMATS[kind]
    codes = rng.integers(0, 1 << form.bits, (rows, inputs)).astype(np.uint8) * form.code_step
    count = -(-inputs // form.scale_inputs)
    scales, minima = (rng.uniform(0.01, 0.02, (rows, count)).astype(np.float16) for _ in range(2))
    table = rng.permutation(256)[:16].astype(np.uint8).view(np.int8)
    if form.float8:
        count = -(-inputs // 32) * 2
        scales = np.float16(2.0) ** rng.integers(-10, 8, (rows, count))
        return QuantRows(kind, codes, scales, factor=0.25 + seed)
    return QuantRows(
        kind,
        codes,
        scales,
        minima if kind.endswith("-asym") else None,
        table if kind == "int4t" else None,
    )


def _float(rows, inputs, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, inputs)).astype(np.float32)


def _pack(entry, source, num_threads=2):
    """Pack an entry and return the matrix that the result represents."""
    pieces = [packed for _, packed in pack_stream([entry], source, num_threads)]
    codes, scales, minima = (
        np.concatenate([packed[section] for packed in pieces]) for section in range(3)
    )
    assert (codes.size, scales.size, minima.size) == entry.sizes
    return unpack_rows(PackedRows(codes, scales, minima), entry.rows, entry.inputs, entry.kind)


@pytest.mark.parametrize(
    ("stored", "kind"),
    [
        ("int8", "int8"),
        ("int4", "int4"),
        ("int4-asym", "int4-asym"),
        ("int4", "int8"),
        ("int4", "int4-asym"),
        ("int4-asym", "f32"),
        ("int4t", "int4t"),
        ("int4t", "int8"),
        ("int4", "int4t"),
        ("int4t", "f32"),
        ("int5", "int5"),
        ("int5-asym", "int5-asym"),
        ("int4", "int5"),
        ("int4", "int5-asym"),
        ("int4-asym", "int5-asym"),
        ("int5", "int5-asym"),
        ("int5", "int8"),
        ("int5-asym", "f32"),
        ("int1-g128", "int1-g128"),
        ("int1-g128", "int2-g64"),
        ("int1-g128", "int8"),
        ("int2-g256", "int2-g256"),
        ("int2-g256", "int2-g64"),
        ("int2-g256", "int5-asym"),
        ("int2-g64", "int2-g64"),
        ("int2-g64", "int4"),
        ("int2-g64", "int4-asym"),
        ("int2-g64", "int5"),
        ("int2-g64", "int8"),
    ],
)
@pytest.mark.parametrize(("rows", "inputs"), [(48, 64), (37, 41), (5, 7), (16, 300)])
def test_stored_weights_keep_their_values(stored, kind, rows, inputs):
    source = Stored({}, {"w": _quant(stored, rows, inputs)})
    back = _pack(PackEntry("m", kind, (("w", rows),), inputs), source)
    np.testing.assert_allclose(back, source.rows("w"), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("stored", "kind", "limit"),
    [
        ("int4-asym", "int8", 0.01),
        ("int5-asym", "int8", 0.01),
        ("int8", "int4", 0.09),
        ("int8", "int4-asym", 0.09),
    ],
)
def test_unsupported_shapes_are_requantized(stored, kind, limit):
    source = Stored({}, {"w": _quant(stored, 48, 96)})
    wanted = source.rows("w")
    back = _pack(PackEntry("m", kind, (("w", 48),), 96), source)
    assert 0 < distance(back, wanted) <= limit


@pytest.mark.parametrize("split", [(32, 16, 16), (20, 7, 13)])
@pytest.mark.parametrize(
    ("kind", "near", "limit"), [("int8", 0.0, 0.006), ("int4-asym", 1e-7, 0.08)]
)
def test_one_matrix_from_tensors_in_different_formats(split, kind, near, limit):
    """The exact parts stay exact, whether tiles end at tensor boundaries or not."""
    q, k, v = split
    source = Stored(
        {"v": _float(v, 64)}, {"q": _quant("int4", q, 64, 1), "k": _quant(kind, k, 64, 2)}
    )
    back = _pack(PackEntry("m", kind, (("q", q), ("k", k), ("v", v)), 64), source)
    exact = np.concatenate([source.rows("q"), source.rows("k")])
    np.testing.assert_allclose(back[: q + k], exact, rtol=1e-6, atol=near)
    assert 0 < distance(back[q + k :], source.rows("v")) < limit


def _blocks(kind, rows, inputs, seed=0):
    return quant_rows_of(TYPES[kind], random_blocks(kind, rows, inputs // 256, seed))


@pytest.mark.parametrize("rows", [48, 37])
@pytest.mark.parametrize(
    ("stored", "kind"),
    [
        *(("q2k", "q2k"), ("q3k", "q3k"), ("q4k", "q4k"), ("q5k", "q5k"), ("q6k", "q6k")),
        *(("q3k", "q6k"), ("q4k", "q5k"), ("iq2xs", "iq2xs"), ("iq3s", "iq3s")),
        ("iq1s", "iq1s"),
    ],
)
def test_k_blocks_keep_their_values_bit_for_bit(stored, kind, rows, monkeypatch):
    source = Stored({}, {"w": _blocks(stored, rows, 512)})
    entry = PackEntry("m", kind, (("w", rows),), 512)
    np.testing.assert_array_equal(_pack(entry, source), source.rows("w"))
    monkeypatch.setattr("kvboost_edge.models.packed.stream._PIECE_BYTES", 4 * 512 * 16)
    np.testing.assert_array_equal(_pack(entry, source, 3), source.rows("w"))


@pytest.mark.parametrize("split", [(32, 16), (20, 13)])
def test_q4_k_and_q5_k_tensors_share_one_matrix(split):
    gate, up = split
    source = Stored({}, {"gate": _blocks("q4k", gate, 256, 1), "up": _blocks("q5k", up, 256, 2)})
    back = _pack(PackEntry("m", "q5k", (("gate", gate), ("up", up)), 256), source)
    np.testing.assert_array_equal(back, np.concatenate([source.rows("gate"), source.rows("up")]))


def test_tensors_of_one_matrix_keep_their_own_factors():
    """Rows of two tensors share a tile."""
    source = Stored({}, {"gate": _quant("nvfp4", 20, 64, 1), "up": _quant("nvfp4", 13, 64, 2)})
    back = _pack(PackEntry("m", "nvfp4", (("gate", 20), ("up", 13)), 64), source)
    np.testing.assert_array_equal(back, np.concatenate([source.rows("gate"), source.rows("up")]))


@pytest.mark.parametrize("num_threads", [1, 3])
def test_tensors_of_one_matrix_keep_their_own_tables(num_threads, monkeypatch):
    """Packing starts a new piece where a tensor ends. int4 has a separate table."""
    stored = {
        "a": _quant("int4t", 48, 96, 1),
        "b": _quant("int4t", 32, 96, 2),
        "c": _quant("int4", 37, 96, 3),
    }
    source = Stored({}, stored)
    entry = PackEntry("m", "int4t", (("a", 48), ("b", 32), ("c", 37)), 96)
    wanted = np.concatenate([source.rows(name) for name in stored])
    np.testing.assert_array_equal(_pack(entry, source, num_threads), wanted)
    monkeypatch.setattr("kvboost_edge.models.packed.stream._PIECE_BYTES", 4 * 96 * 16)
    np.testing.assert_array_equal(_pack(entry, source, num_threads), wanted)


def test_tensors_that_share_a_tile_become_int8_without_error():
    """A tile has one table, so it cannot contain rows of two tensors."""
    spec = describe_model({**CONFIG, "intermediate_size": 40})
    source = _checkpoint(spec, {"_proj": "int4t", "lm_head": "int4t"})
    plan = {entry.name: entry for entry in pack_plan(spec, "auto", source)}
    found = {name.removeprefix("layer0."): entry.kind for name, entry in plan.items()}
    assert {name: found[name] for name in ("qkv", "out", "gate_up", "down", "head")} == {
        "qkv": "int4t",
        "out": "int4t",
        "gate_up": "int8",
        "down": "int4t",
        "head": "int4t",
    }
    wanted = np.concatenate([source.rows(tensor) for tensor, _ in plan["layer0.gate_up"].parts])
    np.testing.assert_array_equal(_pack(plan["layer0.gate_up"], source), wanted)


def test_non_finite_block_scales_are_found():
    bad = _blocks("q6k", 32, 256)
    bad.scales[20, 0] = np.inf
    with pytest.raises(
        ModelFormatError, match=r"'w' in some.file has scales that are not finite in rows 0 to 31"
    ):
        list(pack_stream([PackEntry("m", "q6k", (("w", 32),), 256)], Stored({}, {"w": bad}), 1))


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ({"v_proj": "q6k"}, {"qkv": "q4k", "qkv+1": "q6k", "gate_up": "q4k"}),
        (
            {"k_proj": "q5k", "up_proj": "q5k"},
            {"qkv": "q4k", "qkv+1": "q5k", "qkv+2": "q4k", "gate_up": "q5k"},
        ),
        ({"up_proj": "q6k"}, {"qkv": "q4k", "gate_up": "int8"}),
        (
            {"v_proj": "q4k", "up_proj": "q6k", "_proj": "q3k"},
            {"qkv": "q3k", "qkv+1": "q4k", "gate_up": "q6k"},
        ),
        (
            {"v_proj": "q3k", "up_proj": "q3k", "_proj": "q2k"},
            {"qkv": "q2k", "qkv+1": "q3k", "gate_up": "int8"},
        ),
        (
            {"v_proj": "q4k", "up_proj": "iq2xs", "_proj": "iq3s"},
            {"qkv": "iq3s", "qkv+1": "q4k", "gate_up": "int8"},
        ),
        ({"v_proj": "int8"}, {"qkv": "int8", "gate_up": "q4k"}),
        ({"v_proj": "int4t"}, {"qkv": "q4k", "qkv+1": "int4t", "gate_up": "q4k"}),
        ({"v_proj": "q5k", "_proj": "int4t"}, {"qkv": "int4t", "qkv+1": "q5k", "gate_up": "int4t"}),
        (
            {"k_proj": "q6k", "_proj": "int4t"},
            {"qkv": "int4t", "qkv+1": "q6k", "qkv+2": "int4t", "gate_up": "int4t"},
        ),
        ({"gate_proj": "int4t"}, {"qkv": "q4k", "gate_up": "int8"}),
        (
            {"v_proj": "q6k", "_proj": "nvfp4"},
            {"qkv": "nvfp4", "qkv+1": "q6k", "gate_up": "nvfp4"},
        ),
        ({"up_proj": "int4", "_proj": "int4t"}, {"qkv": "int4t", "gate_up": "int4t"}),
        (
            {"up_proj": "int4-asym", "k_proj": "int8", "_proj": "int4t"},
            {"qkv": "int8", "gate_up": "int8"},
        ),
        # As llama.cpp writes files whose rows are not multiples of 256.
        ({"v_proj": "int8", "_proj": "int5"}, {"qkv": "int8", "gate_up": "int5"}),
        ({"k_proj": "int4", "_proj": "int5"}, {"qkv": "int5", "gate_up": "int5"}),
        (
            {"v_proj": "int5", "up_proj": "int4-asym", "_proj": "int5-asym"},
            {"qkv": "int5-asym", "gate_up": "int5-asym"},
        ),
        ({"v_proj": "q6k", "_proj": "int5"}, {"qkv": "int8", "gate_up": "int5"}),
        (
            {"v_proj": "int2-g64", "_proj": "int2-g256"},
            {"qkv": "int2-g64", "gate_up": "int2-g256"},
        ),
        (
            {"v_proj": "int4", "up_proj": "int2-g256", "_proj": "int1-g128"},
            {"qkv": "int4", "gate_up": "int2-g64"},
        ),
        ({"v_proj": "q6k", "_proj": "int2-g64"}, {"qkv": "int8", "gate_up": "int2-g64"}),
    ],
)
def test_matrices_from_several_block_formats(kinds, expected):
    spec = describe_model({**CONFIG, "hidden_size": 256, "intermediate_size": 256})
    source = _checkpoint(spec, {**kinds, "_proj": kinds.get("_proj", "q4k"), "lm_head": "q6k"})
    plan = pack_plan(spec, "auto", source)
    found = {
        entry.name.removeprefix("layer0."): entry.kind for entry in plan if entry.kind != VECTOR
    }
    assert {
        name: kind for name, kind in found.items() if name.startswith(("qkv", "gate_up"))
    } == expected
    assert found["head"] == "q6k"
    rows = sum(entry.rows for entry in plan if entry.name.startswith("layer0.qkv"))
    assert rows == spec.head_dim * (spec.num_heads + 2 * spec.num_kv_heads)


def test_floats_are_never_packed_as_blocks():
    with pytest.raises(ConfigError, match="floats cannot be packed as 'q6k'"):
        pack_rows(_float(16, 256), "q6k")
    with pytest.raises(ConfigError, match="100 bytes are not a multiple"):
        pack_blocks(np.zeros((16, 100), np.uint8), "q6k")


@pytest.mark.parametrize("kind", PACKED)
def test_packed_bytes_do_not_depend_on_pieces_and_threads(kind, monkeypatch):
    source = Stored({"a": _float(75, 40, 1), "b": _float(60, 40, 2)})
    entry = PackEntry("m", kind, (("a", 75), ("b", 60)), 40)
    whole = _pack(entry, source, 1)
    monkeypatch.setattr("kvboost_edge.models.packed.stream._PIECE_BYTES", 4 * 40 * 16)
    assert len(list(pieces_of([entry]))) == 9
    np.testing.assert_array_equal(_pack(entry, source, 3), whole)


def test_pieces_cover_an_entry_in_order(monkeypatch):
    monkeypatch.setattr("kvboost_edge.models.packed.stream._PIECE_BYTES", 4 * 32 * 48)
    entry = PackEntry("m", "int8", (("a", 64), ("b", 30), ("c", 50)), 32)
    pieces = list(pieces_of([entry]))
    assert [(piece.start, piece.stop) for piece in pieces] == [
        (0, 48),
        (48, 64),
        (64, 112),
        (112, 144),
    ]
    assert pieces[2].parts == [("b", 0, 30), ("c", 0, 18)]
    assert [piece.is_last for piece in pieces] == [False, False, False, True]
    assert list(pieces_of([PackEntry("n", VECTOR, (("x", 5),))])) == [
        EntryRows(PackEntry("n", VECTOR, (("x", 5),)), 0, 5)
    ]


def test_many_threads_use_smaller_pieces():
    """The pieces of all threads together take a constant amount of memory, below a gigabyte."""
    entry = PackEntry("m", "int8", (("a", 1 << 20),), 64)
    for threads, rows in ((1, 1 << 14), (16, 1 << 14), (64, 1 << 12)):
        assert next(pieces_of([entry], threads)).stop == rows
    assert [packing_bytes(threads) < 1e9 for threads in (1, 2, 16, 64, 256)] == [True] * 5


@pytest.mark.parametrize("kind", [*PACKED, VECTOR])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_found(kind, value):
    weights = _float(40, 32)
    weights[33, 7] = value
    source = Stored({"some.tensor": weights[33] if kind == VECTOR else weights})
    entry = PackEntry(
        "m", kind, (("some.tensor", 32 if kind == VECTOR else 40),), 0 if kind == VECTOR else 32
    )
    with pytest.raises(ModelFormatError, match=r"'some.tensor' in some.file holds NaN or infinity"):
        list(pack_stream([entry], source, 2))


@pytest.mark.parametrize(
    ("kind", "value"), [("int8", 9e6), ("int4", -5e5), ("int4-asym", 7e4), ("bf16", 3.4e38)]
)
def test_weights_above_the_range_of_a_format_are_refused(kind, value):
    weights = _float(16, 32)
    weights[3, 4] = value
    with pytest.raises(
        ModelFormatError,
        match=rf"some.file contains the weight .*weights='{kind}' .*set weights='f32'",
    ):
        list(pack_stream([PackEntry("m", kind, (("w", 16),), 32)], Stored({"w": weights}), 1))
    np.testing.assert_array_equal(
        _pack(PackEntry("m", "f32", (("w", 16),), 32), Stored({"w": weights})), weights
    )


def test_non_finite_stored_scales_are_found():
    bad = _quant("int8", 32, 64)
    bad.scales[20, 1] = np.nan
    with pytest.raises(
        ModelFormatError, match=r"'w' in some.file has scales that are not finite in rows 0 to 31"
    ):
        list(pack_stream([PackEntry("m", "int8", (("w", 32),), 64)], Stored({}, {"w": bad}), 1))
    large = _quant("int4", 16, 32)
    large.scales[:] = 60000
    with pytest.raises(ModelFormatError, match="not finite"):
        list(
            pack_stream(
                [PackEntry("m", "int4-asym", (("w", 16),), 32)], Stored({}, {"w": large}), 1
            )
        )


def _checkpoint(spec, kinds):
    """Make a checkpoint for a spec. Tensors whose name contains a key of `kinds` are stored in its
    format.
    """
    source = Stored({})
    for entry in pack_plan(spec, "f32"):
        for tensor, rows in entry.parts:
            kind = next((kind for part, kind in kinds.items() if part in tensor), None)
            if kind is not None:
                make = _blocks if kind in BLOCKS else _quant
                source.quantized[tensor] = make(kind, rows, entry.inputs)
            else:
                source.tensors[tensor] = (
                    _float(rows, max(entry.inputs, 1)) if entry.inputs else _float(1, rows)[0]
                )
    return source


def test_a_quantized_checkpoint_keeps_its_formats():
    spec = describe_model(CONFIG)
    kinds = {
        "v_proj": "int8",
        "down_proj": "int4-asym",
        "gate_proj": "int4-asym",
        "_proj": "int4",
        "lm_head": "int8",
    }
    source = _checkpoint(spec, kinds)
    plan = pack_plan(spec, "auto", source)
    check_tensors(plan, source)
    found = {entry.name: entry.kind for entry in plan if entry.kind != VECTOR}
    layer = {"qkv": "int8", "out": "int4", "gate_up": "int4-asym", "down": "int4-asym"}
    assert found == {
        "embed": "int8",
        "head": "int8",
        **{f"layer{i}.{name}": kind for i in range(2) for name, kind in layer.items()},
    }
    sections = dict(section for entry in plan for section in entry.sections)
    assert {"layer0.gate_up.minima", "layer1.down.minima"} <= set(sections)
    assert "layer0.qkv.minima" not in sections
    assert plan_bytes(plan) == sum(sections.values())


def test_weights_auto_needs_a_quantized_checkpoint():
    spec = describe_model(CONFIG)
    source = _checkpoint(spec, {})
    assert not is_quantized(source)
    for given in (source, None):
        assert_raises(ConfigError, r"weights='auto'.*int8", pack_plan, spec, "auto", given)
    assert_raises(ConfigError, r"int3.*'int4', 'int4-asym'", pack_plan, spec, "int3")


def test_plans_of_float_formats():
    spec = describe_model(CONFIG)
    for weights in WEIGHT_FORMATS:
        kinds = {
            entry.name: entry.kind for entry in pack_plan(spec, weights) if entry.kind != VECTOR
        }
        outer = "int8" if weights.startswith("int4") else weights
        assert {kinds.pop("embed"), kinds.pop("head")} == {outer}
        assert set(kinds.values()) == {weights}


def test_format_labels_are_accepted_names():
    spec = describe_model(CONFIG)
    for weights in WEIGHT_FORMATS:
        assert plan_label(pack_plan(spec, weights), weights) == weights
    source = _checkpoint(spec, {"down_proj": "int4-asym", "_proj": "int4", "lm_head": "int8"})
    assert plan_label(pack_plan(spec, "auto", source), "auto") == "int4+int4-asym+int8"


def test_a_quantized_checkpoint_as_int4_asym():
    """int4 is widened without error, int4-asym is kept as is, and 8-bit weights are requantized.
    The embedding and the head have 8 bits.
    """
    spec = describe_model(CONFIG)
    source = _checkpoint(spec, {"down_proj": "int4-asym", "o_proj": "int8", "_proj": "int4"})
    plan = {entry.name: entry for entry in pack_plan(spec, "int4-asym", source)}
    assert {name for name, entry in plan.items() if entry.kind == "int8"} == {"embed", "head"}
    for name, exact in (
        ("layer0.qkv", True),
        ("layer0.gate_up", True),
        ("layer1.down", True),
        ("layer1.out", False),
    ):
        wanted = np.concatenate([source.rows(tensor) for tensor, _ in plan[name].parts])
        error = distance(_pack(plan[name], source), wanted)
        assert (error < 1e-6) == exact, name
        assert error < 0.09
