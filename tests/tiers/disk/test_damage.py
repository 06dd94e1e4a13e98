"""Files that were changed, truncated, swapped or written by another owner: lookups miss and never
return a wrong byte.
"""

import random
import shutil

import pytest

from helpers.tiers.disk_cases import (
    CAP,
    OTHER_SPACE,
    PAYLOAD_BYTES,
    RECORD_BYTES,
    SPACE,
    InlineSealer,
    chain,
    has_all,
    hashes_of,
    opened,
    present,
    read,
    scratch,
    segments,
    space_dir,
    write,
)
from helpers.tiers.disk_faults import FaultyFiles
from kvboost_edge.tiers.disk import tier as stores
from kvboost_edge.tiers.disk.tier import DiskTier

BLOCKS = chain(40)
HASHES = set(hashes_of(BLOCKS))


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """Directory of a closed tier with 40 blocks in three segments, which no test modifies."""
    directory = tmp_path_factory.mktemp("sound")
    with opened(directory) as tier:
        write(tier, BLOCKS)
    assert len(segments(directory)) == 3
    return directory


def copy_of(sound, directory):
    shutil.copytree(sound, directory, dirs_exist_ok=True)
    return directory


def served(directory):
    with opened(directory, files=FaultyFiles()) as tier:
        return present(tier, BLOCKS)


def damaged_files(directory):
    return sorted(path for path in space_dir(directory).iterdir() if path.name != "lock")


class Copies:
    """Copies of the sound tier's files in memory, restored before every case."""

    def __init__(self, sound):
        self.directory = scratch()
        self.path = space_dir(self.directory)
        self.path.mkdir(mode=0o700)
        self.files = {path.name: path.read_bytes() for path in damaged_files(sound)}

    def fresh(self):
        for path in self.path.iterdir():
            if path.name not in self.files:
                path.unlink()
        for name, data in self.files.items():
            (self.path / name).write_bytes(data)


@pytest.fixture
def copies(sound):
    made = Copies(sound)
    yield made
    shutil.rmtree(made.directory)


def test_random_bit_flips_cost_at_most_one_block(copies, scale):
    """A flip in a segment costs at most the block that it hits. A flip in any other file costs
    none.
    """
    draw = random.Random(1)
    names = [name for name in copies.files for _ in range(8 if name.endswith(".kvs") else 1)]
    for number in range(scale(200, 10_000)):
        copies.fresh()
        name = draw.choice(names)
        data = bytearray(copies.files[name])
        bit = draw.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        (copies.path / name).write_bytes(data)
        assert len(served(copies.directory)) >= len(BLOCKS) - name.endswith(".kvs"), (
            number,
            name,
            bit,
        )


def test_random_truncations_keep_the_blocks_before_the_cut(copies, scale):
    """A truncated segment keeps the blocks before the cut. Any other truncated file costs none."""
    draw = random.Random(2)
    for number in range(scale(200, 10_000)):
        copies.fresh()
        name = draw.choice(list(copies.files))
        data = copies.files[name]
        cut = draw.randrange(len(data))
        (copies.path / name).write_bytes(data[:cut])
        lost = -(-(len(data) - cut) // RECORD_BYTES) if name.endswith(".kvs") else 0
        assert len(served(copies.directory)) >= len(BLOCKS) - lost, (number, name, cut)


def test_blocks_are_found_without_sidecars_and_manifest(sound, tmp_path):
    directory = copy_of(sound, tmp_path / "copy")
    for path in (*space_dir(directory).glob("*.kvx"), space_dir(directory) / "order"):
        path.unlink()
    assert served(directory) == HASHES
    assert len(list(space_dir(directory).glob("*.kvx"))) == 3


def test_a_damaged_record_affects_no_other_record(sound, tmp_path):
    """Neither its header nor the sidecar exists. A scan of every multiple of 64 finds the records
    after it.
    """
    directory = copy_of(sound, tmp_path / "copy")
    for path in (*space_dir(directory).glob("*.kvx"), space_dir(directory) / "order"):
        path.unlink()
    path = segments(directory)[0]
    data = bytearray(path.read_bytes())
    data[3 * RECORD_BYTES : 3 * RECORD_BYTES + 300] = bytes(300)
    path.write_bytes(data)
    assert served(directory) == HASHES - {BLOCKS[3].prefix_hash}


def test_swapped_files_serve_no_wrong_byte(sound, tmp_path):
    for swap in ("kvs", "kvx"):
        directory = copy_of(sound, tmp_path / swap)
        first, second, *_ = sorted(space_dir(directory).glob(f"*.{swap}"))
        first.rename(tmp_path / "aside")
        second.rename(first)
        (tmp_path / "aside").rename(second)
        assert served(directory) <= HASHES
        assert served(directory) <= HASHES


def test_files_of_another_space_are_not_served(sound, tmp_path):
    """Another model's directory has this one's name, but every record names its space."""
    directory = tmp_path / "copy"
    shutil.copytree(space_dir(sound), space_dir(directory, OTHER_SPACE))
    with opened(directory, OTHER_SPACE) as tier:
        assert present(tier, BLOCKS) == set()
    with opened(directory, OTHER_SPACE) as tier:
        assert write(tier, BLOCKS) == len(BLOCKS)
        assert read(tier, BLOCKS) == len(BLOCKS)


@pytest.mark.parametrize("name", ["00000001.kvs", "00000001.kvx", "order", "space.json"])
def test_garbage_links_and_directories_in_place_of_files(sound, tmp_path, name):
    secret = tmp_path / "secret"
    secret.write_bytes(b"nobody's business")
    for kind in ("garbage", "link", "directory", "empty"):
        directory = copy_of(sound, tmp_path / kind)
        path = space_dir(directory) / name
        path.unlink()
        if kind == "garbage":
            path.write_bytes(random.Random(3).randbytes(100_000))
        elif kind == "link":
            path.symlink_to(secret)
        elif kind == "directory":
            path.mkdir()
        else:
            path.touch()
        assert served(directory) >= set(hashes_of(BLOCKS[15:]))
        with opened(directory) as tier:
            assert write(tier, chain(3, 5)) == 3
        assert secret.read_bytes() == b"nobody's business"


def test_payload_that_resembles_a_record_is_not_a_record(tmp_path):
    """A payload may contain the magic, or even a whole record of this space."""
    inner = chain(1, 7)[0]
    with opened(tmp_path / "inner") as tier:
        write(tier, [inner], 64)
    record = segments(tmp_path / "inner")[0].read_bytes()
    block = chain(1, 8)[0]
    text = (record * 20)[:PAYLOAD_BYTES]
    with opened(tmp_path) as tier:
        tier.write([block], [memoryview(text)])
    for path in (*space_dir(tmp_path).glob("*.kvx"), space_dir(tmp_path) / "order"):
        path.unlink()
    with opened(tmp_path, SPACE) as tier:
        into = memoryview(bytearray(PAYLOAD_BYTES))
        assert tier.read([block], [into]) == 1
        assert into == text
        assert not tier.holds(inner.prefix_hash)


def test_removed_segment_numbers_are_not_reused(sound, tmp_path):
    """The manifest lists later segments than exist. Blocks written since then survive a crash
    anyway.
    """
    directory = copy_of(sound, tmp_path / "copy")
    for path in segments(directory)[1:]:
        path.unlink()
    later = chain(40, 9)
    tier = DiskTier.open(
        directory, SPACE, max_bytes=CAP, files=FaultyFiles(), sealer=InlineSealer()
    )
    write(tier, later, 5000)
    shutil.copy(space_dir(sound) / "order", space_dir(directory) / "order")
    for shared in stores._stores.values():
        shared.store.after_fork()  # releases all handles and writes nothing, as a crash does
    stores._stores.clear()
    with opened(directory, files=FaultyFiles()) as again:
        assert has_all(again, later, 5000)
