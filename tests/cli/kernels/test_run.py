"""Tests of `kvboost-edge kernels`."""

import json

import pytest

from kvboost_edge.cli.kernels import run as kernels_run
from kvboost_edge.host.processor import CpuIdentity
from kvboost_edge.kernels.targets import TARGETS, targets_of, usable_targets


@pytest.fixture
def built(monkeypatch):
    """List of the requested builds, which compile nothing."""
    found = []

    def build(target, folder, *, num_processes, tell):
        found.append((target.name, folder, num_processes))
        tell(0, 1)
        tell(1, 1)
        path = folder / f"{target.name}.so"
        folder.mkdir(exist_ok=True)
        path.write_bytes(b"code")
        path.with_suffix(".json").write_text(json.dumps({"entries": ["a", "b"]}))
        return path

    monkeypatch.setattr("kvboost_edge.kernels.build.build_library", build)
    return found


@pytest.fixture
def on_intel(monkeypatch):
    """Simulated Intel processor that supports only the target x86-64-avx2."""
    flags = next(target.flags for target in TARGETS if target.name == "x86-64-avx2")
    identity = CpuIdentity("x86_64", flags, ("GenuineIntel", 6))
    monkeypatch.setattr(kernels_run, "cpu_identity", lambda: identity)
    monkeypatch.setattr(kernels_run, "usable_targets", lambda: usable_targets(identity))


@pytest.mark.usefixtures("on_intel")
@pytest.mark.parametrize(
    ("given", "names"),
    [
        ((), ["x86-64-avx2"]),
        (("--target", "x86-64-zen4", "--target", "x86-64-avx2"), ["x86-64-zen4", "x86-64-avx2"]),
        (("--target", "all"), [target.name for target in targets_of("x86_64")]),
    ],
)
def test_build_writes_the_requested_targets(given, names, built, tmp_path, printed):
    out = printed("kernels", "build", *given, "--out", tmp_path / "out", "--jobs", "3").out
    assert built == [(name, tmp_path / "out", 3) for name in names]
    assert all(name in out for name in names)
    assert "2 kernels" in out


@pytest.mark.usefixtures("on_intel")
def test_build_prints_json(built, tmp_path, answered):
    report = answered("kernels", "build", "--out", tmp_path)["built"]
    assert [one["target"] for one in report] == [name for name, _, _ in built]
    assert (report[0]["kernels"], report[0]["bytes"]) == (2, 4)


@pytest.mark.usefixtures("on_intel")
def test_an_unknown_target_is_refused_with_the_names(tmp_path, printed):
    err = printed("kernels", "build", "--target", "sparc", "--out", tmp_path, code=2).err
    assert "'sparc' is not a class of x86_64 processors" in err
    assert "x86-64-avx512-vnni" in err
    assert err.strip().endswith("all")


def test_without_a_matching_target_one_must_be_named(monkeypatch, printed):
    monkeypatch.setattr(kernels_run, "usable_targets", lambda: ())
    monkeypatch.setattr(
        kernels_run, "cpu_identity", lambda: CpuIdentity("x86_64", frozenset(), None)
    )
    assert "choose one with --target" in printed("kernels", "build", code=2).err
    monkeypatch.setattr(
        kernels_run, "cpu_identity", lambda: CpuIdentity("riscv64", frozenset(), None)
    )
    assert "cannot be built on this system (riscv64)" in printed("kernels", "build", code=2).err


@pytest.mark.parametrize("unused", [("--target", "all"), ("--out", "libraries"), ("--jobs", "2")])
def test_status_refuses_options_of_build(unused, printed):
    err = printed("kernels", "status", *unused, code=2).err
    assert unused[0] in err
    assert "has no effect" in err


def test_status_names_the_target_and_the_reason(answered, printed):
    report = answered("kernels", "status")
    assert (report["used"], report["file"], report["kernels"]) == (False, None, 0)
    assert report["reason"] == "KVBOOST_EDGE_KERNELS=none"
    assert "not used" in printed("kernels", "status").out
