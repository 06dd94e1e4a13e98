"""Random requests of running engines over one disk tier: none hangs, and each answer equals the one
without a cache.
"""

import functools
import logging
import random
import time
from collections import Counter

from helpers.engine.fake_runner import expected_tokens, fake_engine
from kvboost_edge.tiers.disk.tier import DiskTier

REQUESTS = 60  # per engine
SECONDS = 60  # for an answer: far more than any takes, even on a busy machine


@functools.lru_cache(1 << 12)
def uncached(prompt, count):
    return expected_tokens(prompt, count)


class Storm:
    """Engine with a limit on running requests, and random requests of several priorities and
    tenants.

    Their prompts continue a few beginnings, which the disk holds after the first engines.
    """

    def __init__(self, engine, seed):
        self.engine = engine
        self.rng = random.Random(seed)
        stems = random.Random(0)
        self.stems = [
            [stems.randrange(250) for _ in range(stems.choice((20, 48, 100, 160)))]
            for _ in range(12)
        ]
        self.running = []
        self.found = Counter()

    def submit(self):
        rng = self.rng
        stem = rng.choice(self.stems)
        prompt = stem[: rng.choice((32, len(stem), len(stem)))]
        prompt = prompt + [rng.randrange(250) for _ in range(rng.choice((0, 1, 20)))]
        count = rng.choice((1, 3, 20))
        priority = rng.choice((0, 0, 0, -1, -2, 1))
        handle = self.engine.submit(
            prompt,
            max_new_tokens=count,
            temperature=0,
            ignore_eos=True,
            priority=priority,
            tenant=rng.choice("ab"),
        )
        self.running.append((handle, tuple(prompt), count))
        self.found["urgent"] += priority < 0

    def check(self, handle, prompt, count):
        result = handle.result(SECONDS)
        if result.finish_reason == "cancelled":
            self.found["cancelled"] += 1
            return
        assert list(result.output_token_ids) == uncached(prompt, count)
        self.found["answered"] += 1
        self.found.update(result.hit_tokens)

    def run(self):
        rng = self.rng
        left = REQUESTS
        while left:
            burst = min(left, rng.choice((1, 2, 5, 14)))
            left -= burst
            for _ in range(burst):
                self.submit()
            if rng.random() < 0.5:
                self.engine.reset_cache()  # repeated prompts are now read from the disk
            if rng.random() < 0.2:
                rng.choice(self.running)[0].cancel()
            time.sleep(rng.choice((0.0, 0.0, 0.001, 0.004)))  # prefetches are in flight or done
            while self.running and rng.random() < 0.6:
                self.check(*self.running.pop(rng.randrange(len(self.running))))
        for one in self.running:
            self.check(*one)
        assert self.engine.paged_stats()["used_blocks"] == 0
        return self.found


def test_random_tier_faults_hang_no_request_and_keep_answers(scale, tmp_path, caplog):
    """`make test-all` runs 9,000 requests."""
    found = Counter()
    with caplog.at_level(logging.WARNING):
        for seed in range(scale(4, 150)):
            rng = random.Random(seed)
            places = seed % 12 + 1
            with fake_engine(
                rng.choice((16, 24, 64)),
                tiers=[DiskTier.open(tmp_path, bytes(32))],
                max_num_seqs=places,
                max_batch_tokens=rng.choice((16, 64, 256)),
            ) as engine:
                found += Storm(engine, seed).run()
    assert [one.getMessage() for one in caplog.records if "nothing runs" in one.getMessage()] == []
    assert found["answered"] + found["cancelled"] == REQUESTS * scale(4, 150)
    assert found["answered"] > 10 * found["cancelled"] > 0
    assert found["disk"] > found["answered"]
    assert found["pool"] > found["answered"]
    assert found["urgent"] > found["answered"] // 5
