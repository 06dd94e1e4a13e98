"""The memory check: its report and its refusals come from one calculation, before anything is
packed.
"""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from helpers.models.tiny_checkpoints import save_tiny_checkpoint
from helpers.models.tiny_models import build_tiny_model, save_tiny_model
from helpers.onnx.blocks import Form
from helpers.onnx.concat import ConcatDecoder
from helpers.onnx.writer import write_onnx
from kvboost_edge import CPUPagedEngine
from kvboost_edge.config import EngineConfig
from kvboost_edge.engine import build
from kvboost_edge.engine.memory.check import format_bytes, packed_place, plan_fit, planned_memory
from kvboost_edge.engine.memory.pool_size import left_after_weights
from kvboost_edge.engine.memory.selection import select_path
from kvboost_edge.errors import CapacityError, ConfigError, ModelFormatError, RequestError
from kvboost_edge.host.file_memo import NO_CACHE
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.packed.pack_plan import WEIGHT_FORMATS

GB = 10**9
SIZES = {"hidden_size": 256, "num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2}


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setenv("KVBOOST_EDGE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    return save_tiny_checkpoint("qwen3_moe", tmp_path / "model", **SIZES)


def _fit(model, available, **options):
    checkpoint = Checkpoint.open(model)
    config = EngineConfig.from_options(**options)
    return plan_fit(
        checkpoint, config, select_path(checkpoint, config), checkpoint.summary(), available
    )


def test_the_memory_plan_equals_the_engines_usage(model):
    for options in (
        {"num_blocks": 40},
        {"max_cache_bytes": 3e6},
        {"num_blocks": 40, "kv_cache_bits": 8},
    ):
        fit = _fit(model, GB, weights="int4", **options)
        with CPUPagedEngine.from_pretrained(model, weights="int4", **options) as engine:
            stats = engine.paged_stats()
        assert fit.pool == stats["pool_bytes"]
        # The file has a header, and sections at multiples of 64.
        assert (
            0
            <= stats["weight_bytes"] - fit.info.weight_bytes
            < 0.01 * fit.info.weight_bytes + 10_000
        )
        assert fit.needed == fit.info.weight_bytes + fit.pool
        assert fit.refusal == ""
        assert abs(fit.pool_tokens - 16 * stats["num_blocks"]) <= 16 * 4


@pytest.mark.parametrize("kv_cache_bits", [16, 8])
def test_the_planned_kv_of_the_torch_runner_equals_the_loaded_one(kv_cache_bits, tmp_path):
    path = save_tiny_model("llama", tmp_path)
    options = {"runner": "torch", "num_blocks": 8, "kv_cache_bits": kv_cache_bits}
    fit = _fit(path, GB, **options)
    with CPUPagedEngine.from_pretrained(path, **options) as engine:
        assert fit.info.kv_spec == engine.runner_info.kv_spec


def test_an_invalid_size_in_the_config_is_not_reported_as_lack_of_memory(model):
    path = model / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, "moe_intermediate_size": 2**31}), encoding="utf-8")
    with pytest.raises(
        ModelFormatError,
        match=r"model\.safetensors: tensor '.*' has shape .*, expected \(2147483648",
    ):
        _fit(model, GB, weights="int4", num_blocks=40)


def test_weights_and_pool_are_checked_together_before_packing(model, monkeypatch):
    """Weights and pool would each fit alone. `doctor` reports the text that the engine raises."""
    fit = _fit(model, GB, weights="int4", num_blocks=400)
    assert fit.pool > fit.info.weight_bytes // 10
    available = fit.needed - 1
    assert max(fit.info.weight_bytes, fit.pool) < available
    refused = _fit(model, available, weights="int4", num_blocks=400).refusal
    assert "exceed memory" in refused
    assert "lower max_cache_bytes or num_blocks" in refused
    monkeypatch.setattr(build, "available_on", lambda device: available)
    asked = []
    with pytest.raises(CapacityError) as caught:
        CPUPagedEngine.from_pretrained(
            model,
            weights="int4",
            num_blocks=400,
            progress=lambda done, total: asked.append((done, total)),
        )
    assert str(caught.value) == refused
    assert not asked
    assert not (Path(os.environ["KVBOOST_EDGE_CACHE"]) / "packed").exists()
    monkeypatch.setattr(build, "available_on", lambda device: available + 1)
    CPUPagedEngine.from_pretrained(model, weights="int4", num_blocks=400).close()


@pytest.fixture
def hybrid(tmp_path, monkeypatch):
    monkeypatch.setenv("KVBOOST_EDGE_CACHE", str(tmp_path / "cache"))
    return save_tiny_model("qwen3_5_text", tmp_path / "model")


def test_recurrent_states_count_in_the_memory_plan(hybrid):
    options = {"weights": "int8", "num_blocks": 64, "max_num_seqs": 3}
    found = []
    for more in ({}, {"speculation": "off"}, {"max_state_bytes": 2e6}, {"max_num_seqs": 5}):
        fit = _fit(hybrid, GB, **{**options, **more})
        with CPUPagedEngine.from_pretrained(hybrid, **{**options, **more}) as engine:
            stats = engine.paged_stats()
        assert (fit.pool, fit.states) == (stats["pool_bytes"], stats["state_bytes"])
        assert fit.needed == fit.info.weight_bytes + fit.pool + fit.states
        assert (
            planned_memory(hybrid, EngineConfig.from_options(**{**options, **more})).nbytes
            == fit.needed
        )
        found.append(fit.states)
    assert 0 < found[1] < found[0] < found[3]
    assert found[2] <= 2_000_000


@pytest.mark.parametrize("max_state_bytes", [1000, 1_000_000])
def test_states_that_do_not_fit_are_refused_before_packing(max_state_bytes, hybrid, monkeypatch):
    """One budget is smaller than the batch needs, and one exceeds the memory. Both errors give the
    numbers.
    """
    options = {
        "weights": "int8",
        "num_blocks": 64,
        "max_num_seqs": 2,
        "max_state_bytes": max_state_bytes,
    }
    options["speculation"] = "on"  # otherwise there would be fewer drafts
    available = GB
    if max_state_bytes > 1000:
        available = _fit(hybrid, GB, **options).needed - 1
        assert _fit(hybrid, available + 1, **options).refusal == ""
    refused = _fit(hybrid, available, **options).refusal
    size = r"\d\.\d\d MiB"
    words = rf"max_state_bytes=1000 holds 0 states of {size}, but 2 sequences need 3 states"
    if max_state_bytes > 1000:
        words = rf"\d+ recurrent states of {size} \(2 sequences need 2 x {size}\), draft tokens of {size} and a pool of {size} exceed m"
    assert re.match(words, refused)
    assert "max_num_seqs" in refused
    monkeypatch.setattr(build, "available_on", lambda device: available)
    with pytest.raises(CapacityError) as caught:
        CPUPagedEngine.from_pretrained(
            hybrid, progress=lambda *_: pytest.fail("the model was packed"), **options
        )
    assert str(caught.value) == refused
    assert not (Path(os.environ["KVBOOST_EDGE_CACHE"]) / "packed").exists()


@pytest.mark.parametrize("rows", [31, 9, 0])
def test_draft_rows_are_reduced_to_fit_in_plan_and_engine(hybrid, caplog, rows):
    spec = _fit(hybrid, GB, num_blocks=40).info.kv_spec
    options = {"num_blocks": 40, "max_num_seqs": 2, "weights": "int8"}
    options["max_state_bytes"] = 3 * spec.bytes_per_state + rows * spec.bytes_per_draft
    fit = _fit(hybrid, GB, **options)
    assert (fit.refusal, fit.states) == ("", options["max_state_bytes"])
    assert (f"room for {rows} draft tokens" in fit.shortage) == (rows < 31)
    with CPUPagedEngine.from_pretrained(hybrid, **options) as engine:
        stats = engine.paged_stats()
    assert (stats["state_bytes"], stats["max_draft_tokens"]) == (fit.states, rows)
    assert [record.message for record in caplog.records if "instead of 31" in record.message] == [
        fit.shortage
    ] * (rows < 31)
    if rows < 31:
        asked = _fit(hybrid, GB, **options, max_draft_tokens=31).refusal
        assert "raise max_state_bytes or lower max_num_seqs or max_draft_tokens" in asked
        with pytest.raises(CapacityError) as caught:
            CPUPagedEngine.from_pretrained(hybrid, **options, max_draft_tokens=31)
        assert str(caught.value) == asked


def test_max_state_bytes_without_states_is_refused_before_packing(tmp_path, monkeypatch):
    monkeypatch.setenv("KVBOOST_EDGE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    path = save_tiny_model("llama", tmp_path / "model")
    with pytest.raises(ConfigError, match="max_state_bytes=1048576 has no effect"):
        CPUPagedEngine.from_pretrained(
            path,
            runner="native",
            weights="int8",
            progress=lambda *_: pytest.fail("the model was packed"),
            max_state_bytes=1 << 20,
        )
    assert not (tmp_path / "cache" / "packed").exists()


def test_the_onnx_runners_kv_copies_count_in_the_memory_plan(tmp_path, monkeypatch):
    path = write_onnx(build_tiny_model("llama"), tmp_path / "m", Form(concat=True), ConcatDecoder)
    fit = _fit(path, GB, num_blocks=400)
    assert fit.info.name == "onnx"
    assert fit.needed == fit.info.weight_bytes + 2 * fit.pool
    assert planned_memory(path, EngineConfig(num_blocks=400)).nbytes == fit.needed
    assert _fit(path, fit.needed, num_blocks=400).refusal == ""
    refused = _fit(path, fit.needed - 1, num_blocks=400).refusal
    assert "+ the same for the onnx runner's copies exceed memory" in refused
    monkeypatch.setattr(build, "available_on", lambda device: fit.needed - 1)
    monkeypatch.setattr(build, "_load_runner", lambda *_: pytest.fail("the model was loaded"))
    with pytest.raises(CapacityError) as caught:
        CPUPagedEngine.from_pretrained(path, num_blocks=400)
    assert str(caught.value) == refused


def test_the_default_pool_is_a_quarter_of_the_remaining_memory(model, monkeypatch):
    """Reading the weights of a mapped file does not reduce the available memory, so the memory
    before loading counts.
    """
    weights = _fit(model, GB, weights="int4").info.weight_bytes
    available = weights + 4_000_000
    fit = _fit(model, available, weights="int4", max_num_seqs=4)
    assert left_after_weights(available, weights) == fit.left_after_weights == 4_000_000
    assert 500_000 < fit.pool <= 1_000_000
    monkeypatch.setattr(build, "available_on", lambda device: available)
    with CPUPagedEngine.from_pretrained(model, weights="int4", max_num_seqs=4) as engine:
        assert engine.paged_stats()["pool_bytes"] == fit.pool
    assert left_after_weights(weights, available) == 0


@pytest.mark.parametrize("runner", ["native", "torch"])
def test_a_shorter_context_bounds_requests_and_the_pool(model, runner, caplog):
    options = {"max_model_len": 64, "max_num_seqs": 4, "runner": runner}
    planned = _fit(model, GB, **options)
    assert planned.info.max_context == 64
    with CPUPagedEngine.from_pretrained(model, **options) as engine:
        assert engine.runner_info.max_context == 64
        stats = engine.paged_stats()
        assert stats["num_blocks"] == 4 * 64 // 16
        if runner == "native":
            assert planned.pool == stats["pool_bytes"]
        prompt = [5] * 60
        result = engine.generate(prompt, max_new_tokens=4, ignore_eos=True)
        assert result.generated_tokens == 4
        with pytest.raises(RequestError, match="context of 64 tokens"):
            engine.generate(prompt, max_new_tokens=5)
    assert not [text for text in caplog.messages if "max_model_len" in text]


def test_a_context_beyond_the_models_is_reduced_and_logged(model, caplog):
    with CPUPagedEngine.from_pretrained(model, max_num_seqs=1) as engine:
        longest = engine.runner_info.max_context
    with CPUPagedEngine.from_pretrained(model, max_model_len=longest + 1, max_num_seqs=1) as engine:
        assert engine.runner_info.max_context == longest
    (said,) = [text for text in caplog.messages if "max_model_len" in text]
    assert said.startswith(f"max_model_len={longest + 1} (--ctx-size) exceeds the model's")


def test_the_size_of_every_weight_format_is_planned(model):
    found = format_bytes(Checkpoint.open(model))
    assert list(found) == list(WEIGHT_FORMATS)
    assert found["int4"] < found["int4-asym"] < found["int8"] < found["bf16"] < found["f32"]
    assert all(
        found[weights] == _fit(model, GB, weights=weights).info.weight_bytes for weights in found
    )


def test_the_packed_file_is_located_without_reading_the_model(model, monkeypatch):
    def place(cache_dir=None):
        checkpoint = Checkpoint.open(model, cache_dir=cache_dir)
        with monkeypatch.context() as patch:
            fingerprints = sys.modules["kvboost_edge.models.fingerprint"]
            patch.setattr(
                fingerprints, "digest_in_parts", lambda *_, **__: pytest.fail("the model was read")
            )
            found = packed_place(checkpoint, "int4", checkpoint.summary().files, 2)
        assert found.peak < GB
        return found.is_there, found.path

    packed = Path(os.environ["KVBOOST_EDGE_CACHE"]) / "packed"
    assert place() == (False, packed)
    CPUPagedEngine.from_pretrained(model, weights="int4", num_blocks=8).close()
    (file,) = packed.glob("*.kvpack")
    assert place() == (True, file)
    file.unlink()
    assert place() == (False, file)
    assert place(NO_CACHE) == (False, None)
