"""Choice of runner, weight format and KV storage for a model, and refusals."""

import importlib
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from helpers.models.tiny_models import save_tiny_model
from helpers.raising import assert_raises
from kvboost_edge.backends.select import choose_backend, make_backend
from kvboost_edge.config import CHOICES, EngineConfig
from kvboost_edge.errors import ConfigError, ModelFormatError
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.config.spec import describe_model
from kvboost_edge.models.packed.pack_plan import STORED, WEIGHT_FORMATS, pack_plan, plan_bytes
from kvboost_edge.runners.base import LoadOptions, ModelTraits
from kvboost_edge.runners.choice import RUNNERS, choose_runner, load_runner, plan_of
from kvboost_edge.runners.native.select_native import choose_weights, native_kv_spec
from kvboost_edge.runners.torch.select_torch import compute_dtype

LLAMA = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
UNKNOWN = {**LLAMA, "model_type": "gpt_neox"}
INT8_BYTES = plan_bytes(pack_plan(describe_model(LLAMA), "int8"))


def runner(model=LLAMA, *, gguf=False, stored=False, **options):
    return choose_runner(EngineConfig.from_options(**options), ModelTraits(model, gguf, stored))


def weights(available=10**9, pool=0, *, stored=False, **options):
    model = ModelTraits(LLAMA, False, stored, packed_bytes={"int8": INT8_BYTES}.__getitem__)
    return choose_weights(
        EngineConfig.from_options(**options), model, lambda spec, max_context: pool, available
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "native"),
        ({"runner": "native"}, "native"),
        ({"weights": "bf16"}, "native"),
        ({"dtype": "float32"}, "native"),
        ({"dtype": "bfloat16"}, "native"),
        ({"backend": "cpu", "device": "cpu"}, "native"),
        ({"backend": "reference"}, "native"),
        ({"kv_cache_bits": (8, 4)}, "native"),
        ({"arithmetic": "wide"}, "native"),
        ({"kv_cache_bits": 8}, "native"),
        ({"device": "mps", "kv_cache_bits": 8}, "torch"),
        ({"runner": "torch"}, "torch"),
        ({"backend": "torch"}, "torch"),
        ({"backend": "cuda"}, "torch"),
        ({"device": "mps"}, "torch"),
        ({"device": "cuda:1"}, "torch"),
        ({"dtype": "float16"}, "native"),
        ({"device": "cuda", "dtype": "float16"}, "torch"),
    ],
)
def test_native_is_chosen_unless_torch_is_required(options, expected):
    choice = runner(**options)
    assert choice.name == expected
    if expected == "torch":
        assert (
            choice.reason == f"{next(iter(options))}={next(iter(options.values()))!r} requires it"
        )


def test_unsupported_families_run_on_torch_with_the_reason():
    choice = runner(UNKNOWN)
    assert (choice.name, choice.wanted) == ("torch", False)
    assert "gpt_neox" in choice.reason
    assert "not the native runner" in choice.reason


@pytest.mark.parametrize(
    ("options", "gguf"),
    [
        ({"runner": "native"}, False),
        ({"weights": "int4"}, False),
        ({"kv_cache_bits": 4}, False),
        ({}, True),
    ],
)
def test_native_only_options_are_refused_for_other_families(options, gguf):
    named = "a GGUF file" if gguf else next(iter(options))
    assert_raises(ModelFormatError, f"gpt_neox.*{named}", runner, UNKNOWN, gguf=gguf, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"backend": "torch", "weights": "int8"},
            "weights='int8' needs .* backend='cpu', and backend='torch' needs",
        ),
        (
            {"runner": "torch", "weights": "int8"},
            "weights='int8' needs .* and runner='torch' needs",
        ),
        (
            {"runner": "native", "device": "mps"},
            "runner='native' needs .* and device='mps' needs",
        ),
        (
            {"runner": "torch", "kv_cache_bits": 4},
            "kv_cache_bits=4 needs .* and runner='torch' needs",
        ),
        (
            {"device": "cuda", "kv_cache_bits": (8, 4)},
            r"kv_cache_bits=\(8, 4\) needs .* and device='cuda' needs",
        ),
    ],
)
def test_contradictory_options_are_refused_by_name(options, message):
    assert_raises(ConfigError, message, runner, **options)


@pytest.mark.parametrize(
    "options",
    [{"device": "cuda"}, {"device": "mps", "weights": "int4"}, {"backend": "torch"}],
    ids=lambda options: next(iter(options)),
)
def test_a_gguf_file_runs_on_the_cpu_only(options):
    name, value = next(iter(options.items()))
    message = f"^{name}='{value}': a GGUF file runs on the CPU only"
    assert_raises(ConfigError, message, runner, gguf=True, **options)


def hybrid_of(model_type):
    kind = "conv" if model_type.startswith("lfm2") else "linear_attention"
    name = "layers_block_type" if model_type == "nemotron_h" else "layer_types"
    return {**LLAMA, "model_type": model_type, name: ["full_attention", kind, "full_attention"]}


WITH_STATES = (
    "lfm2",
    "lfm2_moe",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "falcon_h1",
    "granitemoehybrid",
    "nemotron_h",
)
ELSEWHERE = (
    {"runner": "torch"},
    {"backend": "torch"},
    {"backend": "cuda"},
    {"backend": "mps"},
    {"device": "cuda"},
    {"device": "mps"},
)


@pytest.mark.parametrize("model_type", WITH_STATES)
@pytest.mark.parametrize("options", ELSEWHERE, ids=str)
def test_other_runners_refuse_recurrent_states(model_type, options):
    model = hybrid_of(model_type)
    with pytest.raises(
        ModelFormatError,
        match=r"keep a recurrent state, .* native runner supports; .* needs the torch",
    ):
        runner(model, **options)
    if model_type.endswith("_text"):
        with pytest.raises(ModelFormatError, match="keep a recurrent state"):
            runner(
                {"model_type": model_type.removesuffix("_text"), "text_config": model}, **options
            )
    with pytest.raises(
        ModelFormatError, match="the model is not an ONNX file; runner='onnx' needs"
    ):
        runner(model, runner="onnx")


@pytest.mark.parametrize("model_type", WITH_STATES)
def test_onnx_graphs_of_models_with_states_are_refused(model_type):
    """The exported graph may have only KV inputs, so that it would load and run."""
    for refusal in ("", "the input 'past_conv.0' of type F32 is not supported"):
        traits = ModelTraits(
            hybrid_of(model_type),
            native_refusal="not supported in ONNX files",
            onnx_refusal=refusal,
        )
        for options in ({}, {"runner": "onnx"}):
            with pytest.raises(
                ModelFormatError,
                match=r"layers of this family keep a recurrent state, .* native runner",
            ):
                choose_runner(EngineConfig.from_options(**options), traits)
    assert (
        choose_runner(EngineConfig(), traits._replace(config=LLAMA, onnx_refusal="")).name == "onnx"
    )


STATES_REFUSED = {
    **dict.fromkeys(("jamba", "recurrent_gemma", "falcon_mamba"), "this kind of recurrent state"),
    **dict.fromkeys(("bamba", "zamba2", "qwen3_next"), "its kind of recurrent state"),
    "kimi_linear": "its recurrent state has a decay",
    "lfm3": "norms before and after each layer",
    "qwen4_exp": "several streams of hidden states",
}


@pytest.mark.parametrize("model_type", STATES_REFUSED)
def test_onnx_graphs_of_stateful_types_are_refused(
    model_type,
):
    for config in (
        {**LLAMA, "model_type": model_type},
        {"text_config": {**LLAMA, "model_type": model_type}},
    ):
        traits = ModelTraits(
            config, native_refusal="not supported in ONNX files", onnx_refusal="", onnx_layers=3
        )
        for options in ({}, {"runner": "onnx"}):
            with pytest.raises(
                ModelFormatError, match=f"model_type='{model_type}': .*{STATES_REFUSED[model_type]}"
            ):
                choose_runner(EngineConfig.from_options(**options), traits)


def test_granite_4_graphs_reveal_their_attention_layers():
    """The graph has past KV for each layer, so no layer is recurrent. A layer of Falcon-H1 has both
    KV and state.
    """
    traits = ModelTraits(
        {**LLAMA, "model_type": "granitemoehybrid"},
        False,
        False,
        "not supported in ONNX files",
        "",
        3,
    )
    assert choose_runner(EngineConfig(), traits).name == "onnx"
    mixed = {**traits.config, "layer_types": ["attention", "mamba", "attention"]}
    falcon = {**traits.config, "model_type": "falcon_h1"}
    others = [
        traits._replace(onnx_layers=2),
        traits._replace(config=mixed),
        traits._replace(config=falcon),
    ]
    for one in others:
        with pytest.raises(ModelFormatError, match="keep a recurrent state"):
            choose_runner(EngineConfig(), one)


def test_granite_4_without_states_runs_on_other_runners():
    model = {
        **LLAMA,
        "model_type": "granitemoehybrid",
        "num_local_experts": 0,
        "layer_types": ["attention"] * 3,
    }
    assert runner(model, runner="torch").name == "torch"
    for types in (
        ["attention", "mamba", "attention"],
        None,
    ):  # without the key every layer is recurrent
        with pytest.raises(
            ModelFormatError, match=r"keep a recurrent state, .* native runner supports"
        ):
            runner({**model, "layer_types": types}, runner="torch")


@pytest.mark.parametrize(
    ("available", "pool", "options", "expected"),
    [
        (2 * INT8_BYTES, 0, {}, "int8"),
        (2 * INT8_BYTES - 1, 0, {}, "int4"),
        (2 * INT8_BYTES + 200, 100, {}, "int8"),
        (2 * INT8_BYTES + 199, 100, {}, "int4"),
        (10, 0, {"weights": "f32"}, "f32"),
        (10**9, 0, {"weights": "int4-asym"}, "int4-asym"),
        (10, 0, {"dtype": "float32"}, "f32"),
        (10, 0, {"dtype": "bfloat16"}, "bf16"),
        (10, 0, {"weights": "bf16", "dtype": "bfloat16"}, "bf16"),
    ],
)
def test_the_weight_format_follows_from_the_memory(available, pool, options, expected):
    chosen, why = weights(available, pool, **options)
    assert chosen == expected
    assert why


def test_a_quantized_checkpoint_keeps_its_formats_by_default():
    assert weights(stored=True)[0] == STORED
    assert weights(stored=True, weights="int8")[0] == "int8"
    assert weights(stored=True, weights="int4-asym")[0] == "int4-asym"
    assert weights(stored=True, dtype="float32")[0] == "f32"


def test_the_options_list_every_weight_format():
    assert sorted(CHOICES["weights"]) == sorted([*WEIGHT_FORMATS, STORED])
    with pytest.raises(ConfigError, match=r"weights='int3' is not one of .*'int4-asym'"):
        EngineConfig.from_options(weights="int3")


def test_weights_and_dtype_may_not_contradict_each_other():
    with pytest.raises(
        ConfigError, match=r"dtype='float32' means weights='f32' .* but weights='int8'"
    ):
        weights(weights="int8", dtype="float32")


@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [
        ({}, {"weights": "f32"}, "weights='f32' are not integers"),
        ({}, {"dtype": "bfloat16"}, "weights='bf16' are not integers"),
        ({"mixer": "conv"}, {}, "recurrent state"),
        ({"bidirectional": True}, {}, "bidirectional"),
    ],
)
def test_wide_arithmetic_names_what_it_does_not_support(model, options, reason):
    spec = SimpleNamespace(**{"bidirectional": False, "mixer": None, **model})
    config = EngineConfig.from_options(arithmetic="wide", **options)
    with pytest.raises(ConfigError, match=rf"arithmetic='wide' is refused: .*{reason}.*; use"):
        choose_weights(config, ModelTraits(LLAMA, describe=lambda: spec), lambda *_: 0, 10**9)
    with pytest.raises(ConfigError, match=r"needs the torch runner|torch"):
        runner(arithmetic="wide", runner="torch")


@pytest.mark.parametrize(
    ("weights", "bits", "dtype"),
    [
        ("f32", (16, 16), "float32"),
        ("int8", (16, 16), "float16"),
        ("bf16", (16, 16), "float16"),
        ("f32", (8, 4), "float16"),
    ],
)
def test_kv_storage_follows_from_weights_and_bits(weights, bits, dtype):
    spec = native_kv_spec(describe_model(LLAMA), weights, 32, bits)
    assert (spec.dtype, spec.bits, spec.block_size, len(spec.layers)) == (dtype, bits, 32, 3)
    assert (spec.layers[0].num_kv_heads, spec.layers[0].head_dim) == (4, 16)


@pytest.mark.parametrize(
    ("asked", "stored", "device", "computed"),
    [
        ("auto", "float16", "cpu", "float32"),
        ("auto", "float16", "cuda:0", "float16"),
        ("auto", "bfloat16", "cpu", "bfloat16"),
        ("auto", "", "cpu", ""),
        ("float16", "float16", "cpu", "float16"),
    ],
)
def test_float16_is_computed_in_float32_on_the_cpu(asked, stored, device, computed):
    assert compute_dtype(asked, stored, device) == computed


def test_the_options_list_every_runner():
    assert sorted(CHOICES["runner"]) == sorted(["auto", *RUNNERS])


@pytest.mark.parametrize("name", RUNNERS)
def test_runners_have_a_plan_and_a_module(name):
    plan = plan_of(name)
    assert plan.WORKS_WITH
    assert plan.AUTO_BACKEND in CHOICES["backend"]
    assert (
        plan.unsupported_reason(ModelTraits(LLAMA, onnx_refusal="" if name == "onnx" else None))
        is None
    )
    assert plan.missing_package(LLAMA) is None
    assert plan.wish(EngineConfig(), ModelTraits(LLAMA)) == ""
    assert callable(importlib.import_module(f"{RUNNERS[name]}.runner").load)


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
    ],
)
def test_nvfp4_weights_run_in_the_native_runner_only(settings):
    config = {**LLAMA, "quantization_config": settings}
    assert choose_runner(EngineConfig(), ModelTraits(config)).name == "native"
    message = r"transformers cannot read NVFP4 weights .*; use runner='native'; runner='torch'"
    with pytest.raises(ModelFormatError, match=message):
        choose_runner(EngineConfig(runner="torch"), ModelTraits(config))


def test_choosing_a_runner_imports_nothing_heavy():
    script = (
        "import sys\n"
        "from kvboost_edge.config import EngineConfig\n"
        "from kvboost_edge.runners.base import ModelTraits\n"
        "from kvboost_edge.runners.choice import choose_runner\n"
        "for model_type in ('llama', 'gpt_neox'):\n"
        f"    choose_runner(EngineConfig(), ModelTraits({LLAMA!r} | {{'model_type': "
        "model_type}))\n"
        "heavy = {'numba', 'torch', 'transformers'}\n"
        "found = [name for name in sys.modules if name in heavy or name.endswith('.runner')]\n"
        "assert not found, found\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


@pytest.mark.parametrize("name", ["llama", "llama-llama3rope", "gemma3"])
@pytest.mark.parametrize("backend", ["cpu", "reference", "torch"])
def test_torch_refuses_reuse_alike_before_and_after_loading(name, backend, tmp_path):
    directory = save_tiny_model(name, tmp_path)
    options = LoadOptions("", "auto", "cpu", 1, 16, (16, 16))
    runner = load_runner("torch", Checkpoint.open(directory), options)
    runner.bind(make_backend(choose_backend(backend), runner.info.kv_spec, 4, num_threads=1))
    said = plan_of("torch").moved_keys_refusal(
        EngineConfig(), json.loads((directory / "config.json").read_text()), backend
    )
    assert (said is None) == (runner.moved_keys_refusal is None), said
    runner.close()
