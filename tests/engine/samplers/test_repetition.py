"""DRY and bad words against the algorithms of llama.cpp and vLLM."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvboost_edge.engine.request.request import SamplingParams
from kvboost_edge.engine.request.words import Breakers, RequestWords
from kvboost_edge.engine.samplers.repetition import make_bad_words, make_dry, repeat_lengths
from kvboost_edge.engine.samplers.sampling import make_sampler, sampling_distribution

VOCAB = 16


def llama_dry(ids, params, breakers):
    """Follow llama_sampler_dry_apply step by step and return the penalty of each token."""
    window = params.dry_penalty_last_n
    last_tokens = list(ids if window < 0 else ids[len(ids) - window :] if window else [])
    n = min(len(ids), len(last_tokens))
    last_tokens = last_tokens[-n:] if n else []
    penalties = {}
    if n <= params.dry_allowed_length:
        return penalties

    def rat(i):
        return last_tokens[n - 1 - i]

    limit = n
    for i in range(n):
        tails = list(breakers.begun.get(rat(i), ()))
        if rat(i) in breakers.alone:
            tails.append(())
        longest = -1
        for tail in tails:
            if longest < len(tail) <= i and all(
                tail[k] == rat(i - k - 1) for k in range(len(tail))
            ):
                longest = len(tail)
        if longest >= 0:
            limit = i - longest
            break
    if limit < params.dry_allowed_length:
        return penalties
    counts = [0] * n
    for k in range(1, n):
        size = 0
        while size + k < n and rat(size) == rat(size + k):
            size += 1
        counts[n - 1 - k] = min(size, limit)
    longest_of = {}
    for i in range(n - 1):
        if counts[i] >= params.dry_allowed_length:
            token = rat(n - 2 - i)
            longest_of[token] = max(longest_of.get(token, 0), counts[i])
    most = int(88.7228391 / np.log(params.dry_base)) if params.dry_base > 1.000001 else 0
    for token, length in longest_of.items():
        if token not in breakers.alone:
            exponent = length - params.dry_allowed_length
            if most > 0:
                exponent = min(exponent, most)
            penalties[token] = params.dry_multiplier * params.dry_base**exponent
    return penalties


def found_penalties(ids, params, breakers):
    logits = np.zeros(VOCAB)
    make_dry(params, breakers)(logits, ids, 0)
    return {int(token): -logits[token] for token in np.flatnonzero(logits)}


TOKENS = st.integers(0, 4)


@given(
    ids=st.lists(TOKENS, min_size=1, max_size=60),
    base=st.sampled_from([1.0, 1.1, 1.75, 30.0]),
    allowed=st.integers(1, 5),
    window=st.sampled_from([-1, 0, 1, 5, 17, 200]),
    alone=st.frozensets(TOKENS, max_size=2),
    begun=st.dictionaries(
        TOKENS,
        st.lists(st.lists(TOKENS, min_size=1, max_size=3).map(tuple), max_size=2).map(tuple),
        max_size=2,
    ),
)
def test_dry_equals_llama_cpp(ids, base, allowed, window, alone, begun):
    params = SamplingParams(
        dry_multiplier=0.8, dry_base=base, dry_allowed_length=allowed, dry_penalty_last_n=window
    )
    breakers = Breakers(alone, begun)
    found = found_penalties(ids, params, breakers)
    assert found == pytest.approx(llama_dry(ids, params, breakers))


@given(ids=st.lists(TOKENS, min_size=1, max_size=40), times=st.integers(1, 30))
def test_repeat_lengths_of_short_and_long_repetitions(ids, times):
    text = [*ids, 9, *ids * times]
    found = repeat_lengths(np.array(text, np.int32))
    for end in {*range(0, len(text) - 1, 7), len(text) - 2}:
        size = 0
        while size <= end and text[end - size] == text[len(text) - 1 - size]:
            size += 1
        assert found[end] == size


def test_a_repetition_of_any_length_takes_linear_work():
    ids = np.zeros(20_000, np.int32)
    np.testing.assert_array_equal(repeat_lengths(ids), np.arange(1, 20_000))


def test_a_penalty_beyond_float32_excludes_the_token():
    ids = [1, 2, 3, 4] * 100
    params = SamplingParams(dry_multiplier=1000, dry_base=100, temperature=1.0)
    logits = np.zeros(VOCAB, np.float32)
    found = sampling_distribution(logits, ids, 0, params)
    assert found[1] == 0
    assert (
        make_sampler(SamplingParams(temperature=0.0, dry_multiplier=1.0), 0)(
            np.eye(VOCAB, dtype=np.float32)[1] * 5, ids, 0
        )
        != 1
    )


def test_dry_example_of_llama_cpp():
    """After a b c c b c y a b c, the token c would complete a repetition of four and y one of
    three.
    """
    a, b, c, y = range(4)
    params = SamplingParams(dry_multiplier=1.0, dry_base=2.0, dry_allowed_length=2)
    ids = [a, b, c, c, b, c, y, a, b, c]
    assert found_penalties(ids, params, Breakers()) == {c: 2.0, y: 1.0}
    assert found_penalties(ids, params, Breakers(frozenset({c}))) == {}
    assert found_penalties(ids, params, Breakers(frozenset({a}))) == {c: 1.0, y: 1.0}


def vllm_bad_words(words, past):
    """Follow `_apply_bad_words_single_batch` of vLLM."""
    found = set()
    for word in words:
        if len(word) > len(past) + 1:
            continue
        size = len(word) - 1
        if (list(past[-size:]) if size else []) == list(word[:size]):
            found.add(word[-1])
    return sorted(found)


@given(
    words=st.lists(st.lists(TOKENS, min_size=1, max_size=4).map(tuple), min_size=1, max_size=6),
    ids=st.lists(TOKENS, max_size=12),
    num_prompt=st.integers(0, 6),
)
def test_bad_words_equal_vllm(words, ids, num_prompt):
    num_prompt = min(num_prompt, len(ids))
    assert make_bad_words(words)(ids, num_prompt) == vllm_bad_words(words, ids[num_prompt:])


def test_min_tokens_masks_end_tokens():
    logits = np.arange(VOCAB, dtype=np.float32)
    for options in ({"temperature": 0.0}, {"top_k": 1}, {"typical_p": 1e-9, "top_k": 1}):
        params = SamplingParams.from_options(min_tokens=3, **options)
        sampler = make_sampler(params, 0, stop_ids={15, 14, 400})
        assert [sampler(logits, [1] * n, 2, 15) for n in range(2, 7)] == [13, 13, 13, 15, 15]


def test_a_grammar_that_allows_only_the_end_overrides_min_tokens_and_bad_words():
    logits = np.full(VOCAB, -np.inf, np.float32)
    logits[15] = 1.0
    for options in ({"temperature": 0.0}, {"temperature": 1.0}, {"typical_p": 0.5}):
        params = SamplingParams.from_options(min_tokens=3, **options)
        words = RequestWords(bad=((15,),))
        assert make_sampler(params, 0, stop_ids={15}, words=words)(logits, [1], 1) == 15


def test_bad_words_are_never_completed():
    words = RequestWords(bad=((3,), (5, 6)))
    logits = np.full(VOCAB, -9.0, np.float32)
    logits[[3, 5, 6]] = 5.0, 4.0, 4.5
    for options in ({"temperature": 0.0}, {"temperature": 0.1}, {"top_n_sigma": 1.0}):
        sampler = make_sampler(SamplingParams.from_options(**options), 0, words=words)
        assert sampler(logits, [1, 5], 1) == 5
        assert sampler(logits, [1, 5], 2) in (5, 6), (
            "the prompt must not count as the start of a bad word"
        )
        assert sampler(logits, [3], 1) != 3
