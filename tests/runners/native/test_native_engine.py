"""The native runner behind the public engine: equal to the bit with and without cache."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvboost_edge import CPUPagedEngine

NATIVE = {"runner": "native", "num_blocks": 64, "backend": "cpu"}
PROMPT = "the quick brown fox jumps over the lazy dog and then it sleeps for the rest of the day"


@pytest.mark.parametrize("weights", ["auto", "int4"])
def test_cached_and_cold_are_equal_to_the_bit(tiny_model_dir: Path, weights: str) -> None:
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


def test_f32_weights_equal_the_torch_runner(tiny_model_dir: Path) -> None:
    options = {"num_blocks": 64, "backend": "cpu", "dtype": "float32"}
    logits = {}
    for runner in ("native", "torch"):
        with CPUPagedEngine.from_pretrained(str(tiny_model_dir), runner=runner, **options) as engine:
            logits[runner] = engine.logits(engine.tokenizer.encode(PROMPT))
    distance = np.linalg.norm(logits["native"] - logits["torch"])
    assert distance <= 1e-4 * np.linalg.norm(logits["torch"])


def test_no_torch_is_imported(tiny_model_dir: Path) -> None:
    code = (
        "import sys; from kvboost_edge import CPUPagedEngine\n"
        "with CPUPagedEngine.from_pretrained(sys.argv[1], num_blocks=32, runner='native') as engine:\n"
        "    assert engine.generate('hello', max_new_tokens=2).generated_tokens > 0\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tiny_model_dir)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
