"""Sparse prefill in an engine: equal bits however a prompt is computed, and KV that exact requests
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


@pytest.fixture(scope="module", autouse=True)
def early_start():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shareable, "FIRST_POSITION", FIRST)
        yield


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


def turns(one, **terms):
    """Return the answers to a prompt, to the prompt again and to the next turn, with the number of
    cached tokens and the labels of each.
    """
    first = one.generate(TEXT, **GREEDY, **terms)
    more = [*TEXT, *first.output_token_ids, *OTHER[:60]]
    results = [first, *(one.generate(ids, **GREEDY, **terms) for ids in (TEXT, more))]
    return [(answer(each), each.cached_tokens, each.approximations) for each in results]


def hashes_of(one):
    return set(one.take_cache_events(whole=True).published)


@pytest.fixture(scope="module")
def alone(model):
    """The results of `turns` and the hashes of the blocks, by the prefill of an engine without a
    choice.
    """
    found = {}
    for prefill in ("exact", "sparse"):
        with engine(model, prefill=prefill) as one:
            found[prefill] = turns(one), hashes_of(one)
    assert found["exact"][0] != found["sparse"][0]
    assert not found["exact"][1] & found["sparse"][1]
    return found


@pytest.mark.parametrize(
    ("option", "choice", "prefill"),
    [
        ("exact", "exact", "exact"),
        ("on-request", None, "exact"),
        ("on-request", "exact", "exact"),
        ("on-request", "sparse", "sparse"),
        ("sparse", "sparse", "sparse"),
        ("sparse", "exact", "exact"),
    ],
)
def test_a_request_has_the_bits_and_blocks_of_an_engine_with_its_prefill(
    model, alone, option, choice, prefill
):
    other = {"exact": "sparse", "sparse": "exact"}[prefill]
    with engine(model, prefill=option) as one:
        if option != "exact":
            assert turns(one, prefill=other) == alone[other][0]
        assert turns(one, prefill=choice) == alone[prefill][0]
        assert alone[prefill][1] <= hashes_of(one)


def test_requests_of_both_kinds_in_a_batch_have_the_bits_of_each_alone(model):
    asked = [(ids, kind) for ids in (OTHER, TEXT) for kind in ("sparse", "exact")]
    with engine(model, prefill="on-request") as one:
        single = [answer(one.generate(ids, prefill=kind, **GREEDY)) for ids, kind in asked]
    assert single[0] != single[1]
    assert single[2] != single[3]
    with engine(model, prefill="on-request", max_batch_tokens=40, max_num_seqs=4) as small:
        handles = [small.submit(ids, prefill=kind, **GREEDY) for ids, kind in asked]
        assert [answer(handle.result()) for handle in handles] == single


# The engine's option and the request's choice of what wrote the blocks and of what reads them.
EXACT, SPARSE = ("exact", None), ("sparse", None)
ASKED = ("on-request", "sparse")


@pytest.mark.parametrize(
    ("writer", "reader", "found"),
    [
        (EXACT, EXACT, 896),
        (EXACT, SPARSE, 0),
        (EXACT, ("on-request", None), 896),
        (EXACT, ("sparse", "exact"), 896),
        (EXACT, ASKED, 0),
        (SPARSE, SPARSE, 768),
        (SPARSE, EXACT, 0),
        (SPARSE, ASKED, 768),
        (SPARSE, ("on-request", None), 0),
        (ASKED, SPARSE, 768),
        (ASKED, EXACT, 0),
        (("on-request", None), EXACT, 896),
    ],
)
def test_the_disk_tier_gives_each_request_the_blocks_of_its_prefill(
    model, alone, tmp_path, writer, reader, found
):
    for option, choice in (writer, reader):
        with engine(model, prefill=option, disk_cache_dir=tmp_path) as one:
            result = one.generate(TEXT, prefill=choice, **GREEDY)
            kind = one.config.prefill_of(choice)
    assert result.hit_tokens.get("disk", 0) == found
    assert answer(result) == alone[kind][0][0][0]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"block_size": 48}, "block_size=48 must be one of"),
        ({"backend": "reference"}, "only 'cpu' selects blocks"),
        ({"max_batch_tokens": 8}, "must be at least 16"),
        ({"max_model_len": 655}, "context of 655 tokens is too short.*at least 656 tokens"),
        ({"runner": "torch", "weights": "auto"}, "prefill='(sparse|on-request)'"),
    ],
    ids=str,
)
@pytest.mark.parametrize("prefill", ["sparse", "on-request"])
def test_other_options_are_refused_by_name(model, options, reason, prefill):
    with pytest.raises(ConfigError, match=reason):
        engine(model, prefill=prefill, **options)


@pytest.mark.parametrize(
    ("option", "choice", "reason"),
    [
        ("exact", "sparse", "prefill='sparse' is refused.*start it with prefill='on-request'"),
        ("on-request", "on-request", "prefill='on-request' is not one of 'exact', 'sparse'"),
    ],
)
def test_a_choice_that_the_engine_does_not_have_is_refused_by_every_call(
    model, option, choice, reason
):
    with engine(model, prefill=option) as one:
        calls = (
            *(one.generate, one.submit, one.check, one.warm, one.pin, one.unpin, one.warm_result),
            lambda ids, **terms: one.kept_answers(**terms),
        )
        for call in calls:
            with pytest.raises(RequestError, match=reason):
                call(TEXT, prefill=choice)


def test_models_without_a_layer_that_selects_blocks_are_refused(tmp_path):
    path = save_tiny_model("mistral", tmp_path, max_position_embeddings=1024, sliding_window=64)
    with pytest.raises(ConfigError, match="every layer has a sliding window"):
        engine(path)


REUSE = {"mode": "chunk_kv_reuse", "recompute_strategy": "none", **GREEDY}


@pytest.mark.parametrize("option", ["sparse", "on-request"])
@pytest.mark.parametrize("choice", [None, "exact", "sparse"])
def test_kv_at_other_positions_is_not_reused_where_requests_may_be_sparse(model, option, choice):
    with engine(model, prefill=option) as one:
        for call in (
            lambda: one.generate(TEXT, prefill=choice, **REUSE),
            lambda: one.warm(documents=[TEXT[:400]], prefill=choice),
        ):
            with pytest.raises(RequestError, match=r"or 'sparse' reuses prefixes only"):
                call()
        assert "use prefill='exact'" in one.reuse_refusal
        assert one.default_reuse_refusal == one.reuse_refusal
