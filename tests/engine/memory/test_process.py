"""The memory limit of the whole process: measured overhead, the pool from the rest, and refusals."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.models.mtp_heads import save_with_head, write_head_file
from helpers.models.tiny_models import build_tiny_model, save_tiny_model
from helpers.onnx.blocks import Form
from helpers.onnx.concat import ConcatDecoder
from helpers.onnx.writer import write_onnx
from kvboost_edge import CPUPagedEngine
from kvboost_edge.config import EngineConfig
from kvboost_edge.engine import build
from kvboost_edge.engine.memory import check, process
from kvboost_edge.engine.memory.pool_size import planned_pool_bytes
from kvboost_edge.engine.memory.process import Overhead
from kvboost_edge.engine.spec_decode.prompt_lookup import TenantHistory
from kvboost_edge.errors import CapacityError, ConfigError
from kvboost_edge.host.memory import Region

MB = 10**6
DEMO = "kvboost-edge/demo"
linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell the peak")

_FILLED = """
import json, sys
from kvboost_edge import CPUPagedEngine
from kvboost_edge.host.memory import process_peak

options = json.loads(sys.argv[1])
with CPUPagedEngine.from_pretrained("kvboost-edge/demo", **options) as engine:
    num_blocks = engine.paged_stats()["num_blocks"]
    length = engine.runner_info.max_context - 20
    for turn in range(200):
        handles = [
            engine.submit([(7 + turn + 3 * i * (i + one)) % 400 for i in range(length)],
                          max_new_tokens=2)
            for one in range(4)
        ]
        for handle in handles:
            handle.result()
        if engine.paged_stats()["occupied_blocks"] >= num_blocks - 4:
            break
    stats = engine.paged_stats()
print(json.dumps([process_peak(), stats["occupied_blocks"] / num_blocks, stats["pool_bytes"]]))
"""


def _filled(**options):
    done = subprocess.run(
        [sys.executable, "-c", _FILLED, json.dumps(options)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@linux
def test_a_process_stays_within_max_memory_with_a_full_pool():
    """The pool gets what weights and overhead leave. The size that a refusal names is enough to
    start.
    """
    code, _, refused = _filled(max_memory="50MB", max_model_len=2048)
    assert code == 1
    least = int(re.search(r"give at least (\d+)MB", refused)[1])
    bound = (least + 60) * MB
    code, out, error = _filled(max_memory=bound, max_model_len=2048)
    assert code == 0, error
    peak, filled, pool = json.loads(out)
    assert filled > 0.9
    assert peak <= bound
    assert pool > 40 * MB  # of the 60 MB above the minimum


@pytest.fixture
def overhead(monkeypatch):
    """Overhead of 300 MB, regardless of what earlier tests left in this process."""
    fixed = Overhead(200 * MB, 100 * MB)
    monkeypatch.setattr(
        check, "measured_overhead", lambda _, config, *__: fixed if config.max_memory else None
    )
    monkeypatch.setattr(process, "process_rss", lambda: 0)
    return fixed


def test_the_pool_gets_what_weights_and_overhead_leave(overhead):
    sizes = []
    for bound in (400 * MB, 500 * MB):
        with CPUPagedEngine.from_pretrained(DEMO, max_memory=bound, max_num_seqs=64) as engine:
            stats = engine.paged_stats()
            info = engine.runner_info
            history = engine._parts.history_bytes
        sizes.append(stats["pool_bytes"])
        left = bound - 300 * MB - info.weight_bytes
        assert history == left // 16
        assert 0.75 * left < stats["pool_bytes"] < left - history
    assert sizes[1] > sizes[0] + 70 * MB
    with CPUPagedEngine.from_pretrained(DEMO, max_memory=500 * MB) as engine:
        stats = engine.paged_stats()
        assert 16 * stats["num_blocks"] == 16 * engine.runner_info.max_context < sizes[1]


def test_less_than_one_context_is_refused_before_loading(overhead, monkeypatch):
    with CPUPagedEngine.from_pretrained(DEMO, num_blocks=8) as engine:
        info = engine.runner_info
    context = planned_pool_bytes(
        EngineConfig(num_blocks=info.max_context // 16), info.kv_spec, info.max_context, 0
    )
    bound = overhead.nbytes + info.weight_bytes + context - 1
    with monkeypatch.context() as patch:
        patch.setattr(build, "_load_runner", lambda *_: pytest.fail("the model was loaded"))
        with pytest.raises(CapacityError) as caught:
            CPUPagedEngine.from_pretrained(DEMO, max_memory=bound)
    said = str(caught.value)
    for part in ("max_memory=", "weights ", "measured overhead 0.20 GB", "buffers 0.10 GB"):
        assert part in said
    assert f"one context of {info.max_context} tokens" in said
    assert "max_model_len" in said
    least = int(re.search(r"give at least (\d+)MB", said)[1]) * MB
    with CPUPagedEngine.from_pretrained(DEMO, max_memory=least) as engine:
        assert 16 * engine.paged_stats()["num_blocks"] >= info.max_context
    half = info.max_context // 2
    with CPUPagedEngine.from_pretrained(DEMO, max_memory=bound, max_model_len=half) as engine:
        assert 16 * engine.paged_stats()["num_blocks"] >= half
    with pytest.raises(CapacityError, match="the requested pool"):
        CPUPagedEngine.from_pretrained(DEMO, max_memory=bound, max_cache_bytes="1GB")
    with CPUPagedEngine.from_pretrained(DEMO, max_memory=bound, num_blocks=9) as engine:
        assert engine.paged_stats()["num_blocks"] == 9


def test_a_refusal_names_weights_and_a_context_that_fit(overhead):
    with CPUPagedEngine.from_pretrained(DEMO, num_blocks=8) as engine:
        info = engine.runner_info
    bound = overhead.nbytes + info.weight_bytes + 6 * MB
    with pytest.raises(CapacityError) as caught:
        CPUPagedEngine.from_pretrained(DEMO, max_memory=bound)
    fits = int(re.search(r"max_model_len \((\d+) fits; --ctx-size\)", str(caught.value))[1])
    assert 256 <= fits < info.max_context
    with CPUPagedEngine.from_pretrained(DEMO, max_memory=bound, max_model_len=fits) as engine:
        assert engine.runner_info.max_context == fits
    with pytest.raises(CapacityError, match=r"max_model_len \(--ctx-size\)"):
        CPUPagedEngine.from_pretrained(DEMO, max_memory=bound - 5 * MB)
    with pytest.raises(CapacityError, match=r"choose weights=(\S+) .*-o weights=\1,") as caught:
        CPUPagedEngine.from_pretrained(DEMO, max_memory=bound, weights="f32")
    weights = re.search(r"choose weights=(\S+)", str(caught.value))[1]
    options = {"weights": weights, "max_model_len": fits}
    CPUPagedEngine.from_pretrained(DEMO, **options).close()  # packed from now on
    CPUPagedEngine.from_pretrained(DEMO, max_memory=bound, **options).close()
    with pytest.raises(CapacityError) as caught:
        CPUPagedEngine.from_pretrained(DEMO, max_memory="1MB", weights="int4")
    assert "choose weights" not in str(caught.value)


def test_recurrent_states_are_taken_from_the_remainder(overhead, tmp_path, monkeypatch):
    monkeypatch.setenv("KVBOOST_EDGE_CACHE", str(tmp_path / "cache"))
    path = save_tiny_model("qwen3_5_text", tmp_path / "model")
    options = {"weights": "int8", "max_model_len": 256}
    CPUPagedEngine.from_pretrained(path, **options).close()  # packed from now on
    with pytest.raises(CapacityError, match=r"\+ states \d") as caught:
        CPUPagedEngine.from_pretrained(path, max_memory=overhead.nbytes, **options)
    least = int(re.search(r"give at least (\d+)MB", str(caught.value))[1]) * MB
    with CPUPagedEngine.from_pretrained(path, max_memory=least, **options) as engine:
        stats = engine.paged_stats()
        weights = engine.runner_info.weight_bytes
    assert 16 * stats["num_blocks"] >= 256
    assert stats["pool_bytes"] + stats["state_bytes"] <= least - overhead.nbytes - weights


def test_packing_memory_counts_in_the_bound(overhead, tmp_path, monkeypatch):
    monkeypatch.setenv("KVBOOST_EDGE_CACHE", str(tmp_path / "cache"))
    small = overhead._replace(buffers=0)
    monkeypatch.setattr(check, "measured_overhead", lambda *_: small)
    options = {"max_memory": small.resident + 40 * MB, "max_model_len": 64}
    with pytest.raises(
        CapacityError, match=r"overhead of 0\.20 GB and the .* needed to pack the weights"
    ) as caught:
        CPUPagedEngine.from_pretrained(DEMO, **options)
    with pytest.raises(
        CapacityError,
        match=r" = 0\.\d+ GB, and 0\.\d+ GB while it packs the weights for the first time; give at "
        r"least \d+MB, ",
    ):
        CPUPagedEngine.from_pretrained(DEMO, max_memory="1MB", max_model_len=64)
    assert not (Path(os.environ["KVBOOST_EDGE_CACHE"]) / "packed").exists()
    least = re.search(r"give at least (\d+MB)", str(caught.value))[1]
    CPUPagedEngine.from_pretrained(DEMO, **{**options, "max_memory": least}).close()
    CPUPagedEngine.from_pretrained(DEMO, **options).close()  # nothing is left to pack


@pytest.mark.parametrize("form", ["model", "head"])
def test_packing_memory_of_a_drafter_counts_in_the_bound(form, overhead, tmp_path, monkeypatch):
    monkeypatch.setenv("KVBOOST_EDGE_CACHE", str(tmp_path / "cache"))
    small = overhead._replace(buffers=0)
    monkeypatch.setattr(check, "measured_overhead", lambda *_: small)
    path = DEMO
    options = {"max_memory": small.resident + 40 * MB, "max_model_len": 64, "weights": "int8"}
    drafting = {"draft_model": DEMO, "draft_weights": "int4"}
    if form == "head":
        path = save_with_head("glm4_moe", tmp_path / "model")
        drafting["draft_model"] = write_head_file(path, tmp_path / "head.gguf")
    CPUPagedEngine.from_pretrained(path, mtp="off", **{**options, "max_memory": "1GB"}).close()
    CPUPagedEngine.from_pretrained(path, mtp="off", **options).close()  # the model is packed
    with monkeypatch.context() as patch:
        patch.setattr(build, "_load_runner", lambda *_: pytest.fail("the model was loaded"))
        with pytest.raises(CapacityError, match=r"the .* needed to pack the weights") as caught:
            CPUPagedEngine.from_pretrained(path, **options, **drafting)
    least = re.search(r"give at least (\d+MB)", str(caught.value))[1]
    CPUPagedEngine.from_pretrained(path, **{**options, "max_memory": least}, **drafting).close()
    CPUPagedEngine.from_pretrained(path, **options, **drafting).close()  # nothing is left to pack


def test_max_memory_needs_the_native_runner(tmp_path):
    path = write_onnx(build_tiny_model("llama"), tmp_path / "m", Form(concat=True), ConcatDecoder)
    with pytest.raises(ConfigError, match="max_memory=1000000000 needs the native runner"):
        CPUPagedEngine.from_pretrained(path, max_memory="1GB")
    with pytest.raises(ConfigError, match="max_memory=5000 is not supported"):
        CPUPagedEngine(build_tiny_model("llama"), None, max_memory=5000)


def test_resident_weights_do_not_count_as_overhead(monkeypatch):
    monkeypatch.setattr(process, "process_rss", lambda: 900)
    monkeypatch.setattr(process, "resident_bytes", lambda regions: 600)
    first = Overhead(200, 50)
    assert first.measured_again([Region(0, 700)]) == Overhead(300, 50)
    assert Overhead(400, 50).measured_again([Region(0, 700)]) == Overhead(400, 50)
    monkeypatch.setattr(process, "resident_bytes", lambda regions: None)
    assert first.measured_again([Region(0, 700)]) == Overhead(900, 50)


def test_the_draft_history_stays_within_its_bytes():
    history = TenantHistory.within(8 * MB)
    for tenant in range(40):
        history.keep(bytes([tenant]) * 8, list(range(2000)))
    assert 0 < history.nbytes <= 4 * MB
    assert history.reserve(3 * MB)
    assert not history.reserve(2 * MB)
