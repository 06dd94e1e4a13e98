"""Sparse prefill in an engine: equal bits however a prompt is computed, and KV that exact engines
never see.
"""

import numpy as np
import pytest

from helpers.models.tiny_models import save_tiny_model
from kvboost_edge import CPUPagedEngine, shareable
from kvboost_edge.errors import ConfigError, RequestError

FIRST = 512
TEXT, OTHER = (
    np.random.default_rng(seed).integers(3, 250, length).tolist()
    for seed, length in ((1, 900), (2, 700))
)
OPTIONS = {"runner": "native", "weights": "f32", "num_threads": 1, "num_blocks": 200}
GREEDY = {"max_new_tokens": 12, "temperature": 0.0, "logprobs": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=1024)


@pytest.fixture(autouse=True)
def early_start(monkeypatch):
    monkeypatch.setattr(shareable, "FIRST_POSITION", FIRST)


def engine(model, **options):
    return CPUPagedEngine.from_pretrained(
        model, **{"prefill": "sparse", "debug_checks": True, **OPTIONS, **options}
    )


def answer(result):
    return result.output_token_ids, [one.logprob for one in result.logprobs]


@pytest.mark.parametrize("bits", [16, 8])
def test_chunks_batches_and_cached_prefixes_change_no_bit(model, bits):
    with engine(model, kv_cache_bits=bits) as cold:
        alone = cold.generate(TEXT, **GREEDY)
        again = cold.generate(TEXT, **GREEDY)
        cold.reset_cache()
        cold.generate(TEXT[:700], **GREEDY)
        # The range of this prompt ends at 560. Its last tokens are not shared.
        continued = cold.generate(TEXT, **GREEDY)
    assert alone.cached_tokens == 0
    assert again.cached_tokens == shareable.sparse_end(len(TEXT), 16) == 768
    assert continued.cached_tokens == 560
    with engine(model, kv_cache_bits=bits, max_batch_tokens=40, max_num_seqs=3) as small:
        handles = [small.submit(ids, **GREEDY) for ids in (OTHER, TEXT, TEXT[:40])]
        batched = [handle.result() for handle in handles][1]
    for other in (again, continued, batched):
        assert answer(other) == answer(alone)
    assert alone.approximations == ("sparse_prefill",)
    with engine(model, kv_cache_bits=bits, prefill="exact") as exact:
        assert answer(exact.generate(TEXT, **GREEDY)) != answer(alone)


@pytest.mark.parametrize("bits", [16, 8])
def test_preempted_sequences_keep_their_sparse_range(tmp_path, bits):
    """The model has layers with and without a sliding window."""
    path = save_tiny_model("gemma3", tmp_path, max_position_embeddings=1024)
    options = {**GREEDY, "max_new_tokens": 60}
    with engine(path, kv_cache_bits=bits) as roomy:
        alone = [answer(roomy.generate(ids, **options)) for ids in (TEXT, OTHER)]
    # Both prompts fit, but not both answers.
    with engine(path, kv_cache_bits=bits, num_blocks=104, max_num_seqs=2) as tight:
        handles = [tight.submit(ids, **options) for ids in (TEXT, OTHER)]
        results = [handle.result() for handle in handles]
    assert [result.preemptions for result in results] != [0, 0]
    assert [answer(result) for result in results] == alone


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("start", [591, 592, 600])
def test_logits_of_cached_prompts_begin_with_whole_query_blocks(model, start, bits):
    with engine(model, kv_cache_bits=bits) as one:
        rows = one.logits(TEXT)
        np.testing.assert_array_equal(one.logits(TEXT, start), rows[start:])


def test_generated_tokens_are_not_shared_after_the_range(model):
    with engine(model) as one:
        first = one.generate(TEXT, **GREEDY)
        longer = [*TEXT, *first.output_token_ids, *OTHER[:60]]
        warm = one.generate(longer, **GREEDY)
        assert warm.cached_tokens == 768
        one.reset_cache()
        assert answer(one.generate(longer, **GREEDY)) == answer(warm)


def test_prompts_below_the_first_position_have_the_bits_of_exact_prefill(model):
    short = TEXT[: FIRST - 1]
    with engine(model) as sparse, engine(model, prefill="exact") as exact:
        result = sparse.generate(short, **GREEDY)
        assert answer(result) == answer(exact.generate(short, **GREEDY))
        assert (result.approximate, result.approximations) == (False, ())
        assert sparse.generate(short, **GREEDY).cached_tokens == 496


def test_only_prompts_with_a_sparse_range_are_labelled(model):
    end = FIRST + shareable.DENSE_TAIL + 16
    with engine(model) as sparse, engine(model, prefill="exact") as exact:
        for length in (end - 1, end):
            results = [one.generate(TEXT[:length], **GREEDY) for one in (sparse, exact)]
            is_equal = answer(results[0]) == answer(results[1])
            assert results[0].approximate == (length == end) == (not is_equal)


def test_the_disk_tier_keeps_sparse_and_exact_blocks_apart(model, tmp_path):
    for prefill in ("exact", "sparse", "exact"):
        with engine(model, prefill=prefill, disk_cache_dir=tmp_path) as one:
            found = one.generate(TEXT, **GREEDY).cached_tokens
    assert found > 800
    with engine(model, prefill="sparse", disk_cache_dir=tmp_path) as one:
        assert one.generate(TEXT, **GREEDY).cached_tokens == 768


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"block_size": 48}, "block_size=48 must be one of"),
        ({"backend": "reference"}, "only 'cpu' selects blocks"),
        ({"max_batch_tokens": 8}, "must be at least 16"),
        ({"max_model_len": 655}, "context of 655 tokens is too short.*at least 656 tokens"),
        ({"runner": "torch", "weights": "auto"}, "prefill='sparse'"),
    ],
    ids=str,
)
def test_other_options_are_refused_by_name(model, options, reason):
    with pytest.raises(ConfigError, match=reason):
        engine(model, **options)


def test_models_without_a_layer_that_selects_blocks_are_refused(tmp_path):
    path = save_tiny_model("mistral", tmp_path, max_position_embeddings=1024, sliding_window=64)
    with pytest.raises(ConfigError, match="every layer has a sliding window"):
        engine(path)


def test_reuse_at_other_positions_is_refused(model):
    with engine(model) as one, pytest.raises(RequestError, match="prefill='sparse'"):
        one.generate(TEXT, mode="chunk_kv_reuse", **GREEDY)
