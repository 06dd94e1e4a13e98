"""The quality gate of non-prefix reuse: one test on an engine of its own, and its stored verdict."""

import asyncio
import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest

from helpers.clocks import give_clock
from helpers.engine.fake_runner import (
    FakeRunner,
    assert_clean,
    checked,
    fake_engine,
    runner_of,
)
from helpers.engine.hand_io_thread import DictTier
from helpers.raising import assert_raises
from kvboost_edge.config import GenerationMode
from kvboost_edge.engine.tasks import quality_gate
from kvboost_edge.engine.tasks.quality_gate import QualityGate
from kvboost_edge.errors import CapacityError, RequestError

REUSE = GenerationMode.CHUNK_KV_REUSE
TEXT = [number * 7 % 256 for number in range(80)]
PROMPT = [*range(20), *TEXT, 5]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KVBOOST_EDGE_CACHE", str(tmp_path))


@pytest.fixture
def tests_run(monkeypatch):
    """Verdicts of the quality tests that really ran."""
    found = []
    measure = QualityGate._measure

    def counted(self, *arguments):
        found.append(measure(self, *arguments))
        return found[-1]

    monkeypatch.setattr(QualityGate, "_measure", counted)
    return found


def engine_of(num_blocks=128, **options):
    return fake_engine(num_blocks, **{"primer_tokens": 32, "reuse_gate": "auto", **options})


def state_of(engine):
    """Return all that the engine reports, except the memory of the process."""
    stats = {
        name: value
        for name, value in engine.paged_stats().items()
        if not name.startswith(("process_", "other_"))
    }
    return stats, engine.block_map(), engine.cache_stats(), runner_of(engine).computed


def gate_of_reuse(engine, **options):
    """Reuse the text after another beginning, and return the result's `gate`."""
    engine.reset_cache()
    assert engine.warm(documents=[TEXT]).chunks_stored == 1
    result = checked(engine, PROMPT, 6, mode=REUSE, **options)
    assert result.reused_span_tokens > 0
    return result.gate


@pytest.fixture
def spoiled(monkeypatch):
    """Runner that computes noise if it attends to keys at other positions."""
    forward = FakeRunner.forward

    def noisy(self, batch):
        logits = forward(self, batch)
        moved = batch.layout.segments is not None and (batch.layout.segments[:, -1] != 0).any()
        return logits[:, ::-1].copy() if moved else logits

    monkeypatch.setattr(FakeRunner, "forward", noisy)


def test_a_model_is_tested_once_on_a_separate_engine(tests_run):
    """The engine that requests the test keeps its cached blocks and its figures."""
    with engine_of() as engine:
        for number in range(40):  # a full pool, in which anything more would evict
            engine.generate([number] * 65, 1)
        assert engine.block_map().count(0) <= 1
        before = state_of(engine)
        verdict = engine.check_reuse()
        assert state_of(engine) == before
        assert tests_run == [verdict]
        # If reuse changes nothing, only the reordering does.
        assert verdict.kl_reuse == 0
        assert verdict.kl_order > 0.1
        assert (verdict.agreement, verdict.passed) == (1, True)
        assert verdict.num_tokens >= 30
        assert verdict.reused_share > 0.2
        assert engine.check_reuse() == verdict
        assert_clean(engine)
    with engine_of() as engine:
        assert engine.check_reuse() == verdict
    assert len(tests_run) == 1, "the stored verdict must be used by other processes"


def test_a_request_uses_the_stored_verdict(tests_run, caplog):
    with engine_of() as engine:
        assert engine.check(PROMPT, mode=REUSE) == len(PROMPT)
        assert [gate_of_reuse(engine) for _ in range(2)] == ["unchecked"] * 2
        assert caplog.text.count("kvboost-edge reuse-check") == 1
        assert tests_run == []
        engine.check_reuse()
        assert gate_of_reuse(engine) == "passed"
        assert engine.generate([9] * 40, 2, mode=REUSE).gate == ""
        assert_clean(engine)
    with engine_of() as engine:
        assert gate_of_reuse(engine) == "passed"
    assert len(tests_run) == 1


def test_another_processes_verdict_is_found_later(tests_run, monkeypatch):
    now = [0.0]
    give_clock(monkeypatch, lambda: now[0], quality_gate)
    tokenized = []
    make = quality_gate.make_material
    monkeypatch.setattr(
        quality_gate,
        "make_material",
        lambda *given, **more: tokenized.append(given) or make(*given, **more),
    )
    with engine_of() as engine, engine_of() as other:
        assert gate_of_reuse(engine) == "unchecked"
        now[0] = 10.0
        assert gate_of_reuse(engine) == "unchecked"
        assert len(tokenized) == 1, "the material must be tokenized once, not at each check"
        now[0] = 15.0
        other.check_reuse()
        assert gate_of_reuse(engine) == "unchecked"
        now[0] = 20.0
        assert gate_of_reuse(engine) == "passed"


def test_a_failed_test_refuses_reuse_with_its_figures(tests_run, spoiled):
    words = r"refused for this model.*KL\(full \|\| reuse\).*reuse_gate='off'"
    with engine_of() as engine:
        engine.generate(TEXT + [1] * 16, 1)
        assert engine.default_reuse_refusal is None
        assert not engine.check_reuse().passed
        assert "refused for this model" in engine.default_reuse_refusal
        assert engine.reuse_refusal is None, "a request that recomputes more must not be refused"
        computed = runner_of(engine).computed
        calls = [
            lambda: engine.submit(PROMPT, mode=REUSE),
            lambda: engine.generate(PROMPT, 6, mode=REUSE),
            lambda: engine.check(PROMPT, mode=REUSE),
            lambda: engine.generate_batch([PROMPT, PROMPT], mode=REUSE),
            lambda: list(engine.stream(PROMPT, mode=REUSE)),
            lambda: asyncio.run(engine.agenerate(PROMPT, mode=REUSE)),
        ]
        for call in calls:
            assert_raises(RequestError, words, call)
        assert runner_of(engine).computed == computed
        checked(engine, PROMPT, 6)
        # A document's KV does not depend on the recompute settings. A request with other settings
        # may reuse it.
        engine.reset_cache()
        assert engine.warm(documents=[TEXT]).chunks_stored == 1
        reused = engine.generate(PROMPT, 6, mode=REUSE, recompute_strategy="query")
        assert reused.reused_span_tokens > 0
        assert_clean(engine)
    with engine_of() as engine, pytest.raises(RequestError, match=words):
        engine.generate(PROMPT, 6, mode=REUSE)
    assert len(tests_run) == 1


def test_each_recompute_strategy_is_tested_separately(tests_run):
    with engine_of() as engine:
        for strategy, ratio, count in (
            ("none", 0.1, 1),
            ("none", 0.2, 1),
            ("cacheblend", 0.2, 2),
            ("none", 0.1, 2),
        ):
            options = {"recompute_strategy": strategy, "recompute_ratio": ratio}
            engine.check_reuse(**options)
            assert len(tests_run) == count
        assert gate_of_reuse(engine, recompute_strategy="none") == "passed"
        assert gate_of_reuse(engine, recompute_strategy="query") == "unchecked"


def test_reuse_gate_off_is_reported(tests_run, spoiled):
    with engine_of() as engine:
        assert not engine.check_reuse().passed
    with engine_of(reuse_gate="off") as engine:
        engine.warm(documents=[TEXT])
        assert engine.generate(PROMPT, 1, mode=REUSE).gate == "off"
        assert engine.generate(PROMPT, 1).gate == ""
    assert len(tests_run) == 1


def test_several_threads_wait_for_one_test(tests_run):
    with engine_of() as engine, ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(engine.check_reuse) for _ in range(4)]
        checked(engine, TEXT, 3)
        assert {one.result(60) for one in waiting} == {*tests_run}
        assert len(tests_run) == 1
        assert_clean(engine)


def test_a_request_that_cannot_run_has_its_own_error(spoiled):
    """CapacityError and other errors of the request precede the refusal by the verdict."""
    with engine_of(num_blocks=20) as engine:
        engine.check_reuse()
        for call in (engine.generate, engine.submit):
            assert_raises(CapacityError, "enlarge max_cache_bytes", call, [1] * 330, mode=REUSE)
        assert_raises(RequestError, "max_new_tokens", engine.generate, [1] * 390, 30, mode=REUSE)
        assert_raises(RequestError, "documents is an empty list", engine.warm, documents=[])
        runner_of(engine).moved_keys_refusal = "it has no keys"
        assert_raises(RequestError, "it has no keys", engine.generate, [1] * 40, mode=REUSE)
        assert runner_of(engine).computed == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_context": 150}, "three documents of 64 tokens .* do not fit into a prompt of 150"),
        ({"recompute_overlap": 400}, "recompute_overlap=64"),
        ({"min_chunk_tokens": 300}, "min_chunk_tokens=300"),
    ],
    ids=str,
)
def test_requests_run_unchecked_without_room_for_the_test(options, words):
    with engine_of(**options) as engine:
        with pytest.raises(RequestError, match=rf"{words}.*reuse_gate='off'"):
            engine.check_reuse()
        assert engine.generate([1] * 40, 4, mode=REUSE).finish_reason == "length"


def test_a_small_pool_is_tested_like_a_large_one(tests_run):
    for num_blocks in (12, 128):
        with engine_of(num_blocks) as engine:
            engine.check_reuse()
    assert len(tests_run) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_test_is_repeated(error, monkeypatch, tests_run):
    failing = iter([error("stop"), None])
    logits = QualityGate.logits

    def interrupted(self, *arguments):
        if (one := next(failing, None)) is not None:
            raise one
        return logits(self, *arguments)

    monkeypatch.setattr(QualityGate, "logits", interrupted)
    with engine_of() as engine:
        assert_raises(error, "stop", engine.check_reuse)
        assert engine.check_reuse().passed
        assert len(tests_run) == 1
        assert_clean(engine)


def test_a_test_whose_documents_were_evicted_gives_no_verdict(monkeypatch, tests_run):
    logits = QualityGate.logits

    def robbed(self, *arguments):
        if len(arguments) == 4:
            with self._core.reading():
                self._parts.manager.reset()
        return logits(self, *arguments)

    monkeypatch.setattr(QualityGate, "logits", robbed)
    with engine_of() as engine:
        assert_raises(RequestError, r"found only 0 of \d+ document", engine.check_reuse)
        assert tests_run == []


def test_a_failing_pass_fails_the_check(monkeypatch):
    with engine_of() as engine, monkeypatch.context() as patch:

        def fail(self, batch):
            raise MemoryError("no memory")

        patch.setattr(FakeRunner, "forward", fail)
        with pytest.raises(MemoryError):
            engine.check_reuse()
    with engine_of() as engine:
        assert engine.check_reuse().passed


def test_the_test_does_not_change_other_requests_seeds():
    outputs = []
    for is_checked in (True, False):
        with engine_of(seed=3) as engine:
            if is_checked:
                engine.check_reuse()
            outputs.append(engine.generate(TEXT, 12, temperature=1.5).output_token_ids)
    assert outputs[0] == outputs[1]


def test_the_test_stores_nothing_in_tiers(tests_run):
    tier = DictTier()
    with engine_of(tiers=[tier]) as engine:
        engine.check_reuse()
        assert engine.verify_correctness(max_new_tokens=6, mode=REUSE)
        assert len(tests_run) == 1
        engine.warm(documents=[TEXT])
    # The document's blocks after its primer.
    assert len(tier.blocks) == (32 + 80) // 16


def test_verify_compares_reuse_with_a_full_computation(tests_run):
    with engine_of() as engine:
        report = engine.verify_correctness(max_new_tokens=6, mode=REUSE)
        assert report
        assert (report.mode, len(report.checks), len(tests_run)) == (REUSE, 4, 1)
        assert report.text_agreement == 1
        assert report.kl_limit == tests_run[0].kl_order > report.mean_kl == 0
        assert all(
            check.reused_tokens > 0 and check.text_equal and check.agreement == 1
            for check in report.checks
        )
        assert len(str(report).splitlines()) == 5
        assert runner_of(engine).computed == 0, (
            "the built-in text must be tested on a separate engine"
        )
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


def test_verify_keeps_the_documents_of_many_prompts():
    """The full computations of all prompts together would fill the pool."""
    prompts = [[number] * 16 + TEXT + [number] * 5 for number in range(8)]
    with engine_of(num_blocks=40) as engine:
        engine.check_reuse()
        engine.warm(documents=[TEXT])
        report = engine.verify_correctness(prompts, max_new_tokens=6, mode=REUSE)
        assert report, str(report)
        assert len(report.checks) == 8
        assert [check.reused_tokens for check in report.checks] == [48] * 8
        assert_clean(engine)


def test_verify_reports_by_how_much_reuse_fails(spoiled):
    with engine_of() as engine:
        report = engine.verify_correctness(max_new_tokens=6, mode=REUSE)
        assert not report
        assert report.kl_limit is not None
        assert report.mean_kl > report.kl_limit
        assert report.text_agreement < 1
        assert all(not check.text_equal and check.agreement < 0.5 for check in report.checks)
        assert str(report).endswith("FAILED")
        assert_clean(engine)


def test_verify_fails_if_answers_differ(monkeypatch):
    """Three of four texts differ, although the mean KL is small."""
    generate = QualityGate.generate

    def changed(self, ids, whose, params, repair=None):
        results = generate(self, ids, whose, params, repair)
        if repair is None:
            return results
        return [
            dataclasses.replace(one, output_token_ids=(1, 2, 3)) if number else one
            for number, one in enumerate(results)
        ]

    with engine_of() as engine:
        engine.check_reuse()
        monkeypatch.setattr(QualityGate, "generate", changed)
        report = engine.verify_correctness(max_new_tokens=6, mode=REUSE)
        assert not report
        assert report.text_agreement == 0.25
        assert "1 of 4 answers equal" in str(report)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"prompts": []}, "prompts is an empty list"),
        ({"prompts": [[1, 999]]}, "token 1 of the prompt is 999"),
        ({"temperature": 0.5}, "option 'temperature' is not a recompute option"),
        ({"recompute_ratio": 2}, "recompute_ratio=2"),
        ({"mode": "nonsense"}, "mode='nonsense' is not one of"),
        ({"mode": "baseline"}, "mode='baseline' does not reuse KV"),
    ],
    ids=str,
)
def test_verify_refuses_invalid_arguments(arguments, words):
    with engine_of() as engine:
        with pytest.raises(RequestError, match=words):
            engine.verify_correctness(**{"mode": REUSE, "max_new_tokens": 4, **arguments})
        assert_clean(engine)
