"""The interface of features: null implementations suffice, and a new feature changes no other file."""

import pytest

from helpers.engine.fake_runner import Bench, expected_tokens, fake_engine
from kvboost_edge.engine.request.request import RequestFeature
from kvboost_edge.engine.schedule.feature import Constraint, Drafting, Feature, SharedSpans
from kvboost_edge.engine.schedule.planners import DraftPlanner, Prefetcher, SpanPlacement
from kvboost_edge.errors import RequestError

PROMPTS = [list(range(20, 60)), list(range(20, 44)), [7, 8, 9]]


def answers(bench):
    """Run the prompts twice, the second time from the cache; return the tokens."""
    found = []
    for _ in range(2):
        handles = [bench.submit(prompt, 6) for prompt in PROMPTS]
        bench.run()
        found.append([list(handle.result(0).output_token_ids) for handle in handles])
    return found


def test_the_scheduler_runs_without_features():
    bench = Bench()
    bench.scheduler.loads = Prefetcher()
    bench.scheduler.sharing = SpanPlacement()
    bench.scheduler.speculation = DraftPlanner()
    assert answers(bench) == [[expected_tokens(prompt, 6) for prompt in PROMPTS]] * 2
    assert bench.manager.used_block_count == 0


def test_a_new_feature_sees_each_sequence():
    """A feature that only counts needs to know nothing but its null base class."""
    seen = []

    class Counting(Drafting):
        def admit(self, table):
            seen.append("admit")

        def count(self, num_drafted, num_accepted):
            seen.append(f"drafted {num_drafted}")

        def release(self):
            seen.append("release")

    bench = Bench()
    bench.core._sequences._speculation.drafting = lambda request: Counting()
    assert answers(bench) == [[expected_tokens(prompt, 6) for prompt in PROMPTS]] * 2
    assert seen.count("admit") == seen.count("release") == 2 * len(PROMPTS)
    assert {word for word in seen if word.startswith("drafted")} == {"drafted 0"}


def test_null_features_add_nothing_to_a_result():
    for kind in (Feature, Drafting, Constraint, SharedSpans):
        assert kind().result_fields() == {}


class Refusing(RequestFeature):
    """Feature that refuses prompts longer than one token and sets a field of the others."""

    def prepare(self, inputs):
        if len(inputs.token_ids) > 1:
            raise RequestError("too long for this feature")
        return {"snapshot_hints": (7,)}


def test_a_feature_sets_fields_and_a_refusal_consumes_no_seed():
    with fake_engine(seed=0) as engine, fake_engine(seed=0) as other:
        engine._builder._features = (Refusing(),)
        with pytest.raises(RequestError, match="too long"):
            engine.submit([7, 8])
        request = engine._builder.read([7], {})
        assert request.snapshot_hints == (7,)
        assert (request.index, request.seed) == (0, other._builder.read([7], {}).seed)
