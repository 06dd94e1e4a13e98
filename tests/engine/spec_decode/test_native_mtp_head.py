"""MTP heads of tiny models on the native runner.

The drafts equal those of the float64 reference. Answers, log probabilities and the KV of published
blocks are equal to the bit to those without the head.
"""

import numpy as np
import pytest

from helpers.engine.draft_models import prompt, with_typical_times, without_lookup
from helpers.engine.native_bench import (
    ALL_BITS,
    Machine,
    NativeBench,
    overlapping_answers,
    recorded_drafts,
)
from helpers.engine.native_kinds import STATES
from helpers.models.mtp_heads import save_with_head
from helpers.models.tensor_files import change_tensors, tensors_of
from helpers.oracles.packed_plan import last_states, mtp_model, mtp_states, plan_floats
from kvboost_edge.engine.request.request import SamplingParams
from kvboost_edge.engine.spec_decode import model_drafts

NUM_BLOCKS = 64
DRAFTS = {"max_draft_tokens": 3, "always_drafts": True}
FAMILIES = ("qwen3_5_text", "glm4_moe")
GREEDY = SamplingParams(max_new_tokens=24, temperature=0.0)
SHORT = SamplingParams(max_new_tokens=12, temperature=0.0)  # the reference is slow

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def machine_of(path, weights, family):
    return Machine(path, weights, STATES if family.startswith("qwen") else None)


def head_bench(machine, *, num_blocks=NUM_BLOCKS, bits=(16, 16), short=0, **options):
    head = machine.head(bits, 1, num_blocks, short)
    bench = NativeBench(machine, num_blocks=num_blocks, bits=bits, drafter=head, **options)
    without_lookup(bench)
    with_typical_times(bench)
    return bench


class Reference:
    """Drafts computed by the float64 reference."""

    def __init__(self, path):
        self.trunk = plan_floats(path)
        self.head, self.weights, self.matrix = mtp_model(path)

    def draft(self, tokens, count, first=0):
        """Draft tokens after `tokens` by a head that has seen them from `first` on.

        The token at `first` has no state.
        """
        states = last_states(*self.trunk, tokens[:-1])
        rows = [np.zeros_like(states[:1]), states[first:]]
        ids = list(tokens[first:])
        for _ in range(count):
            own = mtp_states(self.head, self.weights, np.concatenate(rows), ids)
            ids.append(int((own[-1] @ self.matrix.T).argmax()))
            rows.append(own[-1:])
        return ids[len(ids) - count :]


@pytest.mark.parametrize("family", FAMILIES)
def test_drafted_tokens_equal_the_reference(family, tmp_path):
    path = save_with_head(family, tmp_path)
    machine = machine_of(path, "f32", family)
    reference = Reference(path)
    bench = head_bench(machine, max_batch_tokens=50)
    text = prompt(1, 75)
    drafts = recorded_drafts(bench)
    bench.generate(text, SHORT, **DRAFTS)
    assert len(drafts) > 5
    for tokens, drafted in drafts:
        assert drafted == reference.draft(tokens, len(drafted))
    # A prefix that another request computed, with KV of the head. The state at its end is unknown.
    drafts.clear()
    result = bench.generate([*text[:70], 7, 8, 9], SHORT, **DRAFTS)
    assert result.cached_tokens == 64
    assert len(drafts) > 5
    expected = [_after_hit(reference, tokens, len(drafted), 64) for tokens, drafted in drafts]
    assert [drafted for _, drafted in drafts] == expected
    # The same without KV of the head: it sees the tokens after the prefix.
    other = prompt(2, 64)
    bench.generate(other, GREEDY)
    drafts.clear()
    result = bench.generate([*other, 7, 8, 9], SHORT, **DRAFTS)
    assert result.cached_tokens == 64
    for tokens, drafted in drafts:
        assert drafted == reference.draft(tokens, len(drafted), first=64)
    bench.assert_clean()
    machine.close()


def _after_hit(reference, tokens, count, hit):
    """Draft tokens with a head that has no state of the token before position `hit`."""
    states = last_states(*reference.trunk, tokens[:-1])
    states[hit - 1] = 0
    rows = [np.zeros_like(states[:1]), states]
    ids = list(tokens)
    for _ in range(count):
        own = mtp_states(reference.head, reference.weights, np.concatenate(rows), ids)
        ids.append(int((own[-1] @ reference.matrix.T).argmax()))
        rows.append(own[-1:])
    return ids[len(tokens) :]


def without_layers(path):
    """Make the model's next token depend on the last token alone, and let the head predict it."""
    tensors = tensors_of(path)
    ends = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
    changes = {
        name: np.zeros_like(values)
        for name, values in tensors.items()
        if name.endswith(ends) or ".down_proj" in name
    }
    stored = "model.norm.weight"
    norm = next(values for name, values in tensors.items() if name.endswith(stored))
    size = len(norm)
    own = {"fc.weight": np.hstack([np.eye(size), np.zeros((size, size))]).astype(np.float32)}
    own |= {"pre_fc_norm_embedding.weight": np.zeros(size, np.float32), "norm.weight": norm}
    change_tensors(path, changes | {f"mtp.{name}": values for name, values in own.items()})
    return path


def test_a_perfect_head_is_accepted(tmp_path):
    path = without_layers(save_with_head("qwen3_5_text", tmp_path))
    machine = machine_of(path, "f32", "qwen3_5_text")
    bench = head_bench(machine)
    answer = bench.generate(prompt(1, 20), GREEDY, **DRAFTS)
    assert answer.accepted_tokens == answer.drafted_tokens > 10
    assert answer.drafts["mtp"].accepted_by_position[2] > 3
    sampled = SamplingParams(max_new_tokens=40, temperature=1.1, top_p=0.9, seed=3)
    answer = bench.generate(prompt(1, 20), sampled, **DRAFTS)
    assert answer.accepted_tokens == answer.drafted_tokens > 10
    machine.close()


@pytest.fixture(scope="module", params=FAMILIES)
def machine(request, tmp_path_factory):
    path = save_with_head(request.param, tmp_path_factory.mktemp(request.param))
    made = machine_of(path, "int8", request.param)
    yield made
    made.close()


@pytest.mark.parametrize("bits", ALL_BITS, ids=str)
@pytest.mark.some(3)
def test_answers_and_published_kv_equal_those_without_the_head(machine, bits, monkeypatch):
    monkeypatch.setattr(model_drafts, "_MOST_RARE", 128)
    expected, kv = overlapping_answers(NativeBench(machine, bits=bits), 0)
    assert len(kv) > 10
    for short in (0, 150):
        bench = head_bench(machine, bits=bits, short=short)
        found, found_kv = overlapping_answers(bench, 0, **DRAFTS)
        assert found == expected
        assert found_kv == kv
        speculation = bench.scheduler.speculation
        assert speculation._models.is_on
        assert speculation._models.is_short == (short > 0)
        assert speculation.counts["mtp"].num_drafts > 20


def test_drafts_from_a_short_vocabulary_equal_the_reference(tmp_path, monkeypatch):
    monkeypatch.setattr(model_drafts, "_MOST_RARE", 128)
    path = save_with_head("qwen3_5_text", tmp_path)
    machine = machine_of(path, "f32", "qwen3_5_text")
    reference = Reference(path)
    bench = head_bench(machine, short=150)
    drafts = recorded_drafts(bench)
    bench.generate(prompt(1, 40), GREEDY, **DRAFTS)
    assert len(drafts) > 5
    every = [reference.draft(tokens, len(drafted)) for tokens, drafted in drafts]
    reference.matrix = reference.matrix[:150]
    short = [reference.draft(tokens, len(drafted)) for tokens, drafted in drafts]
    assert short != every
    assert [drafted for _, drafted in drafts] == short
    machine.close()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.some(2)
def test_answers_equal_those_without_the_head_after_preemptions(machine, seed):
    expected, _ = overlapping_answers(NativeBench(machine), seed, 0)
    bench = head_bench(machine, num_blocks=9, max_num_seqs=6, max_batch_tokens=20)
    found, _ = overlapping_answers(bench, seed, 0, **DRAFTS)
    assert found == expected
    assert bench.scheduler.num_preemptions > 0
    assert bench.scheduler.speculation._models.is_on
    assert bench.scheduler.speculation.counts["mtp"].num_drafts > 20
