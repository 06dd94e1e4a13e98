"""kill -9 of whole engines at system calls, at steps and at random times: the next engine answers
correctly.
"""

import os
import random

import numpy as np
import pytest

from helpers.random_ids import random_ids
from helpers.tiers.crashing import crashing
from kvboost_edge import CPUPagedEngine

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

BITS = (16, 8, (8, 4), 4)
ENDS = ("call", "half a call", "step", "time")
OPTIONS = {
    "num_blocks": 40,
    "max_disk_bytes": 4 << 20,
}  # 6 prompts fill 60 blocks; there are 32 segments
_HEAD = random_ids(64, 5, 10, 250)
PROMPTS = [
    _HEAD[: 32 * (i % 3)] + np.random.default_rng(i).integers(10, 250, 90).tolist()
    for i in range(6)
]

CODE = """
import os, signal, threading
from helpers.tiers import disk_faults
from kvboost_edge import CPUPagedEngine
from kvboost_edge.engine.offload.tiering import Tiering
from kvboost_edge.tiers.disk import tier

def end(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def run(options, prompts, end_at, at):
    files = disk_faults.FaultyFiles(-1, disk_faults.ends_within if end_at == "half a call" else disk_faults.ends_before)
    files.at = at if "call" in end_at else -1
    tier.Files = lambda: files
    steps, save = iter(range(1 << 30)), Tiering.save_some
    if end_at == "step":
        Tiering.save_some = lambda *of: end() if next(steps) == at else save(*of)
    if end_at == "time":
        timer = threading.Timer(at / 1000, end)
        timer.daemon = True
        timer.start()
    with CPUPagedEngine.from_pretrained("kvboost-edge/demo", **options) as engine:
        for _ in range(3):
            for prompt in prompts:
                engine.generate(prompt, max_new_tokens=8, temperature=0.0, ignore_eos=True)

"""


@pytest.fixture(scope="module")
def crash():
    with crashing(CODE) as crash:
        yield crash


def answers(engine, prompt):
    result = engine.generate(prompt, max_new_tokens=8, temperature=0.0, ignore_eos=True)
    return result.output_token_ids, engine.logits(
        [*prompt, *result.output_token_ids], start=len(prompt) - 1
    )


@pytest.fixture(scope="module")
def cold():
    found = {}
    for bits in BITS:
        with CPUPagedEngine.from_pretrained(
            "kvboost-edge/demo", num_blocks=100, kv_cache_bits=bits
        ) as engine:
            found[bits] = [answers(engine, prompt) for prompt in PROMPTS]
    return found


@pytest.mark.slow
def test_answers_after_a_crash_equal_uncached_ones(crash, cold, tmp_path, scale):
    """The crashes cover each cache width and each kind of end. Several follow each other in one
    directory, and every other directory has a draft model.
    """
    draw = random.Random(0)
    num_crashes = scale(8, 200)
    in_a_row = scale(2, 5)
    crashes = hits = restored_drafts = 0
    for number in range(num_crashes):
        bits = BITS[number // in_a_row % len(BITS)]
        end_at = ENDS[number % len(ENDS)]
        directory = tmp_path / str(number // in_a_row)
        at = draw.randrange({"call": 120, "half a call": 120, "step": 150, "time": 400}[end_at])
        options = {**OPTIONS, "disk_cache_dir": str(directory), "kv_cache_bits": bits}
        if number // in_a_row % 2:
            options |= {"draft_model": "kvboost-edge/demo", "speculation": "on"}
        crashes += crash(options, draw.sample(PROMPTS, 4), end_at, at)
        with CPUPagedEngine.from_pretrained(
            "kvboost-edge/demo", debug_checks=True, **options
        ) as engine:
            for which in draw.sample(range(len(PROMPTS)), 3):
                output, logits = answers(engine, PROMPTS[which])
                assert output == cold[bits][which][0]
                np.testing.assert_array_equal(logits, cold[bits][which][1])
            stats = engine.paged_stats()
            restored_drafts += stats["draft_restored_blocks"]
            tier = stats["tiers"]["disk"]
            assert tier["writable"]
            assert tier["refused"] == 0
            hits += tier["read_blocks"]
    assert crashes >= num_crashes // 2
    assert hits > 0
    assert restored_drafts > 0
