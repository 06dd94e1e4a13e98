"""Every form of the integer dot product gives the same bits: each is compiled in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from llvmlite import binding

PROGRAM = """
import hashlib
import numpy as np
from test_linear_kernels import _data, _linear
from kvboost_edge.kernels.linear_dot import dot_form
digest = hashlib.sha256()
for kind in ("int8", "int4"):
    for shape in ((1, 50, 100), (15, 33, 64)):
        digest.update(_linear(kind, *_data(*shape))[0].tobytes())
print(dot_form(), digest.hexdigest())
"""
_VNNI256 = "avxvnni"


def _features(form: str) -> str:
    """Feature flags of this machine without what `form` does not have."""
    flags = []
    for name, present in binding.get_host_cpu_features().items():
        wide = name.startswith(("avx512", "avx10", "evex512", "amx"))
        keep = present and not wide and (name != _VNNI256 or form == "vnni256")
        flags.append(("+" if keep else "-") + name)
    return ",".join(flags)


def _run(form: str) -> list[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
    if form != "host":
        environment |= {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": _features(form)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


FORMS = ["plain", *(["vnni256"] if binding.get_host_cpu_features().get(_VNNI256) else [])]


@pytest.fixture(scope="module")
def host_digest() -> str:
    return _run("host")[1]


@pytest.mark.parametrize("form", FORMS)
def test_same_bits_as_the_hosts_own_form(form: str, host_digest: str) -> None:
    name, digest = _run(form)
    assert name == form
    assert digest == host_digest
