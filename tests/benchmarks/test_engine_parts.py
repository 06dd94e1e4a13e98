"""Tests of the parts of an engine that benchmarks read: they exist and are those that compute."""

import numpy as np
import pytest

from benchmarks.data.hybrid_shapes import HYBRID_SHAPES
from benchmarks.data.random_model import write_gguf
from benchmarks.engine_parts import (
    held_state_slots,
    logits_with,
    pass_costs,
    runner_of,
    with_tokenizer,
)
from kvboost_edge import CPUPagedEngine, EngineConfig
from kvboost_edge.config import RecomputeStrategy
from kvboost_edge.reuse.recompute import Repair

DEMO = "kvboost-edge/demo"
TEXT = list(range(20, 148))


@pytest.fixture(scope="module")
def engine():
    with CPUPagedEngine.from_pretrained(DEMO, num_blocks=64, reuse_gate="off") as engine:
        yield engine


def test_the_runner_is_the_one_that_is_described(engine):
    assert runner_of(engine).info is engine.runner_info


def test_costs_are_of_passes_that_the_engine_computed(engine):
    engine.generate(TEXT[:32], 16, temperature=0.0, ignore_eos=True)
    costs = pass_costs(engine)
    assert list(costs) == ["model"]
    assert costs["model"].seconds(1, 0.0) > 0


def test_logits_without_a_rule_are_exact_and_with_one_reuse_moved_text(engine):
    exact = engine.logits(TEXT, start=120)
    rows, result = logits_with(engine, TEXT, 120, "exact", None)
    assert np.array_equal(np.concatenate(rows), exact)
    assert result.reused_span_tokens == 0
    moved = [*range(200, 208), *TEXT]
    rule = Repair(strategy=RecomputeStrategy.NONE)
    engine.generate(TEXT, 1, cache_salt="reuse")
    rows, result = logits_with(engine, moved, len(moved) - 8, "reuse", rule)
    assert sum(len(part) for part in rows) == 8
    assert result.reused_span_tokens > 64


def test_an_engine_answers_with_another_tokenizer_and_end(engine):
    (first,) = engine.generate(TEXT, 1, temperature=0.0, ignore_eos=True).output_token_ids
    config = EngineConfig.from_options(num_blocks=64)
    with with_tokenizer(DEMO, config, engine.tokenizer, first) as other:
        assert other.generate(TEXT, 8, temperature=0.0).finish_reason == "stop"


def test_slots_of_a_model_without_states_are_an_error(engine):
    with pytest.raises(RuntimeError, match="no recurrent states"), held_state_slots(engine):
        pass


@pytest.mark.full
def test_slots_are_those_of_the_states(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, HYBRID_SHAPES["lfm2-tiny"], "Q4_0")
    with (
        CPUPagedEngine.from_pretrained(str(path), num_blocks=64) as engine,
        held_state_slots(engine) as slots,
    ):
        assert len(list(slots.free_ids())) == engine.paged_stats()["state_slots"]
