"""KVBoost's interface, called as its users call it: every class, function, keyword and positional
form.
"""

import inspect
import logging

import pytest
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
    """Names and defaults of the parameters before `**options`."""
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
def test_the_model_by_keyword(name):
    with CPUPagedEngine.from_pretrained(**{name: DEMO}, num_blocks=8) as engine:
        assert engine.runner_info.vocab_size > 0


@pytest.mark.parametrize("args", [(), (DEMO,), (DEMO, True), (DEMO, False)], ids=str)
def test_the_model_by_position(args, engine):
    with KVBoost.from_pretrained(*args, num_blocks=8) as other:
        assert other.cache_root == engine.cache_root
        assert other.config.strict == (args[1] if len(args) > 1 else True)


def test_a_model_under_two_names_is_refused():
    with pytest.raises(ConfigError, match="model_name_or_path and model_name both name the model"):
        KVBoost.from_pretrained(DEMO, model_name="another")


def test_both_sizes_of_the_pool_give_the_smaller(caplog):
    """The README's only call of this class."""
    with (
        caplog.at_level(logging.INFO, "kvboost_edge"),
        CPUPagedEngine.from_pretrained(
            DEMO, max_cache_bytes=4_000_000_000, block_size=16, num_blocks=819
        ) as engine,
    ):
        assert engine.paged_stats()["num_blocks"] == 819
    assert "max_cache_bytes=4000000000 and num_blocks=819 are given" in caplog.text
    assert "smallest of these sizes, 819 blocks" in caplog.text
    with CPUPagedEngine.from_pretrained(DEMO, max_cache_bytes=1e6, num_blocks=819) as engine:
        assert 0 < engine.paged_stats()["pool_bytes"] <= 1_000_000


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("recompute_strategy", "selective"),
        ("recompute_strategy", kvboost_edge.RecomputeStrategy.CACHEBLEND),
        ("recompute_strategy", "none"),
        ("recompute_overlap", 16),
        ("recompute_ratio", 0.15),
        ("chunk_size", 128),
        ("kv_cache_bits", None),
        ("kv_cache_bits", 16),
        ("kv_cache_bits", 8),
        ("kv_cache_bits", 4),
        ("device", "cpu"),
        ("device", None),
        ("chunk_boundary_window", 16),
        ("overlap_k", 16),
        ("sink_tokens", 32),
        ("disk_cache_dir", None),
        ("recency_window_chunks", 8),
        ("max_chunks", 16),
    ],
)
def test_options_of_from_pretrained(name, value):
    with KVBoost.from_pretrained(DEMO, num_blocks=32, **{name: value}) as engine:
        assert engine.generate(QUESTION, max_new_tokens=2).generated_tokens <= 2


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
    """In KVBoost that is the mode of every call, and its models are all loaded ones."""
    with KVBoost(*loaded, kv_cache_bits=bits, num_blocks=64, reuse_gate="off") as engine:
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
        with pytest.raises(RequestError, match="does not take positions from rope"):
            engine.generate(QUESTION, 3, GenerationMode.CHUNK_KV_REUSE)


def test_4_bits_of_a_loaded_model_are_refused_with_the_way_out(loaded):
    with pytest.raises(ConfigError, match=r"or from_pretrained\(path, kv_cache_bits=4\)"):
        KVBoost(*loaded, kv_cache_bits=4)


# Generation.


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


def test_generate_by_position(engine):
    prompt = SYSTEM + QUESTION
    greedy = engine.generate(prompt, 8).output_token_ids
    assert engine.generate(prompt, 8, *GREEDY).output_token_ids == greedy
    assert engine.generate(prompt, max_new_tokens=8, temperature=1.0, do_sample=False) is not None
    sampled = [engine.generate(prompt, 8, "prefix_cache", 1.5, True) for _ in range(3)]
    assert len({one.output_token_ids for one in sampled}) > 1, "a temperature given by position"
    seeded = engine.generate(prompt, 8, "prefix_cache", 1.5, True, seed=sampled[0].seed)
    assert seeded.output_token_ids == sampled[0].output_token_ids


@pytest.mark.parametrize("name", ["generate_batch", "generate_many"])
def test_several_prompts_by_position(engine, name):
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
    with pytest.raises(RequestError, match="sampling= and temperature= are both given"):
        engine.generate(QUESTION, 6, "baseline", 0.5, sampling=params)


# Verification.


def test_verify_correctness_by_position(engine):
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
    with pytest.raises(RequestError, match="prompts is a string"):
        engine.verify_correctness(QUESTION)


# Results.


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


def test_warm_reports_chunks_and_twice_the_same(caplog):
    with KVBoost.from_pretrained(DEMO, num_blocks=64, chunk_size=64) as engine:
        ids = [*range(20, 20 + 64 * 3 + 40)]
        for call in (engine.warm, engine.warm_chunks, lambda text: engine.warm(text=text)):
            result = call(ids)
            assert (result.chunks_stored, result.token_count, result.chunk_size) == (4, 232, 64)
            assert (result.chunk_boundary_aligned, result.partial_tail_tokens) == (False, 40)
            assert f"warm: {result.alignment_warning}" in caplog.text
            caplog.clear()
        assert engine.warm(ids[:128], 0) == engine.warm(ids[:128], position_offset=0) == 2
        assert not caplog.text
    with KVBoost.from_pretrained(DEMO, num_blocks=64) as engine:
        assert engine.warm(ids).chunk_size == 128, "by default, as there"


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


def test_options_that_act_on_documents_alone_say_so(caplog):
    options = {"chunk_boundary_window": 16, "overlap_k": 16, "sink_tokens": 32}
    with KVBoost.from_pretrained(DEMO, num_blocks=32, **options):
        said = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert len(said) == 1
    assert "chunk_boundary_window=16, overlap_k=16, sink_tokens=32: for documents" in said[0]
    caplog.clear()
    with KVBoost.from_pretrained(DEMO, num_blocks=32, chunk_size=128):
        assert not caplog.records


@pytest.mark.parametrize(("window", "kept"), [(0, 8), (2, 16)])
def test_chunks_in_the_recency_window_are_evicted_last(window, kept):
    """The last prompt was used once, the one before it often, and little that was used once is
    kept: without a window the last one goes first.
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
