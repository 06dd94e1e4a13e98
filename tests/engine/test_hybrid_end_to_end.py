"""Tiny hybrid models through the whole engine: answers with and without cached state are equal to
the bit.

The state is in the pool, on disk, or on disk after the process that stored it was killed.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.models.tiny_models import save_tiny_model
from helpers.pairwise import each_once
from helpers.random_ids import random_ids
from kvboost_edge import CPUPagedEngine
from kvboost_edge.errors import BackendUnavailable, CapacityError, ConfigError, ModelFormatError

TESTS = Path(__file__).parents[1]
PROMPT = random_ids(100, 3, 3, 250)
OTHER = [*PROMPT[:50], *random_ids(30, 4, 3, 250)]
ANSWER = {"max_new_tokens": 20, "temperature": 0.0, "ignore_eos": True, "logprobs": 2}

TO_BE_KILLED = """
import json, os, signal, sys, time
from kvboost_edge import CPUPagedEngine

path, prompt, answer, options = json.loads(sys.stdin.read())
engine = CPUPagedEngine.from_pretrained(path, **options)
engine.generate(prompt, **answer)
while engine.cache_stats()["disk_writes"] < 7 or engine.paged_stats()["staging_bytes"]:  # 7 blocks; states come behind
    time.sleep(0.01)
while engine.cache_stats()["disk_writes"] < 9:
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""


FAMILIES = ("lfm2", "qwen3_5_text", "granitemoehybrid-h", "nemotron_h-moe", "falcon_h1")
ALL_BITS = (16, 8, (8, 4), 4)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    return save_tiny_model(request.param, tmp_path_factory.mktemp(request.param))


def engine_of(model, **options):
    return CPUPagedEngine.from_pretrained(
        model, **{"num_blocks": 64, "num_threads": 1, "weights": "int8", **options}
    )


def same(one, other):
    return one.output_token_ids == other.output_token_ids and one.logprobs == other.logprobs


@pytest.mark.parametrize(("model", "bits"), each_once(FAMILIES, ALL_BITS), indirect=["model"])
def test_cold_cached_and_branching_answers_are_bit_equal(model, bits):
    with engine_of(model, kv_cache_bits=bits, debug_checks=True) as engine:
        cold = [engine.generate(prompt, mode="baseline", **ANSWER) for prompt in (PROMPT, OTHER)]
        first, hit = (engine.generate(PROMPT, **ANSWER) for _ in range(2))
        assert (first.cached_tokens, hit.cached_tokens) == (0, 96)
        assert same(first, cold[0])
        assert same(hit, cold[0])
        assert engine.reset_cache() > 0
        assert same(engine.generate(PROMPT, **ANSWER), cold[0])
        branches = [
            engine.generate([*OTHER[:50], *tail], **ANSWER) for tail in (OTHER[50:], OTHER[50:])
        ]
        assert all(same(branch, cold[1]) for branch in branches)
        stats = engine.paged_stats()
        spec = engine.runner_info.kv_spec
        assert (
            stats["state_bytes"]
            == stats["state_slots"] * spec.bytes_per_state + 31 * spec.bytes_per_draft
            > 0
        )
        assert stats["other_bytes"] >= 0


@pytest.mark.parametrize(("model", "bits"), each_once(FAMILIES, ALL_BITS), indirect=["model"])
@pytest.mark.some(3)
def test_drafts_from_history_change_no_bit(model, bits, tmp_path):
    """The tenant's second request finds its answer in the history. After a restart, the states of
    the conversation are on disk.
    """
    options = {
        "kv_cache_bits": bits,
        "debug_checks": True,
        "disk_cache_dir": tmp_path,
        "max_disk_bytes": 64 << 20,
    }
    sampled = {**ANSWER, "max_new_tokens": 40, "temperature": 0.8, "seed": 3}
    for answer in ({**ANSWER, "max_new_tokens": 40}, sampled):
        with engine_of(model, speculation="on", **options) as engine:
            alone = engine.generate(PROMPT, mode="baseline", speculation="off", **answer)
            engine.generate(PROMPT, speculation="auto", **answer)
            drafted = engine.generate(PROMPT, **answer)
            assert drafted.accepted_tokens > 5
            assert same(drafted, alone)
            turn = [*PROMPT, *alone.output_token_ids, 5, 6, 7]
            following = engine.generate(turn, mode="baseline", speculation="off", **ANSWER)
            assert same(engine.generate(turn, **ANSWER), following)
        with engine_of(model, speculation="on", **options) as engine:
            restored = engine.generate(turn, **ANSWER)
            assert restored.hit_tokens["disk"] >= 128
            assert same(restored, following)


def test_chats_share_the_state_after_their_system_message(tmp_path):
    """The chat template gives the place where a user message begins, so a state is kept there
    without a hint from the caller.
    """
    system = {"role": "system", "content": "You are a helper of few words. " * 4}
    chats = [
        [system, {"role": "user", "content": content}]
        for content in ("What is it?", "Another question, longer.")
    ]
    with engine_of(save_tiny_model("qwen3_5_text", tmp_path), debug_checks=True) as engine:
        cold = engine.generate(chats[1], mode="baseline", **ANSWER)
        engine.reset_cache()
        engine.generate(chats[0], **ANSWER)
        assert engine.paged_stats()["state_snapshots"]["hint"] == 1
        found = engine.generate(chats[1], **ANSWER)
        border = len(engine.tokenizer.encode_chat([system], False))
    assert found.cached_tokens == border // 16 * 16 > 64
    assert same(found, cold)


@pytest.mark.parametrize(
    "model",
    [FAMILIES[0], *(pytest.param(one, marks=pytest.mark.full) for one in FAMILIES[1:])],
    indirect=True,
)
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_states_survive_the_death_of_the_process(model, tmp_path):
    options = {
        "num_blocks": 64,
        "num_threads": 1,
        "weights": "int8",
        "disk_cache_dir": str(tmp_path / "blocks"),
        "max_disk_bytes": 64 << 20,
    }
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent)}
    told = json.dumps([str(model), PROMPT, ANSWER, options])
    died = subprocess.run(
        [sys.executable, "-c", TO_BE_KILLED], input=told, text=True, env=environment, check=False
    )
    assert died.returncode == -signal.SIGKILL
    with engine_of(model) as engine:
        cold = engine.generate(PROMPT, **ANSWER)
    with engine_of(model, **options) as engine:
        restored = engine.generate(PROMPT, **ANSWER)
    assert restored.hit_tokens["disk"] == 96
    assert same(restored, cold)


def test_options_unsupported_by_hybrid_models_are_refused_by_name(model):
    with pytest.raises(
        CapacityError, match=r"max_state_bytes=1000 holds 0 states of .* sequences need"
    ):
        engine_of(model, max_state_bytes=1000)
    with pytest.raises((BackendUnavailable, ConfigError, ModelFormatError), match="state"):
        engine_of(model, runner="torch", weights="auto")
