"""Libraries of compiled kernels: built by child processes, loaded without Numba."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvboost_edge.errors import BackendUnavailable, ConfigError
from kvboost_edge.kernels import build, library, team
from kvboost_edge.kernels.attention import storage
from kvboost_edge.kernels.bitmask import mask_logits_entry
from kvboost_edge.kernels.build import build_library
from kvboost_edge.kernels.linear import weights
from kvboost_edge.kernels.signature import function_at
from kvboost_edge.kernels.targets import TARGETS, usable_targets

pytestmark = pytest.mark.skipif(not usable_targets(), reason="no class for this machine")

ENTRIES = {
    entry.name: entry
    for entry in (
        *team.team_entries,
        storage.copy_entry,
        mask_logits_entry,
        weights.floats_entry,
        weights.codes_entry,
    )
}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with a library of a few kernels for this machine."""
    folder = tmp_path_factory.mktemp("libraries")
    told: list[tuple[int, int]] = []
    path = build_library(
        usable_targets()[0],
        folder,
        names=list(ENTRIES),
        num_processes=2,
        tell=lambda done, total: told.append((done, total)),
    )
    assert told == [(done, len(ENTRIES)) for done in range(len(ENTRIES) + 1)]
    assert sorted(path.name for path in folder.iterdir()) == [path.stem + ".json", path.name]
    return folder


@pytest.fixture
def folder(built, tmp_path):
    """A copy of the folder that a test may change."""
    return shutil.copytree(built, tmp_path / "libraries")


@pytest.fixture
def chosen(monkeypatch):
    """Function that chooses a library again, with KVBOOST_EDGE_KERNELS set."""
    library.library_choice()  # caches this process's choice, which other tests use

    def choose(folder):
        monkeypatch.setenv("KVBOOST_EDGE_KERNELS", str(folder))
        for name in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"):
            monkeypatch.delenv(name, raising=False)
        return library.library_choice.__wrapped__()

    return choose


def arguments():
    """Return new arguments for each kernel."""
    rng = np.random.default_rng(3)
    logits = rng.standard_normal(200).astype(np.float32)
    words = rng.integers(-(2**31), 2**31, 7).astype(np.int32)
    rows = rng.standard_normal((20, 40)).astype(np.float32)
    codes = rng.integers(0, 2**32, (32, 16), dtype=np.uint32)
    return {
        "_wait_for": (np.array([3, 9], dtype=np.int64), 1, 9, 4),
        "_look_out": (np.array([5], dtype=np.int64), 4, 10),
        "_copy": (
            rng.integers(0, 256, (6, 33), dtype=np.uint8),
            np.array([[0, 3], [3, 5]], dtype=np.int64),
        ),
        "mask_logits": (words, logits, np.zeros_like(logits)),
        "_store_floats": (rows, np.zeros(32 * 40 * 2, dtype=np.uint8), 2),
        "_store_words": (
            codes,
            np.zeros(32 * 16 // 2, dtype=np.uint32),
            4,
            np.zeros(8 * 16, dtype=np.uint32),
        ),
    }


@pytest.mark.parametrize("name", ENTRIES)
def test_library_code_gives_the_same_bits(name, built, chosen):
    entry = ENTRIES[name]
    code = chosen(built).library
    ours, theirs = (arguments()[name.partition(":")[2]] for _ in range(2))
    call = function_at(code.address_of(name), name, entry.kinds, entry.returns)
    matches, result = call(theirs)
    assert matches
    assert result == entry.kernel.dispatcher(*ours)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_missing_kernel_has_no_address(built, chosen):
    code = chosen(built).library
    assert code.address_of("kvboost_edge.kernels.team:nothing") == 0
    assert all(code.address_of(name) for name in ENTRIES)


USE = """
import sys
from kvboost_edge.kernels import build, library, team
from kvboost_edge.kernels.attention.storage import copy_entry, _copy
import numpy as np
assert library.kernel_library() is not None, library.library_choice()
pool = np.arange(8, dtype=np.uint8).reshape(2, 4)
_copy(pool, np.array([[0, 1]]))
assert pool[1].tolist() == [0, 1, 2, 3]
kernels = team.KernelTeam(2)
assert copy_entry.is_ready and copy_entry.address
print([name for name in ("numba", "llvmlite.binding") if name in sys.modules])
from kvboost_edge.kernels.vectors import KIND_F32
from kvboost_edge.kernels.attention.storage import merge_state
merge_state(*[np.zeros((1, 1, 4), np.float32), np.zeros((1, 1), np.float32)] * 2)
print("numba" in sys.modules)
"""


def test_numba_is_imported_only_for_missing_kernels(built):
    environment = os.environ | {"KVBOOST_EDGE_KERNELS": str(built)}
    done = subprocess.run(
        [sys.executable, "-c", USE], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["[]", "True"]


def edited(folder, **values: Any):
    path = next(folder.glob("*.json"))
    path.write_text(json.dumps(json.loads(path.read_bytes()) | values))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"format": 0}, "broken or of another version"),
        ({"entries": "none"}, "broken or of another version"),
        ({"more": 1}, "broken or of another version"),
        ({"target": "x86-64-other"}, "it is for x86-64-other"),
        ({"features": "+avx2"}, "other instructions"),
        ({"cpu": "another"}, "other instructions"),
        ({"platform": "darwin"}, "it is for darwin"),
        ({"sources": "0" * 64}, "other sources"),
        ({"versions": {"numba": "0.1", "llvmlite": "0.2"}}, "built with numba 0.1, but"),
        ({"versions": {}}, "built with numba None, but"),
        ({"sha256": "0" * 64}, "differs from its description"),
    ],
)
def test_a_mismatched_library_is_refused_with_a_reason(values, reason, folder, chosen, caplog):
    edited(folder, **values)
    choice = chosen(folder)
    assert choice.library is None
    assert reason in choice.reason
    assert "kernels are compiled instead" in caplog.text


def test_broken_files_are_refused(folder, chosen):
    code = next(folder.glob("*.so"))
    code.write_bytes(code.read_bytes()[:-100])
    assert "differs from its description" in chosen(folder).reason
    code.unlink()
    assert "cannot be read" in chosen(folder).reason
    next(folder.glob("*.json")).write_text("{")
    assert "cannot be read" in chosen(folder).reason


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no permissions")
@pytest.mark.parametrize("mode", [0o777, 0o775])
@pytest.mark.parametrize("which", ["folder", "file"])
def test_files_of_other_users_are_refused(which, mode, folder, chosen):
    (folder if which == "folder" else next(folder.glob("*.so"))).chmod(mode)
    assert "can be written by other users" in chosen(folder).reason


def test_other_settings_disable_the_library(built, chosen, monkeypatch):
    assert chosen("none").reason == "KVBOOST_EDGE_KERNELS=none"
    monkeypatch.setattr(library, "usable_targets", lambda: ())
    assert "no class" in chosen(built).reason


@pytest.mark.parametrize("name", ["NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"])
def test_compiling_for_another_processor_disables_the_library(name, built, monkeypatch):
    monkeypatch.setenv("KVBOOST_EDGE_KERNELS", str(built))
    monkeypatch.setenv(name, "generic")
    assert library.library_choice.__wrapped__().reason == f"{name} is set"


def test_a_folder_without_a_library_is_logged_once(tmp_path, chosen, caplog):
    assert "there is no library for" in chosen(tmp_path).reason
    assert f"KVBOOST_EDGE_KERNELS={tmp_path} has no library" in caplog.text


@pytest.mark.parametrize("setting", [None, "", "none"])
def test_the_library_folder_defaults_to_the_cache(setting, monkeypatch, tmp_path):
    monkeypatch.setenv("KVBOOST_EDGE_CACHE", str(tmp_path))
    monkeypatch.delenv("KVBOOST_EDGE_KERNELS")
    if setting is not None:
        monkeypatch.setenv("KVBOOST_EDGE_KERNELS", setting)
    assert library.library_folder() == tmp_path / "kernels"


def test_a_slower_target_does_not_replace_a_faster_one(built, chosen, monkeypatch):
    targets = usable_targets()
    faster = targets[0]._replace(name="x86-64-faster")
    monkeypatch.setattr(library, "usable_targets", lambda: (faster, *targets))
    assert chosen(built).reason == "there is no library for x86-64-faster"


def test_a_missing_linker_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("CC", "nowhere-cc")
    with pytest.raises(BackendUnavailable, match="no C compiler was found"):
        build_library(TARGETS[0], tmp_path, names=[])


def test_no_linker_is_imported_from_the_current_directory(tmp_path, monkeypatch):
    (tmp_path / "ziglang.py").write_text("print('from the current directory')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    done = subprocess.run(build._linker(), capture_output=True, text=True, check=False)
    assert done.stdout == ""


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    place = tmp_path / "file"
    place.write_text("")
    with pytest.raises(ConfigError, match="cannot be written to"):
        build_library(usable_targets()[0], place, names=[])


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no permissions")
def test_a_searched_folder_of_other_users_is_refused_before_the_build(tmp_path, monkeypatch):
    monkeypatch.setenv("KVBOOST_EDGE_KERNELS", str(tmp_path))
    tmp_path.chmod(0o775)
    told = []
    monkeypatch.chdir(tmp_path)
    for name in (tmp_path, Path()):
        with pytest.raises(ConfigError, match=re.escape(f"chmod go-w {name}`")):
            build_library(usable_targets()[0], name, tell=lambda *counts: told.append(counts))
    assert told == []


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no permissions")
@pytest.mark.parametrize("reason", ["mode", "owner"])
def test_a_library_may_be_built_for_elsewhere_in_a_folder_of_other_users(
    reason, tmp_path, chosen, caplog, monkeypatch
):
    place = tmp_path / "libraries"
    place.mkdir(mode=0o755)
    names = [team.team_entries[0].name]
    with monkeypatch.context() as building:
        if reason == "mode":
            place.chmod(0o775)
        elif os.getuid() == 0:
            os.chown(place, 12345, -1)
        else:
            building.setattr(os, "getuid", lambda: place.stat().st_uid + 1)
        for _ in range(2):
            build_library(usable_targets()[0], place, names=names, num_processes=1)
        assert caplog.text.count(f"{place} can be written by other users") == 1
        assert "can be written by other users" in chosen(place).reason
    copy = shutil.copytree(place, tmp_path / "copy")
    copy.chmod(0o755)
    assert chosen(copy).library is not None


def test_a_child_that_ends_at_its_start_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_MODULE", "kvboost_edge.kernels.nowhere")
    with pytest.raises(BackendUnavailable, match=r"compiled kernels exited with 1.*nowhere"):
        build_library(usable_targets()[0], tmp_path, num_processes=1)


def test_an_unknown_kernel_ends_the_build(tmp_path):
    with pytest.raises(BackendUnavailable, match="is not the name of a kernel"):
        build_library(
            usable_targets()[0], tmp_path, names=["kvboost_edge.kernels.team:no"], num_processes=1
        )
    assert list(tmp_path.iterdir()) == []


def test_builds_are_reproducible(tmp_path):
    names = [entry.name for entry in team.team_entries]
    first, second = (
        build_library(usable_targets()[0], tmp_path / name, names=names, num_processes=1)
        for name in "ab"
    )
    assert first.read_bytes() == second.read_bytes()
    assert first.with_suffix(".json").read_bytes() == second.with_suffix(".json").read_bytes()
