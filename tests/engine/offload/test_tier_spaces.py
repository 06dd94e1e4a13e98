"""One directory for engines that differ in what determines a block: no engine finds another's
blocks, and the cap applies to all of them.
"""

import numpy as np
import pytest

from helpers.models.tiny_checkpoints import save_tiny_checkpoint
from helpers.random_ids import random_ids
from kvboost_edge import CPUPagedEngine

PROMPT = random_ids(410, 3, 10, 250)
CAP = 1 << 20


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Models of one shape and tokenizer that differ in their weights or their rope."""
    folder = tmp_path_factory.mktemp("models")
    kinds = {"one": {}, "another seed": {"seed": 1}, "rope": {"rope_theta": 5000.0}}
    for name in kinds:
        (folder / name).mkdir()
    return {
        name: save_tiny_checkpoint("llama", folder / name, **options)
        for name, options in kinds.items()
    }


ENGINES = (
    ("one", {}),
    ("one", {"block_size": 32}),
    ("one", {"kv_cache_bits": 8}),
    ("one", {"kv_cache_bits": 4}),
    ("one", {"kv_cache_bits": (8, 4)}),
    ("one", {"weights": "int4"}),
    ("one", {"weights": "f32"}),
    ("one", {"backend": "reference"}),
    ("another seed", {}),
    ("rope", {}),
)


def test_different_engines_share_a_directory_but_no_blocks(models, tmp_path):
    root = tmp_path / "disk"
    for name, options in ENGINES:
        fixed = {"num_blocks": 32, "pack_cache": False, "weights": "int8", **options}
        with CPUPagedEngine.from_pretrained(models[name], **fixed) as engine:
            cold = engine.logits(PROMPT, start=350)
        fixed |= {"disk_cache_dir": root, "max_disk_bytes": CAP, "debug_checks": True}
        for is_known in (False, True):
            with CPUPagedEngine.from_pretrained(models[name], **fixed) as engine:
                result = engine.generate(PROMPT, max_new_tokens=1, temperature=0.0)
                full = len(PROMPT) // engine.config.block_size * engine.config.block_size
                assert result.hit_tokens.get("disk", 0) == (full if is_known else 0), (
                    name,
                    options,
                )
                np.testing.assert_array_equal(engine.logits(PROMPT, start=350), cold)
                tier = engine.paged_stats()["tiers"]["disk"]
                assert (tier["refused"], tier["errors"], tier["state"]) == (0, 0, "")
                if is_known:
                    other = engine.generate(PROMPT, max_new_tokens=1, tenant="another")
                    assert other.cached_tokens == 0
            assert sum(path.stat().st_size for path in root.glob("*/*.kvs")) <= CAP
    assert sum(path.is_dir() for path in root.iterdir()) == len(ENGINES)
    assert len({path.parent for path in root.glob("*/*.kvs")}) < len(ENGINES), (
        "the size limit was never reached"
    )
