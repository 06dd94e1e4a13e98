"""The test that stands before reuse: run once, by one thread, leaving nothing behind; what fails it
is refused.
"""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from helpers.engine.fake_runner import (
    assert_clean,
    checked,
    expected_tokens,
    fake_engine,
    hold_passes,
    runner_of,
)
from helpers.engine.hand_mover import DictTier
from helpers.raising import assert_raises
from kvboost_edge.config import GenerationMode
from kvboost_edge.engine.tasks.quality_gate import QualityGate
from kvboost_edge.errors import CapacityError, KVBoostError, RequestError

REUSE = GenerationMode.CHUNK_KV_REUSE
TEXT = [number * 7 % 256 for number in range(80)]
PROMPT = [*range(20), *TEXT, 5]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KVBOOST_EDGE_CACHE", str(tmp_path))


@pytest.fixture
def tests_run(monkeypatch):
    """What the tests that really ran found."""
    found = []
    measure = QualityGate._measure

    def counted(self, *arguments):
        found.append(measure(self, *arguments))
        return found[-1]

    monkeypatch.setattr(QualityGate, "_measure", counted)
    return found


def engine_of(num_blocks=128, **options):
    return fake_engine(num_blocks, **{"primer_tokens": 32, "reuse_gate": "auto", **options})


def spoil(engine):
    """What leans on keys at other positions becomes noise."""
    runner = runner_of(engine)
    forward = runner.forward

    def noisy(batch):
        logits = forward(batch)
        moved = batch.layout.segments is not None and (batch.layout.segments[:, -1] != 0).any()
        return logits[:, ::-1].copy() if moved else logits

    runner.forward = noisy


def test_reuse_is_tested_once_and_leaves_nothing(tests_run):
    with engine_of() as engine:
        engine.generate(TEXT + [1] * 16, 1)
        before = engine.block_map()
        assert engine.check(PROMPT, mode=REUSE) == len(PROMPT)
        assert tests_run == []
        result = checked(engine, PROMPT, 6, mode=REUSE)
        assert (result.mode, result.gate, len(tests_run)) == (REUSE, "passed", 1)
        (verdict,) = tests_run
        # Where reuse changes nothing only another order does.
        assert verdict.kl_reuse == 0
        assert verdict.kl_order > 0.1
        assert (verdict.agreement, verdict.passed) == (1, True)
        assert verdict.num_tokens >= 30
        assert verdict.reused_share > 0.2
        with engine._core.reading():
            manager = engine._parts.manager
            root = engine._parts.root
            assert (
                len(manager.content.under(root)) == manager.published_block_count >= before.count(1)
            )
            assert engine._core.answers._kept._roots.keys() <= {root}
        assert engine.generate(PROMPT, 6, mode=REUSE).gate == "passed"
        assert engine.generate([9] * 40, 2, mode=REUSE).gate == ""
        assert len(tests_run) == 1
        assert_clean(engine)
    with engine_of() as engine:
        assert engine.warm(documents=[TEXT]).chunks_stored == 1
        assert engine.generate(PROMPT, 6, mode=REUSE).approximate
    assert len(tests_run) == 1, "the outcome is kept for other processes"


def test_what_fails_the_test_is_refused_with_its_figures(tests_run):
    words = r"refused for this model.*KL\(full \|\| reuse\).*reuse_gate='off'"
    with engine_of() as engine:
        spoil(engine)
        engine.generate(TEXT + [1] * 16, 1)
        assert_raises(RequestError, words, engine.submit, PROMPT, mode=REUSE)
        computed = runner_of(engine).computed
        calls = [
            lambda: engine.generate(PROMPT, 6, mode=REUSE),
            lambda: engine.check(PROMPT, mode=REUSE),
            lambda: engine.warm(documents=[TEXT]),
            lambda: engine.warm(TEXT, position_offset=9),
            lambda: engine.generate_batch([PROMPT, PROMPT], mode=REUSE),
            lambda: list(engine.stream(PROMPT, mode=REUSE)),
            lambda: asyncio.run(engine.agenerate(PROMPT, mode=REUSE)),
        ]
        for call in calls:
            assert_raises(RequestError, words, call)
        assert runner_of(engine).computed == computed
        checked(engine, PROMPT, 6)
        assert not tests_run[0].passed
        assert_clean(engine)
    with engine_of() as engine, pytest.raises(RequestError, match=words):
        engine.generate(PROMPT, 6, mode=REUSE)
    assert len(tests_run) == 1


def test_other_repairs_are_other_tests(tests_run):
    with engine_of() as engine:
        for strategy, ratio, count in (
            ("none", 0.1, 1),
            ("none", 0.2, 1),
            ("cacheblend", 0.2, 2),
            ("none", 0.1, 2),
        ):
            engine.generate(
                PROMPT, 1, mode=REUSE, recompute_strategy=strategy, recompute_ratio=ratio
            )
            assert len(tests_run) == count


def test_off_says_that_nothing_was_tested(tests_run):
    with engine_of(reuse_gate="off") as engine:
        engine.warm(documents=[TEXT])
        assert engine.generate(PROMPT, 1, mode=REUSE).gate == "off"
        assert engine.generate(PROMPT, 1).gate == ""
    assert tests_run == []


def test_several_threads_wait_for_one_test(tests_run):
    go = threading.Event()
    with engine_of() as engine, ThreadPoolExecutor(4) as pool:
        hold_passes(engine, go)
        waiting = [pool.submit(engine.generate, PROMPT, 4, mode=REUSE) for _ in range(4)]
        go.set()
        for one in waiting:
            assert list(one.result(60).output_token_ids) == expected_tokens(PROMPT, 4)
        assert len(tests_run) == 1
        assert_clean(engine)


def test_other_requests_run_beside_the_test(tests_run):
    with engine_of() as engine, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(engine.generate, PROMPT, 4, mode=REUSE)
        while not asked.done():
            checked(engine, TEXT, 3)
        assert asked.result(60).finish_reason == "length"
        assert len(tests_run) == 1


def test_a_request_that_fails_in_any_case_starts_no_test(tests_run):
    with engine_of(num_blocks=20) as engine:
        for call in (engine.generate, engine.submit):
            assert_raises(CapacityError, "enlarge max_cache_bytes", call, [1] * 330, mode=REUSE)
        assert_raises(RequestError, "max_new_tokens", engine.generate, [1] * 390, 30, mode=REUSE)
        assert_raises(RequestError, "documents is an empty list", engine.warm, documents=[])
        runner_of(engine).moved_keys_refusal = "it has no keys"
        assert_raises(RequestError, "it has no keys", engine.generate, [1] * 40, mode=REUSE)
        assert runner_of(engine).computed == 0
    assert tests_run == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_context": 150}, "no room for three documents of 64 tokens .* in a prompt of 150"),
        ({"num_blocks": 40}, "half of the pool"),
        ({"recompute_overlap": 400}, "recompute_overlap=64"),
        ({"min_chunk_tokens": 300}, "min_chunk_tokens=300"),
    ],
    ids=str,
)
def test_without_room_for_its_test_reuse_is_refused(options, words):
    with engine_of(**options) as engine:
        with pytest.raises(RequestError, match=rf"{words}.*reuse_gate='off'"):
            engine.generate([1] * 40, 4, mode=REUSE)
        assert runner_of(engine).computed == 0


def test_an_engine_that_is_closed_ends_its_test():
    engine = engine_of()
    go = threading.Event()
    begun = threading.Event()

    def hold(batch):
        begun.set()
        assert go.wait(30)

    runner_of(engine).on_forward = hold
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(engine.generate, PROMPT, 4, mode=REUSE) for _ in range(2)]
        assert begun.wait(30)
        closing = pool.submit(engine.close)
        go.set()
        closing.result(60)
        for one in asked:
            assert_raises(KVBoostError, "closed", one.result, 60)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_test_that_is_interrupted_is_run_again(error, monkeypatch, tests_run):
    failing = iter([error("stop"), None])
    logits = QualityGate.logits

    def interrupted(self, *arguments):
        if (one := next(failing, None)) is not None:
            raise one
        return logits(self, *arguments)

    monkeypatch.setattr(QualityGate, "logits", interrupted)
    with engine_of() as engine:
        assert_raises(error, "stop", engine.generate, PROMPT, 4, mode=REUSE)
        assert engine.paged_stats()["cached_blocks"] == 0
        assert engine.generate(PROMPT, 4, mode=REUSE).finish_reason == "length"
        assert len(tests_run) == 1
        assert_clean(engine)


@pytest.mark.parametrize(("times", "passes"), [(3, True), (5, False)])
def test_what_others_drive_out_of_the_pool_proves_nothing(times, passes, monkeypatch, tests_run):
    """The documents are computed again, so many times; then the request is refused and the next one
    tries.
    """
    left = iter(range(times))
    logits = QualityGate.logits
    with engine_of() as engine:

        def robbed(self, *arguments):
            if len(arguments) == 4 and next(left, None) is not None:
                engine.reset_cache()
            return logits(self, *arguments)

        monkeypatch.setattr(QualityGate, "logits", robbed)
        if not passes:
            with pytest.raises(RequestError, match=r"found 0 of \d+ tokens again.*try again"):
                engine.generate(PROMPT, 4, mode=REUSE)
        assert engine.generate(PROMPT, 4, mode=REUSE).finish_reason == "length"
        assert len(tests_run) == 1
        assert tests_run[0].reused_share > 0.4
        assert_clean(engine)


def test_a_failing_pass_fails_the_request_that_asked():
    with engine_of() as engine:

        def fail(batch):
            raise MemoryError("no memory")

        runner_of(engine).on_forward = fail
        with pytest.raises(MemoryError):
            engine.generate(PROMPT, 4, mode=REUSE)
        runner_of(engine).on_forward = None
        assert engine.generate(PROMPT, 4, mode=REUSE).finish_reason == "length"
        assert_clean(engine)


def test_the_draws_of_others_are_what_they_would_be_without_it():
    outputs = []
    for gate in ("auto", "off"):
        with engine_of(seed=3, reuse_gate=gate) as engine:
            engine.generate(PROMPT, 1, mode=REUSE)
            outputs.append(engine.generate(TEXT, 12, temperature=1.5).output_token_ids)
    assert outputs[0] == outputs[1]


def test_no_tier_is_given_what_the_test_computed(tests_run):
    tier = DictTier()
    with engine_of(tiers=[tier]) as engine:
        engine.generate(PROMPT, 1, mode=REUSE)
        assert len(tests_run) == 1
        engine.warm(documents=[TEXT])
    # The prompt's own blocks, and the document's behind its primer.
    assert len(tier.blocks) == len(PROMPT) // 16 + (32 + 80) // 16


def test_verify_compares_reuse_with_a_full_computation(tests_run):
    with engine_of() as engine:
        report = engine.verify_correctness(max_new_tokens=6, mode=REUSE)
        assert report
        assert (report.mode, len(report.checks), len(tests_run)) == (REUSE, 4, 1)
        assert report.kl_limit == tests_run[0].kl_order > report.mean_kl == 0
        assert all(
            check.reused_tokens > 0 and check.text_equal and check.agreement == 1
            for check in report.checks
        )
        assert len(str(report).splitlines()) == 5
        with engine._core.reading():
            assert engine._parts.manager.published_block_count == 0
        engine.warm(documents=[TEXT])
        own = engine.verify_correctness(
            [PROMPT], max_new_tokens=6, mode="chunk_kv_reuse", recompute_strategy="none"
        )
        assert own
        assert (own.checks[0].prompt_tokens, own.checks[0].reused_tokens) == (101, 68)
        nothing = engine.verify_correctness([[3] * 40], max_new_tokens=6, mode=REUSE)
        assert not nothing
        assert "nothing was reused" in str(nothing)
        assert_clean(engine)


def test_verify_says_by_how_much_reuse_goes_too_far():
    with engine_of() as engine:
        spoil(engine)
        report = engine.verify_correctness(max_new_tokens=6, mode=REUSE)
        assert not report
        assert report.kl_limit is not None
        assert report.mean_kl > report.kl_limit
        assert all(
            check.passed and not check.text_equal and check.agreement < 0.5
            for check in report.checks
        )
        assert str(report).endswith("FAILED")
        assert_clean(engine)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"prompts": []}, "prompts is an empty list"),
        ({"prompts": [[1, 999]]}, "token 1 of the prompt is 999"),
        ({"temperature": 0.5}, "option 'temperature' does not go with mode='chunk_kv_reuse'"),
        ({"recompute_ratio": 2}, "recompute_ratio=2"),
        ({"mode": "nonsense"}, "mode='nonsense' is not one of"),
        ({"mode": "baseline"}, "mode='baseline' has nothing to be compared"),
    ],
    ids=str,
)
def test_verify_refuses_what_is_wrong(arguments, words):
    with engine_of() as engine:
        with pytest.raises(RequestError, match=words):
            engine.verify_correctness(**{"mode": REUSE, "max_new_tokens": 4, **arguments})
        assert_clean(engine)
