"""Compilation of a model: exactly the kernels of its weights, layers and cache, none of them in the
process that uses them.
"""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from helpers.kernels.own_compilations import LIST_OWN
from helpers.models.tiny_checkpoints import save_tiny_checkpoint
from helpers.models.tiny_models import save_tiny_model
from kvboost_edge.errors import ConfigError
from kvboost_edge.kernels.attention.storage import copy_entry
from kvboost_edge.kernels.linear.weight_formats import FORMAT_OF, FORMATS, MAX_KINDS
from kvboost_edge.kernels.linear.weights import fit_entries, floats_entry
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.kernels.program.entries import entries_of, pass_entries
from kvboost_edge.models.config.spec import describe_model
from kvboost_edge.runners.native.program import possible_operations
from kvboost_edge.runners.native.runner import NativeRunner

PLAIN = lt.OPERATIONS[lt.K_PROGRAM]
APART = {
    "qwen3_moe": {lt.K_EXPERTS},
    "lfm2": {lt.K_CONV, lt.K_TAILS},
    "qwen3_5_moe_text": {lt.K_SCAN, lt.K_TAILS, lt.K_EXPERTS},
}
RUN = (
    LIST_OWN
    + """
import json, sys
from kvboost_edge import CPUPagedEngine
options = {"weights": sys.argv[1], "kv_cache_bits": int(sys.argv[2]), "num_blocks": 64, "num_threads": 2}
# KVBOOST_EDGE_CACHE is empty: weights are packed.
with CPUPagedEngine.from_pretrained("kvboost-edge/demo", speculation="off", **options) as engine:
    engine.generate_batch(["one two three four five six " * 9, "one two"], max_new_tokens=20, ignore_eos=True)
from kvboost_edge.kernels.entry import _ENTRIES
used = [name for name, entry in _ENTRIES.items() if entry.kernel.dispatcher.overloads]
print(json.dumps([own, used]))
"""
)


@pytest.mark.parametrize(("weights", "bits"), [("int8", 16), ("int4-asym", 8), ("f32", 16)])
@pytest.mark.some(3)
def test_a_run_uses_only_kernels_compiled_ahead(weights, bits, tmp_path):
    command = [sys.executable, "-c", RUN, weights, str(bits)]
    environment = {
        **os.environ,
        "KVBOOST_EDGE_CACHE": str(tmp_path),
        "KVBOOST_EDGE_KERNELS": "none",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    own, used = json.loads(done.stdout)
    assert own == []
    names = {weights, "int8"} if weights == "int4-asym" else {weights}
    kinds = {FORMATS[name].kind for name in names}
    wanted = {entry.name for entry in pass_entries(kinds, PLAIN, quantized=bits != 16)}
    packing = {fit_entries.get(name, floats_entry).name for name in names}
    assert (
        set(used) == wanted - {copy_entry.name} | packing
    )  # blocks of forked sequences are copied


def test_each_weight_and_kv_format_has_its_own_code():
    plain = {entry.name for entry in pass_entries([], PLAIN, quantized=False)}
    coded = {entry.name for entry in pass_entries([], PLAIN, quantized=True)}
    assert len(plain - coded) == 1
    assert len(coded - plain) == 2
    for kind in FORMAT_OF:
        more = {entry.name for entry in pass_entries([kind, kind], PLAIN, quantized=False)} - plain
        assert len(more) == 1


def test_numbers_of_weight_formats_are_not_indices_of_other_entries():
    assert len(FORMAT_OF) == len(FORMATS)
    assert 0 <= min(FORMAT_OF) <= max(FORMAT_OF) < MAX_KINDS
    others = {lt.K_ATTEND, lt.K_CLOSE, *lt.OPERATIONS} - {lt.K_PROGRAM}
    assert MAX_KINDS <= min(others) <= max(others) < lt.NUM_KERNELS


@pytest.mark.parametrize("name", APART)
def test_rare_operations_have_separate_entries(name, tmp_path):
    """The operations predicted before weights are packed are those of the program."""
    runner = NativeRunner.from_dir(save_tiny_model(name, tmp_path), weights="int8")
    possible = possible_operations(runner._spec)
    assert (
        set(entries_of(possible))
        == set(entries_of(runner._program.kinds))
        == {lt.K_PROGRAM, *APART[name]}
    )
    assert runner._program.kinds <= set(possible)
    plain, own = (pass_entries([], operations, quantized=False) for operations in (PLAIN, possible))
    assert len(set(own) - set(plain)) == len(APART[name])
    runner.close()


def test_each_operation_has_one_entry():
    kinds = {kind for name, kind in vars(lt).items() if name.endswith("Op")}
    known = [kind for knows in lt.OPERATIONS.values() for kind in knows]
    assert len(known) == len(kinds)
    assert set(known) == kinds
    assert [entries_of([kind]) for kind in known] == [[entry] for entry in lt.ENTRY_OF.tolist()]


def test_operations_encode_their_fields_in_order():
    rows = lt.BufferRows(3, 64, 16)
    norm = lt.NormOp(rows, lt.BufferRows(4, 96), 48, 1 << 40, 1e-6, lt.PanelTarget(5, 6, 1))
    cap = lt.CapOp(rows, 7, 30.0)
    table = lt.table_of([norm, cap])
    codes = [kind for knows in lt.OPERATIONS.values() for kind in knows]
    assert table[:, 0].tolist() == [codes.index(lt.NormOp), codes.index(lt.CapOp)]
    assert table[0, 1:9].tolist() == [3, 64, 16, 4, 96, 0, 48, 1 << 40]
    assert table[0, 10:].tolist() == [5, 6, 1] + [0] * (lt.OP_NUMBERS - 13)
    floats = table.view(np.float32).reshape(2, -1, 2)[:, :, 0]
    assert floats[0, 9] == np.float32(1e-6)
    assert floats[1, 5] == 30.0


def test_a_program_with_an_unknown_operation_is_refused(tmp_path, monkeypatch):
    model = save_tiny_checkpoint("llama", tmp_path)
    known = [operation for operation in PLAIN if operation is not lt.GatedOp]
    monkeypatch.setitem(lt.OPERATIONS, lt.K_PROGRAM, known)
    assert lt.GatedOp not in possible_operations(
        describe_model(json.loads((model / "config.json").read_text()))
    )
    with pytest.raises(ConfigError, match="no entry runs the program operation GatedOp"):
        NativeRunner.from_dir(model, weights="int8")
