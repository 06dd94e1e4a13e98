"""Wide arithmetic in the engine: answers depend only on the prompt, as in exact arithmetic.

Full blocks before the last prompt token are computed in wide arithmetic and shared. All other
tokens are computed exactly and shared with no other request.
"""

import numpy as np
import pytest

from kvboost_edge.engine.engine import CPUPagedEngine
from kvboost_edge.errors import RequestError

PROMPT, OTHER = (
    np.random.default_rng(seed).integers(3, 250, count).tolist()
    for seed, count in ((1, 80), (2, 50))
)
SHARED = 64  # the last token of PROMPT is in its fifth block
GREEDY = {"temperature": 0, "logprobs": 2, "max_new_tokens": 40}


def opened(path, **options):
    usual = {"arithmetic": "wide", "num_blocks": 64, "num_threads": 1, "speculation": "off"}
    return CPUPagedEngine.from_pretrained(path, **{**usual, **options})


def seen(result):
    return result.output_token_ids, result.logprobs


@pytest.fixture(scope="module", params=[16, 8], ids="kv{}".format)
def bits(request):
    return request.param


@pytest.fixture(scope="module")
def engine(tiny_model_dir, bits):
    with opened(tiny_model_dir, kv_cache_bits=bits) as engine:
        yield engine


@pytest.fixture(scope="module")
def cold(engine):
    return engine.generate(PROMPT, mode="baseline", **GREEDY)


def test_cached_prompts_give_the_answer_of_an_empty_cache(engine, cold):
    engine.generate([*PROMPT[:70], 7, *PROMPT[71:]], **GREEDY)  # publishes 64 tokens
    first = engine.generate(PROMPT, **GREEDY)
    again = engine.generate(PROMPT, **GREEDY)
    assert (first.cached_tokens, again.cached_tokens) == (SHARED, SHARED)
    assert seen(first) == seen(again) == seen(cold)
    assert cold.approximations == ("wide_arithmetic",)


def test_answers_are_computed_again_as_part_of_the_next_prompt(engine, cold):
    following = [*PROMPT, *cold.output_token_ids, *OTHER[:20]]
    alone = engine.generate(following, mode="baseline", **GREEDY)
    engine.generate(PROMPT, **GREEDY)
    result = engine.generate(following, **GREEDY)
    assert result.cached_tokens == SHARED
    assert seen(result) == seen(alone)
    assert engine.generate(following, **GREEDY).cached_tokens == (len(following) - 1) // 16 * 16
    assert seen(engine.generate(PROMPT, **GREEDY)) == seen(cold)


def test_batches_chunks_drafts_and_preemption_do_not_change_answers(
    tiny_model_dir, bits, engine, cold
):
    other = engine.generate(OTHER, mode="baseline", **GREEDY)
    options = {"max_batch_tokens": 24, "num_blocks": 10, "max_num_seqs": 2, "speculation": "on"}
    with opened(tiny_model_dir, kv_cache_bits=bits, **options) as small:
        both = small.generate_batch([PROMPT, OTHER], **GREEDY)
    assert [seen(one) for one in both] == [seen(cold), seen(other)]
    assert sum(one.preemptions for one in both) > 0


def test_only_shared_blocks_are_computed_in_wide_arithmetic(tiny_model_dir, bits, engine, cold):
    with opened(tiny_model_dir, kv_cache_bits=bits, arithmetic="exact") as exact:
        assert exact.cache_root != engine.cache_root
        assert exact.generate(PROMPT, **GREEDY).logprobs != cold.logprobs
        short = exact.generate(PROMPT[:16], **GREEDY)
    assert seen(engine.generate(PROMPT[:16], **GREEDY)) == seen(short)
    rows = engine.logits(PROMPT)
    np.testing.assert_array_equal(engine.logits(PROMPT, 70), rows[70:])


def test_hidden_states_and_logits_of_both_kinds_of_tokens_are_joined(engine):
    first, second = (engine.embed([one])[0] for one in (PROMPT, OTHER))
    np.testing.assert_array_equal(engine.embed([PROMPT, OTHER]), np.stack([first, second]))


def test_reuse_at_other_positions_is_refused_with_a_remedy(engine):
    with pytest.raises(RequestError, match="use arithmetic='exact'"):
        engine.generate(PROMPT, mode="chunk_kv_reuse", **GREEDY)
