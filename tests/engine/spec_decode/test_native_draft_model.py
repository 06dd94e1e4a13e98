"""A draft model on the native runner, for every width of the engine's KV.

Answers, log probabilities and the KV of published blocks are equal to the bit to those without it.
"""

import pytest

from helpers.engine.draft_models import with_typical_times, without_lookup
from helpers.engine.hand_io_thread import DictTier
from helpers.engine.native_bench import ALL_BITS, NativeBench, overlapping_answers
from helpers.engine.native_kinds import machine_of
from kvboost_edge.engine.spec_decode import model_drafts

NUM_BLOCKS = 64
DRAFTS = {"max_draft_tokens": 5, "always_drafts": True}


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    """The engine's model, and another draft model of the same vocabulary."""
    folder = tmp_path_factory.mktemp("drafts")
    made = machine_of("qwen3", "int8", folder), machine_of("qwen2", "int8", folder)
    yield made
    for machine in made:
        machine.close()


def run(bench, seed, steps_between=4, **fields):
    return overlapping_answers(bench, seed, steps_between, longest=40, **fields)


@pytest.mark.parametrize("bits", ALL_BITS, ids=str)
def test_answers_and_published_kv_equal_those_without_a_draft_model(machines, bits, monkeypatch):
    monkeypatch.setattr(model_drafts, "_MOST_RARE", 128)
    machine, other = machines
    answers, kv = run(NativeBench(machine, bits=bits), 0)
    assert len(kv) > 10
    accepted = []
    for maker, short in ((machine, 0), (other, 0), (machine, 150)):
        drafter = maker.drafter(NUM_BLOCKS, short, bits=bits)
        bench = NativeBench(machine, bits=bits, num_blocks=NUM_BLOCKS, drafter=drafter)
        without_lookup(bench)
        with_typical_times(bench)
        found, found_kv = run(bench, 0, **DRAFTS)
        assert found == answers
        assert found_kv == kv
        assert bench.scheduler.speculation._models.is_on
        accepted.append(bench.scheduler.speculation.num_accepted)
    assert accepted[0] > accepted[2] > 0, accepted


@pytest.mark.parametrize("bits", ALL_BITS, ids=str)
@pytest.mark.some(2)
def test_restarts_with_changed_draft_models_lose_nothing(machines, bits):
    """Restarts have another draft model, none, or the first one again. Answers, the KV of published
    blocks and their stored records equal those without a draft model.
    """
    machine, other = machines
    makers = (machine, other, None, machine)
    tier = DictTier()
    plain = DictTier()
    restored = []
    for maker in makers:
        expected, kv = run(NativeBench(machine, bits=bits, tiers=[plain]), 0)
        drafter = None if maker is None else maker.drafter(NUM_BLOCKS, bits=bits)
        bench = NativeBench(
            machine, bits=bits, num_blocks=NUM_BLOCKS, drafter=drafter, tiers=[tier]
        )
        fields = {}
        if drafter is not None:
            drafter.backend.poison_blocks(range(NUM_BLOCKS))
            without_lookup(bench)
            with_typical_times(bench)
            fields = DRAFTS
        found, found_kv = run(bench, 0, **fields)
        assert found == expected
        assert found_kv == kv
        assert {key: tier.blocks[key] for key in plain.blocks} == plain.blocks
        restored.append(bench.core.tiering.num_draft_restored)
    assert restored[:3] == [0, 0, 0]
    assert restored[3] > 0
    assert len(tier.blocks) > len(plain.blocks)


def test_the_target_as_draft_model_is_always_accepted(machines):
    machine, _ = machines
    bench = NativeBench(
        machine, num_blocks=NUM_BLOCKS, max_num_seqs=3, drafter=machine.drafter(NUM_BLOCKS)
    )
    without_lookup(bench)
    with_typical_times(bench)
    for seed in range(3):
        run(bench, seed, **DRAFTS)
    speculation = bench.scheduler.speculation
    assert speculation.num_accepted == speculation.num_drafted > 150


def test_the_target_as_draft_model_is_accepted_after_preemptions(machines):
    machine, _ = machines
    bench = NativeBench(machine, num_blocks=7, max_num_seqs=6, drafter=machine.drafter(7))
    without_lookup(bench)
    with_typical_times(bench)
    for seed in range(3):
        run(bench, seed, 0, **DRAFTS)
    speculation = bench.scheduler.speculation
    assert bench.scheduler.num_preemptions > 0
    assert speculation.num_accepted == speculation.num_drafted > 100
