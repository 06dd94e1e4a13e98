"""Tests of served hybrid models.

Their recurrent states count in the memory budget, tokens recomputed because of a missing snapshot
are reported with that cause, and unsupported options are rejected by name.
"""

import dataclasses
import threading

import pytest

from helpers.engine.fake_hybrid import hybrid_parts
from helpers.models.tiny_models import save_tiny_model
from helpers.server.cache_miss_cases import COMPLETIONS, EXPLAIN, app_of, complete
from kvboost_edge import CPUPagedEngine
from kvboost_edge.config import EngineConfig
from kvboost_edge.engine.memory.report import MemoryReport
from kvboost_edge.errors import ConfigError
from kvboost_edge.server.__main__ import _load, _planned
from kvboost_edge.server.flags import parse_flags
from kvboost_edge.server.models.loader import reserved_bytes


@pytest.fixture
def hybrid():
    """Engine with blocks for 1,024 tokens and 12 slots for recurrent states."""
    config = EngineConfig.from_options(debug_checks=True)
    parts = hybrid_parts(64, 12)
    memory_report = MemoryReport(
        1000, parts.backend.pool_bytes, tuple, lambda: 0, parts.backend.states.nbytes
    )
    with CPUPagedEngine._built_by(
        lambda _: dataclasses.replace(parts, memory_report=memory_report), config
    ) as engine:
        yield engine


def test_recurrent_states_count_in_a_models_memory(hybrid):
    states = hybrid.paged_stats()["state_bytes"]
    assert states == 12 * 64 + 31 * 64, (
        "state_bytes must include the slots and the rows of 31 drafts"
    )
    assert reserved_bytes(hybrid) == 1000 + hybrid.paged_stats()["pool_bytes"] + states


async def test_a_missing_state_is_the_miss_cause_once(hybrid):
    """The second prompt diverges where no snapshot exists and has the cause "state". The third one
    finds a snapshot there. Matched and restored tokens are reported separately.
    """
    head = "A beginning that both prompts have, longer than some blocks of the pool are. "
    found = []
    async with app_of(hybrid) as app:
        for tail in (
            "One goes on with these words, and with more of them. " * 2,
            "Two, however, does with others. ",
            "Three has its own. ",
        ):
            body = {"prompt": head + tail, "max_tokens": 2, **EXPLAIN}
            answer = (await app.post(COMPLETIONS, json=body)).json()
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            ours = answer["kvboost"]
            assert ours["miss_reason"] == ours["cache"]["cause"]
            assert ours["cache"]["hit_tokens"]["pool"] == cached
            found.append((ours["matched_tokens"], cached, ours["miss_reason"]))
            if tail.startswith("Two"):
                position = ours["cache"]["position"]
        shown = (await app.get("/v1/requests")).json()["data"]
        metrics = (await app.get("/metrics")).text
    whole = len(head) // 16 * 16
    assert found == [(0, 0, "first_seen"), (whole, 0, "state"), (whole, whole, "changed_text")]
    assert position == whole
    assert [one["cause"] for one in shown] == ["changed_text", "state", "first_seen"]
    assert 'kvboost:prompt_causes_total{cause="state",model_name="fake"} 1.0' in metrics


async def test_state_slots_and_snapshots_are_reported(hybrid):
    head = "A beginning that both prompts have, longer than some blocks of the pool are. "
    async with app_of(hybrid) as app:
        for tail in (
            "One goes on with these words, and with more of them. ",
            "Two, however, does with others. ",
        ):
            await complete(app, head + tail)
        blocks = (await app.get("/v1/blocks")).json()
        pool = (await app.get("/v1/stats")).json()
        metrics = (await app.get("/metrics")).text
    stats = hybrid.paged_stats()
    kept = stats["state_snapshots"]
    used = stats["state_slots_used"]
    assert (kept["junction"], sum(kept.values()), stats["state_slots"]) == (1, used, 12)
    assert stats["replayed_tokens"] == len(head) // 16 * 16
    for name in ("state_slots", "state_slots_used", "replayed_tokens"):
        assert blocks[name] == pool["pool"][name] == stats[name]
    assert blocks["memory"]["state_bytes"] == pool["memory"]["state_bytes"] == stats["state_bytes"]
    assert pool["pool"]["state_snapshots"] == kept
    told = {
        state: f'{{model_name="fake",state="{state}"}} {count}.0' for state, count in kept.items()
    }
    told |= {"free": f'{{model_name="fake",state="free"}} {12 - used}.0'}
    told |= {"running": '{model_name="fake",state="running"} 0.0'}
    assert sorted(
        line for line in metrics.splitlines() if line.startswith("kvboost:state_slots{")
    ) == sorted(f"kvboost:state_slots{line}" for line in told.values())
    assert (
        f'kvboost:replayed_tokens_total{{model_name="fake"}} {stats["replayed_tokens"]}.0'
        in metrics
    )


async def test_options_unsupported_by_hybrid_models_are_refused_by_name(hybrid):
    async with app_of(hybrid) as app:
        body = {"prompt": "Hello", "max_tokens": 1, "kvboost": {"mode": "chunk_kv_reuse"}}
        refused = await app.post("/v1/completions", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "kvboost")
        assert "recurrent" in refused.json()["error"]["message"]
        warmed = await app.post("/v1/warm", json={"documents": ["A text of its own."]})
        assert (warmed.status_code, "recurrent" in warmed.text) == (400, True)
        assert (await complete(app, "Hello"))["cause"] in ("first_seen", "tail")


def test_max_state_bytes_applies_to_hybrid_models_only(tiny_model_dir, tmp_path):
    hybrid = save_tiny_model("lfm2", tmp_path)
    flags = [
        "--max-state-bytes",
        "200000",
        "--num-blocks",
        "64",
        "--num-threads",
        "1",
        "--reuse-gate",
        "off",
    ]
    alone = parse_flags(["--model", str(tiny_model_dir), *flags], "p")
    with pytest.raises(ConfigError, match="max_state_bytes=200000 has no effect"):
        _planned(str(tiny_model_dir), alone)
    several = parse_flags(["--model", str(tiny_model_dir), "--model", f"h={hybrid}", *flags], "p")
    for path, has_states in ((tiny_model_dir, False), (hybrid, True)):
        planned = _planned(str(path), several)
        with _load(str(path), several, threading.Event()) as engine:
            states = engine.paged_stats()["state_bytes"]
        assert planned.has_states is has_states
        assert (100_000 < states <= 200_000) if has_states else states == 0
