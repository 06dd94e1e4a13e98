"""The random schedules of test_native_schedules on a Gemma 4: layers of two shapes, the last ones over keys and values
of earlier layers, and only the wanted rows in those."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from engine.test_native_schedules import ALL_BITS, Truth, run_schedule
from helpers.engine.hand_mover import DictTier
from helpers.engine.native_bench import Machine
from helpers.models.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    layers = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
    directory = save_tiny_model("gemma4", tmp_path_factory.mktemp("shared"), **layers, num_kv_shared_layers=2)
    machine = Machine(directory)
    yield machine
    machine.close()


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.full) for part in (1, 2))])
def test_random_schedules_equal_uncached_single_runs(
    machine: Machine, part: int, scale: Callable[[int, int], int]
) -> None:
    per_part, truth = scale(30, 1000), Truth(machine)
    tiers = {bits: DictTier(losses=0.1, seed=part) for bits in ALL_BITS}
    seeds = range(part * per_part, (part + 1) * per_part)
    outcomes = [run_schedule(machine, truth, seed, tiers) for seed in seeds]
    hits = sum((cached for _, cached in outcomes), Counter())
    assert sum(preemptions for preemptions, _ in outcomes) >= 3
    assert min(hits[name] for name in ("pool", "shelf", "moved", "drafted", "accepted")) > 30
