"""Stored blocks are valid only while the same tokens give the same bits."""

import hashlib
import os
import subprocess
import sys

import pytest

from kvboost_edge import CPUPagedEngine
from kvboost_edge.kernels.linear.weight_formats import FORMATS
from kvboost_edge.runners.native.runner import NUMERICS_VERSION, describe_numerics

TOKENS = [(7 * i * i + 3 * i) % 250 for i in range(96)]
# By version and cache bits. The digests are the same on every processor.
BITS = {(3, 16): "4d327d336415dfea", (3, 8): "00057342d0b0e30b", (3, 4): "478100a921ef6b92"}
# Angles as the runner computes them, for usual bases and head sizes, up to long contexts.
TABLES = """
import hashlib
import numpy as np
from kvboost_edge.kernels.attention.rope import RopeTable
from kvboost_edge.models.config.rope_kinds import rope_kind

digest = hashlib.sha256()
for theta, dim in ((1e4, 128), (5e5, 64), (1e6, 128), (150000, 64), (1e6, 96)):
    for kind in ("default", "proportional"):
        rope = rope_kind({"rope_type": kind, "rope_theta": theta, "partial_rotary_factor": 0.5}, dim, 4096)
        table = RopeTable(np.array(rope.frequencies, np.float32), rope.factor)
        table.cover(132_000)
        digest.update(table.cos[::97].tobytes() + table.sin[::97].tobytes())
print(digest.hexdigest()[:16])
"""
TABLES_DIGEST = "9a1ccca1013db54b"


@pytest.mark.parametrize("kv_bits", [16, 8, 4])
def test_bits_equal_those_of_this_numerics_version(kv_bits):
    """A failure means that a change of kernels or program changed the results. Raise
    NUMERICS_VERSION and record the new bits here. Otherwise blocks on disk and in Redis would mix
    with unequal ones.
    """
    with CPUPagedEngine.from_pretrained(
        "kvboost-edge/demo", num_blocks=8, kv_cache_bits=kv_bits, weights="int8"
    ) as engine:
        logits = engine.logits(TOKENS)
        stored = engine._parts.backend.read_blocks(range(6))
    found = hashlib.sha256(logits.tobytes() + stored.tobytes()).hexdigest()[:16]
    assert found == BITS[NUMERICS_VERSION, kv_bits]


def test_only_models_with_scaled_codes_depend_on_their_version():
    kinds = {name: form.kind for name, form in FORMATS.items()}
    plain = describe_numerics([kinds["int4"], kinds["q6k"]])
    found = [describe_numerics([kinds["int4"], kinds[name]]) for name in ("q2k", "q3k")]
    assert found == [f"{plain} scaled codes 2"] * 2


@pytest.mark.parametrize(
    "wide",
    [
        pytest.param(True, marks=pytest.mark.full, id="NumPy as it is"),
        pytest.param(False, id="NumPy without what it need not have"),
    ],
)
def test_rope_tables_do_not_depend_on_the_processor(wide):
    """NumPy's own float32 functions give other bits on processors with AVX-512, where a cache may
    come from.
    """
    from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

    off = "" if wide else ",".join(name for name in __cpu_dispatch__ if __cpu_features__[name])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "NPY_DISABLE_CPU_FEATURES": off,
    }
    done = subprocess.run(
        [sys.executable, "-c", TABLES],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        check=False,
    )
    assert done.stdout.split() == [TABLES_DIGEST], done.stderr
