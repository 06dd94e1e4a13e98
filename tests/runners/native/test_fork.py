"""A sequence forked inside a block: after copy-on-write, both sides have the logits of a cold run,
equal to the bit.
"""

import numpy as np
import pytest

from helpers.models.tiny_checkpoints import save_tiny_checkpoint
from helpers.runners.paged_driver import PagedDriver
from kvboost_edge.backends.cpu import CPUBackend
from kvboost_edge.runners.native.runner import NativeRunner

BLOCK = 16
LENGTH = 580  # beyond the first attention partition of 512 tokens
TEXT, OTHER = (np.random.default_rng(seed).integers(0, 256, LENGTH).tolist() for seed in (0, 1))
# One token into a block, in its middle, one token before its end, and in the second partition.
CUTS = [1, 33, 37, 47, 530]
WIDTHS = ((16, 16), (8, 8), (8, 4))


class Model:
    """A runner with two threads for forks and one with one thread for cold runs, because a runner
    has one backend at a time.
    """

    def __init__(self, directory, bits):
        self._runners = []
        self._backends = []
        for threads in (1, 2):
            runner = NativeRunner.from_dir(
                directory, weights="int8", num_threads=threads, kv_bits=bits
            )
            self._runners.append(runner)
            self._backends.append(CPUBackend(runner.info.kv_spec, 128, num_threads=threads))

    def driver(self, threads=2):
        """Return a driver over a pool that is NaN wherever nothing was written."""
        return PagedDriver(self._runners[threads - 1], self._backends[threads - 1])

    def cold(self, tokens, start):
        driver = self.driver(threads=1)
        return driver.prefill(driver.open(tokens))[start:]

    def close(self):
        for part in (*self._runners, *self._backends):
            part.close()


@pytest.fixture(scope="module", params=WIDTHS, ids=str)
def model(request, tmp_path_factory):
    directory = save_tiny_checkpoint(
        "qwen2", tmp_path_factory.mktemp("fork"), max_position_embeddings=2048
    )
    model = Model(directory, request.param)
    yield model
    model.close()


def fork_at(driver, cut):
    """Return two sequences with the same first `cut` tokens. The parent continues with OTHER, the
    child with TEXT.
    """
    parent = driver.open(TEXT[:cut])
    driver.prefill(parent)
    child = driver.fork(parent)
    parent.token_ids += OTHER[cut:]
    child.token_ids += TEXT[cut:]
    return parent, child


def same(actual, expected):
    return bool(np.isfinite(expected).all()) and np.array_equal(actual, expected)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("ahead", [1, 3, 40])
@pytest.mark.some(4)
def test_the_parent_continues_first(model, cut, ahead):
    driver = model.driver()
    parent, child = fork_at(driver, cut)
    elsewhere = [*TEXT[:cut], *OTHER[cut:]]
    first = driver.step([(parent, ahead)])[0]
    shared = cut // BLOCK
    assert child.table.block_ids[:shared] == parent.table.block_ids[:shared]
    assert child.table.block_ids[shared] != parent.table.block_ids[shared]
    assert same(driver.prefill(child), model.cold(TEXT, cut))
    assert same(np.concatenate([first, driver.prefill(parent)]), model.cold(elsewhere, cut))


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.some(3)
def test_the_child_continues_first(model, cut):
    driver = model.driver()
    parent, child = fork_at(driver, cut)
    first = driver.step([(child, 2)])[0]
    driver.close(parent)
    assert same(np.concatenate([first, driver.prefill(child, 7)]), model.cold(TEXT, cut))


@pytest.mark.parametrize("cut", CUTS)
def test_parent_and_child_in_one_pass(model, cut):
    driver = model.driver()
    parent, child = fork_at(driver, cut)
    grandchild = driver.fork(child)
    expected = [model.cold([*TEXT[:cut], *OTHER[cut:]], cut), *[model.cold(TEXT, cut)] * 2]
    for count in (5, LENGTH - cut - 5):
        parts = driver.step([(parent, count), (child, count), (grandchild, count)])
        for index, part in enumerate(parts):
            assert same(part, expected[index][:count])
            expected[index] = expected[index][count:]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.some(3)
def test_forks_while_decoding(model, cut):
    """The sequence is forked every five tokens, and each fork continues alone, so open blocks are
    copied repeatedly.
    """
    driver = model.driver()
    sequence = driver.open(TEXT[: cut + 25])
    driver.step([(sequence, cut)])
    forks = []
    for _ in range(5):
        child = driver.fork(sequence)
        start = child.table.num_computed_tokens
        child.token_ids = [*TEXT[:start], *OTHER[start : start + 30]]
        forks.append((child, start))
        for _ in range(5):
            driver.step([(sequence, 1)])
    for child, start in forks:
        assert same(driver.prefill(child, 9), model.cold(child.token_ids, start))
