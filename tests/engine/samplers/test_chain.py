"""The sampler chain against llama.cpp's rules, applied token by token."""

import itertools
import math

import numpy as np
import pytest

from kvboost_edge.engine.request.request import SamplingParams
from kvboost_edge.engine.request.sampler_order import DEFAULT_ORDER, SAMPLER_LETTERS, SAMPLERS
from kvboost_edge.engine.request.words import RequestWords
from kvboost_edge.engine.samplers.chain import Mirostat
from kvboost_edge.engine.samplers.numbers import XTC_STREAM, uniform
from kvboost_edge.engine.samplers.sampling import make_sampler, sampling_distribution
from kvboost_edge.errors import RequestError

VOCAB = 3000
LLAMA_CPP = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temp")


def random_logits(seed, size=VOCAB, scale=3.0):
    return np.random.default_rng(seed).normal(0, scale, size).astype(np.float32)


class Reference:
    """llama.cpp's samplers over a list of [id, logit]."""

    def __init__(self, logits, params, seed=0, position=0, *, ends=(), texts=()):
        self.left = [[i, float(value)] for i, value in enumerate(logits)]
        self.given = logits
        self.ends = ends
        self.texts = texts
        self.p = params
        self.applies_xtc = uniform(seed, position, XTC_STREAM) < params.xtc_probability

    def softmax(self):
        self.left.sort(key=lambda one: (-one[1], one[0]))
        weights = [math.exp(value - self.left[0][1]) for _, value in self.left]
        total = sum(weights)
        return [weight / total for weight in weights]

    def top_n_sigma(self):
        if self.p.top_n_sigma <= 0:
            return
        values = [value for _, value in self.left]
        mean = sum(values) / len(values)
        sigma = math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))
        least = max(values) - self.p.top_n_sigma * sigma
        self.left = [one for one in self.left if one[1] >= least]

    def temperature(self):
        temperature = self.p.temperature
        if self.p.dynatemp_range > 0:
            if len(self.left) == 1:
                return
            low = max(0.0, temperature - self.p.dynatemp_range)
            high = temperature + self.p.dynatemp_range
            entropy = -sum(p * math.log(p) for p in self.softmax() if p > 0)
            share = entropy / math.log(len(self.left))
            temperature = low + (high - low) * share**self.p.dynatemp_exponent
        if temperature <= 0:
            self.softmax()
            self.left = self.left[:1]
            return
        for one in self.left:
            one[1] /= temperature

    def top_k(self):
        if self.p.top_k:
            self.softmax()
            self.left = self.left[: self.p.top_k]

    def typ_p(self):
        if self.p.typical_p >= 1:
            return
        probs = self.softmax()
        entropy = -sum(p * math.log(p) for p in probs if p > 0)
        scores = [abs(-math.log(p) - entropy) if p > 0 else math.inf for p in probs]
        self.keep_until(probs, sorted(range(len(probs)), key=scores.__getitem__), self.p.typical_p)

    def top_p(self):
        if self.p.top_p < 1:
            probs = self.softmax()
            self.keep_until(probs, range(len(probs)), self.p.top_p)

    def keep_until(self, probs, order, share):
        total = 0.0
        kept = []
        for place in order:
            kept.append(self.left[place])
            total += probs[place]
            if total >= share and len(kept) >= self.p.min_keep:
                break
        self.left = kept

    def min_p(self):
        probs = self.softmax()
        kept = sum(p >= self.p.min_p * probs[0] for p in probs)
        self.left = self.left[: max(kept, self.p.min_keep)]

    def xtc(self):
        if not self.applies_xtc or self.p.xtc_threshold > 0.5:
            return
        last = sum(p >= self.p.xtc_threshold for p in self.softmax()) - 1
        if last > 0 and len(self.left) - last >= self.p.min_keep:
            self.left = self.left[last:]

    def infill(self):
        probs = self.softmax()
        ends = [token in self.ends for token, _ in self.left]
        ending = sum(p for p, end in zip(probs, ends, strict=True) if end)
        if 3 * ending * len(probs) > sum(probs) - ending:
            self.left = [one for one, end in zip(self.left, ends, strict=True) if end]
            return
        dead = set()
        texts = ["" if token in self.ends else self.texts[token] for token, _ in self.left]
        for one, short in enumerate(texts):
            for other, long in enumerate(texts):
                if one in dead:
                    break
                if one == other or other in dead or not short or not long.startswith(short):
                    continue
                into, out = (other, one) if probs[other] > probs[one] else (one, other)
                probs[into] += probs[out]
                probs[out] = 0.0
                dead.add(out)
        rows = [row for row in zip(self.left, probs, ends, strict=True) if row[2] or row[1] >= 0.2]
        count = sum(not end for _, _, end in rows)
        if not count:
            self.left = [[max(self.ends, key=lambda token: self.given[token]), 1.0]]
            return
        total = sum(p for _, p, _ in rows)
        self.left = [one for one, p, end in rows if end or p / total >= 1 / (count + 1)]

    def distribution(self, size=VOCAB):
        for name in DEFAULT_ORDER if self.p.samplers is None else self.p.samplers:
            if name not in ("penalties", "dry"):
                getattr(self, name)()
        full = np.zeros(size)
        for (token, _), p in zip(self.left, self.softmax(), strict=True):
            full[token] = p
        return full


OFF = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "temperature": 1.0}
CASES = [
    {"typical_p": 0.9},
    {"typical_p": 0.2, "temperature": 0.5},
    {"typical_p": 0.999},  # the set is larger than the candidates tried first
    {"typical_p": 1e-9},
    {"typical_p": 0.9, "top_k": 40},
    {"top_n_sigma": 1.0},
    {"top_n_sigma": 0.0, "typical_p": 0.5},
    {"top_n_sigma": 0.3, "temperature": 2.0},
    {"dynatemp_range": 0.5},
    {"dynatemp_range": 0.5, "dynatemp_exponent": 2.5, "temperature": 0.8},
    {"dynatemp_range": 2.0, "temperature": 0.3},
    {"dynatemp_range": 0.5, "top_k": 1},
    {"xtc_probability": 1.0, "temperature": 0.3},
    {"xtc_probability": 1.0, "xtc_threshold": 0.01},
    {"xtc_probability": 1.0, "xtc_threshold": 0.51, "temperature": 0.1},
    {"xtc_probability": 1.0, "xtc_threshold": 0.0, "top_k": 5},
    {"min_keep": 5, "top_p": 0.01, "min_p": 1.0, "typical_p": 0.01},
    {"min_keep": 2000, "top_p": 0.1},
    {"min_keep": 4, "top_k": 5, "xtc_probability": 1.0, "xtc_threshold": 0.01},
    {"top_k": 50, "top_p": 0.8, "min_p": 0.05, "temperature": 1.7, "typical_p": 0.95},
]
ORDERS = [None, LLAMA_CPP, LLAMA_CPP[::-1], ("temp", "temp"), ()]


@pytest.mark.parametrize("order", ORDERS, ids=["usual", "llama.cpp", "reversed", "twice", "none"])
@pytest.mark.parametrize("options", CASES, ids=repr)
def test_distribution_equals_the_reference(options, order):
    params = SamplingParams.from_options(**OFF | options, samplers=order)
    for seed in range(2):
        logits = random_logits(seed)
        before = logits.copy()
        found = sampling_distribution(logits, [1, 2, 3], 2, params)
        np.testing.assert_array_equal(logits, before, "the caller's logits are read only")
        np.testing.assert_allclose(
            found, Reference(logits, params, 0, 3).distribution(), rtol=1e-9, atol=1e-12
        )


@pytest.mark.parametrize("scale", [1.0, 3.0, 6.0])
@pytest.mark.parametrize("top_k", [1, 5, 40])
@pytest.mark.some(2)
def test_infill_equals_the_reference(scale, top_k):
    """Many of the texts are prefixes of others. The end tokens are likely in only some of the
    cases.
    """
    params = SamplingParams.from_options(
        **OFF | {"top_k": top_k, "top_p": 0.95}, samplers=("top_k", "top_p", "infill")
    )
    outcomes = set()
    for seed in range(40):
        rng = np.random.default_rng(seed)
        logits = random_logits(seed, 80, scale)
        ends = set(rng.choice(80, 3, replace=False).tolist())
        logits[list(ends)] -= 9.0 * (seed % 3)
        texts = ["".join(rng.choice(list("ab"), rng.integers(0, 4))) for _ in range(80)]
        words = RequestWords(texts=tuple(text.encode() for text in texts))
        found = sampling_distribution(logits, [1], 1, params, stop_ids=ends, words=words)
        expected = Reference(logits, params, ends=ends, texts=texts).distribution(80)
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)
        drawn = set(np.flatnonzero(found).tolist())
        outcomes.add("ends" if drawn <= ends else "goes on" if not drawn & ends else "both")
        token = make_sampler(params, seed, stop_ids=ends, words=words)(logits, [1], 1)
        assert token in drawn
    assert outcomes >= {"ends", "goes on"}


def test_infill_respects_the_grammar():
    """The sampler ends an unlikely text only if the grammar allows the end."""
    logits = np.zeros(20, np.float32)
    logits[3] = 0.1
    params = SamplingParams.from_options(**OFF, samplers=("infill",))
    words = RequestWords(texts=tuple(f"<{token}>".encode() for token in range(20)))

    def drawn(logits, ends):
        found = sampling_distribution(logits, [1], 1, params, stop_ids=ends, words=words)
        return np.flatnonzero(found).tolist()

    masked = logits.copy()
    masked[[7, 9]] = -np.inf
    assert drawn(masked, {7, 9}) == [3]
    unlikely = logits.copy()
    unlikely[[7, 9]] = -20.0, -19.0
    assert drawn(unlikely, {7, 9, 400}) == [9]
    assert drawn(logits, ()) == [3]
    assert drawn(masked, {7, 8}) == [8]
    # Tokens without a text in the table, as in a padded vocabulary.
    assert drawn(np.array([0, 9.0], np.float32), ()) == [1]
    words = RequestWords()
    assert drawn(np.array([0, 9.0], np.float32), ()) == [1]


def test_infill_compares_only_the_most_likely_tokens():
    """All other texts begin with that of the first of 400 equally likely tokens, which alone is
    left.
    """
    logits = np.zeros(401, np.float32)
    logits[400] = -30.0
    params = SamplingParams.from_options(**OFF, samplers=("infill",))
    words = RequestWords(texts=tuple(b"a" * (1 + (token > 0)) for token in range(401)))
    found = sampling_distribution(logits, [1], 1, params, stop_ids={400}, words=words)
    assert np.flatnonzero(found).tolist() == [0]


@pytest.mark.parametrize("mass", [0.05, 0.5, 0.9, 0.99])
def test_typical_p_equals_transformers(mass):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    warp = transformers.TypicalLogitsWarper(mass=mass)
    for seed in range(3):
        logits = random_logits(seed)
        wide = torch.tensor(logits, dtype=torch.float64)[None]
        expected = torch.softmax(warp(None, wide), -1)[0].numpy()
        params = SamplingParams(**OFF, typical_p=mass)
        np.testing.assert_allclose(
            sampling_distribution(logits, [1], 1, params), expected, rtol=1e-9, atol=1e-12
        )


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 50, "top_p": 0.8, "min_p": 0.05, "temperature": 1.7},
        {"top_p": 0.9},
        {"min_p": 0.2, "temperature": 0.4},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "top_k": 9},
    ],
    ids=repr,
)
def test_the_default_order_written_out_changes_nothing(options):
    params = SamplingParams.from_options(**OFF | options)
    named = SamplingParams.from_options(**OFF | options, samplers=DEFAULT_ORDER)
    logits = random_logits(5)
    ids = [4, 4, 9, 2, 9]
    np.testing.assert_allclose(
        sampling_distribution(logits, ids, 2, named),
        sampling_distribution(logits, ids, 2, params),
        rtol=1e-9,
        atol=1e-12,
    )


def test_penalties_apply_where_they_are_placed():
    """A penalty after top_k changes the weights of the tokens that top_k left. One before it
    changes which tokens are left.
    """
    logits = np.array([5.0, 4.0, 3.0], np.float32)
    options = OFF | {"top_k": 1, "presence_penalty": 2.0}
    for order, chosen in ((("penalties", "top_k"), 1), (("top_k", "penalties"), 0)):
        params = SamplingParams.from_options(**options, samplers=order)
        assert sampling_distribution(logits, [0], 0, params).argmax() == chosen
        assert make_sampler(params, 1)(logits, [0], 0) == chosen
    without = SamplingParams.from_options(**options, samplers=("top_k",))
    assert make_sampler(without, 1)(logits, [0], 0) == 0
    greedy = SamplingParams(temperature=0.0, presence_penalty=2.0, samplers=("top_k",))
    assert make_sampler(greedy, 1)(logits, [0], 0) == 0
    greedy = SamplingParams(temperature=0.0, presence_penalty=2.0)
    assert make_sampler(greedy, 1)(logits, [0], 0) == 1


def test_repeat_last_n_bounds_the_penalties():
    logits = np.zeros(8, np.float32)
    ids = [1, 2, 3, 4, 5]

    def penalized(**options):
        params = SamplingParams(temperature=1.0, **options)
        shares = sampling_distribution(logits, ids, 2, params)
        return set(np.flatnonzero(shares < shares.max()).tolist())

    for window, seen, said in (
        (-1, {1, 2, 3, 4, 5}, {3, 4, 5}),
        (2, {4, 5}, {4, 5}),
        (0, *2 * [set()]),
    ):
        # A penalty has no effect on a logit of 0, so shift all.
        logits[:] = 1.0
        assert penalized(repetition_penalty=2.0, repeat_last_n=window) == seen
        assert penalized(frequency_penalty=1.0, repeat_last_n=window) == said
    assert penalized(presence_penalty=1.0, repeat_last_n=4) == {3, 4, 5}


def test_xtc_uses_its_own_random_number():
    logits = np.log(np.array([0.5, 0.3, 0.2])).astype(np.float32)
    params = SamplingParams(**OFF, xtc_probability=0.4)
    positions = range(3000)
    applied = [uniform(9, at, XTC_STREAM) < 0.4 for at in positions]
    assert abs(np.mean(applied) - 0.4) < 0.03
    draws = [uniform(9, at) for at in positions]
    assert abs(np.corrcoef(applied, draws)[0, 1]) < 0.05
    sampler = make_sampler(params, 9)
    for at in range(1, 200):
        token = sampler(logits, [0] * at, 1)
        expected = 2 if applied[at] else int(np.searchsorted([0.5, 0.8], draws[at], "right"))
        assert token == expected


def test_stream_0_equals_the_draw_without_streams():
    """Stream 0 keeps the random numbers of versions without streams."""
    for seed, at in itertools.product((0, 7, 2**64 - 1), (0, 1, 1000)):
        key = np.array([seed, at], np.uint64)
        assert uniform(seed, at) == np.random.Generator(np.random.Philox(key=key)).random()


def mirostat(logits_of, params, seed, num_prompt, count):
    """Run llama.cpp's mirostat 2.0 with the random numbers of this package."""
    mu = 2 * params.mirostat_tau
    ids = list(range(num_prompt))
    mus = []
    for _ in range(count):
        mus.append(mu)
        scaled = logits_of(ids).astype(float) / params.temperature
        order = np.argsort(-scaled, kind="stable")
        probs = np.exp(scaled - scaled.max())
        probs /= probs.sum()
        kept = [token for token in order if -math.log2(probs[token]) <= mu] or [order[0]]
        kept.sort()  # the draw is in the order of token ids
        shares = probs[kept] / probs[kept].sum()
        place = int(np.searchsorted(np.cumsum(shares), uniform(seed, len(ids)), side="right"))
        place = min(place, len(kept) - 1)
        ids.append(int(kept[place]))
        mu -= params.mirostat_eta * (-math.log2(shares[place]) - params.mirostat_tau)
    return ids[num_prompt:], mus


@pytest.mark.parametrize("tau", [0.0, 2.0, 5.0])
@pytest.mark.parametrize("eta", [0.0, 0.1, 1.0])
def test_mirostat_equals_the_reference(tau, eta):
    params = SamplingParams(
        temperature=0.9, mirostat=2, mirostat_tau=tau, mirostat_eta=eta, top_k=1, samplers=("xtc",)
    )

    def logits_of(ids):
        return random_logits(len(ids), 500)

    expected, _ = mirostat(logits_of, params, 3, 4, 60)
    sampler = make_sampler(params, 3)
    ids = [0, 1, 2, 3]
    for _ in range(60):
        ids.append(sampler(logits_of(ids), ids, 4))
    assert ids[4:] == expected


def test_mirostat_resumes_from_any_earlier_position():
    params = SamplingParams(temperature=1.0, mirostat=2, mirostat_eta=0.7)
    one = Mirostat(params)
    for at, p in enumerate((0.5, 0.1, 0.9, 0.01)):
        one.note(10 + at, 10, p)
    other = Mirostat(params)
    for at, p in ((0, 0.5), (1, 0.3)):
        other.note(10 + at, 10, p)
    one.note(11, 10, 0.3)
    assert one.mu(10, 10) == 10.0
    assert [one.mu(at, 10) for at in (10, 11, 12)] == [other.mu(at, 10) for at in (10, 11, 12)]


def test_masked_tokens_are_not_candidates():
    """Each sampler of the chain considers only the tokens that a grammar left."""
    logits = np.full(50, -np.inf, np.float32)
    logits[[7, 9]] = 1.0, 0.9
    for options in CASES:
        params = SamplingParams.from_options(**OFF | options)
        found = np.flatnonzero(sampling_distribution(logits, [1, 2], 1, params))
        assert set(found.tolist()) <= {7, 9}
    params = SamplingParams(**OFF, mirostat=2)
    assert make_sampler(params, 0)(logits, [1], 1) in (7, 9)
    every = np.full(50, -np.inf, np.float32)
    assert make_sampler(SamplingParams(**OFF, typical_p=0.5), 0)(every, [1], 1) == 0


@pytest.mark.parametrize(
    "named",
    [
        {"typical_p": 0.9},
        {"top_n_sigma": 1.0},
        {"dynatemp_range": 0.1},
        {"xtc_probability": 0.1},
        {"mirostat": 2},
    ],
    ids=repr,
)
def test_naming_a_sampler_turns_on_sampling(named):
    assert SamplingParams.from_options(**named).samples
    assert not SamplingParams.from_options(**named, temperature=0.0).samples
    assert not SamplingParams.from_options(**named, do_sample=False).samples


def test_sampler_names_and_aliases():
    assert SamplingParams(samplers=["typical_p", "top-k"]).samplers == ("typ_p", "top_k")
    assert SamplingParams(samplers="top_k;temp").samplers == ("top_k", "temperature")
    assert SamplingParams(samplers="xtc").samplers == ("xtc",)
    letters = "".join(SAMPLER_LETTERS)
    assert SamplingParams(samplers=letters).samplers == tuple(SAMPLER_LETTERS.values())
    assert SamplingParams(samplers=()).samplers == ()
    assert sorted(SAMPLER_LETTERS.values()) == sorted(SAMPLERS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samplers": ["tfs_z"]}, "samplers holds 'tfs_z'"),
        ({"samplers": "qq"}, "samplers holds 'q'"),
        ({"samplers": [1]}, "samplers holds '1'"),
        ({"samplers": 3}, "samplers=3 must be"),
        ({"samplers": ["xtc"] * 33}, "more than 32"),
        ({"mirostat": 1}, "use mirostat=2"),
        ({"mirostat": 3}, "mirostat"),
        ({"typical_p": 0.0}, "typical_p"),
        ({"dry_base": 0.5}, "dry_base"),
        ({"dry_sequence_breakers": ["x" * 41]}, "dry_sequence_breakers holds"),
        ({"dry_sequence_breakers": [str(i) for i in range(33)]}, "33 strings; at most 32"),
        ({"bad_words": [""]}, "bad_words holds ''"),
        ({"bad_words": 5}, "bad_words=5"),
        ({"min_tokens": 65}, "min_tokens=65 must be at most max_new_tokens=64"),
    ],
    ids=repr,
)
def test_invalid_sampler_options_are_refused(options, message):
    with pytest.raises(RequestError, match=message.replace("(", r"\(")):
        SamplingParams.from_options(**options)
