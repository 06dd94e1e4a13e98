"""Options whose KV at the end of a prompt is not shared: every feature that reads the cache, pins
it or resumes a prompt, with each of these options.
"""

import numpy as np
import pytest

from helpers.engine.fake_runner import fake_engine, runner_of
from helpers.models.tiny_models import save_tiny_model
from kvboost_edge import CPUPagedEngine, shareable
from kvboost_edge.errors import RequestError

SIZE = 16
PROMPT = np.random.default_rng(1).integers(3, 250, 896).tolist()  # a multiple of the block size
# Engine options, tokens of PROMPT whose KV is shared, and terms of the requests.
OPTIONS = {
    "wide": ({"arithmetic": "wide"}, 880, {}),
    "sparse": ({"prefill": "sparse"}, 768, {}),
    "on-request": ({"prefill": "on-request"}, 768, {"prefill": "sparse"}),
}
GREEDY = {"max_new_tokens": 20, "temperature": 0.0, "logprobs": 1}


@pytest.fixture(scope="module", autouse=True)
def early_start():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shareable, "FIRST_POSITION", 512)
        yield


@pytest.fixture(scope="module", params=OPTIONS)
def option(request):
    return OPTIONS[request.param]


@pytest.fixture
def fake(option):
    with fake_engine(200, 2000, **option[0]) as engine:
        yield engine, *option[1:]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=1024)


def opened(model, option, **more):
    usual = {"runner": "native", "weights": "int8", "num_threads": 1, "num_blocks": 200}
    return CPUPagedEngine.from_pretrained(
        model, **{**usual, "debug_checks": True, "speculation": "off", **option[0], **more}
    )


@pytest.fixture(scope="module")
def engine(model, option):
    with opened(model, option) as engine:
        yield engine


@pytest.fixture(scope="module")
def cold(engine, option):
    return seen(engine.generate(PROMPT, mode="baseline", **GREEDY, **option[2]))


def seen(result):
    return result.output_token_ids, result.logprobs


def test_a_pin_holds_the_shareable_blocks_until_unpin(fake):
    engine, shared, terms = fake
    engine.pin(PROMPT, **terms)
    engine.reset_cache()
    assert engine.paged_stats()["pinned_blocks"] == shared // SIZE
    assert engine.generate(PROMPT, 2, **terms).cached_tokens == shared
    if terms:
        assert engine.unpin(PROMPT) == 0
    assert [engine.unpin(PROMPT, **terms) for _ in range(2)] == [shared // SIZE, 0]
    assert engine.paged_stats()["pinned_blocks"] == 0


def test_pins_at_the_end_of_a_prompt_hold_its_shareable_blocks(fake):
    engine, shared, terms = fake
    pins = ((len(PROMPT), 60.0), (100, 60.0))
    handle = engine.submit(PROMPT, max_new_tokens=2, pins=pins, **terms)
    handle.result(30)
    assert handle.pinned_tokens == shared
    assert engine.paged_stats()["pinned_blocks"] == shared // SIZE


def test_results_and_statistics_count_the_tokens_that_are_not_shared(fake):
    engine, shared, terms = fake
    engine.generate(PROMPT, 2, **terms)
    before = engine.paged_stats()
    again = engine.generate(PROMPT, 2, **terms)
    # The last block is computed again in wide arithmetic, as in exact engines with quantized KV.
    assert again.miss_reason == ("tail" if shared == 880 else "private_tail")
    after = engine.paged_stats()
    counts = [after[name] - before[name] for name in ("hit_tokens", "miss_tokens")]
    assert counts == [shared, len(PROMPT) - shared]


def test_warm_reports_the_tokens_that_are_not_kept(fake):
    engine, shared, terms = fake
    warmed = engine.warm(PROMPT, **terms)
    is_wide = shared == 880  # fewer than 32 tokens are missing
    assert warmed.chunks_stored == (7 if is_wide else 6)
    assert warmed.chunk_boundary_aligned == is_wide
    assert is_wide or "the last 128 tokens are not cached" in warmed.alignment_warning


def test_prompts_without_a_shareable_block_are_refused_before_they_are_pinned():
    with fake_engine(arithmetic="wide") as engine:
        with pytest.raises(RequestError, match="do not fill a block of 16; pin a longer prompt"):
            engine.pin(PROMPT[:SIZE])
        assert runner_of(engine).computed == 0
        handle = engine.submit(PROMPT[:SIZE], max_new_tokens=2, pins=((SIZE, 60.0),))
        assert (handle.result(30).generated_tokens, handle.pinned_tokens) == (2, 0)


@pytest.mark.parametrize("start", [591, 600, 879, 895])
def test_logits_of_a_cached_prompt_equal_those_of_an_empty_cache(engine, start):
    engine.reset_cache()
    rows = engine.logits(PROMPT)
    np.testing.assert_array_equal(engine.logits(PROMPT, start), rows[start:])


def test_preemption_and_drafts_do_not_change_answers(model, option, cold):
    limits = {"max_batch_tokens": 40, "num_blocks": 79, "max_num_seqs": 2}
    with opened(model, option, speculation="on", **limits) as small:
        other = small.submit(PROMPT[300:600], max_new_tokens=90, temperature=0.0)
        results = [small.submit(PROMPT, **GREEDY, **option[2]).result(60), other.result(60)]
        again = small.generate(PROMPT, **GREEDY, **option[2])
    assert seen(results[0]) == seen(again) == cold
    assert sum(one.preemptions for one in results) > 0
    assert again.drafted_tokens > 0
