"""The memory report: it counts resident memory, not reserved memory. Nothing is kept unless
requested.
"""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from helpers.gguf.writer import write_gguf
from kvboost_edge import CPUPagedEngine
from kvboost_edge.engine.memory import report as memory_report
from kvboost_edge.engine.memory.report import MemoryReport
from kvboost_edge.host.memory import Region

linux = pytest.mark.skipif(
    sys.platform != "linux", reason="other systems do not tell what is resident"
)


def test_other_bytes_exclude_resident_weights_and_pool(monkeypatch):
    monkeypatch.setattr(memory_report, "process_rss", lambda: 1000)
    regions = [Region(0, 600)]
    now = [0.0]
    monkeypatch.setattr(memory_report, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def count(found):
        now[0] += 0.01
        return sum(region.nbytes for region in found)

    monkeypatch.setattr(memory_report, "resident_bytes", count)
    assert MemoryReport(600, 300).snapshot()["other_bytes"] == 100
    counted = MemoryReport(600, 300, lambda: regions)
    assert counted.snapshot() | {"process_peak_bytes": 0} == {
        "weight_bytes": 600,
        "pool_bytes": 300,
        "draft_weight_bytes": 0,
        "draft_pool_bytes": 0,
        "state_bytes": 0,
        "copied_bytes": 0,
        "buffer_bytes": 0,
        "other_bytes": 400,
        "process_rss_bytes": 1000,
        "process_peak_bytes": 0,
    }
    regions.append(Region(0, 350))
    now[0] += 0.9
    assert (
        counted.snapshot()["other_bytes"] == 400
    )  # a count stays valid for a hundred times its own duration
    now[0] += 0.2
    assert counted.snapshot()["other_bytes"] == 50
    now[0] += 1.1
    monkeypatch.setattr(memory_report, "resident_bytes", lambda found: None)
    assert counted.snapshot()["other_bytes"] == 100
    copying = MemoryReport(600, 300, lambda: regions, lambda: 30).snapshot()
    assert (copying["copied_bytes"], copying["other_bytes"]) == (30, 70)
    regions.append(Region(0, 5000))
    assert MemoryReport(6000, 0).snapshot()["other_bytes"] == 0


_RESIDENT = """
from kvboost_edge import CPUPagedEngine

for bits in (16, 8):
    with CPUPagedEngine.from_pretrained(
        "kvboost-edge/demo", max_cache_bytes=200e6, kv_cache_bits=bits, max_num_seqs=2
    ) as engine:
        stats = engine.paged_stats()
        resident = stats["process_rss_bytes"] - stats["other_bytes"] - stats["weight_bytes"]
        print(stats["pool_bytes"], resident)
"""


@linux
def test_an_untouched_pool_is_not_resident():
    """The check runs in a new process, since an array here could get memory that earlier ones have
    touched.
    """
    done = subprocess.run(
        [sys.executable, "-c", _RESIDENT], capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        pool, resident = map(int, line.split())
        assert pool > 190e6
        assert resident < 20e6


def test_pack_cache_false_stores_nothing_and_keeps_answers(tiny_model_dir, tmp_path, monkeypatch):
    path = write_gguf(tiny_model_dir, tmp_path / "m.gguf", kind="Q8_0")
    monkeypatch.setenv("KVBOOST_EDGE_CACHE", str(tmp_path / "cache"))
    found = []
    for pack_cache in (False, True):
        with CPUPagedEngine.from_pretrained(path, num_blocks=16, pack_cache=pack_cache) as engine:
            found.append((engine.logits(list(range(3, 20))), engine.tokenizer.encode("Hello")))
        assert (tmp_path / "cache").exists() == pack_cache
    np.testing.assert_array_equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


_START = """
import json, sys, time
from kvboost_edge import CPUPagedEngine
with CPUPagedEngine.from_pretrained(sys.argv[1], max_cache_bytes=64e6) as engine:
    engine.generate("Hello", max_new_tokens=4)
    end = time.monotonic() + 20
    while engine.paged_stats()["other_bytes"] > 190e6 and time.monotonic() < end:
        time.sleep(0.1)  # what is left over is given back once the engine rests
    stats = engine.paged_stats()
    weights, name = 0, ""
    for line in open("/proc/self/smaps"):
        if "-" in line.split()[0]:
            name = line
        elif line.startswith("Rss:") and ".kvpack" in name:
            weights += 1024 * int(line.split()[1])
    print(json.dumps([stats["other_bytes"], stats["process_rss_bytes"], weights]))
"""


@linux
def test_other_memory_is_small_at_first_and_later_starts(tmp_path):
    # Kernels are compiled first, so that their memory does not count here.
    with CPUPagedEngine.from_pretrained("kvboost-edge/demo", num_blocks=64) as engine:
        engine.generate("Hello", max_new_tokens=4)
    command = [sys.executable, "-c", _START, "kvboost-edge/demo"]
    environment = {**os.environ, "KVBOOST_EDGE_CACHE": str(tmp_path)}
    for _ in range(2):
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=200, env=environment
        )
        other, rss, weights = json.loads(done.stdout)
        assert 30e6 < other < 190e6
        assert rss - weights - 64e6 < other <= rss - weights
