"""Tiny real models on the torch runner: greedy tokens equal those of transformers, whatever the
schedule and the cache.
"""

import weakref

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.distance import distance
from helpers.models.tiny_models import EOS_ID, FAMILIES, save_tiny_model
from helpers.random_ids import random_ids
from helpers.runners.families import VARIED
from kvboost_edge import CPUPagedEngine, GenerationMode
from kvboost_edge.engine import build
from kvboost_edge.errors import CapacityError, ConfigError, ModelFormatError, RequestError

pytestmark = pytest.mark.usefixtures("one_torch_thread")

SOME_FAMILIES = ["llama", "gemma2", "qwen3"]
NEW = 24
BLOCK = 16
# One thread: a tiny matrix has no work to share, and on a busy machine the team would wait for its
# last thread.
OPTIONS = {
    "runner": "torch",
    "backend": "cpu",
    "dtype": "float32",
    "debug_checks": True,
    "num_threads": 1,
}


class Truth:
    """Reference: transformers alone, one prompt at a time."""

    def __init__(self, directory):
        self.directory = directory
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    @torch.inference_mode()
    def greedy(self, prompt, count=NEW):
        ids = torch.tensor([prompt])
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=-1,
        )
        return [int(token) for token in out[0, len(prompt) :]]

    @torch.inference_mode()
    def logits(self, ids):
        return np.asarray(self.model(torch.tensor([ids])).logits[0])


@pytest.fixture(scope="module", params=SOME_FAMILIES)
def truth(request, tmp_path_factory):
    return Truth(save_tiny_model(request.param, tmp_path_factory.mktemp(request.param)))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name in VARIED else pytest.mark.full) for name in FAMILIES
    ],
)
def any_truth(request, tmp_path_factory):
    return Truth(save_tiny_model(request.param, tmp_path_factory.mktemp(request.param)))


@pytest.fixture
def engine(truth):
    with CPUPagedEngine.from_pretrained(
        truth.directory, num_blocks=64, max_batch_tokens=64, **OPTIONS
    ) as engine:
        yield engine
        assert engine.paged_stats()["used_blocks"] == 0


def greedy(engine, prompt, count=NEW, **options):
    return list(
        engine.generate(prompt, max_new_tokens=count, ignore_eos=True, **options).output_token_ids
    )


def test_cold_and_cached_answers_equal_transformers(truth, engine):
    prompt = random_ids(3 * BLOCK + 5, 1)
    expected = truth.greedy(prompt)
    assert greedy(engine, prompt) == expected
    for cut in (0, 1, BLOCK - 1, BLOCK, 2 * BLOCK + 3):
        other = prompt[:cut] + random_ids(40, 100 + cut)
        result = engine.generate(other, max_new_tokens=NEW, ignore_eos=True)
        assert result.cached_tokens == cut // BLOCK * BLOCK
        assert list(result.output_token_ids) == truth.greedy(other)
    warm = engine.generate(prompt, max_new_tokens=NEW, ignore_eos=True)
    assert (warm.cached_tokens, list(warm.output_token_ids)) == (3 * BLOCK, expected)
    baseline = engine.generate(prompt, NEW, GenerationMode.BASELINE, ignore_eos=True)
    assert (baseline.cached_tokens, list(baseline.output_token_ids)) == (0, expected)


@pytest.mark.some(4)
def test_a_batch_with_preemption_and_a_second_turn(any_truth):
    prompts = [random_ids(20, 9) + random_ids(5 + 9 * i, i) for i in range(4)]
    options = {"num_blocks": 8, "max_num_seqs": 3, "max_batch_tokens": 24, **OPTIONS}
    with CPUPagedEngine.from_pretrained(any_truth.directory, **options) as engine:
        results = engine.generate_batch(prompts, max_new_tokens=NEW, ignore_eos=True)
        assert [list(result.output_token_ids) for result in results] == [
            any_truth.greedy(one) for one in prompts
        ]
        assert engine.paged_stats()["preemptions"] > 0
        history = prompts[0] + greedy(engine, prompts[0])
        turn = history + random_ids(10, 5)
        result = engine.generate(turn, max_new_tokens=NEW, ignore_eos=True)
        assert result.cached_tokens == (len(history) - 1) // BLOCK * BLOCK
        assert list(result.output_token_ids) == any_truth.greedy(turn)
        assert engine.paged_stats()["used_blocks"] == 0


def test_logits_equal_transformers(truth, engine):
    ids = random_ids(75, 6)
    expected = truth.logits(ids)
    for start in (0, 33, 64):
        rows = engine.logits(ids, start=start)
        assert distance(rows, expected[start:]) < 1e-4


@pytest.mark.some(3)
def test_verify_correctness_passes(engine):
    report = engine.verify_correctness()
    assert report, str(report)


def test_a_loaded_transformers_model_is_served(truth):
    tokenizer = AutoTokenizer.from_pretrained(truth.directory)
    prompt = random_ids(40, 8)
    with CPUPagedEngine(truth.model, tokenizer, num_blocks=32, backend="cpu") as engine:
        assert greedy(engine, prompt, 20) == truth.greedy(prompt, 20)
        assert engine.tokenizer.encode("hé") == tokenizer("hé").input_ids
    assert truth.greedy(prompt, 3) == truth.greedy(prompt, 3), (
        "the engine must leave the model usable by its owner"
    )


@pytest.fixture(scope="module")
def llama_dir(tmp_path_factory):
    return save_tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def llama_truth(llama_dir):
    return Truth(llama_dir)


@pytest.mark.parametrize(
    "option",
    [{"dtype": "float32"}, {"revision": "main"}, {"token": "secret"}, {"local_files_only": True}],
    ids=str,
)
def test_options_about_loading_do_not_apply_to_a_loaded_model(llama_dir, llama_truth, option):
    (name,) = option
    with pytest.raises(
        ConfigError, match=f"option '{name}' does not apply to a model that is already loaded"
    ) as caught:
        CPUPagedEngine(llama_truth.model, AutoTokenizer.from_pretrained(llama_dir), **option)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_num_threads_is_applied(llama_dir, backend):
    model = Truth(llama_dir).model
    tokenizer = AutoTokenizer.from_pretrained(llama_dir)
    with CPUPagedEngine(model, tokenizer, num_blocks=8, backend=backend, num_threads=2) as engine:
        assert torch.get_num_threads() == 2
        assert engine.paged_stats()["num_threads"] == 2
    torch.set_num_threads(1)
    with CPUPagedEngine(model, tokenizer, num_blocks=8, backend=backend) as engine:
        assert torch.get_num_threads() == 1, "the owner's thread count must stay"
        expected = 1 if backend == "torch" else engine._parts.backend.num_threads
        assert engine.paged_stats()["num_threads"] == expected


def test_close_frees_the_weights(llama_dir):
    engine = CPUPagedEngine.from_pretrained(llama_dir, num_blocks=8, **OPTIONS)
    weight = weakref.ref(next(engine._parts.runner.model.parameters()))
    greedy(engine, random_ids(20, 1), 3)
    assert weight() is not None
    engine.close()
    assert weight() is None
    assert engine.runner_info.architecture == "llama"


def test_close_leaves_a_loaded_model_to_its_owner(llama_dir):
    truth = Truth(llama_dir)
    before = truth.greedy(random_ids(20, 2), 5)
    CPUPagedEngine(
        truth.model, AutoTokenizer.from_pretrained(llama_dir), num_blocks=8, backend="cpu"
    ).close()
    assert truth.greedy(random_ids(20, 2), 5) == before


@pytest.mark.parametrize(
    ("stored", "asked", "per_param"),
    [
        ("float16", "auto", 4),
        ("bfloat16", "auto", 2),
        ("float32", "auto", 4),
        ("float16", "float16", 2),
    ],
)
def test_weight_bytes_are_planned_in_the_loaded_dtype(
    tmp_path, monkeypatch, stored, asked, per_param
):
    directory = save_tiny_model("llama", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, stored))
    model.save_pretrained(directory)
    needed = per_param * sum(parameter.numel() for parameter in model.parameters())
    monkeypatch.setattr(build, "available_on", lambda device: needed - 1)
    with pytest.raises(CapacityError, match="the weights take"):
        CPUPagedEngine.from_pretrained(directory, **{**OPTIONS, "dtype": asked})
    monkeypatch.setattr(build, "available_on", lambda device: needed)
    with pytest.raises(CapacityError, match="pool"):
        CPUPagedEngine.from_pretrained(directory, num_blocks=10**6, **{**OPTIONS, "dtype": asked})


@pytest.mark.parametrize("rope_type", ["longrope", "dynamic"])
def test_scaled_rope_runs_in_its_first_range(tmp_path, rope_type):
    rope = {"rope_type": rope_type, "rope_theta": 1000.0, "factor": 4.0}
    if rope_type == "longrope":
        rope |= {
            "short_factor": [1.0] * 8,
            "long_factor": [4.0] * 8,
            "original_max_position_embeddings": 64,
        }
    directory = save_tiny_model("llama", tmp_path, rope_parameters=rope)
    prompt = random_ids(40, 1)
    with CPUPagedEngine.from_pretrained(directory, num_blocks=64, **OPTIONS) as engine:
        context = engine.runner_info.max_context
        assert context == (64 if rope_type == "longrope" else 512)
        expected = Truth(directory).greedy(prompt, 24)
        assert greedy(engine, prompt, 24) == greedy(engine, prompt, 24) == expected
        with pytest.raises(RequestError, match=f"context of {context}"):
            engine.generate(prompt, max_new_tokens=context)


@pytest.mark.parametrize(
    ("backend", "num_threads"), [("cpu", None), ("reference", 1), ("torch", 1)]
)
def test_other_backends_and_all_threads_give_equal_answers(
    llama_dir, llama_truth, backend, num_threads
):
    prompt = random_ids(50, 1)
    expected = llama_truth.greedy(prompt, 24)
    options = {
        **OPTIONS,
        "backend": backend,
        "num_threads": num_threads,
        "num_blocks": 16,
        "max_batch_tokens": 20,
    }
    with CPUPagedEngine.from_pretrained(llama_dir, **options) as engine:
        for _ in range(2):
            assert greedy(engine, prompt, 24) == expected
        assert engine.paged_stats()["backend"] == backend
    torch.set_num_threads(1)


def test_text_chat_and_eos_equal_transformers(llama_dir):
    with CPUPagedEngine.from_pretrained(str(llama_dir), num_blocks=32, **OPTIONS) as engine:
        tokenizer = AutoTokenizer.from_pretrained(llama_dir)
        text = engine.generate("hello", max_new_tokens=5)
        assert text.prompt_tokens == len(tokenizer("hello").input_ids)
        chat = [{"role": "user", "content": "hello"}]
        result = engine.generate(chat, max_new_tokens=5)
        template = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        assert result.prompt == template
        assert result.prompt_tokens == len(tokenizer(template, add_special_tokens=False).input_ids)
        stopped = engine.generate("hello", max_new_tokens=5, logit_bias={EOS_ID: 1000.0})
        assert stopped.output_token_ids == (EOS_ID,)
        assert (stopped.finish_reason, stopped.output_text) == ("stop", "")


def test_a_pool_larger_than_memory_is_refused(llama_dir):
    with pytest.raises(CapacityError, match=r"weights .* \+ pool .* exceed memory"):
        CPUPagedEngine.from_pretrained(llama_dir, num_blocks=10**10, **OPTIONS)
    with pytest.raises(CapacityError, match="is too small: a block"):
        CPUPagedEngine.from_pretrained(llama_dir, max_cache_bytes=100, **OPTIONS)


def test_a_missing_model_is_refused(tmp_path):
    with pytest.raises(ModelFormatError, match="there is no model directory"):
        CPUPagedEngine.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(ModelFormatError, match=r"config\.json is missing"):
        CPUPagedEngine.from_pretrained(tmp_path)
