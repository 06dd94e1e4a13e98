"""A disk tier keeps its blocks over restarts and has one writer at a time."""

import os
import threading

import pytest

from helpers.tiers.disk_cases import (
    CAP,
    OTHER_SPACE,
    RECORD_BYTES,
    SPACE,
    chain,
    hashes_of,
    opened,
    payload,
    present,
    read,
    write,
)
from kvboost_edge.errors import ConfigError
from kvboost_edge.tiers.disk.tier import DiskTier


def test_blocks_survive_restarts(tmp_path):
    blocks = chain(20)
    for attempt in range(3):
        with opened(tmp_path) as tier:
            if attempt == 0:
                assert not tier.holds(blocks[0].prefix_hash)
                assert write(tier, blocks) == 20
            assert all(tier.holds(block.prefix_hash) for block in blocks)
            assert read(tier, blocks) == 20
            stat = tier.stat()
            assert (stat.blocks, stat.bytes, stat.max_bytes) == (20, 20 * RECORD_BYTES, CAP)
            assert (stat.read_blocks, stat.read_bytes) == (20, 20 * RECORD_BYTES)
            assert (stat.writable, stat.state) == (True, "")


def test_a_block_is_stored_once(tmp_path):
    with opened(tmp_path) as tier:
        assert write(tier, chain(5)) == 5
        assert write(tier, chain(8)) == 8
        assert tier.stat().written_blocks == 8
        assert tier.stat().written_bytes == 8 * RECORD_BYTES


def test_a_read_ends_at_the_first_missing_block(tmp_path):
    blocks = chain(6)
    with opened(tmp_path) as tier:
        write(tier, [*blocks[:3], *blocks[4:]])
        assert read(tier, blocks) == 3
        assert tier.stat().missing == 1
        assert read(tier, blocks[4:]) == 2


@pytest.mark.parametrize("part", ["parent_hash", "tokens"])
def test_a_block_with_another_address_is_refused_and_dropped(tmp_path, part):
    block = chain(2)[1]
    with opened(tmp_path) as tier:
        write(tier, [block])
        other = block._replace(**{part: bytes(reversed(getattr(block, part)))})
        assert tier.read([other], [memoryview(bytearray(4000))]) == 0
        assert tier.stat().refused == 1
        assert not tier.holds(block.prefix_hash)


def test_a_block_of_another_length_is_refused(tmp_path):
    blocks = chain(2)
    for nbytes in (3999, 4001, 64, 2000, 8000):
        with opened(tmp_path / str(nbytes)) as tier:
            write(tier, blocks)
            assert tier.read(blocks[1:], [memoryview(bytearray(nbytes))]) == 0
            assert tier.stat().refused == 1
        with opened(tmp_path / str(nbytes)) as tier:
            assert tier.read(blocks[:1], [memoryview(bytearray(nbytes))]) == 0
            assert tier.stat().refused == 1


def test_spaces_are_isolated(tmp_path):
    blocks = chain(4)
    with opened(tmp_path) as tier, opened(tmp_path, OTHER_SPACE) as other:
        write(tier, blocks)
        assert present(other, blocks) == set()
        write(other, blocks[:2])
    with opened(tmp_path, OTHER_SPACE) as other:
        assert present(other, blocks) == set(hashes_of(blocks[:2]))


def test_dropped_blocks_stay_dropped_after_a_restart(tmp_path):
    blocks = chain(6)
    with opened(tmp_path) as tier:
        write(tier, blocks)
        tier.drop([blocks[5].prefix_hash, bytes(32)])
        assert read(tier, blocks) == 5
    with opened(tmp_path) as tier:
        assert read(tier, blocks) == 5


def test_blocks_of_different_lengths_coexist(tmp_path):
    with opened(tmp_path) as tier:
        for seed, nbytes in enumerate((1, 63, 64, 65, 4095, 4096, 70_000, 200_000)):
            assert write(tier, chain(1, seed), nbytes) == 1
        for seed, nbytes in enumerate((1, 63, 64, 65, 4095, 4096, 70_000, 200_000)):
            assert read(tier, chain(1, seed), nbytes) == 1


def test_a_block_larger_than_the_cap_is_refused_and_reported(tmp_path):
    with opened(tmp_path) as tier:
        assert write(tier, chain(1), CAP) == 0
        stat = tier.stat()
        assert stat.not_written == 1
        assert not stat.writable
        assert f"max_disk_bytes={CAP}" in stat.state


def test_tiers_of_one_process_share_a_store(tmp_path):
    blocks = chain(8)
    with opened(tmp_path) as first, opened(tmp_path) as second:
        write(first, blocks)
        assert read(second, blocks) == 8
        assert (first.stat().read_blocks, second.stat().read_blocks) == (0, 8)
        first.close()
        first.close()
        assert first.stat().state == "closed"
        assert (
            first.write(blocks, [memoryview(b"")] * 8),
            first.read(blocks, [memoryview(b"")] * 8),
        ) == (0, 0)
        assert write(second, chain(10)) == 10
    with opened(tmp_path) as tier:
        assert read(tier, chain(10)) == 10


def test_two_threads_write_and_read_one_store(tmp_path):
    chains = [chain(40, seed) for seed in range(4)]

    def work(mine, found):
        with opened(tmp_path) as tier:
            for start in range(0, 40, 4):
                write(tier, mine[start : start + 4])
                found.append(read(tier, mine[: start + 4]))

    with opened(tmp_path):
        results = [[] for _ in chains]
        threads = [
            threading.Thread(target=work, args=pair) for pair in zip(chains, results, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == [list(range(4, 44, 4))] * 4


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_holds_no_lock_and_writes_nothing(tmp_path):
    tier = DiskTier.open(tmp_path, SPACE, max_bytes=CAP)
    write(tier, chain(4))
    ready = os.pipe()
    ended = os.pipe()
    child = os.fork()
    if child == 0:
        empty = (
            tier.stat().state == "closed"
            and write(tier, chain(5)) == 0
            and read(tier, chain(4)) == 0
        )
        tier.close()
        with opened(tmp_path) as own:
            reads = own.stat().state != "" and read(own, chain(4)) == 4
        os.write(ready[1], b"1" if empty and reads else b"0")
        os.read(ended[0], 1)
        os._exit(0)
    assert os.read(ready[0], 1) == b"1"
    tier.close()
    with opened(tmp_path) as again:  # the child lives and blocks no other owner
        assert again.stat().writable
        assert read(again, chain(4)) == 4
    os.write(ended[1], b"1")
    os.waitpid(child, 0)
    for end in (*ready, *ended):
        os.close(end)


@pytest.mark.parametrize("cap", [0, -1, True, 1.5e9, (1 << 20) - 1])
def test_an_invalid_cap_is_refused_by_name(tmp_path, cap):
    with pytest.raises(ConfigError, match="max_disk_bytes"):
        DiskTier.open(tmp_path, SPACE, max_bytes=cap)
    with opened(tmp_path) as tier:
        assert tier.stat().writable, "no lock may be left"


def test_a_space_name_must_be_32_bytes(tmp_path):
    with pytest.raises(ConfigError, match="32 bytes"):
        DiskTier.open(tmp_path, b"short")


def test_payloads_are_distinct():
    assert len({payload(block) for block in chain(5)}) == 5
