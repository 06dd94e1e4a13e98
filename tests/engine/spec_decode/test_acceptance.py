"""Draft tokens of sequences with recurrent states: a slot holds the state of exactly the computed
tokens.
"""

import threading

import pytest

from engine.spec_decode.test_speculation import DRAFTS, SIZE, prompt
from helpers.engine.fake_hybrid import expected_hybrid, next_state
from helpers.engine.fake_runner import ROOT, VOCAB_SIZE
from helpers.engine.hostile_drafts import CutDrafter
from helpers.engine.model_kinds import HYBRID
from kvboost_edge.config import EngineConfig
from kvboost_edge.engine.engine import CPUPagedEngine
from kvboost_edge.errors import KVBoostError, RequestError


def drafting(num_right, num_drafts=6, **options):
    """Build a bench whose drafts have `num_right` correct tokens followed by wrong ones."""
    bench = HYBRID.bench(**options)

    def drafter(request):
        truth = [*request.prompt_ids, *expected_hybrid(request.prompt_ids, 100)]
        return (
            CutDrafter(truth, num_right, num_drafts, VOCAB_SIZE)
            if request.max_draft_tokens
            else None
        )

    bench.scheduler.speculation.prompt_lookup = drafter
    return bench


def assert_slots_are_of_what_is_computed(bench):
    states = bench.manager.states
    backend = bench.parts.backend
    for sequence in bench.scheduler.running:
        own = states._states[sequence.blocks._serial]
        expected = (0, 0)
        for token_id in sequence.token_ids[: sequence.num_computed_tokens]:
            expected = next_state(expected, token_id)
        assert backend.read_state(own.slot) == expected


@pytest.mark.parametrize("num_right", range(7))
@pytest.mark.parametrize("closes_blocks", [False, True])
@pytest.mark.some(2)
def test_partly_right_drafts_change_only_the_number_of_passes(num_right, closes_blocks):
    bench = drafting(num_right)
    bench.scheduler.speculation._closes_blocks = closes_blocks
    handles = [bench.submit(prompt(number, 14 + number), 60, terms=DRAFTS) for number in range(3)]
    while bench.step():
        assert_slots_are_of_what_is_computed(bench)
    for handle in handles:
        result = bench.answer(handle)
        assert result.drafted_tokens > result.accepted_tokens or num_right == 6
        assert (result.accepted_tokens > 0) == (num_right > 0)
    assert bench.runner.taken_in == bench.scheduler.speculation.num_accepted


@pytest.mark.parametrize("num_right", [1, 5, 6])
@pytest.mark.some(2)
def test_states_after_accepted_drafts_are_kept_at_block_ends(num_right):
    """After any cut of the answer, the next turn resumes at the last full block. With small states,
    each block end can be resumed.
    """
    token_ids = prompt(1, 20)
    for length in range(30, 47):
        bench = drafting(num_right)
        longer = [*token_ids, *bench.ask(token_ids, length, terms=DRAFTS).output_token_ids, 3]
        assert bench.ask(longer, 4).cached_tokens == (len(longer) - 2) // SIZE * SIZE
    bench = drafting(num_right, every_block=True)
    whole = [*token_ids, *bench.ask(token_ids, 60, terms=DRAFTS).output_token_ids]
    for stop in (33, 49, 65):
        assert bench.ask([*whole[:stop], 1, 1], 3).cached_tokens == stop // SIZE * SIZE


def test_drafts_of_a_request_that_stores_nothing_publish_nothing():
    """The accepted drafts extend over the ends of blocks."""
    bench = drafting(6)
    assert (
        bench.ask(prompt(1, 20), 40, terms={**DRAFTS, "stores_nothing": True}).accepted_tokens
        > SIZE
    )
    states = bench.manager.states
    assert (bench.manager.content.under(ROOT), states.slots.num_used) == ([], 0)


def test_total_drafts_are_bounded_by_the_draft_rows():
    bench = drafting(6, num_draft_rows=4)
    sizes = []

    def look(batch):
        states = batch.layout.states
        sizes.append(int(batch.layout.cu_seqlens_q[-1] - states.certain.sum()))

    bench.runner.on_forward = look
    handles = [bench.submit(prompt(number, 9), 30, terms=DRAFTS) for number in range(3)]
    bench.run()
    assert max(sizes) == 4
    for handle in handles:
        bench.answer(handle)


def test_sequences_share_the_draft_rows():
    bench = drafting(6, num_draft_rows=6)
    handles = [bench.submit(prompt(number, 9), 30, terms=DRAFTS) for number in range(3)]
    bench.run()
    drafted = [handle.result(0).drafted_tokens for handle in handles]
    assert min(drafted) > max(drafted) // 2, "one sequence took most of the draft rows"


def test_nothing_is_drafted_without_draft_rows():
    assert drafting(6, num_draft_rows=0).ask(prompt(1, 9), 30, terms=DRAFTS).drafted_tokens == 0


def test_a_failed_state_update_ends_only_its_requests():
    bench = drafting(6)
    token_ids = prompt(2, 20)

    def fail():
        raise MemoryError

    bench.runner.on_accept = fail
    plain = bench.submit(prompt(5, 20), 40)
    doomed = [bench.submit([*token_ids, number], 40, terms=DRAFTS) for number in range(2)]
    bench.run()
    for handle in doomed:
        with pytest.raises(MemoryError):
            handle.result(0)
    bench.answer(plain)
    bench.runner.on_accept = None
    for number in range(2):
        bench.ask([*token_ids, number], 40, terms=DRAFTS)


def test_an_answer_ended_by_its_draft_needs_no_state_update():
    bench = drafting(6)
    token_ids = prompt(3, 20)

    def fail():
        raise MemoryError

    bench.runner.on_accept = fail
    assert bench.ask(token_ids, 4, terms=DRAFTS).drafted_tokens > 0


def test_a_freed_slot_may_be_reused_during_state_updates():
    """The failing request is the first of the pass. Its slot may be reassigned before the states of
    the others advance.
    """
    token_ids = prompt(9, 20)
    bad = 251
    bench = HYBRID.bench(64, 3)

    class Failing(CutDrafter):
        def propose(self, known, most):
            bench.runner.nan_for = {known[-1]} if len(known) == 26 else set()
            return super().propose(known, most)

    def drafter(request):
        truth = [*request.prompt_ids, *expected_hybrid(request.prompt_ids, 60)]
        made = Failing if request.index == 1 else CutDrafter
        return made(truth, 5 if request.index == 2 else 0, 5, VOCAB_SIZE)

    bench.scheduler.speculation.prompt_lookup = drafter
    doomed = bench.submit([bad, *token_ids], 60, terms=DRAFTS)
    fine = bench.submit(token_ids, 60, terms=DRAFTS)
    bench.run()
    with pytest.raises(KVBoostError, match="NaN"):
        doomed.result(0)
    bench.answer(fine)


def test_a_cancel_between_drafts_releases_everything():
    bench = drafting(6)
    handles = []
    for number in range(12):
        handles.append(bench.submit(prompt(number, 20), 60, terms=DRAFTS))
        for _ in range(number % 5):
            bench.step()
        handles[-1].cancel()
        bench.step()
    bench.run()
    states = bench.manager.states
    assert bench.manager.used_block_count == 0
    assert states.slots.num_used == sum(states.slots.counts().values())


def test_statistics_and_reset_do_not_wait_for_state_updates():
    """Both calls return while states are being updated, as they do during a pass."""
    text = [*range(60, 90)] * 3
    ended = []
    with CPUPagedEngine._built_by(
        lambda _: HYBRID.parts(64, 12), EngineConfig(num_blocks=64, speculation="on")
    ) as engine:
        runner = engine._parts.runner

        def ask():
            runner.on_accept = None
            for call in (engine.paged_stats, engine.reset_cache):
                asking = threading.Thread(target=call)
                asking.start()
                asking.join(5)
                ended.append(not asking.is_alive())

        engine.generate(text, max_new_tokens=40)
        runner.on_accept = ask
        result = engine.generate(text, max_new_tokens=40)
        assert list(result.output_token_ids) == expected_hybrid(
            text, 40, engine._parts.eos_token_ids
        )
        assert result.accepted_tokens > 0
    assert ended == [True, True]


@pytest.mark.parametrize("num_right", range(1, 7))
def test_a_reset_during_state_updates_changes_no_answer(num_right):
    bench = drafting(num_right)
    bench.runner.on_accept = bench.manager.reset
    handles = [bench.submit([*prompt(1, 20), number], 40, terms=DRAFTS) for number in range(3)]
    bench.run()
    for handle in handles:
        bench.answer(handle)


def test_draft_rows_are_nan_before_a_pass():
    bench = drafting(6)
    backend = bench.parts.backend
    seen = []
    bench.runner.on_forward = lambda batch: seen.append(backend.drafted(0).view("f4").copy())
    bench.ask(prompt(1, 9), 30, terms=DRAFTS)
    assert len(seen) > 5
    assert all((values != values).all() for values in seen)


def test_a_hybrid_engine_drafts_unless_turned_off():
    text = [*range(60, 90)] * 3
    with CPUPagedEngine._built_by(
        lambda _: HYBRID.parts(64, 12), EngineConfig(num_blocks=64, speculation="on")
    ) as engine:
        result = engine.generate(text, max_new_tokens=40)
        assert list(result.output_token_ids) == expected_hybrid(
            text, 40, engine._parts.eos_token_ids
        )
        assert engine.generate(text, max_new_tokens=40).drafted_tokens > 0
    parts = HYBRID.parts(64, 12, num_draft_rows=0)
    with CPUPagedEngine._built_by(
        lambda _: parts, EngineConfig(num_blocks=64, speculation="off")
    ) as engine:
        with pytest.raises(
            RequestError,
            match=r"speculation='on' is refused: draft tokens .*, but the engine was",
        ):
            engine.generate(text, speculation="on")
        assert engine.generate(text, max_new_tokens=40, speculation="auto").drafted_tokens == 0
