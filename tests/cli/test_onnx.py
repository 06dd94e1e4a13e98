"""Tests of `inspect` and `doctor` on folders with ONNX files: contents, chosen runner, and the
reason against others.
"""

from helpers.models.tiny_models import build_tiny_model
from helpers.onnx.blocks import Form
from helpers.onnx.concat import ConcatDecoder
from helpers.onnx.writer import write_onnx
from kvboost_edge.cli.doctor import doctor_report
from kvboost_edge.cli.inspect import model_report
from kvboost_edge.config import EngineConfig
from kvboost_edge.models.checkpoint import Checkpoint


def test_inspect_describes_an_onnx_folder(tmp_path):
    known = write_onnx(build_tiny_model("qwen2"), tmp_path / "known", Form(block=64))
    report = model_report(Checkpoint.open(known), EngineConfig())
    assert report["format"] == "ONNX 4 bit"
    assert (report["runner"], report["weights"], report["architecture"]) == (
        "native",
        "auto",
        "qwen2",
    )
    assert report["weight_dtypes"] == "4 bit in blocks of 64, F32"
    assert report["weight_files"] == "model.onnx, model.onnx.data"
    assert report["layers"] == 3
    other = write_onnx(
        build_tiny_model("qwen2"), tmp_path / "other", Form(concat=True), ConcatDecoder
    )
    report = model_report(Checkpoint.open(other), EngineConfig())
    assert (report["runner"], report["backend"]) == ("onnx", "cpu")
    assert "not the native runner: " in report["runner_reason"]
    assert report["kv_dtype"] == "float32"
    assert report["kv_bytes_per_token"] == 3 * 2 * 2 * 16 * 4


def test_doctor_names_the_onnx_runner_or_the_missing_package(tmp_path, monkeypatch):
    folder = write_onnx(build_tiny_model("llama"), tmp_path / "m", Form(concat=True), ConcatDecoder)
    section = f"Model {folder}"
    report = doctor_report(str(folder), {}, EngineConfig())
    assert report[section]["runner"] == "onnx"
    assert report["Versions"]["onnxruntime"] != "not installed"
    monkeypatch.setattr(
        "kvboost_edge.runners.onnx.select_onnx.importlib.util.find_spec", lambda name: None
    )
    found = doctor_report(str(folder), {}, EngineConfig())[section]
    assert found["runner"] == "none"
    assert "needs onnxruntime, which is not installed" in found["runner_reason"]
    (folder / "model.onnx").write_bytes(b"nothing of the kind")
    assert "model.onnx" in doctor_report(str(folder), {}, EngineConfig())[section]["problem"]
