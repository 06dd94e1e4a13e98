"""The ONNX runner against transformers: both graph variants, in chunks, in batches, and with shared
blocks.
"""

import logging
import random
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from helpers.distance import distance
from helpers.models.tiny_models import build_tiny_model
from helpers.onnx.blocks import Form
from helpers.onnx.concat import ConcatDecoder
from helpers.onnx.wire import damaged
from helpers.onnx.writer import Decoder, write_onnx
from helpers.random_ids import random_ids
from helpers.runners.logits import dense_logits
from helpers.runners.paged_driver import PagedDriver
from kvboost_edge import CPUPagedEngine
from kvboost_edge.backends.select import choose_backend, make_backend
from kvboost_edge.errors import (
    BackendUnavailable,
    ConfigError,
    KVBoostError,
    ModelFormatError,
    install_extra,
)
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.runners.base import LoadOptions
from kvboost_edge.runners.onnx.runner import load

pytestmark = pytest.mark.usefixtures("one_torch_thread")

PROMPT = random_ids(61, 7)
NEW_TOKENS = 12
KINDS = {"shared": Decoder, "concat": ConcatDecoder}
FAMILIES = {
    "llama": ({}, Form(bits=0)),
    "qwen2": ({}, Form()),
    "qwen3": ({}, Form(bits=8, block=64)),
    "gemma": ({"tie_word_embeddings": False}, Form(bits=0)),
    "gemma2": ({"num_hidden_layers": 2, "tie_word_embeddings": False}, Form(bits=0, genai=False)),
    "phi3": ({}, Form(zeros="codes")),
    "mistral": ({}, Form(bits=0)),
}


def written(folder, kind="shared", family="llama", *, half_past=False, **overrides):
    """Return a transformers model and a folder with the same model as ONNX."""
    fields, form = FAMILIES[family]
    model = build_tiny_model(family, **{**fields, **overrides})
    model.set_attn_implementation("eager")
    form = Form(**{**form.__dict__, "concat": kind == "concat", "half_past": half_past})
    return model, write_onnx(model, folder, form, KINDS[kind])


def loaded(folder):
    return load(Checkpoint.open(folder), LoadOptions("", "auto", "cpu", 1, 16, (16, 16)))


def drive(runner, backend="cpu", num_blocks=32):
    return PagedDriver(
        runner,
        make_backend(choose_backend(backend), runner.info.kv_spec, num_blocks, num_threads=1),
    )


def greedy(model, prompt, count=NEW_TOKENS):
    """Return all tokens of a greedy generation, and the logits of the prompt."""
    with torch.inference_mode():
        whole = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        )[0].tolist()
        return whole, dense_logits(model, prompt)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.some(2)
def test_families_equal_transformers(family, kind, tmp_path):
    """Logits are within 1e-4 when chunks end inside blocks, and greedy tokens are equal when
    decoded together with another sequence.
    """
    model, folder = written(tmp_path / "m", kind, family)
    whole, expected = greedy(model, PROMPT)
    other, _ = greedy(model, PROMPT[::-1][:37])
    runner = loaded(folder)
    driver = drive(runner)
    first = driver.open(PROMPT)
    second = driver.open(PROMPT[::-1][:37])
    logits = driver.prefill(first, 23)
    assert distance(logits, expected) <= 1e-4
    last = driver.prefill(second, 16)[-1]
    driver.decode([first, second], [logits[-1], last], NEW_TOKENS)
    assert first.token_ids == whole
    assert second.token_ids == other
    runner.close()


@pytest.mark.parametrize("kind", KINDS)
def test_both_backends_store_the_same_kv(kind, tmp_path):
    """KV gathered from the pool of either NumPy backend equals the computed KV."""
    _, folder = written(tmp_path / "m", kind)
    found = []
    for backend in ("cpu", "reference"):
        runner = loaded(folder)
        driver = drive(runner, backend)
        sequence = driver.open(PROMPT)
        logits = driver.prefill(sequence, 61)
        again = driver.open(PROMPT)
        assert again.table.num_computed_tokens == 48
        warm = driver.prefill(again, 61)
        assert runner.buffers.num_gathered == 1
        assert distance(logits[48:], warm) <= 1e-5
        found.append(logits)
        runner.close()
    np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.parametrize("kind", KINDS)
def test_kv_in_half_precision(kind, tmp_path):
    """Logits are within the rounding error of float16. The pool stores onnxruntime's own values, so
    warm results are as close as cold ones.
    """
    model, folder = written(tmp_path / "m", kind, half_past=True)
    whole, expected = greedy(model, PROMPT)
    runner = loaded(folder)
    assert runner.info.kv_spec.dtype == "float16"
    driver = drive(runner)
    cold = driver.prefill(driver.open(PROMPT), 23)
    assert 1e-5 < distance(cold, expected) < 2e-3
    again = driver.open(PROMPT)
    assert again.table.num_computed_tokens == 48
    warm = driver.prefill(again, 61)
    assert runner.buffers.num_gathered == 1
    assert distance(cold[48:], warm) <= 1e-3
    driver.decode([again], [warm[-1]], NEW_TOKENS)
    assert again.token_ids == whole
    runner.close()
    with CPUPagedEngine.from_pretrained(
        folder, runner="onnx", num_blocks=64, debug_checks=True
    ) as engine:
        results = engine.generate_batch([PROMPT, PROMPT[::-1]], max_new_tokens=NEW_TOKENS)
        assert list(results[0].output_token_ids) == whole[len(PROMPT) :]
        layers = engine.runner_info.kv_spec.layers
        per_token = sum(2 * 2 * layer.num_kv_heads * layer.head_dim for layer in layers)
        assert engine.paged_stats()["bytes_per_block"] == 16 * per_token


@pytest.mark.parametrize("kind", KINDS)
def test_engine_shares_prefixes_streams_and_samples(kind, tmp_path):
    model, folder = written(tmp_path / "m", kind)
    whole, _ = greedy(model, PROMPT)
    with CPUPagedEngine.from_pretrained(
        folder, runner="onnx", num_blocks=64, max_num_seqs=4, debug_checks=True, max_batch_tokens=40
    ) as engine:
        assert engine.runner_info.name == "onnx"
        cold = engine.generate(PROMPT, max_new_tokens=NEW_TOKENS)
        warm = engine.generate(PROMPT, max_new_tokens=NEW_TOKENS)
        assert list(cold.output_token_ids) == list(warm.output_token_ids) == whole[len(PROMPT) :]
        assert (cold.cached_tokens, warm.cached_tokens) == (0, 48)
        streamed = list(engine.stream(PROMPT, max_new_tokens=NEW_TOKENS))
        assert streamed
        batch = engine.generate_batch(
            [PROMPT, PROMPT[:40], PROMPT[::-1], PROMPT], max_new_tokens=NEW_TOKENS
        )
        assert (
            list(batch[0].output_token_ids)
            == list(batch[3].output_token_ids)
            == whole[len(PROMPT) :]
        )
        for prompt, result in ((PROMPT[:40], batch[1]), (PROMPT[::-1], batch[2])):
            assert list(result.output_token_ids) == greedy(model, prompt)[0][len(prompt) :]
        seeded = [
            engine.generate(PROMPT, max_new_tokens=8, temperature=0.8, seed=3).output_token_ids
            for _ in range(2)
        ]
        assert seeded[0] == seeded[1]
        assert engine.verify_correctness([PROMPT])


def test_preemption_with_more_sequences_than_buffers(tmp_path):
    """Sequences are preempted and recomputed, and exceed the number that the buffers hold."""
    model, folder = written(tmp_path / "m")
    prompts = [[(17 * i + j) % 250 for j in range(20 + i)] for i in range(6)]
    with CPUPagedEngine.from_pretrained(
        folder, runner="onnx", num_blocks=9, max_num_seqs=6, max_batch_tokens=24, debug_checks=True
    ) as engine:
        results = engine.generate_batch(prompts, max_new_tokens=40)
        assert engine.paged_stats()["preemptions"] > 0
        assert engine._core._runner.buffers.nbytes <= engine.paged_stats()["pool_bytes"]
    for prompt, result in zip(prompts, results, strict=True):
        found = list(result.output_token_ids)  # an answer may end early
        assert found == greedy(model, prompt, 40)[0][len(prompt) :][: len(found)]
        assert len(found) == 40 or result.finish_reason == "stop"


@pytest.mark.parametrize("kind", KINDS)
def test_kv_copies_count_in_the_memory_report(kind, tmp_path):
    _, folder = written(tmp_path / "m", kind)
    with CPUPagedEngine.from_pretrained(folder, runner="onnx", num_blocks=64) as engine:
        per_token = engine.runner_info.kv_spec.bytes_per_block // 16
        assert engine.runner_info.copies_kv
        assert engine.paged_stats()["copied_bytes"] == 0
        engine.generate(PROMPT, max_new_tokens=NEW_TOKENS)  # 73 tokens, in room for 128
        stats = engine.paged_stats()
        # Past and present are one buffer or two. The last ones stay for a continued request.
        assert stats["copied_bytes"] == {"shared": 1, "concat": 2}[kind] * 128 * per_token
        assert stats["other_bytes"] <= stats["process_rss_bytes"] - stats["copied_bytes"]


def test_auto_prefers_the_native_runner(tmp_path, caplog):
    _, known = written(tmp_path / "known")
    _, other = written(tmp_path / "other", "concat")
    with caplog.at_level(logging.INFO, "kvboost_edge"):
        with CPUPagedEngine.from_pretrained(known, num_blocks=16) as engine:
            assert engine.runner_info.name == "native"
        assert "runner native: it supports this model family" in caplog.text
        caplog.clear()
        with CPUPagedEngine.from_pretrained(other, num_blocks=16) as engine:
            assert engine.runner_info.name == "onnx"
    line = next(
        record for record in caplog.records if record.getMessage().startswith("runner onnx:")
    )
    assert line.levelno == logging.WARNING
    assert "not the native runner:" in line.getMessage()
    assert "is not supported here" in line.getMessage()
    assert "transformers does not load ONNX files" in line.getMessage()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dtype": "bfloat16"}, ConfigError, "dtype='bfloat16' does not apply to the ONNX runner"),
        ({"weights": "int8"}, ConfigError, "needs the native runner"),
        ({"kv_cache_bits": 8}, ConfigError, "kv_cache_bits=8 does not apply to the ONNX runner"),
        ({"kv_cache_bits": 4}, ConfigError, "needs the native runner"),
        ({"backend": "torch"}, ConfigError, "needs the torch runner"),
    ],
)
def test_unsupported_options_are_refused(options, error, message, tmp_path):
    _, folder = written(tmp_path / "m")
    with pytest.raises(error, match=message):
        CPUPagedEngine.from_pretrained(folder, runner="onnx", num_blocks=16, **options)


def test_other_models_and_missing_packages_are_refused(tiny_model_dir, tmp_path, monkeypatch):
    with pytest.raises(
        ModelFormatError, match="the model is not an ONNX file; runner='onnx' needs the onnx runner"
    ):
        CPUPagedEngine.from_pretrained(tiny_model_dir, runner="onnx", num_blocks=16)
    _, folder = written(tmp_path / "m", "concat")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        BackendUnavailable,
        match=f"needs onnxruntime, which is not installed.*{re.escape(install_extra('onnx'))}",
    ):
        CPUPagedEngine.from_pretrained(folder, num_blocks=16)


def test_reading_an_onnx_model_loads_no_onnxruntime(tmp_path):
    """Running it on the native runner does not load it either."""
    _, folder = written(tmp_path / "m")
    code = (
        "import sys; from kvboost_edge import CPUPagedEngine; e = "
        f"CPUPagedEngine.from_pretrained({str(folder)!r}, num_blocks=16); e.generate([1, 2, 3], "
        "max_new_tokens=2); e.close(); print([n for n in ('onnx', 'onnxruntime', 'torch') if n in "
        "sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_non_finite_keys_end_only_their_request(tmp_path):
    model, _ = written(tmp_path / "first", "concat")
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = torch.nan
    folder = write_onnx(model, tmp_path / "m", Form(bits=0, concat=True), ConcatDecoder)
    with CPUPagedEngine.from_pretrained(folder, num_blocks=16, max_num_seqs=2) as engine:
        bad = engine.submit([1, 7, 2], max_new_tokens=3)
        good = engine.submit([1, 2, 3], max_new_tokens=3)
        with pytest.raises(KVBoostError, match="NaN"):
            bad.result()
        assert good.result().generated_tokens == 3


def test_the_torch_backend_is_refused(tmp_path):
    runner = loaded(written(tmp_path / "m")[1])
    backend = make_backend(choose_backend("torch"), runner.info.kv_spec, 4)
    with pytest.raises(ConfigError, match="supports backend='cpu' and 'reference'"):
        runner.bind(backend)
    runner.close()


def test_errors_of_onnxruntime_name_the_file(tmp_path):
    """A type mismatch found by onnxruntime raises the package's own error with the file name."""
    _, folder = written(tmp_path / "m", "concat")
    path = folder / "model.onnx"
    path.write_bytes(path.read_bytes().replace(b"LessOrEqual", b"LessXrEqual"))
    with pytest.raises(ModelFormatError, match=r"model.onnx: onnxruntime cannot load this model"):
        loaded(folder)


@pytest.mark.slow
@pytest.mark.parametrize("count", [150, pytest.param(500, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_run_or_are_refused(kind, count, tmp_path):
    """Whatever bytes change, the file runs or is refused with the package's own error, and
    onnxruntime does not crash the process.
    """
    _, folder = written(tmp_path / "m", kind, num_hidden_layers=1)
    path = folder / "model.onnx"
    rng = random.Random(1)
    sound = path.read_bytes()
    ran = 0
    for _ in range(count):
        path.write_bytes(damaged(sound, rng))
        try:
            runner = loaded(folder)
        except ModelFormatError:
            continue
        ran += 1
        runner.close()
    assert count // 100 < ran < count // 2
