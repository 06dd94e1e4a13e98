"""ONNX decoders on the native runner: tensors, configs and logits equal those of transformers."""

import logging

import numpy as np
import pytest
import torch

from helpers.distance import distance
from helpers.json_files import change_json, read_json
from helpers.models.tiny_models import build_tiny_model, save_tiny_model
from helpers.onnx.blocks import Form
from helpers.onnx.writer import Decoder, write_onnx
from helpers.oracles.bit_cases import PROMPT, native_logits
from helpers.oracles.transformers_logits import assert_native_equals
from kvboost_edge import CPUPagedEngine
from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.config.architectures import SUPPORTED_ARCHITECTURES
from kvboost_edge.models.config.spec import describe_model
from kvboost_edge.models.packed.conversions import conversion_error
from kvboost_edge.models.packed.pack_plan import pack_plan

pytestmark = pytest.mark.usefixtures("one_torch_thread")

LOCAL_GLOBAL = ["sliding_attention", "full_attention", "sliding_attention"]
FAMILIES = {
    "llama": {},
    "llama-llama3rope": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "gemma": {"tie_word_embeddings": False},
    "gemma2": {"num_hidden_layers": 2, "tie_word_embeddings": False},
    "gemma3": {"num_hidden_layers": 3, "layer_types": LOCAL_GLOBAL, "tie_word_embeddings": False},
    "phi3": {},
    "granite": {},
}


def test_the_listed_families_are_tested():
    types = {"gemma3": "gemma3_text", "llama-llama3rope": "llama"}
    named = {name for name, known in SUPPORTED_ARCHITECTURES.items() if "ONNX" in known.files}
    assert named == {types.get(name, name) for name in FAMILIES}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("genai", [True, False], ids=["genai", "hub"])
def test_families_equal_transformers(name, genai, tmp_path):
    """Codes, scales, norms, biases, RoPE and all constants are found. With float32 weights, the
    file gives transformers' logits, and the config inferred from the graph equals the model's own.
    """
    model = build_tiny_model(name, **FAMILIES[name])
    folder = write_onnx(model, tmp_path / "m", Form(genai=genai, packed=genai))
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.native_refusal == ""
    if genai and name != "mistral":
        told = describe_model(checkpoint.config)
        own = describe_model(model.config.to_dict())
        for field in set(told.__dataclass_fields__) - {"ropes", "tied"}:
            ours = getattr(told, field)
            theirs = getattr(own, field)
            assert ours == (
                pytest.approx(theirs, rel=1e-6) if isinstance(theirs, float) else theirs
            ), field
    assert_logits_equal(model, folder)


def assert_logits_equal(model, folder):
    """Compare the logits of the file with float32 weights, computed in pieces, with those of
    transformers on the stored values.
    """
    with torch.inference_mode():
        expected = (
            model.set_attn_implementation("eager")
            or model(torch.tensor([PROMPT])).logits[0].numpy()
        )
    assert distance(native_logits(folder, "f32"), expected) <= 1e-4


def test_greedy_tokens_equal_transformers(tmp_path):
    model = build_tiny_model("qwen3")
    assert_native_equals(model, write_onnx(model, tmp_path / "m"))


FORMS = {
    "4-16": (Form(block=16), "int8", 0.01),
    "4-32": (Form(), "int4", 5e-4),
    "4-64": (Form(block=64), "int4", 5e-4),
    "4-128": (Form(block=128), "int4", 5e-4),
    "4-32-zeros": (Form(zeros="codes"), "int4-asym", 2e-3),
    "4-128-zeros": (Form(block=128, zeros="codes"), "int4-asym", 2e-3),
    "4-64-float-zeros": (Form(block=64, zeros="floats"), "int4-asym", 2e-3),
    "8-32": (Form(bits=8), "int8", 5e-4),
    "8-128": (Form(bits=8, block=128), "int8", 5e-4),
    "8-16": (Form(bits=8, block=16), "int8", 0.01),
    "8-64-zeros": (Form(bits=8, block=64, zeros="codes"), "int8", 0.01),
    "halves": (Form(block=64, halves=True), "int4", 0.0),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_quantization_block_is_read(name, tmp_path):
    """Any rows equal scale * (code - zero point) as written. Packing them costs at most the error
    in the table, and none where no rounding is needed.
    """
    form, kind, most = FORMS[name]
    model = build_tiny_model("llama", hidden_size=96, intermediate_size=224, head_dim=32)
    folder = write_onnx(model, tmp_path / "m", form)
    with Checkpoint.open(folder).open_source() as source:
        for tensor in ("self_attn.k_proj", "mlp.down_proj"):
            full = f"model.layers.1.{tensor}.weight"
            expected = model.state_dict()[full].numpy()
            assert source.kind(full) == kind
            np.testing.assert_array_equal(source.rows(full), expected)
            np.testing.assert_array_equal(source.rows(full, 5, 30), expected[5:30])
            stored = source.quant_rows(full, 5, 30)
            assert stored.codes.shape == expected[5:30].shape
            assert stored.scales.shape == (25, -(-expected.shape[1] // 32))
            with pytest.raises(ModelFormatError, match="single rows cannot be read"):
                source.stored_rows(full)
            error = conversion_error(source, full, kind).relative
            assert error <= most
            assert (error > 0) == (most > 0)


def test_missing_biases_are_zero(tmp_path):
    """onnxruntime-genai's builder omits biases that are all 0."""
    model = build_tiny_model("qwen2")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("_proj.bias"):
                weight.zero_()

    class NoBias(Decoder):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.state = {
                name: array for name, array in self.state.items() if not name.endswith("_proj.bias")
            }

    folder = write_onnx(model, tmp_path / "m", Form(), NoBias)
    assert Checkpoint.open(folder).config["model_type"] == "qwen2"
    assert_logits_equal(model, folder)


def test_float_weights_equal_safetensors_bit_for_bit(tmp_path):
    model = save_tiny_model("qwen2", tmp_path / "safetensors")
    folder = write_onnx(build_tiny_model("qwen2"), tmp_path / "m", Form(bits=0))
    assert not Checkpoint.open(folder).is_quantized
    for weights in ("f32", "int8"):
        np.testing.assert_array_equal(native_logits(folder, weights), native_logits(model, weights))


VARIANTS = {
    "no external data": ("llama", Form(external=False)),
    "bias inside": ("qwen2", Form(bias_inside=True)),
    "rope before attention": ("qwen3", Form(outer_rope=True)),
    "quantized embedding": ("gemma2", Form(quantized_embedding=True)),
    "8 bit": ("llama", Form(bits=8, block=64)),
    "halves": ("llama", Form(halves=True, packed=False)),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_graph_variants_equal_transformers(name, tmp_path):
    family, form = VARIANTS[name]
    model = build_tiny_model(family, num_hidden_layers=2)
    folder = write_onnx(model, tmp_path / "m", form)
    assert_logits_equal(model, folder)
    tied = bool(Checkpoint.open(folder).config["tie_word_embeddings"])
    assert tied == form.quantized_embedding


def test_the_engine_keeps_the_files_formats_and_logs_rounding(tmp_path, caplog):
    model = build_tiny_model("llama", hidden_size=128, num_hidden_layers=2)
    folder = write_onnx(model, tmp_path / "m", Form(block=64, zeros="codes"))
    found = []
    for weights in ("auto", "f32"):
        with (
            caplog.at_level(logging.INFO, "kvboost_edge"),
            CPUPagedEngine.from_pretrained(folder, weights=weights, num_blocks=16) as engine,
        ):
            assert engine.runner_info.name == "native"
            found.append(engine.logits(list(range(40, 70))))
            messages = [{"role": "user", "content": "hi"}]
            assert engine.generate(messages, max_new_tokens=3).generated_tokens > 0
    assert distance(*found) <= 5e-2
    assert (
        "4 bit in blocks of 64 with zero points: 15 tensors are converted to int4-asym with a relative "
        "error of" in caplog.text
    )
    assert "F32: 1 tensors are converted to int8 with a relative error of" in caplog.text
    assert (
        "runner native: it supports this model family; weights: as the checkpoint stores them"
        in caplog.text
    )


def test_a_file_or_its_folder_may_be_given(tmp_path):
    folder = write_onnx(
        build_tiny_model("llama", num_hidden_layers=1), tmp_path / "m", Form(genai=False)
    )
    by_folder = Checkpoint.open(folder)
    by_file = Checkpoint.open(folder / "onnx" / "model_q4.onnx")
    assert by_folder.path == by_file.path == folder
    assert by_folder.fingerprint() == by_file.fingerprint()
    assert by_folder.format == "ONNX 4 bit"
    assert by_folder.generation().eos_token_ids == (258,)
    assert by_folder.file_bytes > sum(path.stat().st_size for path in (folder / "onnx").iterdir())


def test_changed_weights_change_the_fingerprint(tmp_path):
    folder = write_onnx(build_tiny_model("llama", num_hidden_layers=1), tmp_path / "m", Form())
    before = Checkpoint.open(folder).fingerprint()
    data = folder / "model.onnx.data"
    raw = bytearray(data.read_bytes())
    raw[-1] ^= 1
    data.write_bytes(raw)
    assert Checkpoint.open(folder).fingerprint() != before
    path = folder / "genai_config.json"
    change_json(path, model={**read_json(path)["model"], "eos_token_id": [257, 258]})
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.generation().eos_token_ids == (257, 258)
    assert checkpoint.fingerprint() != before


def test_the_plan_includes_every_tensor(tmp_path):
    """A separate head and an embedding stored as floats are both in the plan."""
    folder = write_onnx(build_tiny_model("phi3", num_hidden_layers=1), tmp_path / "m", Form())
    checkpoint = Checkpoint.open(folder)
    with checkpoint.open_source() as source:
        plan = pack_plan(describe_model(checkpoint.config), "auto", source)
    kinds = {entry.name: entry.kind for entry in plan}
    assert kinds["embed"] == "int8"
    assert kinds["head"] == kinds["layer0.qkv"] == kinds["layer0.gate_up"] == "int4"
