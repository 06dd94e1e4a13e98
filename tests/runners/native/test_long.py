"""Prompts over several attention partitions of 512 tokens: every family and cache width, all logits
equal to the bit.
"""

import numpy as np
import pytest

from helpers.distance import distance
from helpers.engine.native_bench import BLOCK, Machine, NativeBench
from helpers.models.tiny_checkpoints import save_tiny_checkpoint
from helpers.models.tiny_models import (
    FAMILIES,
    NESTED,
    build_tiny_model,
    save_nested_model,
    save_tiny_model,
)
from helpers.random_ids import random_ids
from helpers.runners.logits import dense_logits
from kvboost_edge.engine.request.request import SamplingParams
from kvboost_edge.kvcache.recurrent.snapshots import StateSizes
from kvboost_edge.models.families.registry import FAMILIES as KNOWN

PARTITION = 512
CONTEXT = 2048
BLOCKS = 100
LONG = random_ids(1210, 3)
WIDTHS = ((16, 16), (8, 8), (8, 4))
GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0, logprobs=2)

# name -> (family, weights, config fields). The windows of tiny models are short; these span
# partitions.
CASES = {
    "llama": ("llama", "int8", {}),
    "llama-llama3rope": ("llama-llama3rope", "int4", {}),
    "llama-yarn": ("llama-yarn", "bf16", {}),
    "mistral": ("mistral", "int8", {}),
    "mistral-700": ("mistral", "f32", {"sliding_window": 700}),
    "qwen2": ("qwen2", "int4", {}),
    "bitnet": ("bitnet", "int4", {}),
    "qwen3": ("qwen3", "int4-asym", {}),
    "qwen3_vl": ("qwen3_vl", "int8", {}),
    "gemma": ("gemma", "int8", {}),
    "gemma2": ("gemma2", "int8", {}),
    "gemma2-520": ("gemma2", "bf16", {"sliding_window": 520}),
    "gemma3": ("gemma3", "int4", {"sliding_window": 513}),
    "gemma4": ("gemma4", "int8", {}),
    "gemma4_unified": ("gemma4_unified", "int4", {"sliding_window": 513}),
    "phi3": ("phi3", "int8", {}),
    "olmo2": ("olmo2", "f32", {}),
    "olmo3": ("olmo3", "int8", {}),
    "exaone4": ("exaone4", "int4", {"sliding_window": 513}),
    "ernie4_5": ("ernie4_5", "int8", {}),
    "glm4": ("glm4", "bf16", {}),
    "ministral3": ("ministral3", "int8", {}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", "int4", {}),
    "granitemoehybrid": ("granitemoehybrid", "int8", {}),
    "granite_swa": ("granite_swa", "int8", {"layer_rope_theta": [1000.0, 0, 50.0, 1000.0]}),
    "minicpm": ("minicpm", "int8", {}),
    "granite": ("granite", "int4-asym", {}),
    "smollm3": ("smollm3", "int8", {}),
    "qwen3_moe": ("qwen3_moe", "int4", {}),
    "qwen2_moe": ("qwen2_moe", "int8", {}),
    "olmoe": ("olmoe", "int4-asym", {}),
    "mixtral": ("mixtral", "bf16", {}),
    "granitemoe": ("granitemoe", "int4", {}),
    "ernie4_5_moe": ("ernie4_5_moe", "int8", {}),
    "glm4_moe": ("glm4_moe", "int4", {}),
    "gpt_oss": ("gpt_oss", "int8", {}),
    "lfm2": ("lfm2", "int8", {}),
    "lfm2_moe": ("lfm2_moe", "int4", {}),
    "qwen3_5_text": ("qwen3_5_text", "int4", {}),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", "int8", {}),
    "granitemoehybrid-h": ("granitemoehybrid-h", "int4", {}),
    "nemotron_h-moe": ("nemotron_h-moe", "int8", {}),
    "falcon_h1": ("falcon_h1", "int4", {}),
}
HYBRIDS = ("lfm2", "qwen3_5", "granitemoehybrid-", "nemotron_h", "falcon_h1")


class Case:
    """One model with one cache width, and the logits of LONG in one pass with one thread."""

    def __init__(self, machine, bits, number):
        self.number = number
        self._machine = machine
        self._bits = bits
        self.cold = self.bench(max_batch_tokens=CONTEXT).logits(LONG)

    def bench(self, **options):
        return NativeBench(self._machine, bits=self._bits, **{"num_blocks": BLOCKS, **options})


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    """Return the machine of a case. The previous one is closed when another one is requested."""
    made = {}

    def machine(name):
        if name not in made:
            close()
            family, weights, fields = CASES[name]
            save = (
                save_tiny_checkpoint
                if family in ("llama", "qwen2", "qwen3", "minicpm")
                else save_tiny_model
            )
            if family in NESTED and family not in FAMILIES:
                save = save_nested_model
            directory = save(
                family, tmp_path_factory.mktemp("long"), max_position_embeddings=CONTEXT, **fields
            )
            made[name] = Machine(
                directory, weights, StateSizes(24) if family.startswith(HYBRIDS) else None
            )
        return made[name]

    def close():
        while made:
            made.popitem()[1].close()

    yield machine
    close()


def widths():
    """Combine models with cache widths. `make test` runs one width per model, in rotation."""
    for number, name in enumerate(CASES):
        for index, bits in enumerate(WIDTHS):
            is_chosen = index == number % len(WIDTHS)
            yield pytest.param(
                (name, bits), id=f"{name}-{bits}", marks=() if is_chosen else pytest.mark.full
            )


@pytest.fixture(scope="module", params=widths())
def case(request, machines):
    name, bits = request.param
    return Case(machines(name), bits, list(CASES).index(name))


def equal(actual, expected):
    return bool(np.isfinite(expected).all()) and np.array_equal(actual, expected)


def test_every_family_is_covered():
    plain = {
        name: fields.get("model_type", name.partition("-")[0]) for name, fields in FAMILIES.items()
    }
    text = {name: parts[0] for name, parts in NESTED.items()}
    covered = {
        (text | plain).get(family, family.partition("-")[0]) for family, _, _ in CASES.values()
    }
    assert covered == set(KNOWN)


def test_logits_do_not_depend_on_the_pass_size(case, scale):
    """`make test` runs one of the four sizes for each model, in rotation."""
    sizes = ((CONTEXT, 2), (7, 1), (513, 1), (100, 2))
    for budget, threads in scale(sizes[case.number % 4 :: 4], sizes):
        bench = case.bench(max_batch_tokens=budget, threads=threads)
        assert equal(bench.logits(LONG), case.cold), f"passes of {budget} tokens"


@pytest.mark.some(3)
def test_logits_do_not_depend_on_a_cached_prefix(case, scale):
    """The prompt is computed after the cached prefix, and again with all its full blocks cached.
    `make test` runs one of two prefixes for each model, alternating between models.
    """
    cuts = (530, 2 * PARTITION)
    for cut in scale(cuts[case.number % 2 :: 2], cuts):
        bench = case.bench(threads=2, max_batch_tokens=300)
        bench.generate([*LONG[:cut], 299, 298], SamplingParams(max_new_tokens=0))
        for start, cached in ((cut + 1, cut // BLOCK * BLOCK), (1205, len(LONG) // BLOCK * BLOCK)):
            handle, rows = bench.submit_logits(LONG, start)
            bench.run()
            assert handle.result(0).cached_tokens == cached, f"cut {cut}"
            assert equal(np.concatenate(rows), case.cold[start:]), f"cut {cut}"


@pytest.mark.some(3, 1)
def test_logits_do_not_depend_on_a_shared_prefix_in_a_batch(case, scale):
    number = scale(2, 4)
    prompts = [[*LONG[:1100], index, index + 1, index + 2] for index in range(number)]
    bench = case.bench(threads=2, max_batch_tokens=300)
    handles = [bench.submit(prompt, GREEDY) for prompt in prompts]
    bench.run()
    for prompt, handle in zip(prompts, handles, strict=True):
        alone = case.bench(max_batch_tokens=CONTEXT).generate(prompt, GREEDY)
        together = handle.result(0)
        assert together.output_token_ids == alone.output_token_ids
        assert together.logprobs == alone.logprobs
    shared = 1100 // BLOCK * BLOCK
    assert sum(handle.result(0).cached_tokens for handle in handles) == (number - 1) * shared


@pytest.mark.some(3, 2)
def test_decoding_across_a_partition_border(case):
    """KV written by decoding, one token at a time across the end of a partition, equals that of one
    pass.
    """
    stem = LONG[: 2 * PARTITION - 15]
    bench = case.bench(threads=2, max_batch_tokens=300)
    first = bench.generate(stem, SamplingParams(max_new_tokens=40, temperature=0.0))
    turn = [*stem, *first.output_token_ids, *LONG[:60]]
    cold = case.bench(max_batch_tokens=CONTEXT).logits(turn)
    assert first.output_token_ids == tuple(
        cold[len(stem) - 1 : len(stem) + 39].argmax(axis=1).tolist()
    )
    assert equal(bench.logits(turn, len(stem) + 40), cold[len(stem) + 40 :])


@pytest.mark.parametrize(
    "name",
    ["llama-yarn", "mistral-700", "gemma2-520", "gemma3", "smollm3", "ministral3", "granite_swa"],
)
def test_long_prompts_equal_transformers(name, tmp_path_factory):
    """Compare with transformers, because the other tests would miss partitions that are always
    merged wrongly in the same way.
    """
    family, _, fields = CASES[name]
    fields = {**fields, "max_position_embeddings": CONTEXT}
    machine = Machine(save_tiny_model(family, tmp_path_factory.mktemp("exact"), **fields), "f32")
    logits = NativeBench(machine, num_blocks=BLOCKS, threads=2, max_batch_tokens=300).logits(LONG)
    machine.close()
    model = build_tiny_model(family, **fields)
    model.set_attn_implementation("eager")
    assert distance(logits, dense_logits(model, LONG)) <= 1e-4
