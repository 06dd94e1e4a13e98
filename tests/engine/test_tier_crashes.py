"""kill -9 of whole engines, at calls of the system, at steps and at random times: what the next one answers is right.

One process imports everything and makes a fork of itself, before it has any thread, for every engine that is to die.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvboost_edge import CPUPagedEngine

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

TESTS = Path(__file__).parents[1]
BITS = (16, 8, (8, 4), 4)
ENDS = ("call", "half a call", "step", "time")
PER_DIRECTORY = 5
OPTIONS = {"num_blocks": 40, "max_disk_bytes": 4 << 20}  # of blocks 6 prompts fill 60; of segments there are 32
_HEAD = np.random.default_rng(5).integers(10, 250, 64).tolist()
PROMPTS = [_HEAD[: 32 * (i % 3)] + np.random.default_rng(i).integers(10, 250, 90).tolist() for i in range(6)]

TEMPLATE = """
import json, os, signal, sys, threading
from helpers.tiers import disk_faults
from kvboost_edge import CPUPagedEngine
from kvboost_edge.engine.tiering import Tiering
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

for line in sys.stdin:
    child = os.fork()
    if not child:
        try:
            run(*json.loads(line))
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def template() -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", TEMPLATE], env=environment, **pipes) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def crash(template: subprocess.Popen[str], directory: Path, bits: Any, prompts: list[list[int]], *end: Any) -> bool:
    """Run an engine over these prompts; whether it was killed before it came to its end."""
    assert template.stdin is not None
    assert template.stdout is not None
    options = {**OPTIONS, "disk_cache_dir": str(directory), "kv_cache_bits": bits}
    template.stdin.write(json.dumps([options, prompts, *end]) + "\n")
    template.stdin.flush()
    code = int(template.stdout.readline())
    assert code in (0, -signal.SIGKILL)
    return code != 0


def answers(engine: CPUPagedEngine, prompt: list[int]) -> tuple[tuple[int, ...], np.ndarray]:
    result = engine.generate(prompt, max_new_tokens=8, temperature=0.0, ignore_eos=True)
    return result.output_token_ids, engine.logits([*prompt, *result.output_token_ids], start=len(prompt) - 1)


@pytest.fixture(scope="module")
def cold() -> dict[Any, list[tuple[tuple[int, ...], np.ndarray]]]:
    found = {}
    for bits in BITS:
        with CPUPagedEngine.from_pretrained("kvboost-edge/demo", num_blocks=100, kv_cache_bits=bits) as engine:
            found[bits] = [answers(engine, prompt) for prompt in PROMPTS]
    return found


@pytest.mark.slow
def test_after_a_crash_answers_and_logits_equal_cold_ones(template, cold, tmp_path, scale):
    draw = random.Random(0)
    crashes = hits = 0
    for number in range(scale(20, 200)):
        bits, end_at = BITS[number // PER_DIRECTORY % len(BITS)], ENDS[number % len(ENDS)]
        directory = tmp_path / str(number // PER_DIRECTORY)
        at = draw.randrange({"call": 120, "half a call": 120, "step": 150, "time": 400}[end_at])
        crashes += crash(template, directory, bits, draw.sample(PROMPTS, 4), end_at, at)
        options = {**OPTIONS, "disk_cache_dir": directory, "kv_cache_bits": bits, "debug_checks": True}
        with CPUPagedEngine.from_pretrained("kvboost-edge/demo", **options) as engine:
            for which in draw.sample(range(len(PROMPTS)), 3):
                output, logits = answers(engine, PROMPTS[which])
                assert output == cold[bits][which][0]
                np.testing.assert_array_equal(logits, cold[bits][which][1])
            tier = engine.paged_stats()["tiers"]["disk"]
            assert tier["writable"]
            assert tier["refused"] == 0
            hits += tier["read_blocks"]
    assert crashes >= scale(20, 200) // 2
    assert hits > 0
