"""Blocks outside the pool: which are stored and when, which are loaded, which requests wait, and
faults.
"""

import errno

import pytest

from helpers.clocks import give_timer
from helpers.engine.fake_runner import Bench, expected_tokens, fake_engine
from helpers.engine.hand_io_thread import DictTier
from helpers.engine.model_kinds import HYBRID, PLAIN
from helpers.random_ids import random_ids
from helpers.tiers.disk_faults import FaultyFiles, fails
from kvboost_edge import CPUPagedEngine
from kvboost_edge.config import GenerationMode
from kvboost_edge.engine.offload import prefetch
from kvboost_edge.engine.request.request import RequestArrival
from kvboost_edge.errors import RequestError
from kvboost_edge.kvcache.block_table import BlockTable
from kvboost_edge.kvcache.hashing import prefix_hashes
from kvboost_edge.tiers.disk.tier import DiskTier

PROMPT = list(range(70))  # four full blocks and six tokens


def kept(*prompts, kind=PLAIN, tier=None):
    """Return a tier that another engine filled with the blocks of these prompts."""
    tier = tier or DictTier()
    bench = kind.bench(tiers=[tier])
    for prompt in prompts:
        bench.ask(prompt, 1)
    tier.num_read = tier.num_asked = 0
    return tier


def num_records(kind):
    """Return the number of the prompt's records: four blocks, and a hybrid's state at their end."""
    return 4 + (kind is HYBRID)


@pytest.mark.parametrize("num_blocks", [64, 6])
def test_full_blocks_are_stored_and_restored(kind, num_blocks):
    tier = kept(PROMPT, kind=kind)
    assert len(tier.blocks) == num_records(kind)
    bench = kind.bench(num_blocks, tiers=[tier])
    result = bench.ask(PROMPT, 8)
    assert (result.cached_tokens, result.hit_tokens) == (64, {"pool": 0, "shelf": 64})
    assert (bench.runner.computed, tier.num_read) == (6 + 7, num_records(kind))
    assert result.load_ms > 0
    assert sum(result.phases.values()) == pytest.approx(result.total_ms)
    assert bench.manager.used_block_count == 0
    turn = [*PROMPT, *result.output_token_ids, *range(9)]
    bench.ask(turn, 1)
    assert kind.bench(tiers=[tier]).ask(turn, 2).hit_tokens == {"pool": 0, "shelf": 80}


def test_a_prefix_is_restored_from_the_pool_and_two_tiers():
    near = DictTier("near")
    far = DictTier("far", knows=False)
    kept(PROMPT, tier=far)
    kept(PROMPT[:48], tier=near)
    bench = Bench(tiers=[near, far])
    bench.ask([*PROMPT[:16], 99], 1)
    assert bench.ask(PROMPT, 4).hit_tokens == {"pool": 16, "near": 32, "far": 16}
    assert len(near.blocks) == 4  # blocks from the far tier are stored in the near one


def test_a_miss_names_the_tiers_that_evicted_its_block():
    """The pool has six blocks and the prompt takes five, so another prompt evicts it."""
    other = list(range(300, 390))

    def dropped(tier, *before):
        bench = Bench(6, tiers=[tier])
        for prompt in before:
            bench.ask(prompt, 1)
        tier.drop(list(tier.blocks))
        result = bench.ask(PROMPT, 2)
        assert result.cached_tokens == 0
        return result.miss_reason, result.evicted_from

    full = DictTier()
    full.writable = False  # it never had the blocks
    assert dropped(DictTier()) == ("first_seen", ())
    assert dropped(DictTier(), other) == ("first_seen", ())
    assert dropped(full, PROMPT, other) == ("evicted", ("pool",))
    assert dropped(DictTier(), PROMPT, other) == ("evicted", ("pool", "shelf"))
    assert dropped(kept(PROMPT)) == ("evicted", ("shelf",)), (
        "only the tier can have evicted the block"
    )


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("first_seen", ("evicted", ("shelf",))),
        ("state", ("state", ())),
        ("evicted", ("evicted", ("pool", "shelf"))),
    ],
)
def test_a_missing_state_is_not_reported_as_an_eviction(reason, told):
    tier = DictTier()
    tier.lost.add(b"hash")
    bench = Bench(tiers=[tier])
    table = BlockTable(0, b"root")
    table.miss_reason = reason
    table.missed_hash = b"hash"
    assert bench.scheduler.loads.missed(table) == told


def test_a_bypassed_lookup_reports_no_eviction():
    tier = kept(PROMPT)
    tier.drop(list(tier.blocks))
    result = Bench(tiers=[tier]).ask(PROMPT, 1, GenerationMode.BASELINE)
    assert (result.miss_reason, result.evicted_from) == ("bypassed", ())


def test_other_requests_run_during_a_load(kind):
    bench = kind.bench(tiers=[kept(PROMPT, kind=kind)])
    waiting = bench.submit(PROMPT, 4)
    bench.step()
    other = bench.submit([200, 201, 202], 4)
    for _ in range(10):
        bench.step()
    assert other.done
    assert not waiting.done
    assert bench.scheduler.only_waits
    assert not bench.step()
    bench.run()
    bench.answer(waiting)


@pytest.mark.parametrize("knows", [True, False])
def test_one_load_serves_all_requests_with_the_prefix(kind, knows):
    tier = kept(PROMPT, kind=kind, tier=DictTier(knows=knows))
    bench = kind.bench(tiers=[tier])
    handles = [bench.submit([*PROMPT[:64], 100 + i], 3) for i in range(4)]
    bench.run()
    assert tier.num_read == num_records(kind)
    assert [bench.answer(handle).hit_tokens for handle in handles] == [
        {"pool": 0, "shelf": 64},
        *[{"pool": 64}] * 3,
    ]


def test_a_lost_block_is_computed_without_waiting():
    tier = DictTier(knows=False)
    kept(PROMPT, tier=tier)
    third = next(key for key, (address, _) in tier.blocks.items() if address.tokens[0] == 32)
    bench = Bench(tiers=[tier])
    del tier.blocks[third]
    handles = [bench.submit([*PROMPT, 100 + i], 3) for i in range(2)]
    bench.run()
    assert handles[0].result(0).hit_tokens == {"pool": 0, "shelf": 32}
    assert handles[1].result(0).hit_tokens == {"pool": 64}
    assert third in tier.blocks  # stored again


def test_a_baseline_request_loads_nothing(kind):
    tier = kept(PROMPT, kind=kind)
    result = kind.bench(tiers=[tier]).ask(PROMPT, 1, GenerationMode.BASELINE)
    assert (tier.num_read, result.cached_tokens) == (0, 0)


def test_a_baseline_request_stores_nothing(kind):
    tier = DictTier()
    bench = kind.bench(tiers=[tier])
    bench.ask(PROMPT, 1, GenerationMode.BASELINE)
    assert tier.blocks == {}
    bench.ask(PROMPT, 1)
    assert len(tier.blocks) >= len(PROMPT) // 16


@pytest.mark.parametrize("knows", [True, False])
@pytest.mark.parametrize("arrived", [False, True])
def test_a_cancelled_request_releases_its_blocks(kind, knows, arrived):
    tier = kept(PROMPT, kind=kind, tier=DictTier(knows=knows))
    bench = kind.bench(tiers=[tier])
    handle = bench.submit(PROMPT, 4)
    bench.step()
    if arrived:
        bench.io_thread.pump()
    handle.cancel()
    bench.run()
    assert handle.result(0).finish_reason == "cancelled"
    assert tier.num_read == arrived * num_records(kind)
    assert (
        bench.manager.used_block_count
        == len(bench.scheduler.loads)
        == bench.io_thread.staging_bytes
        == 0
    )


@pytest.mark.parametrize("max_num_seqs", [1, 2, 4])
def test_finished_prefetches_do_not_block_an_urgent_request(kind, max_num_seqs):
    """Finished prefetches take all places of running requests. The urgent request must not stop the
    engine.
    """
    prompts = [[number, *PROMPT] for number in range(max_num_seqs)]
    bench = kind.bench(tiers=[kept(*prompts, kind=kind)], max_num_seqs=max_num_seqs)
    handles = [bench.submit(prompt, 3) for prompt in prompts]
    bench.step()
    while bench.io_thread.pump():
        pass
    bench.core._drain_inbox()
    assert [load.is_done for load in bench.scheduler.loads] == [True] * max_num_seqs
    handles.append(bench.submit([5, 6, 7, 8], 3, priority=-1))
    bench.run(200)
    for handle in handles:
        bench.answer(handle)


def test_a_deadline_ends_a_request_that_waits_for_a_load(kind):
    bench = kind.bench(tiers=[kept(PROMPT, kind=kind)])
    handle = bench.submit(PROMPT, 4, deadline=0.0)
    bench.step()
    bench.step()
    assert handle.result(0).finish_reason == "timeout"
    bench.run()
    assert bench.manager.used_block_count == 0


def test_an_unsaved_block_is_stored_at_eviction():
    tier = DictTier()
    bench = Bench(6, tiers=[tier], max_batch_tokens=96)
    bench.core.tiering.save_some = lambda seconds: None  # nothing is copied after the steps
    for first in (0, 100):
        bench.submit([first + i for i in range(64)], 1)
        while bench.step():
            pass
    bench.io_thread.pump()
    chains = {bytes(address.tokens)[:4] for address, _ in tier.blocks.values()}
    assert {int.from_bytes(tokens, "little") for tokens in chains} >= {32, 48}
    bench.run()
    assert bench.ask(list(range(64)), 2).cached_tokens >= 48


def test_blocks_computed_while_a_tier_was_read_only_are_stored_later(kind):
    tier = DictTier()
    bench = kind.bench(tiers=[tier])
    tier.writable = False
    bench.ask(PROMPT, 1)
    assert not bench.core.tiering.save_more()  # nothing to wait for
    assert tier.num_written == 0
    tier.writable = True
    bench.ask([1], 1)
    assert len(tier.blocks) == num_records(kind)


def test_reused_blocks_that_must_stay_inside_are_not_stored(kind):
    """The blocks of a prompt wait to be stored, a reset drops them, and another prompt whose blocks
    no tier may store gets the same ones.
    """
    tier = DictTier()
    bench = kind.bench(8, tiers=[tier])
    tier.writable = False
    bench.ask(PROMPT, 1)
    bench.manager.reset()
    bench.manager.content.keep_inside(bench.parts.root)
    bench.ask([*range(100, 170)], 1)
    tier.writable = True
    while bench.core.tiering.save_more():
        pass
    bench.io_thread.pump()
    assert tier.blocks == {}


def test_a_failed_write_is_retried_later(tmp_path):
    now = [0.0]
    files = FaultyFiles()
    tier = DiskTier.open(tmp_path, bytes(32), max_bytes=1 << 20, files=files, clock=lambda: now[0])
    bench = Bench(tiers=[tier])
    files.at = files.calls
    files.fault = fails(errno.ENOSPC)
    files.lasting = True
    bench.ask(PROMPT, 1)
    files.at = -1
    assert (tier.stat().writable, tier.stat().written_blocks) == (False, 0)
    assert "No space left" in tier.stat().state
    now[0] += 60
    bench.ask([*range(100, 120)], 1)
    assert (tier.stat().state, tier.stat().written_blocks) == ("", 1)
    tier.close()


def test_a_tier_that_raises_is_disabled(kind, caplog):
    class Broken(DictTier):
        def read(self, blocks, into):
            raise RuntimeError("a fault")

    tier = kept(PROMPT, kind=kind, tier=Broken())
    bench = kind.bench(tiers=[tier])
    assert bench.io_thread.stats()["shelf"].writable
    bench.ask(PROMPT, 3)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    stats = bench.io_thread.stats()["shelf"]
    assert (stats.writable, stats.state.split(";")[0]) == (
        False,
        "disabled after an internal error, which the log describes",
    )


def test_a_load_yields_its_blocks_to_running_sequences(kind):
    """In a pool of six blocks, a running sequence that grows takes the blocks of a load."""
    bench = kind.bench(6, tiers=[kept(PROMPT, kind=kind)])
    growing = bench.submit([250, 251], 50)
    bench.step()
    waiting = bench.submit(PROMPT[:66], 2)
    bench.run()
    for handle in (growing, waiting):
        bench.answer(handle)


def test_a_hanging_tier_is_waited_for_once(kind, monkeypatch, caplog):
    monkeypatch.setattr("kvboost_edge.engine.offload.prefetch.PATIENCE", 0.0)
    bench = kind.bench(tiers=[kept(PROMPT, kind=kind)])
    handles = [bench.submit([*PROMPT, 100 + i], 3) for i in range(2)]
    for _ in range(20):
        bench.step()
    for handle in handles:
        bench.answer(handle)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    bench.run()  # the chunk arrives after all
    assert bench.io_thread.staging_bytes == 0
    bench.manager.reset()
    monkeypatch.setattr("kvboost_edge.engine.offload.prefetch.PATIENCE", 30.0)
    assert bench.ask(PROMPT, 3).hit_tokens == {"pool": 0, "shelf": 64}


def test_a_queued_load_waits_while_others_arrive(monkeypatch, caplog):
    now = [100.0]
    give_timer(monkeypatch, lambda: now[0], prefetch)
    other = list(range(100, 170))
    bench = Bench(tiers=[kept(PROMPT, other)])
    handles = [bench.submit(prompt, 1) for prompt in (PROMPT, other)]
    bench.step()
    for _ in range(2):
        now[0] += 20.0
        bench.step()
        bench.io_thread.pump(1)
        bench.step()
    bench.run()
    assert [handle.result(0).hit_tokens for handle in handles] == [{"pool": 0, "shelf": 64}] * 2
    assert caplog.records == []


def test_use_is_reported_to_the_tier(kind):
    tier = kept(PROMPT, kind=kind)
    kind.bench(tiers=[tier]).ask(PROMPT, 1)
    assert sorted(tier.touched) == sorted(tier.blocks)


TOKENS = random_ids(230, 3, 10, 250)


def test_an_unusable_directory_is_logged_and_the_engine_runs(tmp_path, caplog):
    path = tmp_path / "file"
    path.write_text("")
    with CPUPagedEngine.from_pretrained(
        "kvboost-edge/demo", num_blocks=16, disk_cache_dir=path
    ) as engine:
        assert engine.generate([5, 6], max_new_tokens=2).generated_tokens == 2
        tier = engine.paged_stats()["tiers"]["disk"]
    assert not tier["writable"]
    assert "disk_cache_dir" in tier["state"]
    assert [record.levelname for record in caplog.records if "disk" in record.message] == [
        "WARNING"
    ]


def test_statistics_name_the_tier(tmp_path):
    with CPUPagedEngine.from_pretrained(
        "kvboost-edge/demo", num_blocks=16, disk_cache_dir=tmp_path
    ) as engine:
        engine.warm(TOKENS[:64])
    with CPUPagedEngine.from_pretrained(
        "kvboost-edge/demo", num_blocks=16, disk_cache_dir=tmp_path
    ) as engine:
        engine.warm(TOKENS[:80])
        stats = engine.paged_stats()
        cache = engine.cache_stats()
    assert stats["tiers"]["disk"]["read_blocks"] == cache["disk_hits"] == 4
    assert cache["disk_chunks"] >= 4
    assert cache["disk_budget_mb"] > 1
    assert stats["lost_blocks"] == 0
    with CPUPagedEngine.from_pretrained("kvboost-edge/demo", num_blocks=16) as engine:
        assert engine.paged_stats()["tiers"] == {}
        assert engine.cache_stats()["disk_chunks"] == 0


def test_forged_block_hashes_read_no_other_prefix():
    """The second blocks of two prompts have equal tokens but different KV, since their first blocks
    differ.

    A prompt sent with the hashes of the other hits nothing in the pool, not even the block just
    read for it, and is computed. With its own hashes it is read from the tier.
    """
    other = [200, *PROMPT[1:]]
    for lie in (other, PROMPT[::-1], PROMPT):
        bench = Bench(tiers=[kept(PROMPT, other)])
        known = b"".join(prefix_hashes(lie, bench.parts.root, 16))
        handles = [bench.submit(PROMPT, 8, terms={"prefix_hashes": known}) for _ in range(2)]
        bench.run()
        cached = [bench.answer(handle).cached_tokens for handle in handles]
        assert cached[0] == (64 if lie is PROMPT else 0)
        assert bench.ask(PROMPT, 8).hit_tokens == {"pool": 64}, (
            "the blocks that were read must have their own hashes"
        )


def test_too_many_block_hashes_are_refused():
    with fake_engine(num_blocks=32) as engine:
        for known in (bytes(31), bytes(32 * 5)):
            with pytest.raises(RequestError, match=f"has {len(known)} bytes, expected 4 x "):
                engine.submit(PROMPT, entry=RequestArrival(0.0, None, known))
        for known in (
            b"",
            bytes(32),
            bytes(32 * 4),
            b"".join(prefix_hashes(PROMPT, engine.cache_root, 16)),
        ):
            handle = engine.submit(PROMPT, max_new_tokens=5, entry=RequestArrival(0.0, None, known))
            assert list(handle.result(timeout=60).output_token_ids) == expected_tokens(PROMPT, 5)
        assert handle.result().cached_tokens == 64
