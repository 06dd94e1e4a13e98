"""Directories written by an older or newer version: their blocks miss, are removed, and never
return a wrong byte.
"""

import pytest

from helpers.tiers.disk_cases import chain, has_all, opened, present, read, segments, write
from kvboost_edge.tiers import record
from kvboost_edge.tiers.disk import manifest, sidecar

BLOCKS = chain(40)
PARTS = {
    "records": ((record, "MAGIC"), (sidecar, "MAGIC")),
    "sidecars": ((sidecar, "_MAGIC"),),
    "order": ((manifest, "_MAGIC"),),
}
STEPS = pytest.mark.parametrize("step", [-1, 1], ids=["older", "newer"])


def store_as_version(directory, step, blocks=BLOCKS, parts=tuple(PARTS)):
    """Store the blocks as a version with other version numbers of these parts would."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in (place for part in parts for place in PARTS[part]):
            magic = getattr(module, name)
            patch.setattr(module, name, magic[:-1] + bytes([magic[-1] + step]))
        with opened(directory) as tier:
            assert write(tier, blocks) == len(blocks)


@STEPS
def test_another_version_is_a_miss_and_its_files_are_removed(tmp_path, step):
    store_as_version(tmp_path, step)
    before = segments(tmp_path)
    with opened(tmp_path) as tier:
        assert present(tier, BLOCKS) == set()
        assert not [path for path in before if path.exists()]
        assert write(tier, BLOCKS) == len(BLOCKS)
        assert read(tier, BLOCKS) == len(BLOCKS)
    with opened(tmp_path) as tier:
        assert has_all(tier, BLOCKS)


@STEPS
def test_upgrades_and_downgrades_do_not_share_blocks(tmp_path, step):
    """This version, another one and this version again use the same directory."""
    with opened(tmp_path) as tier:
        write(tier, BLOCKS)
    store_as_version(tmp_path, step, chain(20, 5))
    with opened(tmp_path) as tier:
        assert present(tier, [*BLOCKS, *chain(20, 5)]) == set()
        assert write(tier, chain(20, 5)) == 20
        assert read(tier, chain(20, 5)) == 20


@STEPS
def test_records_of_another_version_under_a_known_index_are_refused(tmp_path, step):
    store_as_version(tmp_path, step, parts=["records"])
    with opened(tmp_path) as tier:
        assert present(tier, BLOCKS) == set()
        assert tier.stat().refused == len(BLOCKS)
        assert write(tier, BLOCKS) == len(BLOCKS)
        assert has_all(tier, BLOCKS)


@pytest.mark.parametrize("part", ["sidecars", "order"])
@STEPS
def test_an_index_of_another_version_is_rewritten(tmp_path, part, step):
    store_as_version(tmp_path, step, parts=[part])
    for _ in range(2):
        with opened(tmp_path) as tier:
            assert has_all(tier, BLOCKS)
