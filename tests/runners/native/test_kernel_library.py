"""A model whose kernels are all loaded from a kernel library."""

import functools
import json
import os
import subprocess
import sys

import pytest

from kvboost_edge.kernels.build import build_library
from kvboost_edge.kernels.linear.amx_choice import trial_entries
from kvboost_edge.kernels.targets import usable_targets

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not usable_targets(), reason="no class for this machine"),
]

# The results, the requested kernels, and the imported modules that are slow to import.
RUN = """
import hashlib, json, sys
from kvboost_edge.kernels import library
from kvboost_edge.kernels.entry import KernelEntry
from kvboost_edge.kernels.targets import TARGETS
library.usable_targets = lambda: [target for target in TARGETS if target.name == sys.argv[2]]
asked = set()
def ready(entry, found=KernelEntry.is_ready.fget):
    asked.add(entry.name)
    return found(entry)
KernelEntry.is_ready = property(ready)
from kvboost_edge import CPUPagedEngine
options = {"num_blocks": 64, "num_threads": 2, "speculation": "on"}
with CPUPagedEngine.from_pretrained("kvboost-edge/demo", **options, **json.loads(sys.argv[1])) as engine:
    prompts = ["one two three four five six " * 9, "one two"]
    results = engine.generate_batch(prompts, max_new_tokens=24, ignore_eos=True)
    logits = engine.logits(list(range(5, 105)))
    numerics = engine.runner_info.numerics
heavy = [name for name in ("numba", "llvmlite.binding", "torch") if name in sys.modules]
tokens = [list(result.output_token_ids) for result in results]
computed = [tokens, hashlib.sha256(logits.tobytes()).hexdigest(), numerics]
print(json.dumps([computed, sorted(asked), heavy]))
"""


OPTIONS = [
    {"weights": "int8"},
    pytest.param({"weights": "int4", "kv_cache_bits": 8}, marks=pytest.mark.full),
]


def run(options, libraries, cache, target=""):
    environment = os.environ | {
        "KVBOOST_EDGE_KERNELS": str(libraries),
        "KVBOOST_EDGE_CACHE": str(cache),
    }
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(options), target],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def compiled_here(tmp_path_factory):
    """Compute with code compiled for this processor, and return results and kernels by options."""

    @functools.cache
    def compute(options):
        here, names, heavy = run(json.loads(options), "none", tmp_path_factory.mktemp("here"))
        assert "numba" in heavy
        return here, names

    return lambda options: compute(json.dumps(options))


@pytest.mark.full
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("target", usable_targets(), ids=lambda target: target.name)
def test_each_target_gives_the_same_bits_without_numba(options, target, compiled_here, tmp_path):
    here, names = compiled_here(options)
    if "+amx-int8" not in target.feature_text:  # such targets have no kernels of the AMX trial
        names = [name for name in names if name not in {entry.name for entry in trial_entries}]
    build_library(target, tmp_path / "libraries", names=names)
    # The first start packs the weights, the second one finds them packed.
    for _ in range(2):
        there, asked, heavy = run(options, tmp_path / "libraries", tmp_path / "there", target.name)
        assert (there, heavy) == (here, [])
        assert set(asked) <= set(names)
