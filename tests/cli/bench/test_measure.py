"""Tests of the work per benchmark case, as counted by the engine itself."""

import pytest

from helpers.models.tiny_models import save_tiny_model
from kvboost_edge import CPUPagedEngine
from kvboost_edge.cli.bench.cases import Case
from kvboost_edge.cli.bench.measure import CaseTimer, RandomTokens
from kvboost_edge.errors import CapacityError, ConfigError


@pytest.fixture
def meter(tiny_engine):
    return CaseTimer(tiny_engine, RandomTokens(tiny_engine.runner_info.vocab_size))


def work(engine, measure):
    """Return the tokens that a call computed, found in the cache and generated."""
    names = ("miss_tokens", "hit_tokens", "generated_tokens")
    before = engine.paged_stats()
    measure()
    after = engine.paged_stats()
    return tuple(after[name] - before[name] for name in names)


CASES = [
    (Case("pp", 48, 0, 0), (48, 0, 1)),
    (Case("pp", 48, 0, 128), (48, 128, 1)),
    (Case("tg", 0, 20, 0), (1, 0, 21)),
    (Case("tg", 0, 20, 128), (1, 128, 21)),
    (Case("warm", 16, 0, 128), (16, 128, 1)),
    (Case("shared", 16, 20, 128, 2), (32, 256, 40)),
]


@pytest.mark.parametrize(("case", "expected"), CASES, ids=[case.name for case, _ in CASES])
def test_each_repetition_computes_the_counted_tokens(meter, tiny_engine, case, expected):
    meter.check(case)
    meter.sample(case)  # computes the cached tokens
    for _ in range(3):
        assert work(tiny_engine, lambda: meter.sample(case)) == expected


def test_hybrid_models_continue_at_the_depth(tmp_path):
    path = save_tiny_model("lfm2", tmp_path)
    with CPUPagedEngine.from_pretrained(path, num_blocks=64, speculation="off") as engine:
        meter = CaseTimer(engine, RandomTokens(engine.runner_info.vocab_size))
        for case, expected in CASES:
            meter.sample(case)
            assert work(engine, lambda case=case: meter.sample(case)) == expected


def test_evicted_tokens_are_an_error(tiny_model_dir):
    options = {"num_blocks": 12, "max_num_seqs": 8}
    with CPUPagedEngine.from_pretrained(tiny_model_dir, **options) as engine:
        meter = CaseTimer(engine, RandomTokens(engine.runner_info.vocab_size))
        with pytest.raises(CapacityError, match="pp512 does not fit"):
            meter.check(Case("pp", 512, 0, 0))
        with pytest.raises(CapacityError, match="at most 8 requests at the same time"):
            meter.check(Case("shared", 16, 8, 128, 9))
        with pytest.raises(CapacityError, match="shared x8 @ d128 does not fit: the pool"):
            meter.sample(Case("shared", 16, 40, 128, 8))


def test_a_depth_of_partial_blocks_is_refused(meter):
    with pytest.raises(ConfigError, match=r"depth 100 is not a multiple of 16 tokens.* use 96"):
        meter.check(Case("pp", 16, 0, 100))


def test_prefixes_repeat_and_other_tokens_do_not():
    one, other = RandomTokens(1000), RandomTokens(1000)
    assert one.prefix(64) == one.prefix(64) == other.prefix(64)
    assert one.prefix(64) != one.prefix(128)[:64]
    assert one.fresh(64) != one.fresh(64)
    assert {*one.prefix(20_000)} == {*range(1000)}
