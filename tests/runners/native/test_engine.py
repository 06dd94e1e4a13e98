"""The native runner in the public engine: results are equal to the bit with and without cache."""

import subprocess
import sys

import numpy as np
import pytest

from helpers.models.tiny_models import build_tiny_model, save_tiny_model
from kvboost_edge import CPUPagedEngine
from kvboost_edge.errors import ConfigError

NATIVE = {"runner": "native", "num_blocks": 64, "backend": "cpu"}
PROMPT = "the quick brown fox jumps over the lazy dog and then it sleeps for the rest of the day"


@pytest.mark.parametrize("weights", ["auto", "int4", "int4-asym"])
def test_cached_and_cold_are_equal_to_the_bit(tiny_model_dir, weights):
    with CPUPagedEngine.from_pretrained(str(tiny_model_dir), weights=weights, **NATIVE) as engine:
        assert engine.runner_info.name == "native"
        assert engine.runner_info.dtype == ("int8" if weights == "auto" else weights)
        report = engine.verify_correctness([PROMPT], max_new_tokens=8)
        assert [check.problem for check in report.checks] == [None]
        assert report.checks[0].max_logit_difference == 0.0
        ids = engine.tokenizer.encode(PROMPT)
        warm = engine.logits(ids)
        engine.reset_cache()
        np.testing.assert_array_equal(engine.logits(ids), warm)


@pytest.mark.parametrize("bits", [8, (8, 4), 4], ids=str)
def test_quantized_caches_are_equal_to_the_bit(tiny_model_dir, bits):
    with CPUPagedEngine.from_pretrained(
        str(tiny_model_dir), kv_cache_bits=bits, **NATIVE
    ) as engine:
        report = engine.verify_correctness(max_new_tokens=20)
        assert report, str(report)
        assert [check.max_logit_difference for check in report.checks] == [0.0, 0.0]
        sampled = engine.verify_correctness([PROMPT], max_new_tokens=8, temperature=0.9)
        assert sampled, str(sampled)
        assert sampled.checks[0].kl_divergence == 0.0
        stats = engine.paged_stats()
        assert stats["used_blocks"] == 0
        spec = engine.runner_info.kv_spec
        num_open = stats["max_num_seqs"] + 1
        assert (
            stats["pool_bytes"] >= 64 * spec.bytes_per_block + num_open * spec.bytes_per_open_block
        )


def test_quantized_caches_are_refused_by_other_runners(tiny_model_dir):
    for options in ({"runner": "torch"}, {"backend": "torch"}, {"device": "cuda"}):
        with pytest.raises(ConfigError, match="kv_cache_bits=4 needs the native runner"):
            CPUPagedEngine.from_pretrained(str(tiny_model_dir), kv_cache_bits=4, **options)
    model = build_tiny_model("llama")
    with pytest.raises(ConfigError, match=r"kv_cache_bits=\(8, 4\) is not supported"):
        CPUPagedEngine(model, None, kv_cache_bits=(8, 4))


@pytest.mark.parametrize(
    ("option", "values"),
    [("kv_cache_bits", (16, 8, (8, 4))), ("weights", ("int8", "int4", "int4-asym"))],
)
def test_caches_of_different_formats_share_nothing(option, values, tiny_model_dir):
    roots = set()
    for value in values:
        options = {option: value, **NATIVE}
        with CPUPagedEngine.from_pretrained(str(tiny_model_dir), **options) as engine:
            roots.add(engine._parts.root)
    assert len(roots) == 3


def test_an_unsupported_family_is_logged(tmp_path, caplog):
    directory = save_tiny_model("gpt_neox", tmp_path)
    with CPUPagedEngine.from_pretrained(directory, num_blocks=8) as engine:
        assert engine.runner_info.name == "torch"
    (record,) = [
        r for r in caplog.records if r.levelname == "WARNING" and r.name.startswith("kvboost_edge")
    ]
    assert "not the native runner" in record.getMessage()
    assert "gpt_neox" in record.getMessage()


@pytest.mark.parametrize(
    ("options", "stored"),
    [({}, "float16"), ({"kv_cache_bits": (8, 4)}, "8 and 4 bits")],
    ids=str,
)
def test_float16_keeps_the_native_runner_and_is_logged(tiny_model_dir, caplog, options, stored):
    with CPUPagedEngine.from_pretrained(
        str(tiny_model_dir), num_blocks=8, dtype="float16", **options
    ) as engine:
        assert (engine.runner_info.name, engine.runner_info.dtype) == ("native", "int8")
    (said,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert said.startswith("the native runner does not support dtype='float16'")
    assert f"weights in int8, KV in {stored};" in said


def test_no_torch_is_imported(tiny_model_dir):
    code = (
        "import sys; from kvboost_edge import CPUPagedEngine\n"
        "with CPUPagedEngine.from_pretrained(sys.argv[1], num_blocks=32, runner='native') as "
        "engine:\n"
        "    assert engine.generate('hello', max_new_tokens=2).generated_tokens > 0\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tiny_model_dir)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
