"""Tests of the benchmark of hybrid models: cache hits of tiny models, snapshots while none may be
kept, and checks of limits.
"""

import numpy as np
import pytest

from benchmarks.bench.bench_states import (
    STATE_SHAPES,
    States,
    options_from,
    rows_of,
    run,
    without_snapshots,
)
from benchmarks.data.random_model import write_gguf
from kvboost_edge import CPUPagedEngine


@pytest.mark.parametrize(
    "name",
    [
        "lfm2-tiny",
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in ("qwen3.5-tiny", "granite-4-tiny")
        ),
    ],
)
@pytest.mark.full
def test_a_tiny_model_meets_the_bars_of_shared_prefixes(tmp_path, name):
    asked, rows, more = run(
        options_from(["--quick", "--shape", name, "--layers", "4", "--models", str(tmp_path)])
    )
    assert asked == f"bench_states {name}, 4 of 4 layers, Q4_0"
    by_name = {row["measure"]: row for row in rows}
    assert {
        row["met"] for measure, row in by_name.items() if measure.startswith("shared prefix")
    } == {"met"}
    assert sum(measure.startswith("shared prefix") for measure in by_name) == 2
    # The KV of the last of 2,000 tokens is not computed, and 1,984 tokens are full blocks.
    assert more["rounds"]["second turn, computed"] == [80]
    assert more["rounds"]["first of a prefix, found"] == [0]
    assert more["rounds"]["second of a prefix, found"] == [288 if name.startswith("lfm2") else 0]
    assert more["rounds"]["second of a prefix"] != more["rounds"]["third of a prefix"]
    assert {"decode, GB/s of weights and states"} < set(by_name)


def test_without_snapshots_nothing_is_stored_and_all_slots_are_released(tmp_path):
    path = tmp_path / "model.gguf"
    shape = STATE_SHAPES["qwen3.5-tiny"]
    write_gguf(path, shape, "Q4_0")
    prompts = np.random.default_rng(0).integers(300, shape.vocab, (3, 70)).tolist()
    with CPUPagedEngine.from_pretrained(str(path), num_blocks=64) as engine:
        states = States(engine, shape.vocab, rounds=1)
        states.ask(prompts[0])
        kept = engine.paged_stats()["state_snapshots"]
        assert kept["prompt"] == 1
        with without_snapshots(engine):
            states.ask(prompts[1])
            assert states.timed(prompts[0])[1] == 64
        assert engine.paged_stats()["state_snapshots"] == kept
        states.ask(prompts[2])
        assert engine.paged_stats()["state_snapshots"]["prompt"] == 2
        engine.reset_cache()
        assert engine.paged_stats()["state_slots_used"] == 0


@pytest.mark.parametrize(
    ("second", "found", "written", "decode", "met"),
    [
        (1.15, 288, 1.01, 0.95, ["met"] * 8),
        (1.16, 287, 1.02, 0.94, ["missed"] * 7 + ["met"]),
    ],
)
def test_bars(second, found, written, decode, met):
    states = States.__new__(States)
    states.figures = {
        "second turn": [second, 2 * second, 3 * second],
        "as many tokens alone": [1.0, 2.0, 3.0],
        "as many tokens behind a prompt": [1.0, 1.0, 3.0],
        "second turn, computed": [80, 80, 80],
        "second of a named prefix, found": [found, 288, 288],
        "third of a prefix, found": [288, found, 288],
        "prefill with": [written, 1.0, written],
        "prefill without": [1.0, 1.0, 1.0],
        "turn with": [written + 0.04] * 3,
        "turn without": [1.0] * 3,
        "decode": [decode],
        "decode, dense": [1.0],
    }
    rows = rows_of(states, 299.0)
    assert [row["met"] for row in rows] == met
    reached = [second, second, found, found, written, written + 0.04, decode, 299]
    assert [row["reached"] for row in rows] == pytest.approx(reached)
    assert rows[0]["measure"] == "second turn, 80 tokens; as many tokens behind a prompt, ms"
