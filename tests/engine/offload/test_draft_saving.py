"""The KV of a draft model outside the pool: it is stored and restored with its block, and no block
depends on it.

The right draft model reads its own pool, so its tokens are all accepted only if its KV is right.
"""

import logging
import random

import pytest

from helpers.engine.draft_models import (
    DRAFT_KINDS,
    MTP,
    assert_all_accepted,
    draft_runner,
    drafting_bench,
    models_of,
    prompt,
)
from helpers.engine.hand_io_thread import DictTier
from helpers.engine.model_kinds import PLAIN
from helpers.models.tiny_checkpoints import save_tiny_checkpoint
from helpers.random_ids import random_ids
from helpers.server.live_servers import wait_until
from helpers.tiers.redis_servers import running_redis
from kvboost_edge import CPUPagedEngine
from kvboost_edge.engine.spec_decode.draft_model import DraftModel
from kvboost_edge.engine.spec_decode.prompt_lookup import PromptLookup
from kvboost_edge.kvcache.hashing import BlockAddress, prefix_hashes
from kvboost_edge.tiers.disk.tier import DiskTier
from kvboost_edge.tiers.record import header_bytes
from kvboost_edge.tiers.redis.tier import RedisTier

SIZE = 16
DRAFTS = {"max_draft_tokens": 4, "always_drafts": True}
PLAIN_TERMS = {"max_draft_tokens": 0}


def first_turn(tier, kind, drafts="right"):
    """Leave a first turn in a tier, from an engine with a draft model; return its prompt and
    answer.
    """
    text = prompt(1, 70)
    bench = drafting_bench(kind, drafts, tiers=[tier])
    return [*text, *bench.ask(text, 31, terms=DRAFTS).output_token_ids]


def ask(bench, text, count, terms):
    """Run `Bench.ask` with an I/O thread that works while the engine does."""
    handle = bench.submit(text, count, terms=terms)
    while not handle.done:
        bench.step()
        bench.io_thread.pump(1)
    bench.run()
    return bench.answer(handle)


def draft_records(tier, blocks):
    """Return the records that are not in `blocks`, which an engine without a draft model has
    stored.
    """
    return {key: value for key, value in tier.blocks.items() if key not in blocks}


def restored(bench):
    return bench.core.tiering.num_draft_restored


def own_records(kind):
    """Return the records that an engine without a draft model leaves of the first turn."""
    tier = DictTier()
    text = prompt(1, 70)
    bench = kind.bench(tiers=[tier])
    bench.ask(text, 31)
    return tier.blocks


@pytest.mark.parametrize("drafts", ["right", MTP])
@pytest.mark.parametrize("knows", [True, False])
def test_draft_kv_of_the_prefix_is_restored_after_a_restart(kind, drafts, knows):
    tier = DictTier(knows=knows)
    turn = first_turn(tier, kind, drafts)
    bench = drafting_bench(kind, drafts, tiers=[tier])
    computed = []
    draft_runner(bench).on_forward = lambda batch: computed.extend(batch.positions)
    result = ask(bench, [*turn, 7, 8], 20, DRAFTS)
    assert result.hit_tokens == {"pool": 0, "shelf": 96}
    assert_all_accepted(bench)
    assert restored(bench) == 6
    assert min(computed) >= 96
    assert not bench.manager.drafted.arriving
    # A second turn of the same engine hits the pool.
    ask(bench, [*turn, 7, 9], 4, DRAFTS)
    assert restored(bench) == 6
    assert min(computed) >= 96


def test_block_records_equal_those_without_a_draft_model(kind):
    alone = own_records(kind)
    tier = DictTier()
    first_turn(tier, kind)
    assert {key: tier.blocks[key] for key in alone} == alone
    records = draft_records(tier, alone)
    # The draft model stores the token and its position, as the engine's model does.
    blocks = {address.prefix_hash: data for address, data in alone.values()}
    assert len(records) == 6
    for address, data in records.values():
        assert data == blocks[address.parent_hash]


@pytest.mark.parametrize("drafts", ["wrong", "random", ""])
def test_another_draft_model_or_none_hits_the_same_blocks(kind, drafts):
    tier = DictTier()
    turn = first_turn(tier, kind)
    if drafts:
        bench = drafting_bench(kind, drafts, tiers=[tier])
    else:
        bench = kind.bench(tiers=[tier])
    terms = DRAFTS if drafts else PLAIN_TERMS
    assert ask(bench, [*turn, 7], 20, terms).hit_tokens == {"pool": 0, "shelf": 96}
    assert restored(bench) == 0
    if drafts:
        assert draft_runner(bench).computed >= len(turn)
    again = drafting_bench(kind, tiers=[tier])
    ask(again, [*turn, 8], 4, DRAFTS)
    assert restored(again) == 6, "the records of the first draft model must stay"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.some(2)
def test_restarts_with_changed_draft_models_lose_no_block(kind, seed):
    """Three conversations continue over restarts. Each prompt hits the blocks that it hits in an
    engine that never had a draft model.
    """

    def hits(drafters, tier):
        known = [prompt(number, 40) for number in range(3)]
        found = []
        for life, drafts in enumerate(drafters):
            if drafts:
                bench = drafting_bench(kind, drafts, tiers=[tier])
            else:
                bench = kind.bench(tiers=[tier])
            for number in range(3):
                text = known[number] + prompt(10 * life + number, 5)
                result = ask(bench, text, 24, DRAFTS if drafts else PLAIN_TERMS)
                found.append(result.hit_tokens)
                known[number] = [*text, *result.output_token_ids]
        return found

    drafters = random.Random(seed).choices((*DRAFT_KINDS, MTP, ""), k=5)
    tier = DictTier()
    plain = DictTier()
    assert hits([*drafters, drafters[0]], tier) == hits([""] * 6, plain)
    assert {key: tier.blocks[key] for key in plain.blocks} == plain.blocks
    assert len(tier.blocks) > len(plain.blocks)


def test_draft_kv_computed_later_is_stored_once(kind):
    tier = DictTier()
    text = prompt(1, 70)
    bench = drafting_bench(kind, tiers=[tier])
    bench.ask(text, 1, terms=PLAIN_TERMS)
    count = tier.num_written
    bench.ask([*text, 5], 4, terms=DRAFTS)
    assert len(tier.blocks) == tier.num_written == count + 4
    bench.ask([*text, 6], 4, terms=DRAFTS)
    assert tier.num_written == count + 4


def test_a_damaged_draft_record_affects_only_its_block(kind):
    tier = DictTier()
    turn = first_turn(tier, kind)
    records = draft_records(tier, own_records(kind))
    hashes = [address.parent_hash for address, _ in records.values()]
    for key, (address, data) in records.items():
        if address.parent_hash == hashes[2]:
            tier.blocks[key] = (address._replace(tokens=bytes(64)), data)
    bench = drafting_bench(kind, tiers=[tier])
    assert ask(bench, [*turn, 7], 20, DRAFTS).hit_tokens == {"pool": 0, "shelf": 96}
    assert_all_accepted(bench)
    assert restored(bench) == 5
    assert draft_runner(bench).computed <= SIZE + len(turn) + 1 - 96 + 20
    assert len(draft_records(tier, own_records(kind))) >= 6, (
        "the damaged record must be stored again"
    )


def test_unsaved_draft_kv_is_stored_before_eviction(monkeypatch):
    """Nothing is saved after the steps, so blocks are evicted before they were saved."""
    tier = DictTier()
    text = prompt(1, 70)
    bench = drafting_bench(PLAIN, num_blocks=8, tiers=[tier])
    monkeypatch.setattr(bench.core.tiering, "save_some", lambda seconds: None)
    monkeypatch.setattr(bench.core.tiering, "save_more", lambda: False)
    bench.ask(text, 9, terms=DRAFTS)  # later steps find the blocks of the first ones
    bench.ask(prompt(2, 120), 4, terms=PLAIN_TERMS)
    assert len(tier.blocks) == 8, "each block must be stored with its record of the draft model"
    again = drafting_bench(PLAIN, tiers=[tier])
    ask(again, [*text, 9], 20, DRAFTS)
    assert_all_accepted(again)
    assert restored(again) == 4


def test_a_record_for_a_block_evicted_meanwhile_is_dropped():
    tier = DictTier()
    turn = first_turn(tier, PLAIN)
    bench = drafting_bench(PLAIN, num_blocks=9, tiers=[tier])
    handle = bench.submit([*turn, 7], 1, terms=PLAIN_TERMS)
    while not handle.done:
        if not bench.step():
            bench.io_thread.pump(1)  # the blocks, but not the records of the draft model
    assert len(bench.manager.drafted.arriving) == 6
    bench.manager.reset()
    other = prompt(3, 100)
    handle = bench.submit(other, 40, terms=DRAFTS)
    for _ in range(3):
        bench.step()
    bench.run()
    bench.answer(handle)
    assert_all_accepted(bench)
    assert restored(bench) == 0
    assert not bench.manager.drafted.arriving


def test_draft_kv_is_restored_into_blocks_that_were_left_partly_filled(kind):
    tier = DictTier()
    turn = first_turn(tier, kind)
    bench = drafting_bench(kind, num_blocks=9, closes_blocks=True, tiers=[tier])
    for seed in range(8):  # each of them leaves a block
        ask(bench, prompt(seed + 3, 20 + seed), 3, DRAFTS)
    ask(bench, [*turn, 7], 8, DRAFTS)
    assert_all_accepted(bench)
    assert restored(bench) == 6


def test_draft_kv_still_arrives_after_its_block_gave_way_to_others(kind):
    """In a quantized pool, blocks that finished requests left partly filled make room for others,
    even after KV from a tier was asked for them.
    """
    tier = DictTier()
    turn = first_turn(tier, kind)
    bench = drafting_bench(kind, num_blocks=16, closes_blocks=True, max_num_seqs=1, tiers=[tier])
    ask(bench, prompt(3, 20), 3, DRAFTS)
    handle = bench.submit([*turn, 7], 1, terms=PLAIN_TERMS)
    while not handle.done:
        if not bench.step():
            bench.io_thread.pump(1)  # the blocks, but not the records of the draft model
    for seed in (4, 5):
        handle = bench.submit(prompt(seed, 20), 30, terms=DRAFTS)
        for _ in range(3):
            bench.step()
        models_of(bench).is_on = False  # the sequence goes on without drafts
        while not handle.done:
            bench.step()
        models_of(bench).is_on = True
    assert len(bench.manager.drafted.arriving) == 6
    bench.run()
    assert restored(bench) == 6
    assert_all_accepted(bench)


def test_drafts_wait_for_restored_kv_but_requests_do_not():
    tier = DictTier()
    turn = first_turn(tier, PLAIN)
    bench = drafting_bench(PLAIN, tiers=[tier])
    handle = bench.submit([*turn, 7], 8, terms=DRAFTS)
    bench.step()
    bench.io_thread.pump(1)
    while bench.step():
        pass
    assert handle.done
    assert bench.answer(handle).drafted_tokens == draft_runner(bench).computed == 0
    bench.run()
    assert restored(bench) == 6


def test_a_closing_engine_reads_no_records():
    tier = DictTier(knows=False)
    turn = first_turn(tier, PLAIN)
    bench = drafting_bench(PLAIN, tiers=[tier])
    handle = bench.submit([*turn, 7], 1, terms=PLAIN_TERMS)
    while not handle.done:
        if not bench.step():
            bench.io_thread.pump(1)
    bench.io_thread._closing = True
    tier.num_asked = 0
    bench.run()
    assert (tier.num_asked, restored(bench)) == (0, 0)
    assert not bench.manager.drafted.arriving


def test_a_tenant_never_restores_another_tenants_draft_kv():
    tier = DictTier()
    text = prompt(1, 70)
    bench = drafting_bench(PLAIN, tiers=[tier])
    bench.ask(text, 20, terms=DRAFTS, tenant="a")
    for tenant, count in (("b", 0), ("a", 4)):
        bench = drafting_bench(PLAIN, tiers=[tier])
        bench.ask([*text, 3], 8, terms=DRAFTS, tenant=tenant)
        assert restored(bench) == count


@pytest.mark.parametrize("closes_blocks", [False, True])
def test_a_failed_pool_write_only_costs_time(kind, closes_blocks, caplog):
    """The draft model computes the KV, also of blocks that earlier requests left partly filled."""
    tier = DictTier()
    turn = first_turn(tier, kind)
    bench = drafting_bench(kind, num_blocks=9, closes_blocks=closes_blocks, tiers=[tier])
    for seed in range(8):
        ask(bench, prompt(seed + 3, 20 + seed), 3, DRAFTS)

    def fail(block_ids, data):
        raise RuntimeError("no room")

    bench.parts.drafter.backend.write_blocks = fail
    with caplog.at_level(logging.ERROR):
        assert ask(bench, [*turn, 7], 20, DRAFTS).hit_tokens["shelf"] == 96
    assert "computed instead" in caplog.text
    assert_all_accepted(bench)
    assert restored(bench) == 0


def test_blocks_kept_inside_store_no_draft_kv():
    tier = DictTier()
    bench = drafting_bench(PLAIN, tiers=[tier])
    bench.manager.content.keep_inside(bench.parts.root)
    bench.ask(prompt(1, 70), 31, terms=DRAFTS)
    assert not tier.blocks


def test_draft_records_are_touched_with_their_blocks(kind):
    """A tier that evicts by last use therefore keeps both."""
    tier = DictTier()
    text = prompt(1, 70)
    bench = drafting_bench(kind, tiers=[tier])
    bench.ask(text, 20, terms=DRAFTS)
    records = draft_records(tier, own_records(kind))
    assert not tier.touched
    bench.ask([*text, 5], 1, terms=DRAFTS)
    assert len(records.keys() & set(tier.touched)) == 4
    hashes = prefix_hashes(text, bench.parts.root, SIZE)
    assert set(tier.touched) >= set(hashes)


def disk(directory):
    return DiskTier.open(directory, bytes(32), max_bytes=1 << 20)


def test_the_disk_tier_stores_draft_kv_and_refuses_damaged_records(tmp_path):
    turn = first_turn(tier := disk(tmp_path), PLAIN)
    assert tier.stat().blocks == 12
    tier.close()
    bench = drafting_bench(PLAIN, tiers=[tier := disk(tmp_path)])
    assert ask(bench, [*turn, 7], 20, DRAFTS).hit_tokens["disk"] == 96
    assert_all_accepted(bench)
    assert restored(bench) == 6
    address = bench.manager.drafted.address(
        BlockAddress(prefix_hashes(turn, bench.parts.root, SIZE)[2], b"", b"")
    )
    tier.close()
    segment = min(tmp_path.rglob("*.kvs"))
    data = bytearray(segment.read_bytes())
    data[data.index(address.prefix_hash) + header_bytes(SIZE)] ^= 1
    segment.write_bytes(data)
    bench = drafting_bench(PLAIN, tiers=[tier := disk(tmp_path)])
    assert ask(bench, [*turn, 7], 20, DRAFTS).hit_tokens["disk"] == 96
    assert_all_accepted(bench)
    assert (restored(bench), tier.stat().refused) == (5, 1)
    tier.close()


def test_the_disk_tier_evicts_draft_records_before_their_blocks(tmp_path):
    first_turn(tier := disk(tmp_path), PLAIN)
    index = tier._store.index
    parents = []
    while (entry := index.oldest(1 << 20)) is not None:
        assert entry.prefix_hash not in {index.get(key).parent_hash for key in index.hashes()}
        parents.append(entry.parent_hash)
        index.drop(entry.prefix_hash)
    assert len(parents) == 12
    tier.close()


def test_redis_stores_draft_kv():
    with running_redis() as server:

        def tier():
            return RedisTier(server.url, bytes(32), trust=True)

        turn = first_turn(one := tier(), PLAIN)
        one.close()
        bench = drafting_bench(PLAIN, tiers=[two := tier()])
        assert ask(bench, [*turn, 7], 20, DRAFTS).hit_tokens["redis"] == 96
        assert_all_accepted(bench)
        assert restored(bench) == 6
        two.close()
        bench = drafting_bench(PLAIN, "wrong", tiers=[three := tier()])
        assert ask(bench, [*turn, 7], 20, DRAFTS).hit_tokens["redis"] == 96
        assert restored(bench) == 0
        three.close()


def test_a_restarted_engine_restores_draft_kv(tmp_path, monkeypatch):
    """The engine's KV is quantized. The draft model's KV never is."""
    # On a busy machine, measured times may favor the drafts of prompt lookup at any step.
    monkeypatch.setattr(PromptLookup, "propose", lambda self, token_ids, most: None)
    starts = []
    forward = DraftModel.forward

    def watched(self, rows, is_abandoned, **options):
        starts.extend(one.start for one in rows)
        return forward(self, rows, is_abandoned, **options)

    monkeypatch.setattr(DraftModel, "forward", watched)
    for name, layers in (("target", 2), ("draft", 1)):
        (tmp_path / name).mkdir()
        save_tiny_checkpoint("llama", tmp_path / name, num_hidden_layers=layers)
    text = random_ids(70, 5, 10, 250)

    def answer(prompt_ids, **options):
        found = {"num_blocks": 32, "kv_cache_bits": 8, "speculation": "on", **options}
        with CPUPagedEngine.from_pretrained(
            tmp_path / "target", disk_cache_dir=tmp_path / "cache", **found
        ) as engine:
            result = engine.generate(prompt_ids, 20, temperature=0.0, ignore_eos=True)
            drafted = engine._parts.manager.drafted
            wait_until(lambda: not drafted.arriving, "the draft model's KV")
            return result, engine.paged_stats()["draft_restored_blocks"]

    draft = {"draft_model": str(tmp_path / "draft")}
    first, _ = answer(text, **draft)
    assert min(starts) == 0
    starts.clear()
    turn = [*text, *first.output_token_ids, 3]
    second, num_restored = answer(turn, **draft)
    assert (second.hit_tokens["disk"], num_restored) == (80, 5)
    assert all(start >= 80 for start in starts)
    for options in ({}, draft | {"draft_weights": "f32"}):
        other, num_restored = answer(turn, **options)
        assert other.output_token_ids == second.output_token_ids
        assert (other.hit_tokens["disk"], num_restored) == (80, 0)
