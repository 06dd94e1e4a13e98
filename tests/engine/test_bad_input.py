"""Bad input of each kind: the error names the problem, nothing is held, and the next request works."""

import numpy as np
import pytest

from helpers.engine.fake_runner import (
    CONTEXT,
    EOS_ID,
    VOCAB_SIZE,
    checked,
    expected_tokens,
    fake_engine,
)
from helpers.raising import assert_raises
from kvboost_edge.backends.base import KVSpec, LayerKVSpec
from kvboost_edge.config import EngineConfig, GenerationMode
from kvboost_edge.engine.engine import CPUPagedEngine
from kvboost_edge.engine.memory.pool_size import (
    check_weights_fit,
    most_sequences,
    num_open_blocks,
    plan_num_blocks,
    planned_pool_bytes,
)
from kvboost_edge.engine.request.request import SamplingParams
from kvboost_edge.errors import CapacityError, ConfigError, RequestError
from kvboost_edge.runners.base import RunnerInfo

NAN = float("nan")
INF = float("inf")
CANARY = [5, 6, 7]
REUSE = {"mode": GenerationMode.CHUNK_KV_REUSE}

BAD_PROMPTS = [
    ("", "the prompt is empty"),
    ([], "the prompt is empty"),
    (np.array([], np.int64), "the prompt is empty"),
    ([-1], r"token 0 of the prompt is -1; the model's vocabulary is 0\.\.259"),
    ([3, VOCAB_SIZE], "token 1 of the prompt is 260"),
    ([2**70], "token 0 of the prompt is 1180591620717411303424"),
    ([1.0], r"token 0 of the prompt=1\.0 must be an integer"),
    ([1, True], "token 1 of the prompt=True must be an integer"),
    ([1, None], "token 1 of the prompt=None"),
    (
        ["a"],
        "the prompt is a list of strings; give a string",
    ),
    ([[1, 2]], r"token 0 of the prompt=\[1, 2\]"),
    (np.array([0.5]), "token 0 of the prompt=0.5"),
    (None, "not NoneType"),
    (7, "not int"),
    (b"bytes", "not bytes"),
    ({"role": "user", "content": "x"}, "not dict"),
    (iter([1, 2]), "a prompt must be a string, a list of token ids or a list of chat messages"),
    ("lone \ud800 surrogate", "lone surrogate at character 5"),
    ([{"role": "user"}], "chat message 0"),
    ([{"content": "x"}], "chat message 0"),
    ([{"role": "user", "content": "x"}, 3], "chat message 1"),
    ([{"role": 3, "content": "x"}], "chat message 0"),
    ([{"role": "user", "content": "x"}], "no chat template"),
    ([1] * CONTEXT, "the prompt has 400 tokens, which leaves no room"),
    ([1] * (CONTEXT + 1), "the prompt has 401 tokens"),
]

BAD_OPTIONS = [
    ({"max_new_tokens": -1}, "max_new_tokens=-1 must be at least 0"),
    ({"max_new_tokens": -3}, "max_new_tokens=-3"),
    ({"max_new_tokens": 2.0}, r"max_new_tokens=2\.0 must be an integer"),
    ({"max_new_tokens": True}, "max_new_tokens=True must be an integer"),
    ({"max_new_tokens": "8"}, "max_new_tokens='8'"),
    (
        {"max_new_tokens": CONTEXT},
        "3 prompt tokens \\+ max_new_tokens=400 make 403 tokens, more than the model's context of 400",
    ),
    ({"temperature": -0.1}, r"temperature=-0\.1 must be in \[0, 1000\]"),
    ({"temperature": 1000.5}, r"temperature=1000\.5 must be in"),
    ({"temperature": 10**400}, "temperature=10000.* must be in"),
    ({"temperature": np.array([0.5])}, "must be a number"),
    ({"temperature": np.array([0.5, 0.6])}, "must be a number"),
    ({"temperature": 1j}, "temperature=1j must be a number"),
    ({"temperature": NAN}, "temperature=nan"),
    ({"temperature": INF}, "temperature=inf"),
    ({"temperature": "1"}, "temperature='1' must be a number"),
    ({"temperature": True}, "temperature=True must be a number"),
    ({"top_p": 0.0}, r"top_p=0\.0 must be in \(0, 1\]"),
    ({"top_p": 1.0001}, "top_p=1.0001"),
    ({"top_p": -1}, "top_p=-1"),
    ({"top_p": NAN}, "top_p=nan"),
    ({"top_p": [0.5]}, r"top_p=\[0\.5\] must be a number"),
    ({"top_k": -1}, "top_k=-1 must be at least 0"),
    ({"top_k": 1.5}, "top_k=1.5 must be an integer"),
    ({"min_p": -0.1}, r"min_p=-0\.1 must be in \[0, 1\]"),
    ({"min_p": 1.1}, "min_p=1.1"),
    ({"repetition_penalty": 0}, r"repetition_penalty=0 must be in \[0\.001, 1000\]"),
    ({"repetition_penalty": 1e30}, r"repetition_penalty=1e\+30 must be in"),
    ({"repetition_penalty": 1e-300}, "repetition_penalty=1e-300 must be in"),
    ({"repetition_penalty": NAN}, "repetition_penalty=nan"),
    ({"presence_penalty": 2.5}, r"presence_penalty=2\.5 must be in \[-2, 2\]"),
    ({"frequency_penalty": -2.5}, "frequency_penalty=-2.5"),
    ({"seed": -1}, "seed=-1 must be in"),
    ({"seed": 2**64}, "seed=18446744073709551616"),
    ({"seed": 1.0}, "seed=1.0 must be an integer"),
    ({"logprobs": -1}, r"logprobs=-1 must be in 0\.\.100"),
    ({"logprobs": 101}, "logprobs=101"),
    ({"logprobs": True}, "logprobs=True must be an integer"),
    ({"do_sample": 1}, "do_sample=1 must be True, False or None"),
    ({"ignore_eos": "no"}, "ignore_eos='no' must be True or False"),
    ({"stop": ""}, "stop holds ''"),
    ({"stop": ["a", 3]}, "stop holds 3"),
    ({"stop": 3}, "stop=3 must be a string or a list"),
    ({"stop": ["x"] * 65}, "stop holds 65 strings"),
    ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids holds token id 260"),
    ({"stop_token_ids": [-1]}, "stop_token_ids holds token id -1"),
    ({"stop_token_ids": "12"}, "stop_token_ids='12' must be a list"),
    ({"stop_token_ids": [1.0]}, "an entry of stop_token_ids=1.0"),
    ({"logit_bias": [1]}, r"logit_bias=\[1\] must map"),
    ({"logit_bias": {1: NAN}}, r"logit_bias\[1\]=nan must be in \[-10000, 10000\]"),
    ({"logit_bias": {1: 1e39}}, r"logit_bias\[1\]=1e\+39 must be in"),
    ({"logit_bias": {1: -(10**400)}}, r"logit_bias\[1\]=-1000.* must be in"),
    ({"logit_bias": {1: np.ones(3)}}, r"logit_bias\[1\]=array.* must be a number"),
    ({"logit_bias": {1: "x"}}, r"logit_bias\[1\]='x'"),
    ({"logit_bias": {"1": 1.0}}, "a key of logit_bias='1' must be an integer"),
    ({"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias holds token id 260"),
    ({"mode": "fast"}, "mode='fast' is not one of 'baseline', 'prefix_cache', 'chunk_kv_reuse'"),
    ({"mode": None}, "mode=None"),
    ({"mode": "baseline", "pin": True}, "pin=True keeps the prompt's blocks, but mode='baseline'"),
    (
        {"recompute_overlap": 8},
        "recompute_overlap needs mode='chunk_kv_reuse', not mode='prefix_cache'",
    ),
    ({**REUSE, "pin": True}, "mode='chunk_kv_reuse' is approximate, and pin needs exact KV"),
    ({**REUSE, "prompt_logprobs": 1}, "prompt_logprobs needs exact KV"),
    ({**REUSE, "max_new_tokens": 0}, "this request needs exact KV"),
    (
        {**REUSE, "recompute_strategy": "left"},
        "recompute_strategy='left' is not one of 'none', 'selective', 'cacheb",
    ),
    ({**REUSE, "recompute_overlap": -1}, r"recompute_overlap=-1 must be in 0\.\.4096"),
    ({**REUSE, "recompute_overlap": 1.5}, r"recompute_overlap=1.5 must be an integer"),
    ({**REUSE, "recompute_ratio": 1.01}, r"recompute_ratio=1.01 must be in \[0, 1\]"),
    ({**REUSE, "recompute_ratio": NAN}, r"recompute_ratio=nan must be in \[0, 1\]"),
    (
        {"temprature": 1.0},
        "unknown sampling option 'temprature'; did you mean 'temperature'\\? known options: temperature",
    ),
    ({"sampling": {"temperature": 1.0}}, "must be a SamplingParams"),
    ({"sampling": SamplingParams(), "top_k": 3}, "sampling= and top_k= are both given"),
]


@pytest.fixture(scope="module")
def engine():
    with fake_engine() as engine:
        yield engine


@pytest.fixture
def canary(engine):
    """Check after the test that nothing is held and that the next request works."""
    yield
    stats = engine.paged_stats()
    assert (stats["used_blocks"], stats["num_running"], stats["num_waiting"]) == (0, 0, 0)
    checked(engine, CANARY, 4)


@pytest.mark.usefixtures("canary")
@pytest.mark.parametrize(
    ("prompt", "message"), BAD_PROMPTS, ids=lambda v: repr(v).partition(" at 0x")[0][:30]
)
def test_invalid_prompts_are_refused(engine, prompt, message):
    assert_raises(RequestError, message, engine.generate, prompt, max_new_tokens=8)


@pytest.mark.usefixtures("canary")
@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS, ids=lambda v: repr(v)[:40])
def test_invalid_options_are_refused(engine, options, message):
    for call in (
        engine.submit,
        engine.stream,
        lambda p, **o: engine.generate_batch([CANARY, p], **o),
    ):
        assert_raises(RequestError, message, call, CANARY, **options)


@pytest.mark.usefixtures("canary")
def test_invalid_batches_are_refused(engine):
    with pytest.raises(RequestError, match="prompts must be a list of prompts, not str"):
        engine.generate_batch("text")
    with pytest.raises(RequestError, match="sampling has 1 entries for 2 prompts"):
        engine.generate_batch([[1], [2]], sampling=[SamplingParams()])
    assert_raises(RequestError, "the prompt is empty", engine.generate_many, [[1], []])
    assert engine.generate_batch([]) == []
    assert engine.generate_many([]) == []


@pytest.mark.usefixtures("canary")
def test_invalid_warm_logits_and_verify_arguments_are_refused(engine):
    with pytest.raises(RequestError, match=r"position_offset=399 .* context of 400"):
        engine.warm([1, 2], position_offset=399)
    assert_raises(RequestError, "the prompt is empty", engine.warm, "")
    with pytest.raises(RequestError, match="401 tokens are more than the model's context of 400"):
        engine.warm([1] * 401)
    assert_raises(RequestError, r"start=3 must be in 0\.\.2", engine.logits, [1, 2, 3], start=3)
    assert_raises(RequestError, "start=-1", engine.logits, [1, 2, 3], start=-1)
    with pytest.raises(RequestError, match=r"start=1\.5 must be an integer"):
        engine.logits([1, 2, 3], start=1.5)
    assert_raises(RequestError, "not text", engine.logits, "abc")
    assert_raises(RequestError, "prompts is an empty list", engine.verify_correctness, [])
    assert not engine.verify_correctness([[1, 2, 3]]), (
        "a prompt that is too short for any reuse must not pass"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blok_size": 16}, "unknown option 'blok_size'"),
        ({"block_size": 15}, "block_size=15"),
        ({"block_size": 0}, "block_size=0"),
        ({"max_cache_bytes": 0}, "max_cache_bytes=0"),
        ({"max_cache_bytes": NAN}, "max_cache_bytes=nan"),
        ({"kv_cache_bits": 5}, "kv_cache_bits=5 is not supported"),
        ({"runner": "tflite"}, "runner='tflite' is not one of"),
        ({"backend": "tpu"}, "backend='tpu' is not one of"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_batch_tokens": 0}, "max_batch_tokens=0"),
        ({"num_threads": 0}, "num_threads=0"),
        ({"strict": "yes"}, "strict='yes'"),
        ({"dtype": []}, r"dtype=\[\] must be a string"),
    ],
    ids=lambda v: repr(v)[:40],
)
def test_invalid_engine_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        CPUPagedEngine.from_pretrained("kvboost-edge/demo", **options)


def test_numpy_scalars_are_accepted(engine):
    options = {
        "max_new_tokens": np.int64(4),
        "temperature": np.float32(0.5),
        "top_k": np.int32(5),
        "seed": np.uint64(3),
    }
    one = engine.generate(np.array(CANARY, np.int32), **options)
    assert (
        one.output_token_ids
        == engine.generate(CANARY, 4, temperature=0.5, top_k=5, seed=3).output_token_ids
    )


def test_the_whole_context_may_be_filled(engine):
    result = engine.generate([1] * (CONTEXT - 2), max_new_tokens=None, ignore_eos=True)
    assert (result.generated_tokens, result.finish_reason) == (2, "length")
    assert (
        engine.generate([1] * (CONTEXT - 1), max_new_tokens=1, ignore_eos=True).finish_reason
        == "length"
    )
    assert engine.logits([1] * CONTEXT, start=CONTEXT - 1).shape == (1, VOCAB_SIZE)
    assert EOS_ID < VOCAB_SIZE


@pytest.mark.parametrize("num_prompt", [1, 15, 16, 17, 255, 256])
def test_without_a_limit_an_answer_fills_a_pool_smaller_than_the_context(num_prompt):
    prompt = [1] * num_prompt
    with fake_engine(num_blocks=16) as engine:
        result = engine.generate(prompt, max_new_tokens=None, ignore_eos=True)
        assert (result.generated_tokens, result.finish_reason) == (257 - num_prompt, "length")
        assert list(result.output_token_ids) == expected_tokens(prompt, 257 - num_prompt)
        with pytest.raises(CapacityError, match=r"needs 17 blocks .* only 16; shorten the prompt"):
            engine.generate([1] * 257, max_new_tokens=None)


SPEC = KVSpec(
    (LayerKVSpec(2, 64),) * 4, 16, "float32"
)  # 4 * 2 * 2 * 64 * 16 * 4 = 65,536 bytes a block
GB = 10**9


def runner_info(spec, weight_bytes=0, *, copies_kv=False):
    return RunnerInfo(
        "some", "llama", "float32", VOCAB_SIZE, 2048, weight_bytes, spec, copies_kv=copies_kv
    )


def plan(available, **options):
    return plan_num_blocks(EngineConfig(**options), runner_info(SPEC, 2 * GB), available)


def test_pool_sizes_follow_from_the_options():
    assert SPEC.bytes_per_block == 65_536
    assert plan(GB, num_blocks=7) == 7
    assert plan(GB, max_chunks=9) == 9 * 128 // 16, "max_chunks must count chunks of 128 tokens"
    assert plan(GB, max_chunks=9, chunk_size=40) == 23, (
        "the pool must be rounded up to whole blocks"
    )
    assert plan(GB, max_cache_bytes=1e6) == 15
    assert plan(100 * GB) == 128 * 16, "the default must be context x max_num_seqs"
    assert plan(65_536 * 400) == 100, "the pool must take at most a quarter of the available memory"
    assert plan(65_536) == 1


def test_the_smallest_of_several_pool_sizes_applies():
    assert plan(GB, max_cache_bytes=1e6, num_blocks=7) == 7
    assert plan(GB, max_cache_bytes=1e6, num_blocks=70) == 15
    assert plan(GB, max_cache_bytes=100 * GB, num_blocks=70) == 70, (
        "a limit above num_blocks must have no effect"
    )
    assert plan(GB, num_blocks=70, max_chunks=4) == 32
    assert plan(GB, num_blocks=20, max_chunks=4, max_cache_bytes=GB) == 20


def test_a_runner_that_copies_kv_needs_the_pool_twice():
    copying = runner_info(SPEC, 2 * GB, copies_kv=True)
    needed = 2 * 100 * SPEC.bytes_per_block
    config = EngineConfig(num_blocks=100)
    assert plan_num_blocks(config, copying, needed) == 100
    with pytest.raises(
        CapacityError,
        match=r"\(100 blocks of 65536 bytes\) \+ the same for the some runner's copies",
    ):
        plan_num_blocks(config, copying, needed - 1)
    assert plan(needed - 1, num_blocks=100) == 100
    assert plan_num_blocks(EngineConfig(), copying, 400 * SPEC.bytes_per_block) == 100


def test_max_num_seqs_follows_from_the_pool():
    for blocks, count in ((1, 1), (31, 1), (64, 2), (1024, 32), (2048, 64), (10**6, 64)):
        assert most_sequences(EngineConfig(), blocks, 16) == count
        assert num_open_blocks(EngineConfig(), blocks, 16) == count + 1
        assert most_sequences(EngineConfig(max_num_seqs=7), blocks, 16) == 7
    with fake_engine(max_num_seqs=3) as engine:
        assert engine.paged_stats()["max_num_seqs"] == 3


def test_a_quantized_pool_and_its_open_blocks_fit_the_budget():
    block = QUANTIZED.bytes_per_block
    one_open = QUANTIZED.bytes_per_open_block
    for budget in range(3 * block + 2 * one_open, 4000 * block, 37 * block + 11):
        config = EngineConfig(kv_cache_bits=8, max_cache_bytes=budget)
        blocks = plan_num_blocks(config, runner_info(QUANTIZED), 10 * GB)
        used = blocks * block + num_open_blocks(config, blocks, 16) * one_open
        assert 0.99 * budget - 2 * (block + one_open) < used <= budget


QUANTIZED = KVSpec((LayerKVSpec(2, 64),) * 4, 16, "float16", (8, 8))


def test_a_quantized_pool_is_planned_with_its_open_blocks():
    options = {"kv_cache_bits": 8, "max_num_seqs": 3}
    block = QUANTIZED.bytes_per_block
    open_bytes = 4 * QUANTIZED.bytes_per_open_block
    assert block < SPEC.bytes_per_block // 3
    assert QUANTIZED.bytes_per_open_block == SPEC.bytes_per_block // 2

    def plan_quantized(available, **more):
        return plan_num_blocks(EngineConfig(**options, **more), runner_info(QUANTIZED), available)

    assert plan_quantized(GB) == 128 * 3, "the default must be context x max_num_seqs"
    assert plan_quantized(GB, max_cache_bytes=open_bytes + 10 * block) == 10
    assert plan_quantized(4 * (open_bytes + 7 * block)) == 7
    with pytest.raises(
        CapacityError, match=f"{block} bytes in this model in addition to {open_bytes} bytes"
    ):
        plan_quantized(GB, max_cache_bytes=open_bytes)
    with pytest.raises(CapacityError, match="exceed memory"):
        plan_quantized(open_bytes + 10 * block - 1, num_blocks=10)
    config = EngineConfig(**options)
    assert planned_pool_bytes(config, QUANTIZED, 2048, GB) == 384 * block + open_bytes
    assert planned_pool_bytes(config, QUANTIZED, 2048, 1) == block + open_bytes, (
        "the smallest pool must not be refused"
    )


def test_sizes_that_do_not_fit_are_refused_with_the_calculation():
    with pytest.raises(CapacityError, match=r"max_cache_bytes=1000 is too small: .* 65536 bytes"):
        plan(GB, max_cache_bytes=1000)
    with pytest.raises(
        CapacityError, match=r"weights 2\.00 GB \+ pool 1\.31 GB .*only 1\.00 GB is available"
    ):
        plan(GB, num_blocks=20_000)
    assert_raises(CapacityError, "max_cache_bytes", plan, GB, max_cache_bytes=4e9)
    with pytest.raises(
        CapacityError, match=r"the weights take 3\.00 GB, but only 1\.00 GB is available"
    ):
        check_weights_fit(3 * GB, GB)
    check_weights_fit(GB, GB)
