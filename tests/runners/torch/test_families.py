"""Every family against transformers: equal greedy tokens and logits within 1e-4 on every path."""

import numpy as np
import pytest
import torch

from conftest import LONG
from helpers.distance import distance
from helpers.models.tiny_models import FAMILIES, build_tiny_model
from helpers.runners.families import VARIED
from helpers.runners.logits import dense_logits
from helpers.runners.paged_driver import PagedDriver
from kvboost_edge.backends.torch_backend import TorchBackend
from kvboost_edge.runners.torch.runner import TorchRunner

pytestmark = pytest.mark.usefixtures("one_torch_thread")

BLOCK = 16
NEW_TOKENS = 32  # the prompt of 17 tokens crosses both windows
PROMPT_LENGTHS = (1, 17, 32, 61, 90)  # around the windows (24, 40) and the block boundaries


class Family:
    """A tiny model with transformers' results for its prompts: greedy continuations and dense
    logits of all tokens.
    """

    def __init__(self, name, lengths):
        model = build_tiny_model(name)
        rng = np.random.default_rng(7)
        self.prompts = [rng.integers(0, 256, length).tolist() for length in lengths]
        model.set_attn_implementation("eager")
        self.wholes = [_generate(model, prompt) for prompt in self.prompts]
        self.logits = [dense_logits(model, whole) for whole in self.wholes]
        self.runner = TorchRunner(model, block_size=BLOCK)

    def driver(self):
        return PagedDriver(self.runner, TorchBackend(self.runner.info.kv_spec, 64))


def _generate(model, prompt):
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
        )
    return output[0].tolist()


def assert_close(actual, expected):
    assert actual.shape == expected.shape
    assert distance(actual, expected) <= 1e-4


# `make test` runs this test with every family and one prompt, the others with `VARIED`.
WITH_EVERY_FAMILY = "test_cold_prefill_and_decode_alone"


def pytest_generate_tests(metafunc):
    kept = FAMILIES if metafunc.function.__name__ == WITH_EVERY_FAMILY else VARIED
    cases = [
        pytest.param(name, marks=() if name in kept else pytest.mark.full) for name in FAMILIES
    ]
    metafunc.parametrize("family", cases, indirect=True, scope="module")


@pytest.fixture(scope="module")
def family(request):
    lengths = PROMPT_LENGTHS
    if not LONG and request.param not in VARIED:
        # Without the cases marked `full`, a single test with the last prompt needs this family.
        is_last = "not full" in request.config.option.markexpr
        lengths = PROMPT_LENGTHS[-1:] if is_last else PROMPT_LENGTHS[1::3]
    family = Family(request.param, lengths)
    yield family
    family.runner.close()


def test_cold_prefill_and_decode_alone(family):
    driver = family.driver()
    prompt = family.prompts[-1]
    whole = family.wholes[-1]
    expected = family.logits[-1]
    sequence = driver.open(prompt)
    logits = driver.prefill(sequence)
    assert_close(logits, expected[: len(prompt)])
    driver.decode([sequence], [logits[-1]], NEW_TOKENS)
    assert sequence.token_ids == whole


@pytest.mark.parametrize("chunk", [7, 16, 50])
def test_chunked_prefill_equals_transformers(family, chunk):
    driver = family.driver()
    assert_close(
        driver.prefill(driver.open(family.prompts[-1]), chunk),
        family.logits[-1][: PROMPT_LENGTHS[-1]],
    )


def test_a_ragged_batch_equals_transformers(family):
    driver = family.driver()
    sequences = [driver.open(prompt) for prompt in family.prompts]
    parts = driver.step([(sequence, sequence.num_left) for sequence in sequences])
    for part, expected in zip(parts, family.logits, strict=True):
        assert_close(part, expected[: len(part)])
    driver.decode(sequences, [part[-1] for part in parts], NEW_TOKENS)
    assert [sequence.token_ids for sequence in sequences] == family.wholes


def test_prefill_mixed_with_decode_equals_transformers(family):
    driver = family.driver()
    running = driver.open(family.wholes[1])
    late = driver.open(family.prompts[-1])
    driver.step([(running, 30)])
    for start in range(0, PROMPT_LENGTHS[-1], 15):
        decoded, prefilled = driver.step([(running, 1), (late, 15)])
        assert_close(decoded, family.logits[1][running.table.num_computed_tokens - 1 :][:1])
        assert_close(prefilled, family.logits[-1][start : start + 15])


@pytest.mark.parametrize("cut", [0, 1, BLOCK - 1, BLOCK, 2 * BLOCK + 3])
def test_a_prefix_hit_equals_transformers(family, cut):
    driver = family.driver()
    whole = family.wholes[-1]
    expected = family.logits[-1]
    first = driver.open([*whole[:cut], *[299] * 40])  # shares `cut` tokens with the second one
    driver.prefill(first)
    driver.close(first)
    second = driver.open(whole)
    assert second.table.num_cached_tokens == cut // BLOCK * BLOCK
    assert_close(driver.prefill(second), expected[second.table.num_cached_tokens :])


def test_fully_cached_prompt_recomputes_its_last_token(family):
    driver = family.driver()
    prompt = family.wholes[-1][: 3 * BLOCK]
    holder = driver.open(prompt)
    driver.prefill(holder)
    again = driver.open(prompt)
    assert again.table.num_cached_tokens == len(prompt) - 1
    assert_close(driver.prefill(again), family.logits[-1][len(prompt) - 1 : len(prompt)])
    driver.decode([holder], [family.logits[-1][len(prompt) - 1]], 2)


def test_a_fork_is_independent(family):
    driver = family.driver()
    prompt = family.prompts[-1]
    parent = driver.open(prompt)
    last = driver.prefill(parent)[-1]
    child = driver.fork(parent)
    other = int(np.argsort(last)[-2])  # the child continues with the second-best token
    child.token_ids.append(other)
    forced = driver.step([(child, 1)])[0][-1]
    driver.decode([parent, child], [last, forced], 8)
    assert parent.token_ids == family.wholes[-1][: len(prompt) + 8]
    assert_close(forced[None], family.runner.eager_logits(np.array([*prompt, other]))[-1:])
    expected = family.runner.eager_logits(np.array(child.token_ids))
    assert child.token_ids[-1] == expected[-2].argmax()
