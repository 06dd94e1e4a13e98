"""The torch runner independent of the family: loading, dtypes, refusals, rows of logits, and
leaving the model unchanged.
"""

import json
import logging
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging as transformers_logging

from helpers.cuda.standin import needs_kernels, standing_in
from helpers.distance import distance
from helpers.models.tiny_models import build_tiny_model, save_tiny_model
from helpers.raising import assert_raises
from helpers.runners.paged_driver import PagedDriver
from kvboost_edge.backends.base import BatchLayout
from kvboost_edge.backends.cuda import CUDABackend
from kvboost_edge.backends.select import choose_backend, make_backend
from kvboost_edge.backends.torch_backend import TorchBackend
from kvboost_edge.errors import CapacityError, ConfigError, ModelFormatError
from kvboost_edge.runners.base import ForwardBatch
from kvboost_edge.runners.torch.runner import TorchRunner

pytestmark = pytest.mark.usefixtures("one_torch_thread")

TOKENS = np.random.default_rng(5).integers(0, 256, 70)


def drive(runner, backend="torch"):
    return PagedDriver(
        runner, make_backend(choose_backend(backend), runner.info.kv_spec, 16, num_threads=1)
    )


def paged_distance(runner, backend="torch", chunk=33):
    """Return the relative L2 distance of paged from eager logits."""
    driver = drive(runner, backend)
    paged = driver.prefill(driver.open(TOKENS.tolist()), chunk)
    eager = runner.eager_logits(TOKENS)
    driver.backend.close()
    return distance(paged, eager)


def flat_pass(token_ids, rows):
    """Return a batch with one new sequence in blocks 0, 1, ..."""
    positions = np.arange(len(token_ids))
    table = np.arange(-(-len(token_ids) // 16), dtype=np.int32)
    layout = BatchLayout(
        np.array([0, len(positions)], np.int32),
        np.array([len(positions)], np.int32),
        table[None],
        positions,
    )
    return ForwardBatch(token_ids, positions, layout, np.array(rows, np.int64))


@needs_kernels
@pytest.mark.parametrize("model_type", ["llama", "gpt_oss"])
def test_the_cuda_backend_agrees_with_eager(model_type):
    """A half-precision model is prefilled in chunks, with the project's kernels over fibers."""
    runner = TorchRunner(build_tiny_model(model_type).half())
    with standing_in() as (kernels, standin):
        backend = CUDABackend(runner.info.kv_spec, 16, device="cpu", kernels=kernels)
        driver = PagedDriver(runner, backend)
        before = standin.launches
        paged = driver.prefill(driver.open(TOKENS.tolist()), 33)
        eager = runner.eager_logits(TOKENS)
        backend.close()
    assert standin.launches - before == 3 * 2 * len(runner.info.kv_spec.layers), (
        "each layer must write and attend once in each of 3 passes"
    )
    assert distance(paged, eager) < 2e-2


# backends and dtypes


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), CapacityError, r"weights \(\d+ bytes\) do"),
        (RuntimeError("MPS backend out of memory"), CapacityError, "use device='cpu' or a smaller"),
        (RuntimeError("invalid device ordinal"), ModelFormatError, "torch cannot move the model"),
    ],
)
def test_a_model_that_cannot_be_moved_is_refused(error, kind, message, tiny_model_dir, monkeypatch):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr("transformers.PreTrainedModel.to", fail)
    with pytest.raises(kind, match=message):
        TorchRunner.from_dir(tiny_model_dir)


def test_too_little_memory_for_the_first_pass_is_refused(monkeypatch):
    model = build_tiny_model("llama")

    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(model, "forward", fail)
    with pytest.raises(CapacityError, match="has too little free memory for a pass of"):
        TorchRunner(model)


@pytest.mark.parametrize("backend", ["cpu", "reference", "torch"])
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt_oss"])
def test_backends_agree_with_eager(model_type, backend):
    assert paged_distance(TorchRunner(build_tiny_model(model_type)), backend) <= 1e-4


@pytest.mark.parametrize("backend", ["cpu", "reference", "torch"])
def test_bfloat16_is_close_within_rounding(backend):
    runner = TorchRunner(build_tiny_model("llama").to(torch.bfloat16))
    assert runner.info.dtype == runner.info.kv_spec.dtype == "bfloat16"
    assert paged_distance(runner, backend) <= 0.03


# loading


def test_from_dir_equals_the_saved_model(tiny_model_dir, capfd):
    runner = TorchRunner.from_dir(tiny_model_dir)
    assert capfd.readouterr().err == "", "loading must not print a progress bar"
    assert transformers_logging.is_progress_bar_enabled()
    np.testing.assert_array_equal(
        runner.eager_logits(TOKENS), TorchRunner(build_tiny_model("llama")).eager_logits(TOKENS)
    )
    info = runner.info
    assert (info.name, info.architecture, info.dtype, info.vocab_size) == (
        "torch",
        "llama",
        "float32",
        300,
    )
    assert (info.max_context, info.kv_spec.block_size, len(info.kv_spec.layers)) == (512, 16, 3)
    assert info.num_params == sum(p.numel() for p in runner.model.parameters())
    assert info.weight_bytes == sum(p.numel() * 4 for p in runner.model.parameters()) + sum(
        b.numel() * 4 for b in runner.model.buffers()
    )


def test_tied_weights_are_counted_once():
    tied, untied = (
        TorchRunner(build_tiny_model("llama", tie_word_embeddings=tie)).info.weight_bytes
        for tie in (True, False)
    )
    assert untied - tied == 300 * 64 * 4


@pytest.mark.parametrize(
    ("stored", "asked", "expected"),
    [
        ("float32", "auto", "float32"),
        ("bfloat16", "auto", "bfloat16"),
        ("float16", "auto", "float32"),
        ("bfloat16", "float32", "float32"),
        ("float32", "bfloat16", "bfloat16"),
        ("float32", "float16", "float16"),
    ],
)
def test_the_dtype_follows_from_the_checkpoint_and_option(
    stored, asked, expected, tiny_model_dir, tmp_path
):
    build_tiny_model("llama").to(getattr(torch, stored)).save_pretrained(tmp_path)
    runner = TorchRunner.from_dir(tmp_path, dtype=asked)
    assert runner.info.dtype == runner.info.kv_spec.dtype == expected
    assert runner.model.dtype == getattr(torch, expected)


def test_the_dtype_falls_back_to_the_stored_weights(tmp_path):
    build_tiny_model("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    edit_config(tmp_path, dtype=None)
    assert TorchRunner.from_dir(tmp_path).info.dtype == "bfloat16"


def edit_config(model_dir, **changes):
    path = model_dir / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_unknown_dtype_is_refused(tiny_model_dir):
    assert_raises(ConfigError, "dtype='int3'", TorchRunner.from_dir, tiny_model_dir, dtype="int3")


def test_a_missing_weight_is_refused(tmp_path):
    weights = load_file(save_tiny_model("llama", tmp_path) / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelFormatError, match=r"1 weights are missing.*layers\.1\.mlp\.up_proj"):
        TorchRunner.from_dir(tmp_path)


@pytest.mark.parametrize(
    "damage", ["no weights", "garbage", "no config", "other shape", "unknown type", "odd value"]
)
def test_a_damaged_directory_is_refused(damage, tmp_path):
    save_tiny_model("llama", tmp_path)
    if damage == "no weights":
        (tmp_path / "model.safetensors").unlink()
    elif damage == "garbage":
        (tmp_path / "model.safetensors").write_bytes(b"garbage" * 100)
    elif damage == "no config":
        (tmp_path / "config.json").unlink()
    elif damage == "other shape":
        edit_config(tmp_path, intermediate_size=64)
    elif damage == "odd value":
        edit_config(tmp_path, num_hidden_layers="three")
    else:
        edit_config(tmp_path, model_type="nonsense", auto_map={"AutoConfig": "evil.Config"})
    assert_raises(ModelFormatError, str(tmp_path), TorchRunner.from_dir, tmp_path)


def test_num_threads_is_applied(tiny_model_dir):
    TorchRunner.from_dir(tiny_model_dir, num_threads=2)
    assert torch.get_num_threads() == 2
    TorchRunner.from_dir(tiny_model_dir, num_threads=1)
    assert torch.get_num_threads() == 1


# refusals


@pytest.mark.parametrize(
    ("model_type", "overrides", "match"),
    [
        ("mamba", {}, "0 of 3 layers"),
        ("recurrent_gemma", {}, "1 of 3 layers"),
        ("lfm2", {}, "2 of 5 layers"),
        ("qwen3_5_text", {}, "2 of 5 layers"),
        ("falcon_h1", {}, "keep a recurrent state"),
        ("llama4_text", {}, "not causal with a window"),
        ("bloom", {}, "BloomForCausalLM does not run on paged attention"),
        ("deepseek_v3", {}, "must have the same head_dim"),
        ("bert", {"is_decoder": False}, "not causal"),
    ],
)
def test_unsupported_models_are_refused(model_type, overrides, match):
    model = build_tiny_model(model_type, **overrides)
    assert_raises(ModelFormatError, match, TorchRunner, model)


def test_a_layer_that_stops_attending_is_an_error():
    model = build_tiny_model("llama")
    driver = drive(TorchRunner(model))
    skipped = model.model.layers[1]
    skipped.forward = lambda hidden_states, **kwargs: hidden_states
    with pytest.raises(ModelFormatError, match=r"LlamaForCausalLM: layer 1 called .* 0 times"):
        driver.prefill(driver.open([1, 2, 3]))


def test_a_layer_that_attends_twice_is_an_error():
    model = build_tiny_model("llama")
    driver = drive(TorchRunner(model))
    layer = model.model.layers[2]
    once = model.model.layers[2].forward
    layer.forward = lambda hidden_states, **kwargs: once(once(hidden_states, **kwargs), **kwargs)
    with pytest.raises(ModelFormatError, match=r"layer 2 called .* 2 times"):
        driver.prefill(driver.open([1, 2, 3]))


def test_an_untested_family_that_mixes_tokens_is_refused():
    model = build_tiny_model("arcee")
    TorchRunner(model)
    model.model.layers[0].mlp.register_forward_hook(
        lambda module, args, output: output + output.roll(1, dims=1)
    )
    assert_raises(
        ModelFormatError, r"arcee: paged logits differ .* limit of 0\.001", TorchRunner, model
    )


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_batch_dependent_rope_is_fixed(kind, caplog):
    rope = {"rope_type": kind, "rope_theta": 1000.0, "factor": 4.0}
    if kind == "longrope":
        rope |= {
            "short_factor": [1.0] * 8,
            "long_factor": [4.0] * 8,
            "original_max_position_embeddings": 40,
        }
    model = build_tiny_model("llama", rope_parameters=rope)
    with caplog.at_level(logging.WARNING):
        runner = TorchRunner(model)
    assert runner.info.max_context == (40 if kind == "longrope" else 512), (
        "the context must end where the RoPE frequencies change"
    )
    assert ("limited to 40 of 512 tokens" in caplog.text) == (kind == "longrope")
    driver = drive(runner)
    short = driver.open(TOKENS[:9].tolist())
    long = driver.open(TOKENS[:40].tolist())
    for part, sequence in zip(driver.step([(short, 9), (long, 40)]), (short, long), strict=True):
        eager = runner.eager_logits(np.array(sequence.token_ids))
        np.testing.assert_allclose(part, eager, rtol=1e-3, atol=1e-4)


def test_max_context_can_be_lowered_only():
    model = build_tiny_model("llama")
    assert TorchRunner(model, max_context=100).info.max_context == 100
    assert TorchRunner(model, max_context=9999).info.max_context == 512


# forward


@pytest.mark.parametrize("keeps_rows", [True, False])
@pytest.mark.parametrize("rows", [[], [9], [0, 9], [7, 2, 2]])
def test_logits_of_the_asked_rows_only(rows, keeps_rows):
    runner = TorchRunner(build_tiny_model("gemma2"))
    runner._keeps_rows = keeps_rows  # False: models whose forward always computes all rows
    drive(runner)
    logits = runner.forward(flat_pass(TOKENS[:10], rows))
    assert logits.shape == (len(rows), 300)
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, runner.eager_logits(TOKENS[:10])[rows], rtol=1e-3, atol=1e-4)


def test_the_model_is_restored_between_passes():
    model = build_tiny_model("mistral")
    before = model.config._attn_implementation
    ids = torch.from_numpy(TOKENS)[None]
    with torch.inference_mode():
        expected = model(ids, use_cache=False).logits
    driver = drive(TorchRunner(model))
    driver.prefill(driver.open(TOKENS.tolist()))
    assert model.config._attn_implementation == before
    with torch.inference_mode():
        assert torch.equal(model(ids, use_cache=False).logits, expected)


def test_the_model_is_restored_after_a_failure():
    model = build_tiny_model("llama")
    before = model.config._attn_implementation
    runner = TorchRunner(model)
    drive(runner)
    with pytest.raises(IndexError):
        runner.forward(flat_pass(np.array([5000]), [0]))
    assert model.config._attn_implementation == before


def test_paged_attention_outside_of_a_pass_is_refused():
    model = build_tiny_model("llama")
    runner = TorchRunner(model)
    with (
        runner._hook._named("kvboost_edge_paged"),
        pytest.raises(ConfigError, match="an engine is running"),
    ):
        model(torch.zeros(1, 1, dtype=torch.int64))


def test_two_runners_of_one_model_in_two_threads():
    model = build_tiny_model("gemma2")
    before = model.config._attn_implementation
    runners = [TorchRunner(model) for _ in range(2)]
    expected = runners[0].eager_logits(TOKENS)
    drivers = [drive(runner) for runner in runners]
    with ThreadPoolExecutor(2) as pool:
        results = pool.map(lambda driver: driver.prefill(driver.open(TOKENS.tolist()), 3), drivers)
        for logits in results:
            np.testing.assert_allclose(logits, expected, rtol=1e-3, atol=1e-4)
    assert model.config._attn_implementation == before


def test_forward_needs_a_backend():
    runner = TorchRunner(build_tiny_model("llama"))
    with pytest.raises(ConfigError, match="bind before forward"):
        runner.forward(flat_pass(TOKENS[:3], [0]))
    drive(runner)
    runner.close()
    with pytest.raises(ConfigError, match="bind before forward"):
        runner.forward(flat_pass(TOKENS[:3], [0]))


def test_a_backend_of_another_shape_is_refused():
    other = TorchBackend(TorchRunner(build_tiny_model("gemma")).info.kv_spec, 2)
    with pytest.raises(ConfigError, match="layers"):
        TorchRunner(build_tiny_model("llama")).bind(other)


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "mps"])
def test_a_backend_on_another_device_is_refused(device, monkeypatch):
    runner = TorchRunner(build_tiny_model("llama"))
    backend = TorchBackend(runner.info.kv_spec, 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(backend, "device", device)
    with pytest.raises(ConfigError, match=f"on device='{device}', but .* use device='cpu'"):
        runner.bind(backend)
    runner.device = "cuda:1"
    with pytest.raises(ConfigError, match="use device='cuda:1'"):
        runner.bind(backend)
    if device != "mps":
        runner.device = "cuda:0"
        runner.bind(backend)


def test_a_dtype_without_storage_is_refused():
    with pytest.raises(ModelFormatError, match="float64"):
        TorchRunner(build_tiny_model("llama").to(torch.float64))
