"""Gemma 4 assistants on the native runner: the drafts are those of transformers, and answers, log
probabilities and the KV of published blocks are equal to the bit to those without an assistant.
"""

import numpy as np
import pytest
import torch

from helpers.engine.draft_models import prompt, with_typical_times, without_lookup
from helpers.engine.hand_io_thread import DictTier
from helpers.engine.native_bench import (
    ALL_BITS,
    Machine,
    NativeBench,
    overlapping_answers,
    recorded_drafts,
)
from helpers.models.assistants import TARGETS, build_assistant, lends_kv, save_pair
from helpers.models.tensor_files import change_tensors, tensors_of
from helpers.models.tiny_models import build_tiny_model
from kvboost_edge.engine.request.request import SamplingParams

DRAFTS = {"max_draft_tokens": 3, "always_drafts": True}
GREEDY = SamplingParams(max_new_tokens=24, temperature=0.0)

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def assistant_bench(machine, path, *, bits=(16, 16), num_blocks=64, max_num_seqs=8, **options):
    drafter = machine.assistant(path, bits, num_blocks, max_num_seqs)
    bench = NativeBench(
        machine,
        bits=bits,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        drafter=drafter,
        **options,
    )
    without_lookup(bench)
    with_typical_times(bench)
    return bench


class Reference:
    """Drafts by transformers."""

    def __init__(self, name, **fields):
        with lends_kv():
            self.model = build_tiny_model(name, **fields)
        self.assistant = build_assistant(name, **fields)

    @torch.no_grad()
    def draft(self, tokens, count):
        """Draft tokens after `tokens`, which are shorter than the window."""
        out = self.model(
            torch.tensor([tokens[:-1]]),
            output_hidden_states=True,
            return_shared_kv_states=True,
            use_cache=False,
        )
        state = out.hidden_states[-1][:, -1:]
        token = tokens[-1]
        found = []
        for _ in range(count):
            embedding = self.model.get_input_embeddings()(torch.tensor([[token]]))
            step = self.assistant(
                inputs_embeds=torch.cat([embedding, state], dim=-1),
                position_ids=torch.tensor([[len(tokens) - 1]]),
                shared_kv_states=out.shared_kv_states,
            )
            token = int(step.logits.argmax())
            state = step.last_hidden_state
            found.append(token)
        return found


@pytest.mark.parametrize("name", TARGETS)
def test_drafted_tokens_equal_those_of_transformers(name, tmp_path):
    window = {"sliding_window": 200}
    path, own = save_pair(name, tmp_path, **window)
    machine = Machine(path, "f32")
    reference = Reference(name, **window)
    bench = assistant_bench(machine, own, max_batch_tokens=40)
    text = prompt(1, 79)
    drafts = recorded_drafts(bench)
    # The second one has a cached prefix.
    for tokens in (text, [*text[:70], 7, 8, 9]):
        drafts.clear()
        bench.generate(tokens, GREEDY, **DRAFTS)
        assert len(drafts) > 5
        assert len(drafts[0][0]) == len(tokens) + 1  # the first draft follows the prompt
        for known, drafted in drafts:
            assert drafted == reference.draft(known, len(drafted))
    bench.assert_clean()
    machine.close()


def predicting(path, own):
    """Let the model's next token depend on its last token alone, and the assistant predict it."""
    ends = ("o_proj.weight", "down_proj.weight", "per_layer_projection.weight")
    for folder in (path, own):
        tensors = tensors_of(folder)
        change_tensors(
            folder,
            {key: np.zeros_like(one) for key, one in tensors.items() if key.endswith(ends)},
        )
    tensors = tensors_of(path)
    embedding = tensors["model.embed_tokens.weight"]
    size = embedding.shape[1]
    wide = tensors_of(own)["model.norm.weight"].shape[0]
    norm = np.zeros(wide, np.float32)
    norm[:size] = tensors["model.norm.weight"] * (size / wide) ** 0.5
    pre = np.zeros((wide, 2 * size), np.float32)
    pre[:size, :size] = np.eye(size)
    head = np.zeros((len(embedding), wide), np.float32)
    head[:, :size] = embedding
    own_tensors = {
        "model.norm.weight": norm,
        "pre_projection.weight": pre,
        "model.embed_tokens.weight": head,
    }
    change_tensors(own, own_tensors)


def test_a_perfect_assistant_is_accepted(tmp_path):
    path, own = save_pair("gemma4", tmp_path)
    predicting(path, own)
    machine = Machine(path, "f32")
    bench = assistant_bench(machine, own)
    sampled = SamplingParams(max_new_tokens=40, temperature=1.1, top_p=0.9, seed=3)
    for params in (GREEDY, sampled):
        answer = bench.generate(prompt(1, 20), params, **DRAFTS)
        assert answer.accepted_tokens == answer.drafted_tokens > 10
    assert answer.drafts["mtp"].accepted_by_position[2] > 3
    machine.close()


@pytest.fixture(scope="module", params=TARGETS)
def pair(request, tmp_path_factory):
    path, own = save_pair(request.param, tmp_path_factory.mktemp(request.param))
    machine = Machine(path, "int8")
    yield machine, own
    machine.close()


@pytest.mark.parametrize("bits", ALL_BITS, ids=str)
@pytest.mark.some(3)
def test_answers_and_published_kv_equal_those_without_the_assistant(pair, bits):
    machine, own = pair
    expected, kv = overlapping_answers(NativeBench(machine, bits=bits), 0)
    assert len(kv) > 10
    bench = assistant_bench(machine, own, bits=bits)
    found, found_kv = overlapping_answers(bench, 0, **DRAFTS)
    assert found == expected
    assert found_kv == kv
    speculation = bench.scheduler.speculation
    assert speculation._models.is_on
    assert speculation.counts["mtp"].num_drafts > 20


@pytest.mark.parametrize("bits", [(16, 16), (8, 4)], ids=str)
@pytest.mark.some(3)
def test_answers_equal_those_without_the_assistant_after_preemptions(pair, bits):
    machine, own = pair
    for seed in range(2):
        expected, _ = overlapping_answers(NativeBench(machine, bits=bits), seed, 0)
        bench = assistant_bench(
            machine, own, bits=bits, num_blocks=9, max_num_seqs=6, max_batch_tokens=20
        )
        found, _ = overlapping_answers(bench, seed, 0, **DRAFTS)
        assert found == expected
        assert bench.scheduler.num_preemptions > 0
        assert bench.scheduler.speculation._models.is_on
        assert bench.scheduler.speculation.counts["mtp"].num_drafts > 20


@pytest.mark.parametrize("bits", [(16, 16), (8, 8)], ids=str)
@pytest.mark.some(3)
def test_drafts_follow_blocks_restored_from_a_tier(pair, bits):
    """An assistant stores nothing on a tier, and drafts after blocks from there as after others."""
    machine, own = pair
    expected, _ = overlapping_answers(NativeBench(machine, bits=bits), 0)
    tier = DictTier()
    plain = DictTier()
    overlapping_answers(NativeBench(machine, bits=bits, tiers=[plain]), 0)
    counts = []
    for _ in range(2):
        bench = assistant_bench(machine, own, bits=bits, tiers=[tier])
        found, _ = overlapping_answers(bench, 0, **DRAFTS)
        assert found == expected
        assert bench.scheduler.speculation._models.is_on
        counts.append(bench.scheduler.speculation.counts["mtp"].num_drafts)
    assert min(counts) > 20
    assert tier.blocks == plain.blocks


@pytest.mark.some(2)
def test_few_hidden_states_are_kept(pair):
    machine, own = pair
    bench = assistant_bench(machine, own)
    params = SamplingParams(max_new_tokens=300, temperature=0.0)
    for fields, most in ((DRAFTS, 135), ({"max_draft_tokens": 3}, 40)):
        handle = bench.submit(prompt(3, 32), params, **fields)
        sizes = []
        while bench.step():
            for sequence in bench.scheduler.running:
                sizes.append(len(sequence.drafting.model.hidden_states._rows))
        assert handle.result(0).generated_tokens == 300
        assert 0 < max(sizes) < most


def test_no_draft_follows_a_full_block_of_a_quantized_pool(pair):
    machine, own = pair
    for bits, count in (((16, 16), 1), ((8, 8), 0)):
        bench = assistant_bench(machine, own, bits=bits)
        drafts = recorded_drafts(bench)
        params = SamplingParams(max_new_tokens=3, temperature=0.0)
        bench.generate(prompt(3, 32), params, **DRAFTS)
        assert [len(tokens) for tokens, _ in drafts].count(33) == count
