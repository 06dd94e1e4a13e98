"""Checks that test_amx.py runs in a separate process compiled for AMX, on emulated or real tile
registers.

    python tests/kernels/linear/amx_checks.py CHECK [WEIGHTS ...]

The process exits with status 0 and prints a JSON line: whether tiles were emulated, the counts of
emulated instructions, and the results of the check.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import binding

from helpers.kernels import amx_emulator
from helpers.kernels.linear_driver import Extra, panel_sizes, run_linear
from helpers.kernels.weight_formats import in_blocks, random_weights
from helpers.models.tiny_checkpoints import save_tiny_checkpoint
from helpers.runners.paged_driver import PagedDriver
from kvboost_edge.backends.cpu import CPUBackend
from kvboost_edge.kernels.linear import amx_choice
from kvboost_edge.kernels.linear.panel import MATRIX_FINE_TOKENS, MATRIX_TOKENS
from kvboost_edge.runners.native import runner as native

# Linux shows the flags on processors whose tiles it grants. Without a request for them, some of the
# instructions would run and others trap.
EMULATED = not binding.get_host_cpu_features().get("amx-int8", False)


def matrices(*kinds: str) -> dict[str, Any]:
    """Assert that results have the bits of AVX512-VNNI, with one plane and two, numbers of tokens
    and tiles that leave a remainder, and non-finite tokens.
    """
    rng = np.random.default_rng(0)
    for kind in kinds:
        for tokens, rows, inputs in ((32, 16, 32), (33, 50, 100), (79, 130, 224)):
            inputs = in_blocks(kind, inputs)
            x = rng.standard_normal((tokens, inputs)).astype(np.float32)
            x[:, :32] = rng.choice([-1, 1], (tokens, 32))
            x[3, 5] = np.inf
            x[9, 6] = -np.inf
            x[12, 1] = np.nan
            x[20] = -0.0
            packed = random_weights(kind, rows, inputs)
            bias, before = (
                rng.standard_normal(shape).astype(np.float32) for shape in (rows, (tokens, rows))
            )
            for fine in (False, True):
                sizes = panel_sizes(tokens, Extra(fine=fine, matrix=1))
                assert sizes[0] == (MATRIX_FINE_TOKENS if fine else MATRIX_TOKENS), sizes
                for extra in (Extra(fine=fine), Extra(bias, before, 0.5, fine=fine, threads=2)):
                    expected, _ = run_linear(kind, x, packed, rows, extra)
                    out, _ = run_linear(kind, x, packed, rows, extra._replace(matrix=1))
                    np.testing.assert_array_equal(
                        out, expected, err_msg=f"{kind} {tokens, rows, inputs} {extra}"
                    )
    return {}


# Sizes for which the gated layer is one operation, or three.
INNER_SIZES = {"int4": 96, "int8": 1096}


def models(*formats: str) -> dict[str, Any]:
    """Assert that a tiny model's logits are equal in one pass without AMX, in one pass with it, on
    two threads, and in chunks that split its panels.
    """
    prompt = np.random.default_rng(1).integers(0, 256, 90).tolist()
    for weights in formats:
        with tempfile.TemporaryDirectory() as directory:
            save_tiny_checkpoint(
                "qwen2",
                Path(directory),
                hidden_size=96,
                intermediate_size=INNER_SIZES[weights],
                num_hidden_layers=2,
            )
            logits = []
            for matrix, threads, chunk in ((0, 1, 90), (1, 1, 90), (1, 2, 90), (1, 2, 41)):
                native.amx_choice = lambda used=matrix: amx_choice.AmxChoice(bool(used), "")
                one = native.NativeRunner.from_dir(directory, weights=weights, num_threads=threads)
                driver = PagedDriver(one, CPUBackend(one.info.kv_spec, 64, num_threads=threads))
                before = amx_emulator.counts()["tdpbssd"]
                logits.append(driver.prefill(driver.open(prompt), chunk))
                assert (amx_emulator.counts()["tdpbssd"] > before) == (bool(matrix) and EMULATED)
                one.close()
            for other in logits[1:]:
                np.testing.assert_array_equal(other, logits[0])
    return {}


def choice() -> dict[str, Any]:
    """Return the decision when tiles are refused, timed, reported as fast, and wrong by one bit."""
    decide = amx_choice.amx_choice
    found = {}

    def decided(name: str) -> None:
        decide.cache_clear()
        before = amx_emulator.counts()["tdpbssd"]
        one = decide()
        found[name] = {
            "used": one.used,
            "reason": one.reason,
            "tiles": amx_emulator.counts()["tdpbssd"] - before,
        }

    amx_choice._ask_for_tiles = lambda: "no tiles"
    decided("refused")
    amx_choice._ask_for_tiles = lambda: ""
    decided("timed")
    seconds = amx_choice._seconds
    result = amx_choice._Trial.result
    amx_choice._seconds = lambda trial: 1e-5 if trial._function is amx_choice._amx_trial else 2e-5
    decided("fast")
    amx_choice._seconds = seconds

    def wrong_result(trial: Any) -> Any:
        out = result(trial)
        if trial._function is amx_choice._amx_trial:
            out.view(np.uint32)[7, 3] ^= 1
        return out

    amx_choice._Trial.result = wrong_result
    decided("wrong")
    return found


def main() -> None:
    if EMULATED:
        amx_emulator.install()
    else:
        assert amx_choice._ask_for_tiles() == ""
    checks: dict[str, Callable[..., dict[str, Any]]]
    checks = {"matrices": matrices, "models": models, "choice": choice}
    found = checks[sys.argv[1]](*sys.argv[2:])
    print(json.dumps(found | {"emulated": EMULATED, "instructions": amx_emulator.counts()}))


if __name__ == "__main__":
    main()
