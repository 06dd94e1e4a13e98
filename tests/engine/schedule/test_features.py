"""The interface of features: null implementations suffice, and a new one changes no other file."""

from helpers.engine.fake_runner import Bench, expected_tokens
from kvboost_edge.engine.schedule.feature import Constraint, Drafting, Feature, SharedSpans
from kvboost_edge.engine.schedule.planners import DraftPlanner, Prefetcher, SpanPlacement

PROMPTS = [list(range(20, 60)), list(range(20, 44)), [7, 8, 9]]


def answers(bench):
    """Run the prompts twice, the second time from the cache; return the tokens."""
    found = []
    for _ in range(2):
        handles = [bench.submit(prompt, 6) for prompt in PROMPTS]
        bench.run()
        found.append([list(handle.result(0).output_token_ids) for handle in handles])
    return found


def test_the_scheduler_needs_no_feature():
    bench = Bench()
    bench.scheduler.loads = Prefetcher()
    bench.scheduler.sharing = SpanPlacement()
    bench.scheduler.speculation = DraftPlanner()
    assert answers(bench) == [[expected_tokens(prompt, 6) for prompt in PROMPTS]] * 2
    assert bench.manager.used_block_count == 0


def test_a_new_feature_is_told_of_each_sequence():
    """A feature that counts: its null base class is all that it has to know."""
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
