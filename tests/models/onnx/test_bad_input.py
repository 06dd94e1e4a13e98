"""Damaged and hostile ONNX files: each is refused by name, none is read past its end, and reading
costs no more than the file's size.
"""

import random
import time
import tracemalloc

import numpy as np
import pytest

from helpers.json_files import change_json, read_json
from helpers.models.tiny_models import build_tiny_model
from helpers.onnx import wire
from helpers.onnx.blocks import Form
from helpers.onnx.wire import damaged
from helpers.onnx.writer import Decoder, write_onnx
from helpers.raising import assert_raises
from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.onnx.file import read_onnx

ONE_LAYER = {"num_hidden_layers": 1}


def one_tensor(folder, entries, shape=(4,), kind=1):
    """Write a file whose only tensor is stored externally."""
    graph = wire.graph_of([], [wire.Weights.outside("w", shape, kind, entries)], [], [])
    (folder / "model.onnx").write_bytes(wire.model(graph))
    return folder / "model.onnx"


@pytest.mark.parametrize(
    "location",
    ["../data", "/etc/hostname", "sub/data", "sub\\data", "..", ".", "", "C:data", "a\0b"],
)
def test_external_data_must_be_in_the_models_directory(location, tmp_path):
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    for place in (tmp_path / "data", folder / "sub" / "data", folder / "data"):
        place.write_bytes(bytes(16))
    path = one_tensor(folder, {"location": location, "offset": "0", "length": "16"})
    with pytest.raises(ModelFormatError, match="external data must be in the model's directory"):
        read_onnx(path)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"offset": "8", "length": "16"}, "bytes 8 to 24 of data, which has 16"),
        ({"offset": "17"}, "which has 16"),
        ({"length": "12"}, "needs 16 bytes, but 12 are stored"),
        ({"offset": "-1"}, "offset='-1', which is not a valid size"),
        ({"length": "1e3"}, "length='1e3', which is not a valid size"),
        ({"offset": "9" * 30}, "is not a valid size"),
        ({"location": "nothing"}, "is missing; download this file as well"),
    ],
)
def test_external_data_ranges_must_be_inside_the_file(entries, message, tmp_path):
    (tmp_path / "data").write_bytes(bytes(16))
    path = one_tensor(tmp_path, {"location": "data", "offset": "0", **entries})
    with pytest.raises(ModelFormatError, match=message):
        read_onnx(path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "too few"),
        (b"\0" * 64, "field with number 0"),
        (b"\x80" * 64, "more than 10 bytes"),
        (wire.number(1, 10) * 20, "contains no graph"),
        (wire.blob(7, b"\x0a\xff\xff\xff\xff\x0f" + bytes(20)), "bytes at"),
        (wire.blob(7, b"") + wire.blob(7, b"") + wire.number(1, 10) * 10, "two graphs"),
        (wire.number(7, 5) * 20, "expected a range of bytes"),
        (wire.blob(7, wire.blob(1, wire.blob(4, b"\xff\xfe") + bytes(16))), "not UTF-8|number 0"),
        (b"\x3b" * 40, "unknown wire type 3"),
    ],
)
def test_unreadable_messages_are_refused(data, message, tmp_path):
    (tmp_path / "m.onnx").write_bytes(data)
    with pytest.raises(ModelFormatError, match=message):
        read_onnx(tmp_path / "m.onnx")


def test_sizes_are_checked_before_allocation(tmp_path):
    """A name, a list and a shape that claim gigabytes are refused before memory is allocated."""
    huge = wire.message(*[wire.number(1, 1 << 40)] * 2, wire.number(2, 1), wire.blob(8, "w"))
    many = wire.message(*[wire.number(1, 1)] * 9, wire.number(2, 1), wire.blob(8, "w"))
    negative = wire.message(wire.number(1, -1), wire.number(2, 1), wire.blob(8, "w"))
    long = wire.message(wire.number(2, 1), wire.blob(8, "w" * 5000))
    listed = wire.node("Op", [], ["x"], axes=[1] * 70_000)
    for nodes, tensors, match in (
        ([], [huge], "invalid shape"),
        ([], [many], "more than 8"),
        ([], [negative], "invalid shape"),
        ([], [long], "more than the limit"),
        ([listed], [], "more than 65536"),
    ):
        (tmp_path / "m.onnx").write_bytes(wire.model(wire.graph_of(nodes, tensors, [], [])))
        assert_raises(ModelFormatError, match, read_onnx, tmp_path / "m.onnx")


def test_a_graph_file_over_2_gb_is_refused(tmp_path):
    with open(tmp_path / "m.onnx", "wb") as file:
        file.truncate(1 << 31)
    start = time.monotonic()
    with pytest.raises(ModelFormatError, match="more than protobuf's limit"):
        read_onnx(tmp_path / "m.onnx")
    assert time.monotonic() - start < 1


def test_external_data_beyond_2_gb_is_read(tmp_path):
    """The size limit applies to the graph only."""
    with open(tmp_path / "data", "wb") as file:
        file.seek(5 << 30)
        file.write(np.arange(4, dtype=np.float32).tobytes())
    path = one_tensor(tmp_path, {"location": "data", "offset": str(5 << 30), "length": "16"})
    tensor = read_onnx(path).tensors["w"]
    assert (tensor.start, tensor.stop) == (5 << 30, (5 << 30) + 16)


def test_a_large_file_is_not_held_in_memory(tmp_path):
    """Weights inside a file are not loaded: reading the graph takes only the graph's size."""
    weights = wire.tensor("w", np.zeros((4096, 4096), dtype=np.float32))
    (tmp_path / "m.onnx").write_bytes(wire.model(wire.graph_of([], [weights], [], [])))
    tracemalloc.start()
    found = read_onnx(tmp_path / "m.onnx")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.tensors["w"].stop - found.tensors["w"].start == 4 * 4096**2
    assert peak < 1_000_000


def written(folder, change=None, form=None):
    """Write a folder with a one-layer Llama, applying a change to its graph."""
    model = build_tiny_model("llama", **ONE_LAYER)
    if change is None:
        return write_onnx(model, folder, form)

    class Changed(Decoder):
        def build(self):
            super().build()
            change(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("helpers.onnx.writer.Decoder", Changed)
        return write_onnx(model, folder, form)


def refusal(folder):
    return Checkpoint.open(folder).native_refusal


def replaced(old, new):
    """Return a change that replaces an operator type by another name of equal length."""
    assert len(old) == len(new)

    def change(decoder):
        decoder.nodes = [node.replace(old.encode(), new.encode()) for node in decoder.nodes]

    return change


def test_unknown_operators_are_named(tmp_path):
    extra = written(
        tmp_path / "extra",
        lambda d: d.nodes.append(wire.node("Bernoulli", ["input_ids"], ["other"])),
    )
    assert "of type Bernoulli is not part of a decoder" in refusal(extra)
    assert "product of an activation" in refusal(
        written(tmp_path / "act", replaced("Sigmoid", "Sigmoic"))
    )
    assert "GroupQueryAttentiox" in refusal(
        written(tmp_path / "attention", replaced("GroupQueryAttention", "GroupQueryAttentiox"))
    )
    assert "ReduceMul" in refusal(written(tmp_path / "lengths", replaced("ReduceSum", "ReduceMul")))
    domain = written(tmp_path / "domain", replaced("com.microsoft", "com.elsewhere"))
    assert "unknown operator domain 'com.elsewhere'" in refusal(domain)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (Form(block=24), "block_size=24 is not one of"),
        (Form(block=8), "block_size=8 is not one of"),
        (Form(bits=2), "bits=2 is not supported"),
    ],
)
def test_unsupported_quantization_blocks_are_named(form, message, tmp_path):
    assert message in refusal(written(tmp_path / "m", form=form))


def test_mismatched_codes_and_scales_are_named(tmp_path):
    def fewer_rows(decoder):
        decoder.nodes = [
            node.replace(wire.number(3, 96), wire.number(3, 80)) for node in decoder.nodes
        ]

    assert "does not hold 80 rows" in refusal(written(tmp_path / "m", fewer_rows))


def test_a_decoder_without_past_inputs_is_refused(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "past", lambda self: [])
        folder = written(tmp_path / "m")
    assert "the graph has 0 past KV inputs for 1 attention layers" in refusal(folder)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "rope_parameters",
            {"rope_type": "default", "rope_theta": 5e5},
            "the RoPE of layer 0 differs from the config's",
        ),
        (
            "rope_parameters",
            {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
            "the RoPE of layer 0",
        ),
        ("num_key_value_heads", 4, "num_key_value_heads of layer 0=4, but the graph computes 2"),
        ("rms_norm_eps", 1e-5, "rms_norm_eps"),
        ("hidden_act", "gelu_pytorch_tanh", "the activation of layer 0"),
        ("num_hidden_layers", 2, "num_hidden_layers=2, but the graph computes 1"),
        ("vocab_size", 301, "vocab_size=301"),
        ("intermediate_size", 128, "intermediate_size of layer 0"),
        ("model_type", "gemma", "the factor of embeddings|head_dim"),
        ("model_type", "ernie4_5", "model_type='ernie4_5' is not supported in ONNX files"),
        ("model_type", "mamba", "is not supported by the native runner"),
        ("max_position_embeddings", 1024, "has 512 positions, but the context has 1024"),
    ],
)
def test_contradictory_configs_are_refused(key, value, message, tmp_path):
    folder = written(tmp_path / "m", form=Form(genai=False))
    assert refusal(folder) == ""
    change_json(folder / "config.json", **{key: value})
    assert any(part in refusal(folder) for part in message.split("|"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decoder": {"filename": "../model.onnx"}}, "must be the name of a file in that folder"),
        ({"decoder": {"filename": "other.onnx"}}, "other.onnx, named in .* is missing"),
        ({"decoder": None}, "must be the name of a file"),
    ],
)
def test_an_unsupported_genai_config_is_refused(change, message, tmp_path):
    folder = written(tmp_path / "m")
    path = folder / "genai_config.json"
    change_json(path, model=read_json(path)["model"] | change)
    with pytest.raises(ModelFormatError, match=message):
        Checkpoint.open(folder)


def test_ambiguous_folders_are_refused(tmp_path):
    folder = written(tmp_path / "m", form=Form(genai=False))
    (folder / "onnx" / "model_q4.onnx").rename(folder / "onnx" / "model_a.onnx")
    assert Checkpoint.open(folder).native_refusal == ""  # no other runner can load the model
    (folder / "onnx" / "model_b.onnx").write_bytes(b"")
    with pytest.raises(
        ModelFormatError, match=r"several ONNX files \(model_a.onnx, model_b.onnx\)"
    ):
        Checkpoint.open(folder)
    (tmp_path / "alone.onnx").write_bytes(bytes(64))
    with pytest.raises(
        ModelFormatError, match=r"neither config.json nor genai_config.json is next to"
    ):
        Checkpoint.open(tmp_path / "alone.onnx")


def test_non_finite_numbers_are_found(tmp_path):
    folder = written(tmp_path / "m")
    tensor = read_onnx(folder / "model.onnx").tensors["model.layers.0.o_proj.MatMul.weight_scales"]
    data = bytearray((folder / "model.onnx.data").read_bytes())
    data[tensor.start + 8 : tensor.start + 12] = np.float32(np.inf).tobytes()
    (folder / "model.onnx.data").write_bytes(data)
    with pytest.raises(
        ModelFormatError,
        match=r"o_proj.MatMul.weight_scales' \(F32\) holds NaN or infinity.* element 2",
    ):
        Checkpoint.open(folder).summary()


def test_files_that_change_while_read_are_refused(tmp_path):
    folder = written(tmp_path / "m")
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.native_refusal == ""
    data = folder / "model.onnx.data"
    data.write_bytes(data.read_bytes()[:-16])
    assert_raises(ModelFormatError, "changed since its graph was read", checkpoint.open_source)
    assert_raises(ModelFormatError, "changed while it was being read", checkpoint.fingerprint)


@pytest.mark.parametrize("count", [300, pytest.param(1000, marks=pytest.mark.full)])
def test_damaged_files_are_opened_or_refused(count, tmp_path):
    """Whatever bytes change, the model opens or is refused with the package's own error, and
    quickly.
    """
    folder = written(tmp_path / "m", form=Form(quantized_embedding=False))
    path = folder / "model.onnx"
    rng = random.Random(0)
    sound = path.read_bytes()
    refused = 0
    for _ in range(count):
        path.write_bytes(damaged(sound, rng))
        try:
            checkpoint = Checkpoint.open(folder)
            refused += bool(checkpoint.native_refusal)
            checkpoint.summary()
        except ModelFormatError:
            refused += 1
    assert refused > count // 2
