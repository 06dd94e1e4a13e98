"""Documents of random tokens, and settings for the recompute of reused chunks."""

from __future__ import annotations

import random

from kvboost_edge.config import GenerationMode, RecomputeStrategy
from kvboost_edge.reuse.recompute import Repair

REUSE = GenerationMode.CHUNK_KV_REUSE
BARE = Repair(strategy=RecomputeStrategy.NONE)
SEAMS = Repair(strategy=RecomputeStrategy.SELECTIVE, overlap=16)
BLEND = Repair(strategy=RecomputeStrategy.CACHEBLEND, overlap=16, ratio=0.25)
QUERY = Repair(strategy=RecomputeStrategy.QUERY, overlap=16, ratio=0.25)


def document(number: int, length: int) -> list[int]:
    return random.Random(number).choices(range(256), k=length)
