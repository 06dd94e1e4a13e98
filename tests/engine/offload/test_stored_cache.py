"""A cache directory written before the package was restructured (commit 6a22bdef).

It holds four blocks of the bundled model, as the options below make them, from one call of
`generate(PROMPT, max_new_tokens=24, temperature=0)`.
"""

import tarfile
from pathlib import Path

from kvboost_edge import CPUPagedEngine

STORED = Path(__file__).parents[2] / "data" / "disk-cache-of-0.1.0.tar.xz"
PROMPT = "The prefix cache of this engine survives a restart. " * 3


def test_a_cache_directory_of_an_earlier_commit_has_the_same_hits(tmp_path):
    with tarfile.open(STORED) as archive:
        archive.extractall(tmp_path, filter="data")
    options = {"num_blocks": 32, "block_size": 16, "num_threads": 1, "kv_cache_bits": 4}

    def answer(**more):
        with CPUPagedEngine.from_pretrained("kvboost-edge/demo", **options, **more) as engine:
            return engine.generate(PROMPT, max_new_tokens=24, temperature=0)

    uncached = answer()
    cached = answer(disk_cache_dir=tmp_path)
    assert (uncached.cached_tokens, cached.cached_tokens) == (0, 64)
    assert cached.hit_tokens == {"pool": 0, "disk": 64}
    assert cached.output_token_ids == uncached.output_token_ids
