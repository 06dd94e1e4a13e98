"""What a model compiles: the kernels of its own weights and cache, none of them in the process that uses it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvboost_edge.kernels.attention.storage import copy_entry
from kvboost_edge.kernels.linear.weights import NUMBERS, fit_entry, floats_entry
from kvboost_edge.kernels.program.entries import pass_entries

RUN = """
import json, sys
from numba.core import event
from kvboost_edge import CPUPagedEngine
own = []
class Listener(event.Listener):
    def on_start(self, one):
        own.append(one.data["dispatcher"].__name__)
    def on_end(self, one):
        pass
event.register("numba:compile", Listener())
options = {"weights": sys.argv[1], "kv_cache_bits": int(sys.argv[2]), "num_blocks": 64, "num_threads": 2}
# KVBOOST_EDGE_CACHE is empty: weights are packed.
with CPUPagedEngine.from_pretrained("kvboost-edge/demo", speculation="off", **options) as engine:
    engine.generate_batch(["one two three four five six " * 9, "one two"], max_new_tokens=20, ignore_eos=True)
from kvboost_edge.kernels.entry import _ENTRIES
used = [name for name, entry in _ENTRIES.items() if entry._kernel.overloads]
print(json.dumps([own, used]))
"""


@pytest.mark.parametrize(("weights", "bits"), [("int8", 16), ("int4-asym", 8), ("f32", 16)])
def test_a_run_compiles_nothing_and_uses_what_was_compiled_ahead(weights: str, bits: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUN, weights, str(bits)]
    environment = {**os.environ, "KVBOOST_EDGE_CACHE": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    own, used = json.loads(done.stdout)
    assert own == []
    kinds = {NUMBERS[weights], NUMBERS["int8"]} if weights == "int4-asym" else {NUMBERS[weights]}
    wanted = {entry.name for entry in pass_entries(kinds, quantized=bits != 16)}
    packing = {(floats_entry if weights == "f32" else fit_entry).name}
    assert set(used) == wanted - {copy_entry.name} | packing  # copied are the blocks of sequences that fork


def test_each_kind_of_weights_and_of_cache_has_code_of_its_own() -> None:
    plain = {entry.name for entry in pass_entries([], quantized=False)}
    coded = {entry.name for entry in pass_entries([], quantized=True)}
    assert len(plain - coded) == 1
    assert len(coded - plain) == 2
    for kind in NUMBERS.values():
        more = {entry.name for entry in pass_entries([kind, kind], quantized=False)} - plain
        assert len(more) == 1
