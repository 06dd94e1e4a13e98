"""Drafts of sequences with states: a slot holds the state of exactly the tokens that are computed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from engine.test_speculation import finish, prompt
from helpers.engine.fake_hybrid import HybridBackend, HybridRunner, expected_hybrid, hybrid_parts, next_state
from helpers.engine.fake_runner import ROOT, VOCAB_SIZE, Bench
from helpers.engine.hostile_drafts import CutDrafter
from kvboost_edge.config import EngineConfig
from kvboost_edge.engine.engine import CPUPagedEngine
from kvboost_edge.engine.handle import RequestHandle
from kvboost_edge.engine.request import Request
from kvboost_edge.errors import KVBoostError, RequestError
from kvboost_edge.runners.base import ForwardBatch

DRAFTS: dict[str, Any] = {"max_draft_tokens": 31, "always_drafts": True}
SIZE = 16


def drafting(num_right: int, num_drafts: int = 6, *, num_draft_rows: int = 31, **options: Any) -> Bench:
    """A bench whose requests are guessed right so far, and then wrong."""
    every_block = options.pop("every_block", False)
    parts = hybrid_parts(options.get("num_blocks", 64), 40, every_block=every_block, num_draft_rows=num_draft_rows)
    bench = Bench(parts=parts, **options)

    def drafter(request: Request) -> CutDrafter | None:
        truth = [*request.prompt_ids, *expected_hybrid(request.prompt_ids, 100)]
        return CutDrafter(truth, num_right, num_drafts, VOCAB_SIZE) if request.max_draft_tokens else None

    bench.scheduler.speculation.drafter = drafter  # type: ignore[method-assign]
    return bench


def runner_of(bench: Bench) -> HybridRunner:
    assert isinstance(bench.runner, HybridRunner)
    return bench.runner


def assert_slots_are_of_what_is_computed(bench: Bench) -> None:
    states, backend = bench.manager.states, bench.parts.backend
    assert states is not None
    assert isinstance(backend, HybridBackend)
    for sequence in bench.scheduler.running:
        own = states._states[sequence.blocks._serial]
        expected = (0, 0)
        for token_id in sequence.token_ids[: sequence.num_computed_tokens]:
            expected = next_state(expected, token_id)
        assert backend.read_state(own.slot) == expected


@pytest.mark.parametrize("num_right", range(7))
@pytest.mark.parametrize("closes_blocks", [False, True])
def test_drafts_right_up_to_any_cut_change_nothing_but_the_number_of_passes(
    num_right: int, closes_blocks: bool
) -> None:
    bench = drafting(num_right)
    bench.scheduler.speculation._closes_blocks = closes_blocks
    handles = [bench.submit(prompt(number, 14 + number), 60, terms=DRAFTS) for number in range(3)]
    while bench.step():
        assert_slots_are_of_what_is_computed(bench)
    for number, handle in enumerate(handles):
        result = handle.result(0)
        assert list(result.output_token_ids) == expected_hybrid(prompt(number, 14 + number), 60)
        assert result.drafted_tokens > result.accepted_tokens or num_right == 6
        assert (result.accepted_tokens > 0) == (num_right > 0)
    assert runner_of(bench).taken_in == bench.scheduler.speculation.num_accepted


@pytest.mark.parametrize("num_right", [1, 5, 6])
def test_what_drafts_were_right_is_kept_where_blocks_end(num_right: int) -> None:
    """Behind any cut of the answer the next turn goes on from the last full block, and every one with small states."""
    for length in range(30, 47):
        bench = drafting(num_right)
        token_ids = prompt(1, 20)
        turn = bench.submit(token_ids, length, terms=DRAFTS)
        finish(bench, [turn])
        longer = [*token_ids, *turn.result(0).output_token_ids, 3]
        following = bench.submit(longer, 4)
        finish(bench, [following])
        assert following.result(0).cached_tokens == (len(longer) - 2) // SIZE * SIZE
        assert list(following.result(0).output_token_ids) == expected_hybrid(longer, 4)
    bench = drafting(num_right, every_block=True)
    turn = bench.submit(token_ids, 60, terms=DRAFTS)
    finish(bench, [turn])
    whole = [*token_ids, *turn.result(0).output_token_ids]
    for stop in (33, 49, 65):
        branch = bench.submit([*whole[:stop], 1, 1], 3)
        finish(bench, [branch])
        assert branch.result(0).cached_tokens == stop // SIZE * SIZE


def test_a_stop_inside_a_draft_leaves_the_state_of_the_tokens_that_are_kept() -> None:
    token_ids = prompt(3, 20)
    truth = expected_hybrid(token_ids, 40)
    for at in range(8, 20):
        bench = drafting(6)
        handle = bench.submit(token_ids, 40, stop_ids=frozenset({truth[at]}), terms=DRAFTS)
        finish(bench, [handle])
        output = list(handle.result(0).output_token_ids)
        assert output == truth[: truth.index(truth[at]) + 1]
        longer = [*token_ids, *output, 5, 6]
        following = bench.submit(longer, 3)
        finish(bench, [following])
        assert following.result(0).cached_tokens == (len(longer) - 3) // SIZE * SIZE
        assert list(following.result(0).output_token_ids) == expected_hybrid(longer, 3)


def test_right_drafts_of_a_request_that_stores_nothing_publish_nothing() -> None:
    """Though they run over the ends of blocks."""
    bench = drafting(6)
    handle = bench.submit(prompt(1, 20), 40, terms={**DRAFTS, "stores_nothing": True})
    finish(bench, [handle])
    assert handle.result(0).accepted_tokens > SIZE
    states = bench.manager.states
    assert states is not None
    assert (bench.manager.content.under(ROOT), states.slots.num_used) == ([], 0)


def test_all_sequences_together_have_no_more_drafts_than_there_are_rows_for() -> None:
    bench = drafting(6, num_draft_rows=4)
    sizes: list[int] = []

    def look(batch: ForwardBatch) -> None:
        states = batch.layout.states
        assert states is not None
        sizes.append(int(batch.layout.cu_seqlens_q[-1] - states.certain.sum()))

    bench.runner.on_forward = look
    handles = [bench.submit(prompt(number, 9), 30, terms=DRAFTS) for number in range(3)]
    finish(bench, handles)
    assert max(sizes) == 4
    for number, handle in enumerate(handles):
        assert list(handle.result(0).output_token_ids) == expected_hybrid(prompt(number, 9), 30)


def test_sequences_share_the_rows_for_drafts() -> None:
    bench = drafting(6, num_draft_rows=6)
    handles = [bench.submit(prompt(number, 9), 30, terms=DRAFTS) for number in range(3)]
    finish(bench, handles)
    drafted = [handle.result(0).drafted_tokens for handle in handles]
    assert min(drafted) > max(drafted) // 2, "the first in rank takes all"


def test_where_there_are_no_rows_nothing_is_guessed() -> None:
    bench = drafting(6, num_draft_rows=0)
    handle = bench.submit(prompt(1, 9), 30, terms=DRAFTS)
    finish(bench, [handle])
    assert handle.result(0).drafted_tokens == 0


def test_states_that_cannot_take_drafts_in_end_their_requests_and_nobody_finds_them() -> None:
    bench = drafting(6)
    token_ids = prompt(2, 20)

    def fail() -> None:
        raise MemoryError

    runner_of(bench).on_accept = fail
    plain = bench.submit(prompt(5, 20), 40)
    doomed = [bench.submit([*token_ids, number], 40, terms=DRAFTS) for number in range(2)]
    bench.run()
    for handle in doomed:
        with pytest.raises(MemoryError):
            handle.result(0)
    assert list(plain.result(0).output_token_ids) == expected_hybrid(prompt(5, 20), 40)
    runner_of(bench).on_accept = None
    again = [bench.submit([*token_ids, number], 40, terms=DRAFTS) for number in range(2)]
    finish(bench, again)
    for number, handle in enumerate(again):
        assert list(handle.result(0).output_token_ids) == expected_hybrid([*token_ids, number], 40)


def test_an_answer_that_its_drafts_end_is_whole_though_no_state_takes_them_in() -> None:
    bench, token_ids = drafting(6), prompt(3, 20)

    def fail() -> None:
        raise MemoryError

    runner_of(bench).on_accept = fail
    handle = bench.submit(token_ids, 4, terms=DRAFTS)
    bench.run()
    assert list(handle.result(0).output_token_ids) == expected_hybrid(token_ids, 4)
    assert handle.result(0).drafted_tokens > 0


def test_a_slot_of_a_request_that_failed_is_another_ones_while_drafts_are_taken_in() -> None:
    """The one that fails is first in the pass, and its slot may be given away before the others' states move on."""
    token_ids, bad = prompt(9, 20), 251
    parts = hybrid_parts(64, 3)
    bench = Bench(parts=parts)

    class Failing(CutDrafter):
        def propose(self, known: Sequence[int], most: int) -> Any:
            bench.runner.nan_for = {known[-1]} if len(known) == 26 else set()
            return super().propose(known, most)

    def drafter(request: Request) -> CutDrafter:
        truth = [*request.prompt_ids, *expected_hybrid(request.prompt_ids, 60)]
        made = Failing if request.index == 1 else CutDrafter
        return made(truth, 5 if request.index == 2 else 0, 5, VOCAB_SIZE)

    bench.scheduler.speculation.drafter = drafter  # type: ignore[method-assign]
    doomed = bench.submit([bad, *token_ids], 60, terms=DRAFTS)
    fine = bench.submit(token_ids, 60, terms=DRAFTS)
    finish(bench, [doomed, fine])
    with pytest.raises(KVBoostError, match="NaN"):
        doomed.result(0)
    assert list(fine.result(0).output_token_ids) == expected_hybrid(token_ids, 60)


def test_a_cancel_between_drafts_gives_everything_back() -> None:
    bench = drafting(6)
    handles: list[RequestHandle] = []
    for number in range(12):
        handles.append(bench.submit(prompt(number, 20), 60, terms=DRAFTS))
        for _ in range(number % 5):
            bench.step()
        handles[-1].cancel()
        bench.step()
    bench.run()
    states = bench.manager.states
    assert states is not None
    assert bench.manager.used_block_count == 0
    assert states.slots.num_used == sum(states.slots.counts().values())


def test_while_states_take_drafts_in_the_figures_are_read_and_the_cache_is_reset() -> None:
    """As during a pass: whoever asks waits for neither."""
    text, ended = [*range(60, 90)] * 3, []
    with CPUPagedEngine._from_parts(hybrid_parts(64, 12), EngineConfig(num_blocks=64, speculation="on")) as engine:
        runner = engine._parts.runner
        assert isinstance(runner, HybridRunner)

        def ask() -> None:
            runner.on_accept = None
            for call in (engine.paged_stats, engine.reset_cache):
                asking = threading.Thread(target=call)
                asking.start()
                asking.join(5)
                ended.append(not asking.is_alive())

        engine.generate(text, max_new_tokens=40)
        runner.on_accept = ask
        result = engine.generate(text, max_new_tokens=40)
        assert list(result.output_token_ids) == expected_hybrid(text, 40, engine._parts.eos_token_ids)
        assert result.accepted_tokens > 0
    assert ended == [True, True]


@pytest.mark.parametrize("num_right", range(1, 7))
def test_a_reset_while_states_take_drafts_in_changes_no_answer(num_right: int) -> None:
    bench = drafting(num_right)
    runner_of(bench).on_accept = bench.manager.reset  # type: ignore[assignment]
    handles = [bench.submit([*prompt(1, 20), number], 40, terms=DRAFTS) for number in range(3)]
    finish(bench, handles)
    for number, handle in enumerate(handles):
        assert list(handle.result(0).output_token_ids) == expected_hybrid([*prompt(1, 20), number], 40)


def test_rows_of_drafts_hold_no_number_before_a_pass() -> None:
    bench = drafting(6)
    backend, seen = bench.parts.backend, []
    assert isinstance(backend, HybridBackend)
    bench.runner.on_forward = lambda batch: seen.append(backend.drafted(0).view("f4").copy())
    finish(bench, [bench.submit(prompt(1, 9), 30, terms=DRAFTS)])
    assert len(seen) > 5
    assert all((values != values).all() for values in seen)


def test_an_engine_guesses_ahead_and_one_that_was_told_not_to_says_why_it_cannot() -> None:
    text = [*range(60, 90)] * 3
    with CPUPagedEngine._from_parts(hybrid_parts(64, 12), EngineConfig(num_blocks=64, speculation="on")) as engine:
        result = engine.generate(text, max_new_tokens=40)
        assert list(result.output_token_ids) == expected_hybrid(text, 40, engine._parts.eos_token_ids)
        assert engine.generate(text, max_new_tokens=40).drafted_tokens > 0
    parts = hybrid_parts(64, 12, num_draft_rows=0)
    with CPUPagedEngine._from_parts(parts, EngineConfig(num_blocks=64, speculation="off")) as engine:
        with pytest.raises(
            RequestError, match="speculation='on' is refused: the model keeps states, and the engine was"
        ):
            engine.generate(text, speculation="on")
        assert engine.generate(text, max_new_tokens=40, speculation="auto").drafted_tokens == 0
