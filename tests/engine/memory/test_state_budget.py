"""The memory for recurrent states: numbers of slots and sequences, and refusals that give the
numbers.
"""

import contextlib
import dataclasses

import pytest

from helpers.engine.fake_hybrid import hybrid_parts
from helpers.engine.fake_runner import fake_parts
from kvboost_edge.backends.base import KVSpec, LayerKVSpec, LayerStateSpec
from kvboost_edge.config import EngineConfig
from kvboost_edge.engine.engine import CPUPagedEngine
from kvboost_edge.engine.memory.state_budget import (
    check_options,
    plan_states,
    planned_states,
    state_bytes,
)
from kvboost_edge.errors import CapacityError, ConfigError, RequestError
from kvboost_edge.runners.base import RunnerInfo

MIB = 1 << 20
# 8 heads of 128: a block of 16 tokens has 64 KiB in float16.
LAYER = LayerKVSpec(8, 128)
# 2 MiB + 96 KiB; 16 KiB
LARGE = LayerStateSpec(3, 8192, 32, 128, 128, 64)
SMALL = LayerStateSpec(2, 2048)
DRAFTS = 31 * LARGE.draft_bytes


def info_of(states):
    spec = KVSpec((LAYER,), 16, "float16", states=states)
    return RunnerInfo("native", "toy", "float32", 100, 4096, 10 * MIB, spec)


def test_state_sizes_of_the_reference_models():
    assert 24 * LARGE.nbytes == int(50.25 * MIB)
    assert 10 * SMALL.nbytes == 160 * 1024
    assert 24 * LARGE.draft_bytes == 24 * 4 * (8192 + 64)
    assert 10 * SMALL.draft_bytes == 80 * 1024


@pytest.mark.parametrize(
    ("states", "num_blocks", "max_num_seqs", "expected"),
    [
        # A quarter of 256 MiB has room for 30 states of 2.1 MiB.
        ((LARGE,), 4096, 4, (30, False, 4)),
        # 13 = (30 - 4) / 2 sequences; the pool alone would allow 64.
        ((LARGE,), 4096, None, (30, False, 13)),
        # A quarter of 4 MiB holds none, so the minimum of 4 + 2 x 3 applies.
        ((LARGE,), 64, 3, (10, False, 3)),
        # Small states are kept after every block: at most one for each block, in at most a quarter
        # of the bytes.
        ((SMALL,), 256, 4, (256, True, 4)),
        ((SMALL,) * 8, 256, 4, (32, True, 4)),
        ((SMALL,) * 9, 256, 4, (28, False, 4)),
    ],
)
def test_the_default_state_memory_is_a_quarter_of_the_pool(
    states, num_blocks, max_num_seqs, expected
):
    config = EngineConfig(num_blocks=num_blocks, max_num_seqs=max_num_seqs)
    sizes, num_seqs = plan_states(config, info_of(states), num_blocks, 1 << 34)
    assert (sizes.num_slots, sizes.every_block, num_seqs) == expected


def test_the_default_fits_the_available_memory():
    pool = 4096 * 64 * 1024
    for room, expected in ((100, 30), (20, 20), (12, 12)):
        config = EngineConfig(num_blocks=4096, max_num_seqs=4)
        sizes, _ = plan_states(config, info_of((LARGE,)), 4096, pool + room * LARGE.nbytes + DRAFTS)
        assert sizes.num_slots == expected


@pytest.mark.parametrize("available", [1 << 34, 8 * MIB])
def test_planning_for_unloading_ignores_available_memory(available):
    """The plan reports the needs of a model that does not fit next to the loaded ones, since those
    may be unloaded.
    """
    config = EngineConfig(num_blocks=4096, max_num_seqs=4)
    info = info_of((LARGE,))
    sizes, _ = plan_states(config, info, 4096, 1 << 34)
    assert planned_states(config, info, available) == sizes
    assert state_bytes(info, sizes) == sizes.num_slots * LARGE.nbytes + DRAFTS
    assert planned_states(config, info_of(()), available) is None
    with pytest.raises(CapacityError, match="max_state_bytes"):
        planned_states(dataclasses.replace(config, max_state_bytes=LARGE.nbytes), info, available)


def test_short_memory_reduces_the_number_of_sequences():
    config = EngineConfig(num_blocks=256)
    pool = 256 * 64 * 1024
    for room, expected in ((12, 4), (10, 3), (6, 1)):
        _, num_seqs = plan_states(
            config, info_of((LARGE,)), 256, pool + room * LARGE.nbytes + DRAFTS
        )
        assert num_seqs == expected
    with pytest.raises(CapacityError, match=r"\(1 sequences need 1 x 2\.09 MiB\) and a pool of"):
        plan_states(config, info_of((LARGE,)), 256, pool + 6 * LARGE.nbytes - 1)
    asked = dataclasses.replace(config, speculation="on")
    with pytest.raises(
        CapacityError,
        match=r"6 recurrent states of 2\.09 MiB \(1 sequences need 1 x 2\.09 MiB\), draft tokens of 0\.98",
    ):
        plan_states(asked, info_of((LARGE,)), 256, pool + 5 * LARGE.nbytes + DRAFTS)


def test_a_given_state_size_determines_the_number_of_slots():
    config = EngineConfig(
        num_blocks=256, max_state_bytes=5 * LARGE.nbytes + DRAFTS + 1, max_num_seqs=4
    )
    sizes, num_seqs = plan_states(config, info_of((LARGE,)), 256, 1 << 34)
    assert (sizes.num_slots, sizes.num_draft_rows, num_seqs) == (5, 31, 4)
    free = EngineConfig(num_blocks=256, max_state_bytes=6e6)
    assert plan_states(free, info_of((LARGE,)), 256, 1 << 34)[1] == 1
    small = EngineConfig(
        num_blocks=256, max_state_bytes=5 * LARGE.nbytes + DRAFTS - 1, max_num_seqs=4
    )
    for asked in ({"speculation": "on"}, {"max_draft_tokens": 31}):
        with pytest.raises(
            CapacityError,
            match=r"holds 4 states of 2\.09 MiB, but 4 sequences need 5 states and 0\.98 MiB for 31 "
            r"draft tokens: 12001024 bytes; raise max_state_bytes or lower max_num_seqs or max_draft_tokens$",
        ):
            plan_states(dataclasses.replace(small, **asked), info_of((LARGE,)), 256, 1 << 34)
    for given, held in ((LARGE.nbytes + DRAFTS, 1), (DRAFTS, 0), (DRAFTS - 1, 0)):
        with pytest.raises(CapacityError, match=f"holds {held} states"):
            plan_states(
                dataclasses.replace(free, max_state_bytes=given), info_of((LARGE,)), 256, 1 << 34
            )


@pytest.mark.parametrize(("lack", "rows"), [(0, 31), (1, 30), (10, 21), (31, 0)])
@pytest.mark.parametrize("max_num_seqs", [4, None])
def test_default_draft_rows_use_the_remaining_memory(lack, rows, max_num_seqs):
    """The draft rows shrink to the memory that the states leave, with and without a given budget."""
    info = info_of((LARGE,))
    needed = (5 if max_num_seqs else 2) * LARGE.nbytes
    room = needed + (31 - lack) * LARGE.draft_bytes
    given = EngineConfig(num_blocks=256, max_state_bytes=room, max_num_seqs=max_num_seqs)
    sizes, num_seqs = plan_states(given, info, 256, 1 << 34)
    assert (sizes.num_slots, sizes.num_draft_rows, num_seqs) == (
        needed // LARGE.nbytes,
        rows,
        max_num_seqs or 1,
    )
    pool = 256 * 64 * 1024
    slots = 4 + 2 * (max_num_seqs or 1)
    free = dataclasses.replace(given, max_state_bytes=None)
    available = pool + slots * LARGE.nbytes
    sizes, num_seqs = plan_states(free, info, 256, available + (31 - lack) * LARGE.draft_bytes)
    assert (sizes.num_slots, sizes.num_draft_rows, num_seqs) == (slots, rows, max_num_seqs or 1)


def test_a_draft_model_gets_at_least_one_row():
    info = info_of((LARGE,))
    room = 5 * LARGE.nbytes
    config = EngineConfig(num_blocks=256, max_num_seqs=4, draft_model="small")
    for rows in (31, 5, 1):
        given = dataclasses.replace(config, max_state_bytes=room + rows * LARGE.draft_bytes)
        sizes, _ = plan_states(given, info, 256, 1 << 34)
        assert (sizes.num_slots, sizes.num_draft_rows) == (5, rows)
    with pytest.raises(CapacityError, match=r"holds 4 states .* for 1 draft tokens: .* raise max"):
        plan_states(dataclasses.replace(config, max_state_bytes=room), info, 256, 1 << 34)


@pytest.mark.parametrize("max_num_seqs", [1, 3, None])
def test_default_drafts_never_prevent_a_start(max_num_seqs, scale):
    """Each budget and each amount of memory near the minimum starts with drafts if it starts
    without them.
    """
    info = info_of((LARGE,))
    pool = 256 * 64 * 1024
    step = LARGE.nbytes // scale(3, 7)
    most = 6 * LARGE.nbytes
    starts = [0, 0]
    for given in (None, *range(LARGE.nbytes, most, step)):
        config = EngineConfig(num_blocks=256, max_state_bytes=given, max_num_seqs=max_num_seqs)
        for available in range(pool, pool + 2 * most, step):
            for way, speculation in enumerate(("off", "auto")):
                with contextlib.suppress(CapacityError):
                    plan_states(
                        dataclasses.replace(config, speculation=speculation), info, 256, available
                    )
                    starts[way] += 1
            assert starts[0] <= starts[1]
    assert starts[0] > 100


@pytest.mark.parametrize(
    ("options", "expected"), [({"speculation": "off"}, 0), ({"max_draft_tokens": 7}, 7)]
)
def test_requested_draft_rows_take_their_memory(options, expected):
    config = EngineConfig(
        num_blocks=256, max_state_bytes=6 * LARGE.nbytes, max_num_seqs=1, **options
    )
    info = info_of((LARGE,))
    sizes, _ = plan_states(config, info, 256, 1 << 34)
    assert sizes.num_draft_rows == expected
    assert sizes.num_slots == (6 if expected == 0 else 5)
    assert planned_states(config, info, 1 << 34) == sizes
    assert state_bytes(info, sizes) == sizes.num_slots * LARGE.nbytes + expected * LARGE.draft_bytes


def test_a_model_without_states_plans_none():
    assert plan_states(EngineConfig(num_blocks=256), info_of(()), 256, 1 << 34) == (None, 8)
    with pytest.raises(ConfigError, match="max_state_bytes=5 has no effect"):
        plan_states(EngineConfig(max_state_bytes=5), info_of(()), 256, 1 << 34)


@pytest.mark.parametrize("wrong", [0, -1, True, "much", float("inf")])
def test_invalid_max_state_bytes_is_refused(wrong):
    with pytest.raises(ConfigError, match="max_state_bytes"):
        EngineConfig(max_state_bytes=wrong)


def test_state_options_need_a_model_with_states():
    for states in ((LARGE,), ()):
        check_options(EngineConfig(speculation="on"), info_of(states))
    with pytest.raises(ConfigError, match="max_state_bytes=5 has no effect"):
        check_options(EngineConfig(max_state_bytes=5), info_of(()))


def test_an_engine_with_states_refuses_unsupported_options_and_reports_states():
    parts = hybrid_parts(64, 12)
    with CPUPagedEngine._built_by(
        lambda _: parts, EngineConfig(num_blocks=64, debug_checks=True)
    ) as engine:
        engine.generate(list(range(40)), max_new_tokens=3)
        stats = engine.paged_stats()
        assert (stats["state_slots"], stats["state_slots_used"]) == (12, 1)
        assert stats["state_snapshots"]["prompt"] == 1
        assert stats["replayed_tokens"] == 0
        result = engine.generate([*range(20), 1, 1], max_new_tokens=1)
        assert (result.miss_reason, result.matched_tokens, result.cached_tokens) == ("state", 16, 0)
        assert engine.paged_stats()["replayed_tokens"] == 16
        with pytest.raises(RequestError, match="recurrent: 1 of its layers have a state"):
            engine.generate([1, 2, 3], mode="chunk_kv_reuse")
        assert engine.reuse_refusal is not None
        with pytest.raises(RequestError, match="snapshot_hints"):
            engine.generate([1, 2, 3], snapshot_hints=(-1,))


def test_an_engine_reports_its_maximum_draft_length():
    text = [*range(60, 90)] * 3
    config = EngineConfig(num_blocks=64, speculation="on")
    with CPUPagedEngine._built_by(
        lambda _: hybrid_parts(64, 12, num_draft_rows=3), config
    ) as engine:
        assert engine.paged_stats()["max_draft_tokens"] == 3
        engine.generate(text, max_new_tokens=40)
        assert engine.generate(text, max_new_tokens=40, max_draft_tokens=31).drafted_tokens > 0
        request = engine._builder.read(text, {"max_draft_tokens": 31})
        assert request.max_draft_tokens == 3, "the draft length must not exceed the draft rows"
        assert engine._builder.read(text, {"max_draft_tokens": 2}).max_draft_tokens == 2
    parts = hybrid_parts(64, 12, num_draft_rows=0)
    config = EngineConfig(num_blocks=64, max_state_bytes=1 << 20)
    with CPUPagedEngine._built_by(lambda _: parts, config) as engine:
        assert engine.paged_stats()["max_draft_tokens"] == 0
        assert engine.generate(text, max_new_tokens=3).drafted_tokens == 0
        assert engine.paged_stats()["draft_bytes"] == 0, (
            "without draft rows, no text may be stored for drafts"
        )
        with pytest.raises(
            RequestError,
            match=r"leaves no room for them; raise max_state_bytes if .*, or lower .*, max_cache_b",
        ):
            engine.generate(text, speculation="on")


def test_an_engine_without_states_reports_none():
    with CPUPagedEngine._built_by(lambda _: fake_parts(8), EngineConfig()) as engine:
        stats = engine.paged_stats()
        assert [
            stats[name]
            for name in ("state_slots", "state_slots_used", "state_snapshots", "state_bytes")
        ] == [
            0,
            0,
            {},
            0,
        ]
        assert stats["max_draft_tokens"] == 31
