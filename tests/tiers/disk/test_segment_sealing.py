"""Segments are sealed while others read and write, by a thread that ends when it has no work."""

import threading

from helpers.tiers.disk_cases import CAP, chain, read, segments
from helpers.tiers.disk_cases import write as write_blocks
from kvboost_edge.tiers.disk.segment_sealing import Sealer
from kvboost_edge.tiers.disk.system_calls import Files
from kvboost_edge.tiers.disk.tier import DiskTier


class SlowDevice(Files):
    """Device that syncs nothing until the test allows it."""

    def __init__(self):
        self.go = threading.Event()

    def sync(self, handle):
        assert self.go.wait(60)


def test_slow_syncs_do_not_delay_reads_and_writes(tmp_path):
    files = SlowDevice()
    sealer = Sealer()
    tier = DiskTier.open(tmp_path, bytes(32), max_bytes=CAP, files=files, sealer=sealer)
    try:
        assert write_blocks(tier, chain(60)) == 60  # four segments
        assert read(tier, chain(60)) == 60
        assert not list(tmp_path.glob("*/*.kvx"))
    finally:
        files.go.set()
        tier.close()
    assert len(list(tmp_path.glob("*/*.kvx"))) == len(segments(tmp_path, bytes(32))) == 4
    assert "kvboost-disk-seal" not in {thread.name for thread in threading.enumerate()}


def test_sealing_jobs_run_in_order_and_failures_are_isolated(caplog):
    done = []
    sealer = Sealer()
    for number in range(5):
        sealer.start(lambda number=number: done.append(number) if number != 2 else 1 / 0)
    sealer.join()
    assert done == [0, 1, 3, 4]
    assert "ZeroDivisionError" in caplog.text
    sealer.join()


def test_without_threads_a_segment_is_sealed_synchronously(tmp_path, monkeypatch):
    def refused(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    tier = DiskTier.open(tmp_path, bytes(32), max_bytes=CAP)
    assert write_blocks(tier, chain(60)) == 60
    tier.close()
    assert len(list(tmp_path.glob("*/*.kvx"))) == len(segments(tmp_path, bytes(32))) == 4
