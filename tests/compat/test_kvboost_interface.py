"""KVBoost's interface as callers use it: every class, function, keyword and positional form.

Its submodules and the views of its engine are in tests/test_kvboost_modules.py.
"""

import copy
import dataclasses
import inspect
import json
import logging

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

import kvboost_edge
from helpers.models.tiny_models import build_tiny_model, save_tiny_model
from helpers.random_ids import random_ids
from kvboost_edge import (
    CPUPagedEngine,
    GenerationMode,
    InferenceEngine,
    KVBoost,
)
from kvboost_edge.errors import ConfigError, RequestError
from kvboost_edge.server.flags import parse_flags

DEMO = "kvboost-edge/demo"
SYSTEM = "You answer questions on ships and harbours. Be brief, and say so if you do not know. " * 6
QUESTION = "\n\nQ: How long is a cable?\nA:"
GREEDY = (GenerationMode.PREFIX_CACHE, 1.0, False)


@pytest.fixture(scope="module")
def engine():
    with KVBoost.from_pretrained(DEMO, num_blocks=256) as engine:
        yield engine


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """A transformers model and its tokenizer."""
    folder = save_tiny_model("llama", tmp_path_factory.mktemp("llama"))
    return build_tiny_model("llama"), AutoTokenizer.from_pretrained(folder)


def given(call):
    """Return names and defaults of the parameters before `**options`."""
    parameters = inspect.signature(call).parameters.values()
    return {
        one.name: one.default
        for one in parameters
        if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY) and one.name != "self"
    }


def names_by_position(call):
    parameters = inspect.signature(call).parameters.values()
    return [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]


# Construction.


def test_three_names_are_one_class():
    assert KVBoost is InferenceEngine is CPUPagedEngine is kvboost_edge.KVBoost


@pytest.mark.parametrize("name", ["model_name_or_path", "model_name", "path_or_id"])
def test_model_by_keyword(name):
    with CPUPagedEngine.from_pretrained(**{name: DEMO}, num_blocks=8) as engine:
        assert engine.runner_info.vocab_size > 0


@pytest.mark.parametrize("args", [(), (DEMO,), (DEMO, True), (DEMO, False)], ids=str)
def test_model_by_position(args, engine):
    with KVBoost.from_pretrained(*args, num_blocks=8) as other:
        assert other.cache_root == engine.cache_root
        assert other.config.strict == (args[1] if len(args) > 1 else True)


def test_a_model_under_two_names_is_refused():
    with pytest.raises(ConfigError, match="model_name_or_path and model_name both name the model"):
        KVBoost.from_pretrained(DEMO, model_name="another")


def test_the_smaller_of_two_pool_sizes_applies(caplog):
    """This is the only call of the class in KVBoost's README."""
    with (
        caplog.at_level(logging.INFO, "kvboost_edge"),
        CPUPagedEngine.from_pretrained(
            DEMO, max_cache_bytes=4_000_000_000, block_size=16, num_blocks=819
        ) as engine,
    ):
        assert engine.paged_stats()["num_blocks"] == 819
    assert "max_cache_bytes=4000000000 and num_blocks=819 are set" in caplog.text
    assert "smallest of these sizes, 819 blocks" in caplog.text
    with CPUPagedEngine.from_pretrained(DEMO, max_cache_bytes=1e6, num_blocks=819) as engine:
        assert 0 < engine.paged_stats()["pool_bytes"] <= 1_000_000


@pytest.mark.parametrize(
    "options",
    [
        {
            "recompute_strategy": "selective",
            "recompute_overlap": 16,
            "kv_cache_bits": None,
            "device": "cpu",
        },
        {
            "recompute_strategy": kvboost_edge.RecomputeStrategy.CACHEBLEND,
            "recompute_ratio": 0.15,
            "kv_cache_bits": 16,
            "device": None,
        },
        {
            "recompute_strategy": "none",
            "chunk_size": 128,
            "chunk_boundary_window": 16,
            "kv_cache_bits": 8,
            "disk_cache_dir": None,
        },
        {
            "overlap_k": 16,
            "sink_tokens": 32,
            "recency_window_chunks": 8,
            "max_chunks": 16,
            "kv_cache_bits": 4,
        },
    ],
    ids=lambda options: "-".join(options),
)
def test_from_pretrained_accepts_kvboosts_options(options):
    with KVBoost.from_pretrained(DEMO, num_blocks=32, **options) as engine:
        assert {name: getattr(engine.config, name) for name in options} == options
        assert engine.generate(QUESTION, max_new_tokens=2, ignore_eos=True).generated_tokens == 2


def test_a_loaded_model_by_position(loaded):
    model, tokenizer = loaded
    with InferenceEngine(model, tokenizer, 128, 128) as engine:
        assert engine.paged_stats()["num_blocks"] * engine.config.block_size == 128 * 128
        assert engine.config.chunk_size == 128
    with InferenceEngine(
        model=model,
        tokenizer=tokenizer,
        chunk_size=64,
        max_chunks=16,
        recompute_overlap=16,
        recompute_strategy="selective",
        recompute_ratio=0.15,
        kv_cache_bits=16,
        disk_cache_dir=None,
        device=None,
    ) as engine:
        assert engine.paged_stats()["num_blocks"] * engine.config.block_size == 16 * 64


@pytest.mark.parametrize("bits", [16, 8])
def test_a_loaded_model_reuses_chunks_by_default(loaded, bits):
    """KVBoost uses this mode for every call, and all its models are loaded ones."""
    with KVBoost(*loaded, kv_cache_bits=bits, num_blocks=64) as engine:
        assert engine.paged_stats()["backend"] == "torch"
        document = random_ids(96, 1)
        engine.warm(document)
        prompt = [*random_ids(17, 2), *document, *random_ids(5, 3)]
        result = engine.generate(prompt, 3, GenerationMode.CHUNK_KV_REUSE)
        assert result.mode == "chunk_kv_reuse"
        assert result.reused_span_tokens > 48
    with KVBoost(*loaded, num_blocks=64, backend="cpu") as engine:
        assert engine.paged_stats()["backend"] == "cpu"
        with pytest.raises(RequestError, match="use backend='torch'"):
            engine.generate(prompt, 3, GenerationMode.CHUNK_KV_REUSE)


def test_a_loaded_model_without_rope_keeps_the_compiled_kernels(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(save_tiny_model("gpt2", tmp_path))
    with KVBoost(build_tiny_model("gpt2"), tokenizer, num_blocks=32, strict=False) as engine:
        assert engine.paged_stats()["backend"] == "cpu"
        with pytest.raises(RequestError, match="uses positions other than by RoPE"):
            engine.generate(QUESTION, 3, GenerationMode.CHUNK_KV_REUSE)


def test_kv_cache_bits_4_of_a_loaded_model_is_refused_with_an_alternative(loaded):
    with pytest.raises(ConfigError, match=r"or from_pretrained\(path, kv_cache_bits=4\)"):
        KVBoost(*loaded, kv_cache_bits=4)


@pytest.mark.parametrize("strict", [True, False])
def test_check_model_compatibility_of_models(loaded, strict):
    model = loaded[0]
    assert "llama" in kvboost_edge.SUPPORTED_ARCHITECTURES
    for report in (
        kvboost_edge.check_model_compatibility(model, strict),
        kvboost_edge.check_model_compatibility(model, strict=strict),
        kvboost_edge.check_model_compatibility(model),
    ):
        assert report.supported
    unknown = {"model_type": "t5"}
    if strict:
        with pytest.raises(kvboost_edge.ModelFormatError, match="t5"):
            kvboost_edge.check_model_compatibility(unknown, strict)
    else:
        assert not kvboost_edge.check_model_compatibility(unknown, strict).supported


def test_flash_attention_functions_are_available(loaded):
    model = loaded[0]
    assert kvboost_edge.get_flash_attn_tier() in ("kvboost_cuda", "torch_flash", "vanilla")
    available = kvboost_edge.flash_attention_available()
    assert available == (kvboost_edge.get_flash_attn_tier() != "vanilla")
    installed = kvboost_edge.install_flash_attention(model)
    assert installed == kvboost_edge.uninstall_flash_attention(model)
    assert (installed > 0) == (kvboost_edge.get_flash_attn_tier() == "kvboost_cuda")


def test_batch_functions_are_available(loaded):
    ids = [[5, 6, 7, 8, 9], [5, 6, 7, 8, 3]]
    assert kvboost_edge.find_common_chunk_prefix(ids, 2) == 4
    groups = kvboost_edge.group_by_prefix(["a", "b"], ids, 2, n_prefix_chunks=2)
    assert list(groups.values()) == [[0, 1]]
    padded, masks = kvboost_edge.pad_and_mask(ids, 0)
    assert padded.shape == masks.shape == (2, 5)
    with torch.inference_mode():
        past = loaded[0](torch.tensor([[5, 6, 7, 8]]), use_cache=True).past_key_values
    wide = kvboost_edge.broadcast_kv([(one.keys, one.values) for one in past.layers], 2)
    first = torch.tensor([9, 3])
    found, _ = kvboost_edge.batched_decode(loaded[0], wide, first, 4, 3, 2)
    with KVBoost(*loaded, num_blocks=16) as engine:
        for row, prompt in zip(found, ids, strict=True):
            expected = engine.generate(prompt, 2, GenerationMode.BASELINE).output_token_ids
            assert list(row)[1:] == list(expected)


@pytest.mark.parametrize(
    ("argv", "engine", "settings"),
    [
        (
            "--model M --host 0.0.0.0 --port 8000 --max-cache-bytes 4e9 --recompute-strategy "
            "cacheblend --kv-cache-bits 8 --batch-window-ms 20 --max-batch-size 8 --warm Hello. "
            "--insecure",
            {"max_cache_bytes": 4_000_000_000, "recompute_strategy": "cacheblend"},
            {"host": "0.0.0.0", "port": 8000},
        ),
        (
            "--model M --backend cpu-paged --block-size 16 --num-blocks 8192",
            {"backend": "cpu", "block_size": 16, "num_blocks": 8192},
            {},
        ),
        (
            "--model M --chunk-size 128 --chunk-boundary-window 16 --overlap-k 16 --sink-tokens 32 "
            "--disk-cache-dir off --max-queue-size 9 --request-timeout 5 --log-level info "
            "--model-name N --device cpu --dtype float16",
            {"chunk_size": 128, "chunk_boundary_window": 16, "overlap_k": 16, "sink_tokens": 32},
            {"max_queue_size": 9, "request_timeout": 5.0},
        ),
    ],
    ids=["production", "cpu", "rest"],
)
def test_kvboosts_server_command_lines_are_accepted(argv, engine, settings):
    options = parse_flags(argv.split(), "kvboost-server")
    assert options.model == "M"
    for name, value in engine.items():
        assert options.engine[name] == value
    for name, value in settings.items():
        assert getattr(options.settings, name) == value
    assert kvboost_edge.EngineConfig.from_options(**options.engine)


# Generation.


def test_quick_start_reuses_the_warmed_prefix(engine):
    """The shared prefix is warmed once, and later calls reuse it."""
    engine.warm(SYSTEM)
    result = engine.generate(SYSTEM + QUESTION, max_new_tokens=8)
    assert result.output_text
    assert result.ttft_ms > 0
    assert result.kv_reuse_ratio > 0.5


@pytest.mark.parametrize("mode", [one for mode in GenerationMode for one in (mode, mode.value)])
def test_modes_are_given_by_name_or_position(engine, mode):
    for result in (
        engine.generate(QUESTION, 2, mode),
        engine.generate(prompt=QUESTION, max_new_tokens=2, mode=mode),
        engine.generate_batch([QUESTION], 2, mode=mode)[0],
    ):
        assert result.mode == (mode if mode != "chunk_kv_reuse" else "prefix_cache"), (
            "the result must report the mode that was used"
        )


@pytest.mark.parametrize("strategy", ["selective", "cacheblend", "none"])
def test_every_recompute_strategy_works(loaded, strategy):
    options = {"num_blocks": 64, "reuse_gate": "off", "recompute_strategy": strategy}
    with KVBoost(*loaded, **options) as engine:
        document = random_ids(96, 11)
        engine.warm(document)
        result = engine.generate([*random_ids(20, 12), *document, 5], 2, "chunk_kv_reuse")
        assert result.approximate
        assert (result.recomputed_tokens < 16) == (strategy == "none")


def test_baseline_mode_leaves_the_cache_unchanged(loaded):
    with KVBoost(*loaded, num_blocks=32) as engine:
        prompt = random_ids(64, 13)
        engine.generate(prompt, 2, GenerationMode.BASELINE)
        assert engine.generate(prompt, 2, GenerationMode.PREFIX_CACHE).cached_tokens == 0
        again = engine.generate(prompt, 2, GenerationMode.BASELINE)
        assert (again.cached_tokens, again.kv_reuse_ratio) == (0, 0.0)


def test_prompts_may_be_text_ids_arrays_or_chats(engine):
    ids = engine.tokenizer.encode(QUESTION)
    expected = engine.generate(QUESTION, 3).output_token_ids
    for prompt in (ids, tuple(ids), np.array(ids), torch.tensor(ids)):
        assert engine.generate(prompt, 3).output_token_ids == expected
    if engine.tokenizer.chat_template is not None:
        assert engine.generate([{"role": "user", "content": "Hello"}], 3).generated_tokens


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": -1}, "temperature=-1"),
        ({"cacheable_prefix": 3}, "unknown sampling option 'cacheable_prefix'"),
        ({"mode": "fast"}, "mode='fast'"),
    ],
    ids=str,
)
def test_invalid_options_are_refused_by_name(engine, options, word):
    with pytest.raises(RequestError, match=word):
        engine.generate(QUESTION, 3, **options)


def test_positions_and_defaults_of_the_generate_family():
    assert names_by_position(KVBoost.generate) == [
        "self", "prompt", "max_new_tokens", "mode", "temperature", "do_sample"
    ]  # fmt: skip
    for call in (KVBoost.generate_batch, KVBoost.generate_many):
        assert names_by_position(call) == [
            "self", "prompts", "max_new_tokens", "temperature", "do_sample"
        ]  # fmt: skip
    for call in (KVBoost.generate, KVBoost.generate_batch, KVBoost.generate_many):
        assert given(call)["max_new_tokens"] == 64
        assert given(call)["temperature"] is given(call)["do_sample"] is None
    assert names_by_position(KVBoost.warm) == ["self", "text", "position_offset"]
    assert names_by_position(KVBoost.verify_correctness)[1:] == ["prompts", "max_new_tokens"]


def test_generate_accepts_positional_arguments(engine):
    prompt = SYSTEM + QUESTION
    greedy = engine.generate(prompt, 8).output_token_ids
    assert engine.generate(prompt, 8, *GREEDY).output_token_ids == greedy
    named = engine.generate(prompt, max_new_tokens=8, temperature=1.0, do_sample=False)
    assert named.output_token_ids == greedy
    sampled = [engine.generate(prompt, 8, "prefix_cache", 1.5, True) for _ in range(3)]
    assert len({one.output_token_ids for one in sampled}) > 1, (
        "a positional temperature must be applied"
    )
    seeded = engine.generate(prompt, 8, "prefix_cache", 1.5, True, seed=sampled[0].seed)
    assert seeded.output_token_ids == sampled[0].output_token_ids


@pytest.mark.parametrize("name", ["generate_batch", "generate_many"])
def test_generate_many_and_batch_accept_positional_arguments(engine, name):
    prompts = [SYSTEM + f"\n\nQ: What is number {i}?\nA:" for i in range(3)]
    expected = [engine.generate(prompt, 6).output_token_ids for prompt in prompts]
    call = getattr(engine, name)
    for results in (
        call(prompts, 6),
        call(prompts, 6, 1.0, False),
        call(prompts, max_new_tokens=6, temperature=0.0),
    ):
        assert [one.output_token_ids for one in results] == expected
    sampled = call(prompts, 6, 5.0, True, seed=3)
    assert [one.output_token_ids for one in sampled] != expected


def test_an_option_twice_is_refused(engine):
    params = kvboost_edge.SamplingParams(max_new_tokens=3)
    assert engine.generate_batch([QUESTION], sampling=params)[0].generated_tokens == 3
    with pytest.raises(RequestError, match="sampling= and max_new_tokens= are both given"):
        engine.generate_batch([QUESTION], 6, sampling=params)
    with pytest.raises(RequestError, match="sampling= and max_new_tokens= are both given"):
        engine.generate(QUESTION, 6, sampling=params)
    with pytest.raises(RequestError, match="sampling= and temperature= are both given"):
        engine.generate(QUESTION, 64, "baseline", 0.5, sampling=params)


# Verification.


def test_verify_correctness_accepts_positional_arguments(engine):
    for report in (
        engine.verify_correctness(),
        engine.verify_correctness(4),
        engine.verify_correctness(max_new_tokens=4),
        engine.verify_correctness([SYSTEM + QUESTION], 4),
        engine.verify_correctness(prompts=[SYSTEM + QUESTION]),
    ):
        assert report
    short = engine.verify_correctness(4)
    assert all(len(engine.tokenizer.encode(one.cold_text, False)) <= 4 for one in short.checks)
    with pytest.raises(RequestError, match="max_new_tokens is given twice: 4 and 5"):
        engine.verify_correctness(4, 5)
    with pytest.raises(RequestError, match="prompts must be a list of prompts, not str"):
        engine.verify_correctness(QUESTION)


# Results.


def test_results_have_kvboosts_fields(engine):
    result = engine.generate(QUESTION, 4)
    fields = dataclasses.asdict(result)
    assert set(fields) >= {
        *("mode", "prompt", "output_text", "generated_tokens", "ttft_ms", "total_ms"),
        *("tokens_per_sec", "kv_reuse_ratio", "prompt_tokens", "cached_tokens"),
    }
    assert json.loads(json.dumps(fields))["prompt"] == result.prompt == QUESTION
    assert copy.deepcopy(result) == result
    assert 0 < result.ttft_ms <= result.total_ms
    assert result.prompt_tokens == len(engine.tokenizer.encode(QUESTION))


def test_statistics_have_kvboosts_keys(engine):
    engine.generate(SYSTEM + QUESTION, 2)
    assert set(engine.cache_stats()) >= {
        *("hot_chunks", "hot_memory_mb", "budget_mb", "budget_utilization", "cache_hits"),
        *("approximate_hits", "cache_misses", "evictions", "hit_rate"),
    }
    stats = engine.paged_stats()
    assert set(stats) >= {
        *("block_utilization", "free_blocks", "used_blocks", "cached_blocks", "num_blocks"),
        *("block_size", "loaded_chunks", "blocks_used_by_chunks", "shared_blocks", "cow_copies"),
    }
    assert json.dumps(stats)
    assert stats["occupied_blocks"] == stats["used_blocks"] + stats["cached_blocks"] > 0


def test_the_cache_is_reset_and_the_engine_closed(loaded):
    with KVBoost(*loaded, num_blocks=16) as engine:
        prompt = random_ids(40, 14)
        engine.generate(prompt, 1)
        assert engine.generate(prompt, 1).cached_tokens == 32
        engine.reset_cache()
        assert engine.generate(prompt, 1).cached_tokens == 0
    engine.close()
    with pytest.raises(kvboost_edge.KVBoostError):
        engine.generate(prompt, 1)


def test_the_disk_tier_outlives_the_engine(tmp_path):
    for cached in (0, 96):
        with KVBoost.from_pretrained(DEMO, num_blocks=32, disk_cache_dir=str(tmp_path)) as engine:
            assert engine.generate(random_ids(100, 15, 10), 1).hit_tokens.get("disk", 0) == cached


def test_warm_accepts_position_offset(loaded):
    with KVBoost(*loaded, num_blocks=64, reuse_gate="off") as engine:
        text = random_ids(96, 16)
        for result in (engine.warm(text, 40), engine.warm(text, position_offset=40)):
            assert result
            assert result.token_count == 96
        prompt = [*random_ids(40, 17), *text, 5]
        assert engine.generate(prompt, 1, "chunk_kv_reuse").reused_span_tokens > 48


def test_reused_tokens_count_as_cached_in_chunk_reuse_alone(loaded):
    with KVBoost(*loaded, num_blocks=64, reuse_gate="off") as engine:
        head = random_ids(32, 4)
        document = random_ids(96, 5)
        engine.generate([*head, *document], 1)
        prompt = [*head, *random_ids(16, 6), *document, 7]
        exact = engine.generate(prompt, 1)
        assert exact.cached_tokens == exact.exact_cached_tokens == 32
        engine.reset_cache()
        engine.generate([*head, *document], 1)
        result = engine.generate(prompt, 1, mode=GenerationMode.CHUNK_KV_REUSE)
        assert result.reused_span_tokens > 48
        assert result.exact_cached_tokens == sum(result.hit_tokens.values()) == 32
        assert result.cached_tokens == 32 + result.reused_span_tokens
        assert result.kv_reuse_ratio == result.cached_tokens / result.prompt_tokens


def test_a_warm_result_compares_like_its_int(engine):
    nothing = engine.warm("x")
    one = engine.warm(SYSTEM)
    count = one.chunks_stored
    assert one == count == int(one)
    assert count == one
    assert one != count + 1
    assert one > 0
    assert one >= count
    assert one < count + 0.5
    assert 0 < one <= count
    assert one > nothing == 0
    assert max(nothing, one) is one
    assert {one: "a"}[count] == "a"
    assert one != "1"
    assert bool(one) > bool(nothing)
    with pytest.raises(TypeError):
        assert one < "1"


def test_warm_reports_chunks_and_an_alignment_warning(caplog):
    with KVBoost.from_pretrained(DEMO, num_blocks=64, chunk_size=64) as engine:
        ids = [*range(20, 20 + 64 * 3 + 40)]
        for call in (engine.warm, engine.warm_chunks, lambda text: engine.warm(text=text)):
            result = call(ids)
            assert (result.chunks_stored, result.token_count, result.chunk_size) == (4, 232, 64)
            assert (result.chunk_boundary_aligned, result.partial_tail_tokens) == (True, 40)
        assert engine.warm(ids[:128], 0) == engine.warm(ids[:128], position_offset=0) == 2
        assert not caplog.text, "an uncached tail shorter than a block must not cause a warning"
    with KVBoost.from_pretrained(DEMO, num_blocks=64) as engine:
        assert engine.warm(ids).chunk_size == 128, "the default must be KVBoost's"
    with KVBoost.from_pretrained(DEMO, num_blocks=64, block_size=128) as engine:
        result = engine.warm(ids[:41])
        assert not result.chunk_boundary_aligned
        assert not result
        assert caplog.text.count(f"warm: {result.alignment_warning}") == 1


# Chunks.


@pytest.mark.parametrize("strategy", list(kvboost_edge.ChunkStrategy))
def test_each_chunk_strategy_works_alone(strategy):
    text = "The ship lies in the harbour. The pilot is on board.\n\n" * 12
    with KVBoost.from_pretrained(
        DEMO, num_blocks=128, chunk_strategy=strategy, reuse_gate="off"
    ) as engine:
        stored = engine.warm(documents=[text])
        count = len(engine.tokenizer.encode(text, False))
        assert stored.token_count == count
        assert stored >= (1 if strategy == "document" else count // 192)
        result = engine.generate("Q: Where is she?\n" + text, 2, GenerationMode.CHUNK_KV_REUSE)
        assert result.reused_span_tokens > 32
    with KVBoost.from_pretrained(DEMO, num_blocks=32, chunk_strategy=strategy.value) as engine:
        assert engine.config.chunk_strategy is strategy


def test_options_for_documents_only_are_logged(caplog):
    options = {"chunk_boundary_window": 16, "overlap_k": 16, "sink_tokens": 32}
    with KVBoost.from_pretrained(DEMO, num_blocks=32, **options):
        said = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert len(said) == 1
    assert (
        "chunk_boundary_window=16, overlap_k=16, sink_tokens=32: applies only to engine.warm"
        in said[0]
    )
    caplog.clear()
    with KVBoost.from_pretrained(DEMO, num_blocks=32, chunk_size=128):
        assert not caplog.records


@pytest.mark.parametrize(("window", "kept"), [(0, 8), (2, 16)])
def test_recency_window_chunks_are_evicted_last(window, kept):
    """The last prompt was used once and the one before it often. Since few blocks used once are
    kept, the last prompt is evicted first without a window.
    """
    often = random_ids(20 * 16, 1, 10)
    last = random_ids(16 * 16, 2, 10)
    options = {} if not window else {"recency_window_chunks": window}
    with KVBoost.from_pretrained(DEMO, num_blocks=48, **options) as engine:
        manager = engine._parts.manager
        manager._pool._free.missed(once=0, again=1000)
        for _ in range(2):
            engine.warm(often)
        engine.warm(last)
        assert manager.peek([*last, 0], engine.cache_root) == 256
        engine.warm(random_ids(20 * 16, 3, 10))
        assert manager.peek([*last, 0], engine.cache_root) == kept * 16
        served = manager.peek([*often, 0], engine.cache_root)
        assert served == (20 if not window else 12) * 16


def test_max_chunks_counts_chunks():
    with KVBoost.from_pretrained(DEMO, max_chunks=16) as engine:
        assert engine.paged_stats()["num_blocks"] == 16 * 128 // 16
        assert engine.generate(list(range(20, 420)), 1).prompt_tokens == 400
    with KVBoost.from_pretrained(DEMO, chunk_size=64, max_chunks=4, num_blocks=32) as engine:
        assert engine.paged_stats()["num_blocks"] == 16
