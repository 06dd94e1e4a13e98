"""Tests of commands that check non-prefix KV reuse or report on it: reuse-check, warmup and doctor."""

import pytest

from helpers.models.tiny_models import save_tiny_model
from kvboost_edge import CPUPagedEngine
from kvboost_edge.engine.tasks.quality_gate import QualityGate
from kvboost_edge.reuse.quality_verdict import Verdict


def test_a_model_is_tested_once_by_warmup_or_reuse_check(tmp_path, monkeypatch, printed, answered):
    def warmed(*options):
        return " ".join(
            printed("warmup", "-o", "weights=int8", "--kv-cache-bits", "16", *options).out.split()
        )

    monkeypatch.setenv("KVBOOST_EDGE_CACHE", str(tmp_path))
    measured = []
    measure = QualityGate._measure
    monkeypatch.setattr(
        QualityGate, "_measure", lambda *arguments: measured.append(1) or measure(*arguments)
    )
    assert "non-prefix KV reuse" not in warmed()
    assert "non-prefix KV reuse passed its quality test: KL(full || reuse) " in warmed(
        "--mode", "chunk_kv_reuse"
    )
    assert len(measured) == 1
    with CPUPagedEngine.from_pretrained("kvboost-edge/demo", weights="int8") as engine:
        assert engine.check_reuse().passed
    assert len(measured) == 1, "the stored verdict must be used by the engine"
    checked = answered("reuse-check", "-o", "weights=int8", "--kv-cache-bits", "16")
    assert checked["passed"] is True
    assert 0 < checked["kl_reuse"] < checked["kl_order"]
    assert len(measured) == 1, "reuse-check must show the stored verdict"
    off = warmed("--mode", "chunk_kv_reuse", "-o", "reuse_gate=off")
    assert "not tested: reuse_gate='off'" in off
    assert len(measured) == 1


def test_reuse_check_exits_with_1_for_a_refused_model(tmp_path, monkeypatch, printed, answered):
    monkeypatch.setenv("KVBOOST_EDGE_CACHE", str(tmp_path))
    bad = Verdict(0.5, 0.1, 0.9, 59, 0.8)
    monkeypatch.setattr(QualityGate, "_measure", lambda *arguments: bad)
    assert "non-prefix KV reuse failed its quality test" in printed("reuse-check", code=1).out
    assert answered("reuse-check", "kvboost-edge/demo", code=1)["passed"] is False


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "yes, unless the model fails"),
        (["-o", "reuse_gate=off"], "yes, untested"),
        (["-o", "arithmetic=wide"], "no: with arithmetic='wide'"),
        (["-o", "backend=reference"], "no: the native runner on backend 'reference'"),
        (["-o", "runner=torch", "-o", "backend=torch"], "yes, unless"),
        (["-o", "runner=torch", "-o", "backend=cpu"], "no: the torch runner on backend 'cpu'"),
    ],
    ids=str,
)
def test_doctor_reports_whether_reuse_is_available(options, words, answered):
    model = answered("doctor", "kvboost-edge/demo", *options)["Model kvboost-edge/demo"]
    assert model["chunk_reuse"].startswith(words)


def test_doctor_reports_no_reuse_with_sparse_prefill(tmp_path, answered):
    directory = save_tiny_model("llama", tmp_path, max_position_embeddings=16384)
    model = answered("doctor", directory, "-o", "prefill=sparse")[f"Model {directory}"]
    assert model["chunk_reuse"].startswith("no: an engine with prefill=")


def test_doctor_reports_no_reuse_for_an_unsupported_model(tmp_path, answered):
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}', encoding="utf-8")
    model = answered("doctor", tmp_path, code=1)[f"Model {tmp_path}"]
    assert "problem" in model or model["chunk_reuse"].startswith("no: ")
