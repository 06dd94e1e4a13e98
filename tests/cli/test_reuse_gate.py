"""What `warmup` and `doctor` say of reuse at other positions."""

import pytest

from kvboost_edge import CPUPagedEngine
from kvboost_edge.engine.tasks.quality_gate import QualityGate


def test_warmup_tests_the_model_so_that_no_request_waits_for_it(tmp_path, monkeypatch, printed):
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
    assert "reuse at other positions" not in warmed()
    assert "reuse at other positions passed its test: KL(full || reuse) " in warmed(
        "--mode", "chunk_kv_reuse"
    )
    assert len(measured) == 1
    with CPUPagedEngine.from_pretrained("kvboost-edge/demo", weights="int8") as engine:
        assert engine.check_reuse().passed
    assert len(measured) == 1, "the outcome is kept for the engine that serves"
    off = warmed("--mode", "chunk_kv_reuse", "-o", "reuse_gate=off")
    assert "not tested: reuse_gate='off'" in off
    assert len(measured) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "yes, if the model passes a test"),
        (["-o", "reuse_gate=off"], "yes, untested"),
        (["-o", "backend=reference"], "no: the native runner on backend 'reference'"),
        (["-o", "runner=torch", "-o", "backend=torch"], "yes, if"),
        (["-o", "runner=torch", "-o", "backend=cpu"], "no: the torch runner on backend 'cpu'"),
    ],
    ids=str,
)
def test_doctor_says_whether_there_is_reuse(options, words, answered):
    model = answered("doctor", "kvboost-edge/demo", *options)["Model kvboost-edge/demo"]
    assert model["chunk_reuse"].startswith(words)


def test_doctor_says_so_of_a_model_that_no_runner_takes(tmp_path, answered):
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}', encoding="utf-8")
    model = answered("doctor", tmp_path, code=1)[f"Model {tmp_path}"]
    assert "problem" in model or model["chunk_reuse"].startswith("no: ")
