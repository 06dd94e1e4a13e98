"""Graphs that the ONNX runner accepts: it finds the inputs and outputs to bind, and refuses
unsupported ones by name.
"""

import pytest

from helpers.onnx import wire
from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.onnx.file import read_onnx
from kvboost_edge.models.onnx.past_kv import past_layout

CONFIG = {"num_attention_heads": 4, "hidden_size": 64}
IDS = wire.value("input_ids", "int64", ["batch", "sequence"])
BRANCH = wire.node("If", ["x"], ["y"]) + wire.blob(
    5, wire.blob(1, "then_branch") + wire.blob(6, b"")
)
LOGITS = wire.value("logits", "float32", ["batch", "sequence", 300])


def model(folder, inputs, outputs, nodes=()):
    path = folder / "model.onnx"
    path.write_bytes(wire.model(wire.graph_of(nodes, [], inputs, outputs)))
    return read_onnx(path)


def past(shape=("batch", 2, "past", 16), kind="float32", layers=1):
    names = [
        f"past_key_values.{index}.{name}" for index in range(layers) for name in ("key", "value")
    ]
    return [wire.value(name, kind, shape) for name in names]


def present(layers=1):
    names = [f"present.{index}.{name}" for index in range(layers) for name in ("key", "value")]
    return [wire.value(name, "float32", ["batch", 2, "total", 16]) for name in names]


def attention(**attributes):
    inputs = ["q", "", "", "past_key_values.0.key", "past_key_values.0.value"]
    return wire.node(
        "GroupQueryAttention",
        inputs,
        ["out"],
        "com.microsoft",
        num_heads=4,
        kv_num_heads=2,
        **attributes,
    )


def test_both_kv_cache_forms_are_distinguished(tmp_path):
    mask = wire.value("attention_mask", "int32", ["batch", "total"])
    concat = [wire.node("Concat", ["past_key_values.0.key", "new"], ["present.0.key"], axis=2)]
    for nodes, shared in (([attention()], True), (concat, False), ([attention(), *concat], False)):
        found = past_layout(
            model(tmp_path, [IDS, mask, *past()], [LOGITS, *present()], nodes), CONFIG
        )
        assert found.shared is shared
        assert found.inputs == {"input_ids": "I64", "attention_mask": "I32"}
        assert [(layer.num_kv_heads, layer.head_dim) for layer in found.layers] == [(2, 16)]
        assert found.dtype == "float32"


def test_the_head_size_falls_back_to_the_config(tmp_path):
    found = model(
        tmp_path, [IDS, *past(("batch", 2, "past", "dim"), "float16")], [LOGITS, *present()]
    )
    assert past_layout(found, CONFIG).layers[0].head_dim == 16
    assert past_layout(found, {**CONFIG, "head_dim": 32}).layers[0].head_dim == 32
    assert past_layout(found, CONFIG).dtype == "float16"
    with pytest.raises(ModelFormatError, match="has heads and dims"):
        past_layout(found, {})


@pytest.mark.parametrize(
    ("inputs", "outputs", "nodes", "message"),
    [
        ([IDS], [LOGITS], [], "has no inputs past_key_values.N.key and .value"),
        ([*past()], [LOGITS, *present()], [], "has no input 'input_ids'"),
        ([IDS, *past()], present(), [], "has no output 'logits'"),
        ([IDS, *past()], [LOGITS], [], "lacks the output 'present.0.key'"),
        ([IDS, past()[0]], [LOGITS, *present()], [], "expected two per layer"),
        (
            [IDS, past()[0], past(layers=2)[2]],
            [LOGITS, *present(2)],
            [],
            "lacks the input 'past_key_values.0.value'",
        ),
        ([IDS, *past((2, "past", 16))], [LOGITS, *present()], [], "expected .1, heads, past, dim."),
        (
            [IDS, *past(("batch", "heads", "past", 16))],
            [LOGITS, *present()],
            [],
            "expected .1, heads, past, dim.",
        ),
        ([IDS, *past(kind="int8")], [LOGITS, *present()], [], "supported: F32 or F16"),
        (
            [IDS, wire.value("use_cache_branch", "bool", [1]), *past()],
            [LOGITS, *present()],
            [],
            "input 'use_cache_branch' of type BOOL is not supported",
        ),
        (
            [wire.value("inputs_embeds", "float32", ["b", "s", 64]), *past()],
            [LOGITS, *present()],
            [],
            "input 'inputs_embeds'",
        ),
        (
            [IDS, *past()],
            [LOGITS, *present()],
            [attention(sliding_window_cache=1)],
            "sliding_window_cache=1",
        ),
        (
            [IDS, *past()],
            [LOGITS, *present()],
            [attention(k_quant_type="PER_TENSOR")],
            "k_quant_type='PER_TENSOR'",
        ),
        ([IDS, *past()], [LOGITS, *present()], [BRANCH], "is a conditional part of the graph"),
    ],
)
def test_unsupported_kv_cache_forms_are_named(inputs, outputs, nodes, message, tmp_path):
    with pytest.raises(ModelFormatError, match=message):
        past_layout(model(tmp_path, inputs, outputs, nodes), CONFIG)
