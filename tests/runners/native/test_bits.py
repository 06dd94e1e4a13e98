"""A token's logits are equal to the bit however it came to be computed: `==` on all of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers.models.tiny_checkpoints import save_tiny_checkpoint
from helpers.oracles.bit_cases import (
    BLOCK,
    PROMPTS,
    TwiceThreaded,
    assert_same_behind_a_prefix,
    assert_same_beside_decode,
    assert_same_in_a_batch,
    assert_same_when_computed_again,
    same,
)


@pytest.fixture(scope="module", params=["int4", "int4-asym", "int8", "bf16", "f32"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwiceThreaded]:
    directory = tmp_path_factory.mktemp("bits")
    # Sizes that are no multiples of 16 or 32, more than one chunk of elementwise work, and one tile too many.
    save_tiny_checkpoint("qwen2", directory, hidden_size=80, intermediate_size=1096, num_hidden_layers=2)
    model = TwiceThreaded(directory, request.param)
    yield model
    model.close()


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 7, 8, 13, 16, 31, 64])
def test_any_chunking(model: TwiceThreaded, chunk: int) -> None:
    driver = model.driver()
    assert same(driver.prefill(driver.open(PROMPTS[0]), chunk), model.cold[0])


@pytest.mark.parametrize("chunk", [1, 17, 1000])
def test_two_threads(model: TwiceThreaded, chunk: int) -> None:
    driver = model.driver(threads=2)
    assert same(driver.prefill(driver.open(PROMPTS[0]), chunk), model.cold[0])


@pytest.mark.parametrize("threads", [1, 2])
def test_in_a_batch(model: TwiceThreaded, threads: int) -> None:
    assert_same_in_a_batch(model, threads)


def test_prefill_beside_decode(model: TwiceThreaded) -> None:
    assert_same_beside_decode(model, 1)


@pytest.mark.parametrize("cut", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 89])
def test_prefix_hit(model: TwiceThreaded, cut: int) -> None:
    assert_same_behind_a_prefix(model, cut)


def test_the_next_turn_reuses_generated_tokens(model: TwiceThreaded) -> None:
    driver = model.driver()
    first = driver.open(PROMPTS[3])
    driver.decode([first], [driver.prefill(first)[-1]], 30)
    driver.close(first)
    turn = [*first.token_ids, *PROMPTS[2]]
    again = driver.open(turn)
    assert again.table.num_cached_tokens >= 2 * BLOCK
    warm = driver.prefill(again)
    fresh = model.driver()
    assert same(warm, fresh.prefill(fresh.open(turn))[again.table.num_cached_tokens :])


def test_recomputed_after_it_was_dropped(model: TwiceThreaded) -> None:
    assert_same_when_computed_again(model)
