"""The sampler against a slow reference, written out step by step."""

import dataclasses

import numpy as np
import pytest

from kvboost_edge.engine.request.request import SamplingParams
from kvboost_edge.engine.samplers.sampling import (
    make_sampler,
    sampling_distribution,
    token_logprobs,
    uniform,
)

VOCAB = 3000


def random_logits(seed, size=VOCAB):
    # Rounded, so that equal logits occur and ties are exercised.
    return np.round(np.random.default_rng(seed).normal(0, 3, size), 1).astype(np.float32)


def slow_distribution(logits, ids, num_prompt, p):
    values = [float(v) for v in logits]
    for token in set(ids):
        factor = np.float32(p.repetition_penalty or 1.0)
        value = np.float32(values[token])
        values[token] = float(value / factor if value > 0 else value * factor)
    for token in set(ids[num_prompt:]):
        count = ids[num_prompt:].count(token)
        step = np.float32(p.presence_penalty) + np.float32(p.frequency_penalty) * np.float32(count)
        values[token] = float(np.float32(values[token]) - step)
    for token, bias in (p.logit_bias or {}).items():
        values[token] = float(np.float32(values[token]) + np.float32(bias))
    temperature = 1.0 if p.temperature is None else p.temperature
    order = sorted(range(len(values)), key=lambda t: (-values[t], t))
    weights = [np.exp((values[t] - values[order[0]]) / temperature) for t in order]
    kept = p.top_k or len(order)
    order = order[:kept]
    weights = weights[:kept]
    if p.top_p is not None and p.top_p < 1:
        cumulative = np.cumsum(weights)
        kept = int(np.sum(cumulative < p.top_p * sum(weights))) + 1
        order = order[:kept]
        weights = weights[:kept]
    full = np.zeros(len(values))
    for token, weight in zip(order, weights, strict=True):
        full[token] = weight if weight >= (p.min_p or 0.0) * weights[0] else 0.0
    return full / full.sum()


CASES = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 1e-4},
    {"temperature": 50.0},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": VOCAB},
    {"top_k": VOCAB + 5},
    {"top_p": 0.9},
    {"top_p": 1e-9},
    {"top_p": 1.0},
    {"top_p": 0.999, "temperature": 30.0},  # the nucleus is larger than the candidates tried first
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 50, "top_p": 0.8, "min_p": 0.05, "temperature": 1.7},
    {"temperature": 1.0, "repetition_penalty": 1.8},
    {"temperature": 1.0, "repetition_penalty": 0.6},
    {"temperature": 1.0, "presence_penalty": 1.5, "frequency_penalty": 0.7},
    {"temperature": 1.0, "frequency_penalty": -1.0},
    {"temperature": 1.0, "logit_bias": {5: 100.0, 6: -100.0}},
]


@pytest.mark.parametrize("options", CASES, ids=repr)
def test_distribution_equals_the_reference(options):
    params = SamplingParams.from_options(**options)
    ids = [3, 3, 5, 1, 8, 8, 8, 1]
    for seed in range(3):
        logits = random_logits(seed)
        before = logits.copy()
        fast = sampling_distribution(logits, ids, 3, params)
        np.testing.assert_array_equal(logits, before, "the caller's logits are read only")
        np.testing.assert_allclose(
            fast, slow_distribution(logits, ids, 3, params), rtol=1e-9, atol=1e-12
        )


@pytest.mark.parametrize("options", CASES, ids=repr)
def test_draws_invert_the_distribution(options):
    """The drawn token is the one whose share of the unit interval contains the random number of
    (seed, position).
    """
    params = SamplingParams.from_options(**options)
    sampler = make_sampler(params, 11)
    logits = random_logits(7)
    for length in range(4, 30):
        ids = list(range(length))
        probs = sampling_distribution(logits, ids, 2, params)
        token = sampler(logits, ids, 2)
        assert probs[token] > 0
        if not {"top_k", "top_p"} & options.keys():
            upper = np.cumsum(probs)[token]
            assert upper - probs[token] - 1e-9 <= uniform(11, length) <= upper + 1e-9


def test_frequencies_follow_the_distribution():
    params = SamplingParams(temperature=0.8, top_k=6)
    logits = random_logits(1, 12)
    probs = sampling_distribution(logits, [], 0, params)
    draws = 20_000
    counts = np.zeros(12)
    for seed in range(draws):
        counts[make_sampler(params, seed)(logits, [0, 1], 1)] += 1
    sigma = np.sqrt(draws * probs * (1 - probs)) + 1e-9
    assert (np.abs(counts - draws * probs) < 5 * sigma).all()


def test_a_known_argmax_is_used_only_for_unchanged_logits():
    logits = np.arange(8, dtype=np.float32)
    assert make_sampler(SamplingParams(), 0)(logits, [1], 1, 7) == 7
    assert make_sampler(SamplingParams(logit_bias={7: -9.0}), 0)(logits, [1], 1, 7) == 6
    assert make_sampler(SamplingParams(), 0, [7])(logits, [1], 1, 7) == 6
    drawn = [
        [make_sampler(SamplingParams(seed=0), seed)(logits, [1], 1, at) for seed in range(9)]
        for at in (7, None)
    ]
    assert drawn[0] == drawn[1]


def test_greedy_breaks_ties_by_token_id():
    logits = np.zeros(100, np.float32)
    logits[[17, 40, 41]] = 3.0
    assert make_sampler(SamplingParams(), 0)(logits, [1], 1) == 17
    assert make_sampler(SamplingParams(top_k=1, temperature=1.0), 0)(logits, [1], 1) == 17
    assert make_sampler(SamplingParams(top_p=0.01), 0)(logits, [1], 1) == 17
    assert make_sampler(SamplingParams(logit_bias={16: 3.0}), 0)(logits, [1], 1) == 16


@pytest.mark.parametrize(
    ("options", "samples"),
    [
        ({}, False),
        ({"temperature": 1.0}, True),
        ({"temperature": 0}, False),
        ({"temperature": 0.0, "do_sample": True}, False),
        ({"top_p": 0.9}, True),
        ({"top_k": 5}, True),
        ({"min_p": 0.1}, True),
        ({"seed": 3}, True),
        ({"temperature": 0.0, "top_p": 0.9}, False),
        ({"do_sample": True}, True),
        ({"do_sample": False, "temperature": 0.9, "top_k": 3}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"logit_bias": {1: 2.0}}, False),
    ],
    ids=repr,
)
def test_options_that_turn_on_sampling(options, samples):
    assert SamplingParams.from_options(**options).samples is samples


def test_sampling_params_are_immutable_values():
    params = SamplingParams(stop="end", stop_token_ids=[3, 4], temperature=1)
    assert params.stop == ("end",)
    assert params.stop_token_ids == (3, 4)
    assert dataclasses.replace(params, temperature=0.0).samples is False
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3


def test_random_numbers_depend_only_on_seed_and_position():
    numbers = {(s, p): uniform(s, p) for s in (0, 1, 2**64 - 1) for p in range(200)}
    assert len(set(numbers.values())) == len(numbers)
    assert all(0.0 <= n < 1.0 for n in numbers.values())
    assert abs(float(np.mean(list(numbers.values()))) - 0.5) < 0.05


def test_logprobs_are_those_of_the_unmodified_logits():
    logits = random_logits(3)
    wide = logits.astype(np.longdouble)
    truth = wide - np.log(np.exp(wide - wide.max()).sum()) - wide.max()
    entry = token_logprobs(logits, 77, 5)
    assert entry.token_id == 77
    assert entry.logprob == pytest.approx(float(truth[77]), abs=1e-9)
    order = sorted(range(VOCAB), key=lambda t: (-logits[t], t))[:5]
    assert [token for token, _ in entry.top] == order
    assert [lp for _, lp in entry.top] == pytest.approx([float(truth[t]) for t in order], abs=1e-9)
    assert token_logprobs(logits, 77, 0).top == ()


def test_minus_infinity_masks_tokens():
    logits = np.full(50, -np.inf, np.float32)
    logits[7] = 1.0
    for options in ({}, {"temperature": 1.0}, {"top_p": 0.5}, {"top_k": 10}, {"min_p": 0.5}):
        assert make_sampler(SamplingParams.from_options(**options), 5)(logits, [1, 2], 1) == 7


def test_suppressed_tokens_are_never_sampled():
    """Logits and biases cannot make them candidates. The other tokens keep their distribution."""
    logits = random_logits(3)
    best = np.argsort(-logits)[:3].tolist()
    assert make_sampler(SamplingParams(), 0, best[:2])(logits, [1], 1) == best[2]
    bias = {best[0]: 10_000.0}
    assert make_sampler(SamplingParams(logit_bias=bias), 0, best[:2])(logits, [1], 1) == best[2]
    without = logits.copy()
    without[best] = -np.inf
    for options in (
        {"temperature": 2.0},
        {"temperature": 2.0, "top_k": 5},
        {"temperature": 2.0, "top_p": 0.5},
    ):
        params = SamplingParams.from_options(**options)
        drawn = [make_sampler(params, seed, best)(logits, [1], 1) for seed in range(40)]
        assert drawn == [make_sampler(params, seed)(without, [1], 1) for seed in range(40)]
        assert not set(best) & set(drawn)
