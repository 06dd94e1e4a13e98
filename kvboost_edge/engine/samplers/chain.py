"""A chain of samplers that narrow the candidates for the next token in a given order.

The rules are those of llama.cpp, in float64. Typical sampling is by Meister et al., "Locally
Typical Sampling" (2022), top-n-sigma by Tang et al., "Top-nσ: Not All Logits Are You Need" (2024),
XTC by p-e-w, and mirostat 2.0 by Basu et al., "Mirostat" (2020).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvboost_edge.engine.request.request import SamplingParams
from kvboost_edge.engine.request.sampler_order import DEFAULT_ORDER
from kvboost_edge.engine.samplers.numbers import XTC_STREAM, largest_places, uniform

__all__ = ["Candidates", "Mirostat", "SamplerChain", "make_chain"]

Ids = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]
Adjust = Callable[[Numbers, Sequence[int], int], None]

# Sorting 150,000 numbers takes about 10 ms, so only the first ones are sorted if they suffice.
_FIRST = 1024
_LEAST_TEMPERATURE = 1e-200  # keeps quotients finite
_MOST_INFILL = 256  # tokens whose texts infill compares, each with each other
_LEAST_INFILL = 0.2


class Candidates:
    """Tokens that may come next.

    Attributes:
        ids: int64 [num_candidates].
        logits: float64 [num_candidates].
        given: logits of the whole vocabulary before any sampler, float32 [vocab_size].
    """

    def __init__(self, logits: npt.NDArray[np.float32]) -> None:
        self.given = logits
        self.ids: Ids = np.flatnonzero(logits > -np.inf).astype(np.int64, copy=False)
        self.logits: Numbers = logits[self.ids].astype(np.float64)
        if not len(self.ids):  # everything is masked, so take the first token
            self.ids = np.zeros(1, np.int64)
            self.logits = np.zeros(1)

    def keep(self, places: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> None:
        """Keep only some of the candidates, in the given order."""
        self.ids = self.ids[places]
        self.logits = self.logits[places]

    def probabilities(self) -> Numbers:
        """Return the probability of each candidate. They add up to 1."""
        weights = np.exp(self.logits - self.logits.max())
        return np.asarray(weights / weights.sum(), np.float64)

    def adjust(self, step: Adjust, token_ids: Sequence[int], num_prompt: int) -> None:
        """Apply a function of logits [vocab_size] to the candidates."""
        whole = np.full(len(self.given), -np.inf)
        whole[self.ids] = self.logits
        step(whole, token_ids, num_prompt)
        self.logits = whole[self.ids]


Step = Callable[[Candidates, Sequence[int], int], None]


class SamplerChain:
    """The samplers of one request, in order."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = steps

    def __call__(
        self, logits: npt.NDArray[np.float32], token_ids: Sequence[int], num_prompt: int
    ) -> tuple[Ids, Numbers]:
        """Return the ids of the remaining tokens and their probabilities."""
        left = Candidates(logits)
        for step in self._steps:
            step(left, token_ids, num_prompt)
        return left.ids, left.probabilities()

    def note(self, position: int, num_prompt: int, probability: float) -> None:
        """Record the probability with which the token at `position` was drawn."""


class Mirostat(SamplerChain):
    """Temperature and mirostat 2.0.

    The limit of surprise `mu` for a token depends on all tokens drawn before. It is kept for each
    position of the output. A position that is drawn again replaces what followed from the first
    draw.
    """

    def __init__(self, params: SamplingParams) -> None:
        super().__init__([_temperature(params), self._cut])
        self._tau = params.mirostat_tau
        self._eta = params.mirostat_eta
        self._mus = [2 * self._tau]

    def mu(self, position: int, num_prompt: int) -> float:
        """Return the limit of surprise for the token at `position`, in bits."""
        return self._mus[min(position - num_prompt, len(self._mus) - 1)]

    def note(self, position: int, num_prompt: int, probability: float) -> None:
        mu = self.mu(position, num_prompt)
        del self._mus[position - num_prompt + 1 :]
        self._mus.append(mu - self._eta * (-math.log2(probability) - self._tau))

    def _cut(self, left: Candidates, token_ids: Sequence[int], num_prompt: int) -> None:
        probs = left.probabilities()
        with np.errstate(divide="ignore"):
            kept = -np.log2(probs) <= self.mu(len(token_ids), num_prompt)
        left.keep(kept if kept.any() else _best(left))


def make_chain(
    params: SamplingParams,
    seed: int,
    adjusts: Mapping[str, Adjust],
    *,
    stop_ids: Collection[int] = (),
    texts: Sequence[bytes] = (),
) -> SamplerChain | None:
    """Return the chain of a request that samples.

    Args:
        adjusts: functions for the penalties that `samplers` places in the chain.
        stop_ids: token ids that end the output.
        texts: text of each token, if `samplers` contains infill.

    Returns:
        The chain, or None if temperature, top_k, top_p and min_p in their usual order suffice.
    """
    if params.mirostat:
        return Mirostat(params)
    if not params.uses_chain:
        return None
    own: dict[str, Step | None] = {
        **{name: _adjusting(adjust) for name, adjust in adjusts.items()},
        "top_n_sigma": _top_n_sigma(params),
        "temperature": _temperature(params),
        "top_k": _top_k(params),
        "typ_p": _typical(params),
        "top_p": _top_p(params),
        "min_p": _min_p(params),
        "xtc": _xtc(params, seed),
        "infill": _infill(stop_ids, texts),
    }
    names = DEFAULT_ORDER if params.samplers is None else params.samplers
    found = (own.get(name) for name in names)
    return SamplerChain([step for step in found if step is not None])


def _adjusting(adjust: Adjust) -> Step:
    return lambda left, token_ids, num_prompt: left.adjust(adjust, token_ids, num_prompt)


def _best(left: Candidates) -> npt.NDArray[np.int64]:
    return np.array([left.logits.argmax()])


def _top_n_sigma(params: SamplingParams) -> Step | None:
    if params.top_n_sigma <= 0:
        return None

    def cut(left: Candidates, token_ids: Sequence[int], num_prompt: int) -> None:
        logits = left.logits
        left.keep(logits >= logits.max() - params.top_n_sigma * logits.std())

    return cut


def _temperature(params: SamplingParams) -> Step:
    temperature = 1.0 if params.temperature is None else params.temperature
    span = params.dynatemp_range
    lowest = max(0.0, temperature - span)
    highest = temperature + span

    def fixed(left: Candidates, token_ids: Sequence[int], num_prompt: int) -> None:
        _scale(left, temperature)

    def dynamic(left: Candidates, token_ids: Sequence[int], num_prompt: int) -> None:
        if len(left.ids) > 1:
            share = _entropy(left.probabilities()) / math.log(len(left.ids))
            _scale(left, lowest + (highest - lowest) * share**params.dynatemp_exponent)

    return dynamic if span > 0 else fixed


def _scale(left: Candidates, temperature: float) -> None:
    if temperature <= 0:
        left.keep(_best(left))
        return
    left.logits = left.logits / max(temperature, _LEAST_TEMPERATURE)


def _entropy(probs: Numbers) -> float:
    """Return the entropy of a distribution in nats."""
    probs = probs[probs > 0]
    return max(0.0, float(-(probs * np.log(probs)).sum()))


def _top_k(params: SamplingParams) -> Step | None:
    if not params.top_k:
        return None
    count = params.top_k

    def cut(left: Candidates, token_ids: Sequence[int], num_prompt: int) -> None:
        if count < len(left.ids):
            left.keep(largest_places(left.logits, count))

    return cut


def _typical(params: SamplingParams) -> Step | None:
    if params.typical_p >= 1:
        return None

    def cut(left: Candidates, token_ids: Sequence[int], num_prompt: int) -> None:
        probs = left.probabilities()
        with np.errstate(divide="ignore"):
            unlike = np.abs(-np.log(probs) - _entropy(probs))
        left.keep(_until(probs, -unlike, params.typical_p, params.min_keep))

    return cut


def _top_p(params: SamplingParams) -> Step | None:
    if params.top_p is None or params.top_p >= 1:
        return None
    share = params.top_p

    def cut(left: Candidates, token_ids: Sequence[int], num_prompt: int) -> None:
        probs = left.probabilities()
        left.keep(_until(probs, left.logits, share, params.min_keep))

    return cut


def _until(probs: Numbers, order: Numbers, share: float, min_keep: int) -> Ids:
    """Return the first places, by descending `order`, whose probabilities add up to `share`."""
    places = largest_places(order, _FIRST)
    if len(places) < min_keep or probs[places].sum() < share:
        places = largest_places(order, len(order))
    count = int(np.searchsorted(np.cumsum(probs[places]), share, side="left")) + 1
    return places[: max(count, min_keep)]


def _min_p(params: SamplingParams) -> Step | None:
    if not params.min_p:
        return None
    least = math.log(params.min_p)

    def cut(left: Candidates, token_ids: Sequence[int], num_prompt: int) -> None:
        kept = left.logits >= left.logits.max() + least
        if kept.sum() >= params.min_keep:
            left.keep(kept)
        else:
            left.keep(largest_places(left.logits, params.min_keep))

    return cut


def _xtc(params: SamplingParams, seed: int) -> Step | None:
    if params.xtc_probability <= 0 or params.xtc_threshold > 0.5:
        return None

    def cut(left: Candidates, token_ids: Sequence[int], num_prompt: int) -> None:
        if uniform(seed, len(token_ids), XTC_STREAM) >= params.xtc_probability:
            return
        likely = np.flatnonzero(left.probabilities() >= params.xtc_threshold)
        if len(likely) < 2 or len(left.ids) - len(likely) + 1 < params.min_keep:
            return
        # All but the least likely of them go; of equally likely tokens, the one with the largest id
        # stays.
        stays = likely[np.lexsort((-left.ids[likely], left.logits[likely]))[0]]
        kept = np.ones(len(left.ids), np.bool_)
        kept[likely] = False
        kept[stays] = True
        left.keep(kept)

    return cut


def _infill(stop_ids: Collection[int], texts: Sequence[bytes]) -> Step:
    """Return llama.cpp's sampler for text between a prefix and a suffix.

    It ends the output if no continuation is likely. Otherwise it keeps the tokens that have,
    together with the tokens that begin or continue their text, a probability of at least 0.2. It is
    meant to run after top_k, because it compares only the 256 most likely tokens.
    """
    every_end = np.array(sorted(stop_ids), np.int64)

    def cut(left: Candidates, token_ids: Sequence[int], num_prompt: int) -> None:
        ends = every_end[every_end < len(left.given)]
        left.keep(largest_places(left.logits, len(left.ids)))
        probs = left.probabilities()
        is_end = np.isin(left.ids, ends)
        ending = probs[is_end].sum()
        if 3 * ending * len(probs) > probs.sum() - ending:
            left.keep(is_end)
            return
        count = min(len(probs), _MOST_INFILL)
        left.keep(np.arange(count))
        is_end = is_end[:count]
        compared = [
            b"" if end or token >= len(texts) else texts[token]
            for token, end in zip(left.ids, is_end, strict=True)
        ]
        merged = np.array(_merged(probs[:count].tolist(), compared))
        kept = is_end | (merged >= _LEAST_INFILL)
        num_texts = int((kept & ~is_end).sum())
        if not num_texts:
            _end(left, ends)
            return
        shares = merged / merged[kept].sum()
        left.keep(kept & (is_end | (shares >= 1 / (num_texts + 1))))

    return cut


def _merged(probs: Sequence[float], texts: Sequence[bytes]) -> list[float]:
    """Add up the probabilities of tokens of which one's text begins the other's.

    The more likely one of them gets the sum, and the other one 0.

    Args:
        probs: probabilities in descending order.
        texts: text of each token. Tokens with an empty text keep their probability.
    """
    found = list(probs)
    left = {place for place, text in enumerate(texts) if text}
    for short in sorted(left):
        for long in sorted(left - {short}):
            if short in left and texts[long].startswith(texts[short]):
                into, out = (long, short) if found[long] > found[short] else (short, long)
                found[into] += found[out]
                found[out] = 0.0
                left.discard(out)
    return found


def _end(left: Candidates, ends: Ids) -> None:
    """Keep only the most likely token that ends the output, if one is allowed."""
    allowed = ends[left.given[ends] > -np.inf]
    if not len(allowed):
        left.keep(_best(left))
        return
    left.ids = allowed[[left.given[allowed].argmax()]]
    left.logits = np.zeros(1)
