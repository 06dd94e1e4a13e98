"""Compiled attention over quantized blocks against the specification, which takes the same rounding
steps.
"""

import os
import subprocess
import sys

import numpy as np
import pytest
from llvmlite import binding

from helpers.kernels.paged_cases import make_case
from helpers.kernels.quantized_kv_cases import (
    before_new,
    form_and_digest,
    make_backend,
    random_passes,
    run,
    run_all,
    whole,
    write,
)
from kvboost_edge.backends.base import AttentionParams
from kvboost_edge.kernels.quantized_kv.code_layout import BIT_PAIRS

OPTIONS = (
    AttentionParams(0.3),
    AttentionParams(0.2, window=70, sinks=np.arange(4, dtype=np.float32)),
    AttentionParams(0.15, softcap=4.0),
)


def some_case(seed, dim, size, per_group):
    lengths = ((1, 30), (3, 600), (20, 81), (17, 17))
    rng = np.random.default_rng([seed, dim])
    return make_case(
        rng, lengths, kv_heads=4 // per_group, per_group=per_group, dim=dim, block_size=size
    )


def attend(name, case, bits, params, threads=1):
    backend = make_backend(name, case, bits, threads=threads)
    write(backend, case, before_new(case))
    try:
        return run(backend, case, case.spans, params)
    finally:
        backend.close()


@pytest.mark.parametrize("bits", BIT_PAIRS, ids=str)
@pytest.mark.parametrize(
    ("dim", "size", "per_group"),
    [(16, 16, 1), (24, 32, 4), (64, 16, 2), (80, 64, 4), (128, 16, 4), (256, 48, 2)],
)
@pytest.mark.some(3)
def test_quantized_attention_equals_the_reference(dim, size, per_group, bits):
    case = some_case(0, dim, size, per_group)
    params = OPTIONS[(dim // 8 + bits[0] + bits[1] // 4) % 3]._replace(softmax_scale=dim**-0.5)
    mine, plain = (attend(name, case, bits, params) for name in ("cpu", "reference"))
    for half, other in zip(mine, plain, strict=True):
        np.testing.assert_allclose(half, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bits", BIT_PAIRS, ids=str)
def test_threads_batches_and_chunks_change_no_bit(bits):
    """Partitions of a long sequence are distributed over the threads and merged in order."""
    rng = np.random.default_rng(5)
    case = make_case(
        rng, ((1, 1600), (40, 700), (3, 90)), kv_heads=2, per_group=7, dim=64, block_size=16
    )
    params = AttentionParams(0.125, window=900)
    wanted = None
    for threads, passes in (
        (1, [whole(case)]),
        (2, [before_new(case), case.spans]),
        (3, random_passes(rng, case, 200)),
        (2, [[span] for span in whole(case)]),
    ):
        backend = make_backend("cpu", case, bits, threads=threads)
        got = run_all(backend, case, passes, params)
        backend.close()
        # All schedules compute the last row. Schedules that compute all rows are compared in full.
        tails = [tuple(array[-1:] for array in pair) for pair in got]
        if wanted is None:
            wanted = got
        for mine, plain in zip(tails, wanted, strict=True):
            for half, other in zip(mine, plain, strict=True):
                np.testing.assert_array_equal(half, other[-1:])
        for mine, plain in zip(got, wanted, strict=True):
            for half, other in zip(mine, plain, strict=True):
                np.testing.assert_array_equal(half, other[-len(half) :])


def test_large_key_biases_keep_accuracy():
    """Keys are like Qwen2's: a few channels are 300 times larger and constant over the text. The
    scores of the rest must stay accurate.
    """
    case = some_case(1, 64, 16, 2)
    bias = np.zeros(64, np.float32)
    bias[[28, 31, 60, 63]] = [300, -250, 280, 310]
    biased = case.__class__(**{**case.__dict__, "keys": [keys + bias for keys in case.keys]})
    params = AttentionParams(0.125)
    plain, _ = attend("cpu", case, (8, 8), params)
    # A constant added to every key changes no softmax. The remaining difference is the float16
    # rounding of the biased channels.
    queries = [rows.copy() for rows in case.queries]
    for rows in queries:
        rows[:, :, [28, 31, 60, 63]] *= 0.1
    exact = case.__class__(**{**case.__dict__, "queries": queries})
    biased = biased.__class__(**{**biased.__dict__, "queries": queries})
    plain, _ = attend("cpu", exact, (8, 8), params)
    got, _ = attend("cpu", biased, (8, 8), params)
    assert np.linalg.norm(got - plain) <= 0.02 * np.linalg.norm(plain)


@pytest.mark.full
def test_the_plain_variant_gives_the_same_bits():
    """The plain variant differs most from the others; test_code_dot.py covers the sums of all
    variants.
    """
    without = ("avx512", "avx10", "evex512", "amx", "avxvnni", "dotprod", "i8mm")
    flags = binding.get_host_cpu_features().items()
    plain = ",".join(
        ("+" if on and not name.startswith(without) else "-") + name for name, on in flags
    )
    program = (
        "from helpers.kernels import quantized_kv_cases as cases; print(*cases.form_and_digest())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        | {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": plain},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["plain", form_and_digest()[1]]
