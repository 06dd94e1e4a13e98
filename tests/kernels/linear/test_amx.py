"""The kernels for Intel's AMX, in a process compiled for it, on emulated tile registers unless the
processor has them.
"""

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
from llvmlite import binding

from helpers.kernels.tile_assembly import tile_assembly
from helpers.kernels.weight_formats import INTEGERS
from helpers.pairwise import each_once
from kvboost_edge.kernels.integers import dot_form
from kvboost_edge.kernels.linear import amx as linear_amx
from kvboost_edge.kernels.linear.weight_formats import INT_KINDS

pytestmark = pytest.mark.skipif(
    dot_form() != "vnni512" or platform.system() != "Linux",
    reason="the kernels for AMX are used beside those for AVX512-VNNI, and emulated on Linux",
)
PROGRAM = Path(__file__).with_name("amx_checks.py")


def _check(*words):
    features = {**binding.get_host_cpu_features(), "amx-tile": True, "amx-int8": True}
    flags = ",".join(("+" if present else "-") + flag for flag, present in features.items())
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment |= {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": flags}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *words],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


# In `make test` only test_every_form.py runs these tiles: compiling them here takes half a minute.
@pytest.mark.parametrize(
    "words", [("matrices", *INTEGERS), ("models", "int4"), ("models", "int8")], ids=" ".join
)
@pytest.mark.full
def test_amx_gives_the_same_bits(words):
    """The program compares the results. The test checks that tiles were used and released."""
    found = _check(*words)
    ran = found["instructions"]
    assert (ran["tdpbssd"] > 1000) == found["emulated"]
    assert ran["tileloadd"] == ran["tilestored"] == ran["tilezero"] == ran["tdpbssd"]
    assert ran["ldtilecfg"] == ran["tilerelease"]


@pytest.mark.full
def test_amx_is_used_only_if_a_trial_is_faster():
    """Emulated tiles are far slower than AVX512-VNNI. The outcome on a real processor depends on
    the trial.
    """
    found = _check("choice")
    emulated = found["emulated"]
    once = 2 * 28 * 6 * 4 * int(emulated)  # both kinds: groups, panels, multiplications
    assert found["refused"] == {"used": False, "reason": "no tiles", "tiles": 0}
    rates = re.fullmatch(
        r"(slower on this machine: )?\d+\.\d\d TOPS per thread, AVX512-VNNI \d+\.\d\d, bit-identical",
        found["timed"]["reason"],
    )
    assert rates is not None
    assert found["timed"]["used"] == (rates[1] is None)
    assert not (emulated and found["timed"]["used"])
    assert found["timed"]["tiles"] == once + 10 * 8 * once // 2
    # 11,010,048 operations in 10 us, and in 20.
    reason = "1.10 TOPS per thread, AVX512-VNNI 0.55, bit-identical"
    assert found["fast"] == {"used": True, "reason": reason, "tiles": once}
    reason = "its results differ from AVX512-VNNI on this machine"
    assert found["wrong"] == {"used": False, "reason": reason, "tiles": once // 2}


def _assembly(kind, fine, monkeypatch):
    """Return the microkernel compiled for a processor with AMX."""
    monkeypatch.setattr(linear_amx, "MATRIX_TOKENS", 32)
    monkeypatch.setattr(linear_amx, "MATRIX_FINE_TOKENS", 16)
    tiles = linear_amx.AmxTiles(kind, fine)
    return tile_assembly(tiles, "x86_64-unknown-linux-gnu", "sapphirerapids", optimize=True)


@pytest.mark.parametrize(("kind", "fine"), each_once(INT_KINDS, (False, True)))
@pytest.mark.some(3)
def test_a_group_takes_four_amx_multiplications(kind, fine, monkeypatch):
    """The first group is compiled separately from those in the loop. The scratch memory is not
    cleared at every entry.
    """
    assembly = _assembly(kind, fine, monkeypatch)
    for instruction in ("tdpbssd", "tilezero", "tilestored", "tileloadd"):
        assert assembly.count(instruction) == 2 * 4
    assert "zmm" in assembly
    assert "memset" not in assembly
