"""Results of calls: text, tokens, stop reasons, times, statistics, warm, logits, verify."""

import dataclasses
import json

import numpy as np
import pytest

from helpers.engine.fake_runner import (
    EOS_ID,
    Bench,
    expected_tokens,
    fake_engine,
    runner_of,
    token_logits,
)
from kvboost_edge.config import GenerationMode

PROMPT = list(range(60, 100))

CACHE_KEYS = """hot_chunks hot_memory_mb budget_mb budget_utilization cache_hits approximate_hits cache_misses evictions
hit_rate exact_hit_rate""".split()
PAGED_KEYS = """occupied_blocks cache_utilization block_utilization free_blocks used_blocks cached_blocks num_blocks block_size loaded_chunks
blocks_used_by_chunks shared_blocks cow_copies bytes_per_block pool_bytes weight_bytes process_rss_bytes
process_peak_bytes copied_bytes buffer_bytes state_bytes state_slots state_slots_used state_snapshots replayed_tokens
max_draft_tokens tokens_held hit_tokens span_tokens miss_tokens evictions preemptions num_running
num_waiting step_seconds step_counts backend runner isa kernel_path attention_path threading_layer num_threads""".split()


@pytest.fixture
def engine():
    with fake_engine() as engine:
        yield engine


@pytest.mark.parametrize("template", ["{{ messages[0].content }}", None])
def test_a_plain_text_prompt_for_a_chat_model_is_logged_once(caplog, template):
    with fake_engine() as engine:
        engine.tokenizer.chat_template = template
        for prompt in (PROMPT, "one", "two"):
            assert engine.generate(prompt, max_new_tokens=1).prompt
        said = [text for text in caplog.messages if "apply the model's chat template" in text]
    assert len(said) == (template is not None)


def test_results_have_every_field(engine):
    engine.generate(PROMPT, max_new_tokens=3)
    result = engine.generate(PROMPT, max_new_tokens=12, logprobs=2)
    tokens = expected_tokens(PROMPT, 12)
    assert result.mode is GenerationMode.PREFIX_CACHE
    assert result.prompt == engine.tokenizer.decode(PROMPT)
    assert list(result.output_token_ids) == tokens
    assert result.output_text == engine.tokenizer.decode(tokens)
    assert result.generated_tokens == 12
    assert result.finish_reason == "length"
    assert (result.prompt_tokens, result.cached_tokens, result.kv_reuse_ratio) == (40, 32, 0.8)
    assert (dict(result.hit_tokens), result.miss_reason) == ({"pool": 32}, "tail")
    assert result.tokens_per_sec == pytest.approx(12 / result.total_ms * 1e3)
    assert result.preemptions == 0
    assert result.logprobs is not None
    assert [entry.token_id for entry in result.logprobs] == tokens
    assert all(entry.top[0] == (entry.token_id, entry.logprob) for entry in result.logprobs), (
        "greedy decoding must take the top token"
    )
    json.dumps(dataclasses.asdict(result))


def test_step_share_is_the_requests_part_of_its_steps():
    for prompts, shares in (([[1] * 40], [1]), ([[1] * 20, [2] * 20], [0.5, 0.5])):
        bench = Bench()
        handles = [bench.submit(prompt, max_new_tokens=4) for prompt in prompts]
        bench.run()
        assert [one.result(0).step_share for one in handles] == pytest.approx(shares)
    bench = Bench()
    handles = [bench.submit(prompt, max_new_tokens=1) for prompt in ([3] * 10, [4] * 40)]
    bench.run()
    assert [one.result(0).step_share for one in handles] == pytest.approx([0.2, 0.8])


@pytest.mark.parametrize("mode", [GenerationMode.BASELINE, "prefix_cache"])
def test_phase_times_add_up_to_the_total(engine, mode):
    for result in engine.generate_batch(
        [PROMPT, [1, 2, 3], "some text"], max_new_tokens=7, mode=mode
    ):
        assert sum(result.phases.values()) == result.total_ms
        assert (
            list(result.phases) == "tokenize queue lookup load probe repair prefill decode".split()
        )
        assert all(value >= 0 for value in result.phases.values())
        assert all(getattr(result, f"{name}_ms") == value for name, value in result.phases.items())
        assert result.ttft_ms == result.token_times_ms[0]
        assert result.ttft_ms == pytest.approx(result.total_ms - result.phases["decode"], abs=1e-6)
        assert list(result.token_times_ms) == sorted(result.token_times_ms)
        assert len(result.token_times_ms) == result.generated_tokens
        assert 0 < result.token_times_ms[-1] <= result.total_ms


def test_eos_ends_the_output_and_is_in_the_ids_only(engine):
    plain = engine.generate(PROMPT, max_new_tokens=10)
    forced = engine.generate(PROMPT, max_new_tokens=10, logit_bias={EOS_ID: 100.0})
    assert forced.output_token_ids == (EOS_ID,)
    assert (forced.output_text, forced.finish_reason) == ("", "stop")
    ignored = engine.generate(
        PROMPT, max_new_tokens=10, logit_bias={EOS_ID: 100.0}, ignore_eos=True
    )
    assert ignored.output_token_ids == (EOS_ID,) * 10
    fifth = plain.output_token_ids[4]
    assert fifth not in plain.output_token_ids[:4]
    stopped = engine.generate(PROMPT, max_new_tokens=10, stop_token_ids=[fifth], ignore_eos=True)
    assert stopped.output_token_ids == plain.output_token_ids[:5]
    assert stopped.output_text == engine.tokenizer.decode(plain.output_token_ids[:4])
    assert stopped.finish_reason == "stop"


def forced_text(engine, prompt, text, **options):
    """Stream while the runner spells `text`, one byte per token, and then EOS."""
    ids = [*engine.tokenizer.encode(text), EOS_ID]
    positions = {len(prompt) + i: token for i, token in enumerate(ids)}
    runner = runner_of(engine)
    real = type(runner)._row

    def spell(batch, row):
        real(runner, batch, row)
        logits = np.zeros(260, np.float32)
        logits[positions[int(batch.positions[row]) + 1]] = 9.0
        return logits

    runner._row = spell
    return list(engine.stream(prompt, **options))


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one END two", "END", "one "),
        ("one EN two", "END", "one EN two"),
        ("aaab", "aab", "a"),
        ("xyz", ["q", "yz", "z"], "x"),
        ("END", "END", ""),
        ("näïve END", "ïve", "nä"),
        ("日本語です。終わり", "終", "日本語です。"),
        ("tail E", "END", "tail E"),
        ("🙂🙃 ok", "🙃", "🙂"),
    ],
)
def test_stop_strings_across_token_borders(engine, text, stop, expected):
    pieces = forced_text(engine, [1, 2, 3], text, stop=stop)
    assert "".join(pieces) == expected
    assert all("\ufffd" not in piece for piece in pieces), "a piece must not end within a character"
    result = engine.generate([1, 2, 3], stop=stop)
    assert result.output_text == expected
    assert result.finish_reason == "stop"


def test_partial_characters_are_not_streamed(engine):
    text = "naïve 日本 🙂 e\u0301 done"
    pieces = forced_text(engine, [1, 2, 3], text)
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_a_partial_character_at_the_end_is_a_replacement_character(engine):
    forced_text(engine, [1, 2, 3], "é")
    result = engine.generate([1, 2, 3], max_new_tokens=1)
    assert (result.output_text, result.finish_reason) == ("\ufffd", "length")


def test_events_carry_every_token(engine):
    handle = engine.submit(PROMPT, max_new_tokens=9, logprobs=0)
    events = list(handle.events())
    result = handle.result()
    assert tuple(event.token_id for event in events) == result.output_token_ids
    assert "".join(event.text for event in events) == result.output_text
    assert tuple(event.time_ms for event in events) == result.token_times_ms
    assert tuple(event.logprobs for event in events) == result.logprobs
    assert list(handle) == [], "each event must be returned once"


def test_seeds_reproduce_and_are_recorded(engine):
    first, second = (engine.generate(PROMPT, max_new_tokens=16, temperature=1.5) for _ in range(2))
    assert first.seed != second.seed
    assert first.output_token_ids != second.output_token_ids
    again = engine.generate(PROMPT, max_new_tokens=16, temperature=1.5, seed=first.seed)
    assert again.output_token_ids == first.output_token_ids
    with fake_engine(seed=0) as same, fake_engine(seed=1) as other:
        same.generate(PROMPT, max_new_tokens=3)
        seeds = [e.generate(PROMPT, max_new_tokens=16, temperature=1.5).seed for e in (same, other)]
    assert seeds[0] == second.seed or seeds[0] != seeds[1]
    assert len(set(seeds)) == 2


def test_generate_many_keeps_the_order_and_shares_prefixes():
    with fake_engine(num_blocks=8, max_num_seqs=1) as engine:
        a = [1] * 64
        b = [2] * 64
        prompts = [[*(a if i % 2 == 0 else b), i] for i in range(8)]
        results = engine.generate_many(prompts, max_new_tokens=3)
        for prompt, result in zip(prompts, results, strict=True):
            assert list(result.output_token_ids) == expected_tokens(prompt, 3)
        # The pool holds one prefix at a time, so a prefix is reused only if its requests run in
        # succession.
        assert sum(result.cached_tokens == 64 for result in results) == 6


@pytest.mark.parametrize(
    ("length", "options", "stored", "tail"),
    [
        (40, {"chunk_size": 16}, 2, 8),
        (128, {}, 1, 0),
        (140, {}, 1, 12),
        (200, {}, 2, 72),
        (40, {}, 1, 40),
        (31, {}, 0, 31),
        (100, {"block_size": 64, "chunk_size": 64}, 1, 36),
        (41, {"block_size": 128}, 0, 41),
        (300, {"block_size": 256}, 1, 44),
        (70, {"chunk_size": 20}, 3, 10),
    ],
    ids=str,
)
def test_warm_counts_chunks_and_logs_the_partial_tail(length, options, stored, tail, caplog):
    with fake_engine(**options) as engine:
        result = engine.warm("x" * length)
        assert (result.chunks_stored, result.partial_tail_tokens) == (stored, tail)
        assert (int(result), bool(result), result.token_count) == (stored, stored > 0, length)
        assert result.chunk_size == engine.config.chunk_tokens
        block = engine.config.block_size
        lost = length % block
        assert result.chunk_boundary_aligned == (lost < 32) == (result.alignment_warning is None)
        logged = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
        said = f"warm: the last {lost} tokens do not fill a block of {block} and are not cached"
        assert logged == ([] if lost < 32 else [said])
        assert engine.warm_chunks("x" * length) == stored, (
            "a repeated call must store the same number of chunks"
        )
        whole = length // block * block
        assert engine.generate("x" * length + "y", max_new_tokens=1).cached_tokens == whole


def test_a_chunk_with_an_evicted_block_is_not_counted():
    with fake_engine(num_blocks=16, chunk_size=32) as engine:
        engine.warm([1] * 96)
        assert engine.warm_result([1] * 96).chunks_stored == 3
        engine.generate([2] * 176, max_new_tokens=1)
        assert engine.paged_stats()["evictions"] == 1
        assert engine.warm_result([1] * 96).chunks_stored == 2
        assert engine.warm([1] * 96).chunks_stored == 3


@pytest.mark.parametrize("start", [0, 5, 20])
def test_logits_of_a_preempted_request_are_returned_once(start):
    bench = Bench(5, max_batch_tokens=2)
    bench.submit(range(100, 116), 40)
    bench.step()
    token_ids = list(range(48))
    handle, rows = bench.submit_logits(token_ids, start)
    bench.run()
    assert handle.result(0).preemptions > 0
    truth = np.stack([token_logits(token_ids[: i + 1]) for i in range(start, 48)])
    np.testing.assert_array_equal(np.concatenate(rows), truth)


def test_logits_equal_each_positions(engine):
    truth = np.stack([token_logits(PROMPT[: i + 1]) for i in range(40)])
    with fake_engine(max_batch_tokens=7) as chunked:
        for start in (0, 1, 15, 16, 31, 32, 39):
            for each in (engine, chunked):
                rows = each.logits(PROMPT, start=start)
                assert rows.dtype == np.float32
                np.testing.assert_array_equal(rows, truth[start:])
    before = runner_of(engine).computed
    engine.logits(PROMPT, start=33)
    assert runner_of(engine).computed - before == 8, "tokens before start must come from the cache"


def test_verify_correctness_passes_and_reports(engine):
    report = engine.verify_correctness()
    assert report
    assert all(check.reused_tokens > 0 and check.text_equal for check in report.checks)
    assert len(str(report).splitlines()) == 2
    sampled = engine.verify_correctness(["z" * 50], max_new_tokens=8, temperature=0.9, top_p=0.9)
    assert sampled
    assert sampled.checks[0].kl_divergence == 0.0


def test_verify_correctness_can_fail(engine, monkeypatch):
    runner = runner_of(engine)
    real = runner._row

    def drift(batch, row):
        """Return wrong logits if part of the prompt was cached, so that the pass starts after
        position 0.
        """
        logits = real(batch, row)
        if int(batch.positions[0]) == 48:
            logits = logits + np.linspace(0, 9, len(logits), dtype=np.float32)
        return logits

    monkeypatch.setattr(runner, "_row", drift)
    report = engine.verify_correctness()
    assert not report
    assert all("the logits differ" in str(check.problem) for check in report.checks)
    assert "FAILED" in str(report)
    short = engine.verify_correctness([[1, 2, 3]])
    assert not short
    assert "nothing was reused" in str(short.checks[0].problem)


def test_stats_have_every_key(engine):
    engine.generate(PROMPT, max_new_tokens=3)
    engine.generate(PROMPT, max_new_tokens=3)
    cache = engine.cache_stats()
    paged = engine.paged_stats()
    assert set(CACHE_KEYS) <= cache.keys()
    assert set(PAGED_KEYS) <= paged.keys()
    assert (cache["hot_chunks"], cache["cache_hits"], cache["approximate_hits"]) == (2, 2, 0)
    assert cache["hit_rate"] == 32 / 80
    assert paged["free_blocks"] == paged["num_blocks"] - paged["used_blocks"] == 64
    assert (paged["cached_blocks"], paged["tokens_held"]) == (2, 32)
    assert (paged["hit_tokens"], paged["miss_tokens"]) == (32, 48)
    assert paged["process_rss_bytes"] > paged["pool_bytes"] == 64 * paged["bytes_per_block"]
    assert engine.block_map().count(1) == 2
    json.dumps([cache, paged])


def test_a_pool_full_of_cached_blocks_is_occupied_but_not_in_use():
    with fake_engine(num_blocks=4) as engine:
        assert engine.paged_stats()["cache_utilization"] == 0
        engine.generate(list(range(40)), max_new_tokens=1)
        engine.pin(list(range(100, 116)))
        stats = engine.paged_stats()
    assert (stats["occupied_blocks"], stats["cache_utilization"]) == (3, 0.75)
    assert (stats["used_blocks"], stats["block_utilization"]) == (1, 0.25)
    assert list(stats)[:2] == ["occupied_blocks", "cache_utilization"]
