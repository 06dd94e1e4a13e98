"""Samplers in an engine: the tokens equal those of the request alone, in any batch, after
preemptions and with any draft tokens.
"""

import functools
import random

import numpy as np
import pytest

from helpers.engine.fake_hybrid import ZEROS, next_state, state_logits
from helpers.engine.fake_runner import EOS_ID, VOCAB_SIZE, fake_tokenizer, token_logits
from helpers.engine.hostile_drafts import KINDS, hostile
from helpers.engine.model_kinds import PLAIN, ModelKind
from helpers.pairwise import each_once
from kvboost_edge.engine.request.request import RequestInputs, SamplingParams
from kvboost_edge.engine.request.terms import Terms
from kvboost_edge.engine.samplers.sampling import make_sampler
from kvboost_edge.engine.samplers.vocabulary import WordFields

COUNT = 40
STOP = frozenset({EOS_ID, 7, 8})
FEW = dict.fromkeys((10, 11, 12, 13), 20.0)  # a text of these tokens repeats itself
CASES = {
    "min_tokens": {"temperature": 0.0, "min_tokens": 30},
    "min_tokens, sampled": {"temperature": 3.0, "min_tokens": 20},
    "dry": {"temperature": 0.0, "dry_multiplier": 5.0, "logit_bias": FEW},
    "dry, sampled": {"temperature": 0.4, "dry_multiplier": 5.0, "logit_bias": FEW},
    "bad words": {"temperature": 0.5, "bad_words": (*"aeiotu", "xy")},
    "mirostat": {"temperature": 1.2, "mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.5},
    "xtc": {"temperature": 0.8, "xtc_probability": 0.5, "xtc_threshold": 0.05},
    "typical": {"temperature": 1.0, "typical_p": 0.7},
    "sigma, dynamic": {"temperature": 1.0, "top_n_sigma": 1.0, "dynatemp_range": 0.8},
    "infill": {"samplers": "tki", "temperature": 0.3, "top_k": 40, "min_tokens": 20},
    "order": {"samplers": "dxtkm", "dry_multiplier": 1.0, "xtc_probability": 0.3, "top_k": 20}
    | {"temperature": 1.5, "min_p": 0.01},
}


@functools.cache
def fields():
    return WordFields(fake_tokenizer(), VOCAB_SIZE)


def words_of(params):
    return fields().prepare(RequestInputs(Terms(), params, [1], generates=True))["words"]


def logits_of(kind, ids):
    if kind is PLAIN:
        return token_logits(ids)
    state = ZEROS
    for token in ids:
        state = next_state(state, token)
    return state_logits(state, ids)


def alone(prompt, params, seed, kind=PLAIN):
    """Sample the tokens without an engine."""
    sampler = make_sampler(params, seed, stop_ids=STOP, words=words_of(params))
    ids = list(prompt)
    while len(ids) < len(prompt) + COUNT:
        ids.append(sampler(logits_of(kind, ids), ids, len(prompt)))
        if ids[-1] in STOP:
            break
    return ids


def prompt(seed, length):
    """Return a random prompt. One of an odd seed repeats itself."""
    ids = np.random.default_rng(seed).integers(10, 250, length).tolist()
    return ids * 3 if seed % 2 else ids


@pytest.mark.parametrize(("kind", "case"), each_once(ModelKind, CASES))
@pytest.mark.some(3)
def test_tokens_equal_those_of_a_single_run(kind, case):
    """The pools are small, the drafts are of every kind, and one of the six requests is greedy."""
    options = CASES[case]
    preempted = accepted = rejected = 0
    for seed in range(3):
        rng = random.Random(seed)
        bench = kind.bench(
            rng.choice((8, 10)),
            max_num_seqs=rng.choice((3, 6)),
            max_batch_tokens=rng.choice((3, 17, 64)),
        )
        truths = {}
        bench.scheduler.speculation.prompt_lookup = hostile(
            lambda request, truths=truths: truths[request.index],
            lambda request: KINDS[request.index % len(KINDS)],
            VOCAB_SIZE,
        )
        handles = {}
        for number in range(1, 7):
            ids = prompt(10 * seed + number, rng.randrange(1, 20))
            chosen = {"seed": number, **({"temperature": 0.0} if number == 3 else options)}
            params = SamplingParams.from_options(**chosen, max_new_tokens=COUNT)
            truths[number] = alone(ids, params, number, kind)
            terms = {"max_draft_tokens": rng.choice((0, 5, 31)), "always_drafts": True}
            handles[number] = (
                len(ids),
                params.min_tokens,
                bench.submit(
                    ids,
                    COUNT,
                    stop_ids=STOP,
                    terms={**terms, "words": words_of(params)},
                    **chosen,
                ),
            )
            for _ in range(rng.randrange(3)):
                bench.step()
        bench.run()
        for number, (length, least, handle) in handles.items():
            found = list(handle.result(0).output_token_ids)
            assert found == truths[number][length:], f"seed {seed}, request {number}"
            assert len(found) > least
        preempted += bench.scheduler.num_preemptions
        speculation = bench.scheduler.speculation
        accepted += speculation.num_accepted
        rejected += speculation.num_drafted - speculation.num_accepted
        assert bench.manager.used_block_count == 0
    assert preempted > 0
    assert accepted > 0
    assert rejected > 0


def test_each_case_changes_the_answer():
    """If the options changed nothing, the comparison with single runs would prove nothing."""
    for case, options in CASES.items():
        usual = {
            name: options[name]
            for name in ("temperature", "top_k", "min_p", "logit_bias")
            if name in options
        }
        changed = 0
        for number in range(1, 20):
            ids = prompt(number, 12)
            params = SamplingParams.from_options(**options, max_new_tokens=COUNT)
            plain = SamplingParams.from_options(**usual, max_new_tokens=COUNT)
            changed += alone(ids, params, number) != alone(ids, plain, number)
            if changed > 2:
                break
        assert changed > 2, case


def test_dry_ends_a_loop():
    """A sampled text leaves an endless loop once the repetition is long enough."""
    loop = [*range(10, 20)] * 3
    params = SamplingParams(temperature=0.0, dry_multiplier=100.0)
    sampler = make_sampler(params, 0, words=words_of(params))
    logits = np.zeros(VOCAB_SIZE, np.float32)
    logits[10] = 50.0
    assert sampler(logits, loop, 0) != 10
    assert sampler(logits, [*loop[:-1], 250], 0) == 10
