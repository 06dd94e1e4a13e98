"""Sampling parameters and immutable requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvboost_edge.config import GenerationMode
from kvboost_edge.engine.request.requested_grammar import Grammar
from kvboost_edge.engine.request.sampler_order import DEFAULT_ORDER, SAMPLERS, read_samplers
from kvboost_edge.engine.request.terms import Terms
from kvboost_edge.engine.request.words import NO_WORDS, RequestWords
from kvboost_edge.errors import RequestError
from kvboost_edge.options import as_float, as_int, check_options, option, refuse_unknown
from kvboost_edge.reuse.recompute import Repair
from kvboost_edge.shareable import ALL_TOKENS

if TYPE_CHECKING:
    from kvboost_edge.text.turns.thinking import ReasoningLimit

__all__ = [
    "Request",
    "RequestArrival",
    "RequestFeature",
    "RequestInputs",
    "SamplingParams",
    "check_mode",
    "resolve_sampling",
]

_SAMPLING_KEYWORDS = ("temperature", "top_p", "top_k", "min_p", "seed")
_MAX_LOGPROBS = 100
_MAX_STOPS = 64
_MAX_MESSAGE = 1024  # characters of reasoning_budget_message
# These limits keep the arithmetic on logits finite. Practical values are far below them.
_MAX_TEMPERATURE = 1e3
_MAX_REPETITION_PENALTY = 1e3
_MAX_LOGIT_BIAS = 1e4
_MAX_BAD_WORDS = 256
_MAX_BREAKERS = 32
_MAX_BREAKER_LENGTH = 40
_MAX_WORD_LENGTH = 256


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stop parameters, which raise RequestError if invalid.

    The fields are listed in docs/reference/options.md.
    """

    temperature: float | None = option(
        None,
        "Sampling temperature. 0 always takes the most likely token",
        float,
        low=0,
        high=_MAX_TEMPERATURE,
        unset="the model's own or 0.7, if tokens are sampled",
    )
    do_sample: bool | None = option(
        None,
        "Sample tokens instead of always taking the most likely one",
        bool,
        unset="true if the temperature is not 0 and temperature, top_p, top_k, min_p, seed, "
        "typical_p, top_n_sigma, dynatemp_range, xtc_probability or mirostat is given",
    )
    top_p: float | None = option(
        None,
        "Sample from the most likely tokens whose probabilities add up to this value",
        float,
        low=0,
        high=1,
        open_low=True,
        unset="the model's own or 0.95, if tokens are sampled",
    )
    top_k: int | None = option(
        None,
        "Number of most likely tokens to sample from. 0 means all tokens",
        int,
        low=0,
        unset="the model's own or 0, if tokens are sampled",
    )
    min_p: float | None = option(
        None,
        "Minimum probability of a token to sample, as a fraction of the probability of the "
        "most likely token",
        float,
        low=0,
        high=1,
        unset="the model's own or 0.05, if tokens are sampled",
    )
    typical_p: float = option(
        1.0,
        "Sample from the tokens whose surprise is closest to the expected one and whose "
        "probabilities add up to this value. 1 means all tokens",
        float,
        low=0,
        high=1,
        open_low=True,
    )
    top_n_sigma: float = option(
        0.0,
        "Sample from tokens whose logits are within this number of standard deviations of the "
        "largest logit. 0 or less means all tokens",
        float,
        unit="standard deviations",
        low=-1,
        high=1000,
    )
    dynatemp_range: float = option(
        0.0,
        "Half the range of the dynamic temperature, which goes from temperature minus this value "
        "to temperature plus this value with the entropy of the tokens. 0 keeps the temperature "
        "fixed",
        float,
        low=0,
        high=_MAX_TEMPERATURE,
    )
    dynatemp_exponent: float = option(
        1.0,
        "Exponent of the relative entropy from which the dynamic temperature is computed",
        float,
        low=0,
        high=100,
    )
    xtc_probability: float = option(
        0.0,
        "Probability with which XTC removes, for one token, all tokens above xtc_threshold but "
        "the least likely of them",
        float,
        low=0,
        high=1,
    )
    xtc_threshold: float = option(
        0.1,
        "Minimum probability of the tokens that XTC removes. Above 0.5, XTC is off",
        float,
        low=0,
        high=1,
    )
    mirostat: int = option(
        0,
        "2 samples with mirostat 2.0, which replaces all samplers but penalties, dry and "
        "temperature. 0 turns it off",
        int,
        low=0,
        high=2,
    )
    mirostat_tau: float = option(
        5.0, "Surprise that mirostat aims at", float, unit="bits", low=0, high=100
    )
    mirostat_eta: float = option(
        0.1, "Learning rate of mirostat, by which it adapts to each token", float, low=0, high=10
    )
    min_keep: int = option(
        0,
        "Minimum number of tokens that typical_p, top_p, min_p and xtc each keep",
        int,
        unit="tokens",
        low=0,
        high=1_000_000,
    )
    samplers: tuple[str, ...] | None = option(
        None,
        f"Order of the samplers, of {', '.join(SAMPLERS)}. Those left out do not run. May "
        "also be a string of names separated by ; or of llama.cpp's letters",
        unset=",".join(DEFAULT_ORDER),
    )
    seed: int | None = option(
        None,
        "Seed of the random number generator",
        int,
        low=0,
        high=2**64 - 1,
        unset="a seed chosen by the engine",
    )
    repetition_penalty: float | None = option(
        None,
        "Penalty for tokens that occur in the prompt or the output. Their positive logits are "
        "divided by it and their negative logits multiplied by it",
        float,
        low=1 / _MAX_REPETITION_PENALTY,
        high=_MAX_REPETITION_PENALTY,
        unset="1 if decoding is greedy, otherwise the model's own or 1",
    )
    presence_penalty: float = option(
        0.0,
        "Value subtracted from the logits of tokens that occur in the output",
        float,
        low=-2,
        high=2,
    )
    frequency_penalty: float = option(
        0.0,
        "Value subtracted from the logit of a token for each time that the token occurs in the "
        "output",
        float,
        low=-2,
        high=2,
    )
    repeat_last_n: int = option(
        -1,
        "Number of last tokens that the three penalties cover. -1 means all, and 0 turns the "
        "penalties off",
        int,
        unit="tokens",
        low=-1,
        high=2**24,
    )
    dry_multiplier: float = option(
        0.0,
        "Strength of DRY, a penalty for tokens that continue a repetition. 0 turns it off. The "
        "penalty is dry_multiplier * dry_base ^ (length of the repetition - dry_allowed_length)",
        float,
        low=0,
        high=1000,
    )
    dry_base: float = option(
        1.75, "Base of DRY's penalty, which grows with the repetition", float, low=1, high=100
    )
    dry_allowed_length: int = option(
        2,
        "Length of the shortest repetition that DRY penalizes",
        int,
        unit="tokens",
        low=1,
        high=2**24,
    )
    dry_penalty_last_n: int = option(
        -1,
        "Number of last tokens in which DRY looks for repetitions. -1 means all",
        int,
        unit="tokens",
        low=-1,
        high=2**24,
    )
    dry_sequence_breakers: tuple[str, ...] = option(
        ("\n", ":", '"', "*"),
        f"Up to {_MAX_BREAKERS} strings of up to {_MAX_BREAKER_LENGTH} characters at which DRY "
        "ends a repetition",
    )
    bad_words: tuple[str, ...] = option(
        (), f"Up to {_MAX_BAD_WORDS} words that the output does not contain", unset="none"
    )
    logit_bias: Mapping[int, float] | None = option(
        None,
        "Mapping of token ids to values that are added to their logits, each in "
        f"[{-_MAX_LOGIT_BIAS:g}, {_MAX_LOGIT_BIAS:g}]",
        unset="none",
    )
    logprobs: int | None = option(
        None,
        "Number of most likely tokens to report with the log probability of each generated "
        "token. Penalties and temperature are not applied to these values",
        int,
        low=0,
        high=_MAX_LOGPROBS,
        unset="no log probabilities",
    )
    prompt_logprobs: int | None = option(
        None,
        "Number of most likely tokens to report with the log probability of each prompt token. "
        "The prompt is then computed in full instead of taken from the cache",
        int,
        low=0,
        high=_MAX_LOGPROBS,
        unset="no log probabilities",
    )
    stop: tuple[str, ...] = option(
        (), f"Up to {_MAX_STOPS} strings that end the output. The output does not include them"
    )
    include_stop_str_in_output: bool = option(
        False, "Include the stop string or stop token that ended the output in its text", bool
    )
    stop_token_ids: tuple[int, ...] = option(
        (), "Token ids that end the output like an end-of-sequence token, even with ignore_eos"
    )
    ignore_eos: bool = option(False, "Continue after an end-of-sequence token", bool)
    max_new_tokens: int | None = option(
        64,
        "Maximum number of tokens to generate. None generates until the context or the KV cache is "
        "full, and 0 only computes the prompt",
        int,
        unit="tokens",
        low=0,
        optional=True,
    )
    min_tokens: int = option(
        0,
        "Minimum number of tokens to generate before an end-of-sequence token, a stop token or "
        "a stop string ends the output. A complete structured output ends earlier",
        int,
        unit="tokens",
        low=0,
        high=2**24,
    )
    min_indent: int = option(
        0,
        "Minimum indentation of the lines after the first one. The output ends before the first "
        "character of a line with less, also of an empty line. 0 sets no minimum",
        int,
        unit="spaces and tabs",
        low=0,
        high=2**16,
    )
    max_decode_ms: int | None = option(
        None,
        "Time from the first token after which the next line break ends the output",
        int,
        unit="ms",
        low=1,
        high=2**31,
        unset="no limit",
    )
    json_schema: Mapping[str, Any] | str | bool | None = option(
        None,
        "JSON schema that the output must match, as a dict or JSON text. Only one of "
        "json_schema, regex, grammar and choice may be given (extra [structured])",
        unset="none",
    )
    regex: str | None = option(None, "Regular expression that the output must match", unset="none")
    grammar: str | None = option(
        None, "Grammar in Lark or GBNF format that the output must match", unset="none"
    )
    choice: tuple[str, ...] | None = option(
        None, "List of strings. The output must be one of them", unset="none"
    )
    reasoning_budget: int | None = option(
        None,
        "Maximum number of tokens of the model's reasoning, after which its end is forced and the "
        "answer follows. 0 ends the reasoning at once, and -1 sets no limit",
        int,
        unit="tokens",
        low=-1,
        high=2**24,
        unset="no limit",
    )
    reasoning_budget_message: str | None = option(
        None,
        "Text that ends a reasoning cut by reasoning_budget, before its closing marker",
        str,
        high=_MAX_MESSAGE,
        unset="none",
    )

    @classmethod
    def from_options(cls, **options: Any) -> SamplingParams:
        """Create parameters from keyword options.

        Raises:
            RequestError: an option is unknown or its value is invalid.
        """
        known = (f.name for f in dataclasses.fields(cls))
        refuse_unknown("sampling option", options, known, RequestError)
        return cls(**options)

    def __post_init__(self) -> None:
        check_options(self, RequestError)
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(
            self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids)
        )
        object.__setattr__(self, "logit_bias", _logit_bias(self.logit_bias))
        if self.reasoning_budget_message and self.reasoning_budget is None:
            raise RequestError(
                "reasoning_budget_message has no effect without reasoning_budget; give both"
            )
        if self.samplers is not None:
            object.__setattr__(self, "samplers", read_samplers(self.samplers))
        object.__setattr__(
            self,
            "bad_words",
            _texts("bad_words", self.bad_words, _MAX_BAD_WORDS, _MAX_WORD_LENGTH),
        )
        object.__setattr__(
            self,
            "dry_sequence_breakers",
            _texts(
                "dry_sequence_breakers",
                self.dry_sequence_breakers,
                _MAX_BREAKERS,
                _MAX_BREAKER_LENGTH,
            ),
        )
        if self.mirostat == 1:
            raise RequestError("mirostat=1 is not supported; use mirostat=2, the newer algorithm")
        if self.max_new_tokens is not None and self.min_tokens > self.max_new_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens} must be at most max_new_tokens={self.max_new_tokens}"
            )

    @property
    def samples(self) -> bool:
        """True if tokens are sampled at random, False if the most likely token is chosen."""
        if self.temperature == 0.0:
            return False
        if self.do_sample is not None:
            return self.do_sample
        named = any(getattr(self, name) is not None for name in _SAMPLING_KEYWORDS)
        return named or bool(self.mirostat) or self._narrows

    @property
    def _narrows(self) -> bool:
        """True if a sampler is on that only a chain has."""
        return (
            self.typical_p < 1
            or self.top_n_sigma > 0
            or self.dynatemp_range > 0
            or self.xtc_probability > 0
        )

    @property
    def uses_chain(self) -> bool:
        """True if temperature, top_k, top_p and min_p in their usual order do not suffice."""
        return self.samplers is not None or self.min_keep > 1 or self._narrows

    @property
    def uses_penalties(self) -> bool:
        """True if the repetition, presence and frequency penalties are applied."""
        return self.repeat_last_n != 0 and self._has("penalties")

    @property
    def uses_dry(self) -> bool:
        """True if DRY penalizes repetitions."""
        return self.dry_multiplier > 0 and self.dry_penalty_last_n != 0 and self._has("dry")

    @property
    def uses_infill(self) -> bool:
        """True if the sampler infill runs."""
        return self.samples and not self.mirostat and "infill" in (self.samplers or ())

    def _has(self, sampler: str) -> bool:
        return self.samplers is None or bool(self.mirostat) or sampler in self.samplers

    @property
    def reads_vocabulary(self) -> bool:
        """True if words must be looked up in the vocabulary, which may take a while."""
        return self.uses_dry or self.uses_infill or bool(self.bad_words)

    @property
    def fits(self) -> bool:
        """True if the output is structured, which requires compiling a grammar."""
        return any(
            each is not None for each in (self.json_schema, self.regex, self.grammar, self.choice)
        )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Check that token ids are in the model's vocabulary.

        Raises:
            RequestError: a token id is out of range.
        """
        for name, ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("logit_bias", tuple(self.logit_bias or ())),
        ):
            for token_id in ids:
                if not 0 <= token_id < vocab_size:
                    raise RequestError(
                        f"{name} holds token id {token_id}; use ids in 0..{vocab_size - 1}"
                    )


class RequestArrival(NamedTuple):
    """The arrival of a request and the data that came with it.

    Attributes:
        at: start of the caller's call, in seconds of `time.perf_counter`.
        prompt_text: text to report as the result's `prompt`. None reports the prompt's text or its
            decoded token ids.
        prefix_hashes: the caller's hashes of the prompt's first full blocks, as concatenated
            32-byte values. `hashing.known_hash` handles wrong ones.
    """

    at: float
    prompt_text: str | None = None
    prefix_hashes: bytes = b""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A checked request. Times are in seconds of `time.perf_counter`.

    Attributes:
        index: arrival number in this engine. Requests with lower numbers are served first.
        prompt: text of the prompt, for the result.
        prompt_ids: token ids of the prompt.
        params: sampling parameters.
        terms: other options of the request, see `Terms`.
        max_tokens: maximum number of tokens in prompt and output together.
        seed: the caller's seed, or one drawn for the request, see `Seeds`.
        stop_ids: token ids that end the output. They are `stop_token_ids` and, without ignore_eos,
            the model's EOS ids.
        root: root of the prefix hashes, derived from tenant, salt and prefill.
        entered_at: start of the caller's call.
        tokenized_at: time at which tokenizing the prompt ended.
        logits_start: index of the first token whose logits are returned, or None to generate text.
        wants_states: whether to return hidden states after the final norm instead of logits.
        stores_nothing: whether the request is a single pass whose KV is not cached.
        prefill_only: whether to compute the prompt but generate nothing.
        suppressed: token ids that the model's files exclude from answers.
        words: bad words and DRY's sequence breakers as token ids.
        tenant: digest of the tenant, equal to the root without salt and sparse prefill.
        cache_key: digest of the terms' cache_key, see engine/schedule/retention.py. None without a
            key.
        snapshot_hints: positions of the prompt at which snapshots of recurrent state are kept.
        repair: recompute settings for tokens reused from other positions, or None without such
            reuse.
        gate: status of the quality gate, see `GenerationResult`.
        max_draft_tokens: maximum number of draft tokens per step, or 0 for none.
        always_drafts: whether to verify draft tokens even if that is not expected to save time.
        fills_drafter: whether an MTP head computes its KV of the prompt for later requests if
            this one generates nothing.
        grammar: grammar that the answer must match, or None for any text.
        reasoning: limit of the answer's reasoning, or None without a limit.
        prefix_hashes: the caller's hashes of the prompt's first full blocks, see `RequestArrival`.
        prefill: how the prompt is computed, "exact" or "sparse".
        approximations: labels of the options that make the answer approximate.
        num_shareable: number of leading tokens whose KV may come from the cache and be added to
            it, see `shareable_end`.
    """

    index: int
    prompt: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    terms: Terms
    max_tokens: int
    seed: int
    stop_ids: frozenset[int]
    root: bytes
    entered_at: float
    tokenized_at: float
    logits_start: int | None = None
    wants_states: bool = False
    stores_nothing: bool = False
    prefill_only: bool = False
    suppressed: tuple[int, ...] = ()
    words: RequestWords = NO_WORDS
    tenant: bytes = b""
    cache_key: bytes | None = None
    snapshot_hints: tuple[int, ...] = ()
    repair: Repair | None = None
    gate: str = ""
    max_draft_tokens: int = 0
    fills_drafter: bool = False
    grammar: Grammar | None = None
    reasoning: ReasoningLimit | None = None
    always_drafts: bool = False
    prefix_hashes: bytes = b""
    prefill: str = "exact"
    approximations: tuple[str, ...] = ()
    num_shareable: int = ALL_TOKENS

    @property
    def rank(self) -> tuple[int, int]:
        """Sort key for scheduling. The smallest key is served first."""
        return self.terms.level, self.index

    @property
    def mode(self) -> GenerationMode:
        """The mode, which sets how the request uses the cache."""
        return GenerationMode(self.terms.mode)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def shareable_ids(self) -> tuple[int, ...]:
        """The prompt tokens whose KV may be shared."""
        return self.prompt_ids[: self.num_shareable]

    @property
    def shares_prompt(self) -> bool:
        """True if all prompt tokens but the last may come from the cache."""
        bypassed = self.logits_start is not None or self.params.prompt_logprobs is not None
        return self.uses_cache and not bypassed

    @property
    def min_draft_tokens(self) -> int:
        """Minimum number of draft tokens of a draft, which is at most their maximum."""
        return min(self.terms.min_draft_tokens, self.max_draft_tokens)

    @property
    def uses_cache(self) -> bool:
        """True if some of the request's tokens may come from the cache."""
        return self.mode is not GenerationMode.BASELINE and not self.stores_nothing

    @property
    def publishes(self) -> bool:
        """True if the KV that the request computes is added to the cache."""
        # A baseline request leaves nothing in the cache, so comparison runs do not depend on their
        # order.
        if self.stores_nothing or self.mode is GenerationMode.BASELINE:
            return False
        # A request for logits with reused spans must not cache its KV. Otherwise the next such
        # request would find exact KV and reuse less.
        return self.repair is None or self.logits_start is None

    @property
    def max_slots(self) -> int:
        """Maximum number of KV slots. The last sampled token needs none."""
        return max(self.max_tokens - 1, len(self.prompt_ids))


class RequestInputs(NamedTuple):
    """Inputs from which features build their fields of a request.

    Attributes:
        terms: validated non-sampling options.
        params: validated sampling options.
        token_ids: token ids of the prompt.
        generates: False if the request only computes logits or the prompt's KV.
    """

    terms: Terms
    params: SamplingParams
    token_ids: Sequence[int]
    generates: bool


class RequestFeature:
    """A feature that adds fields to requests. This null implementation adds none."""

    def prepare(self, inputs: RequestInputs) -> dict[str, Any]:
        """Return the feature's fields of the `Request`.

        Raises:
            RequestError: the feature refuses the request.
        """
        return {}


def resolve_sampling(sampling: SamplingParams | None, options: Mapping[str, Any]) -> SamplingParams:
    """Return `sampling`, or parameters created from keyword options.

    Raises:
        RequestError: both are given, or an option is invalid.
    """
    if sampling is None:
        return SamplingParams.from_options(**options)
    if not isinstance(sampling, SamplingParams):
        raise RequestError(f"sampling={sampling!r} must be a SamplingParams object")
    if options:
        raise RequestError(
            f"sampling= and {sorted(options)[0]}= are both given; set the option in sampling"
        )
    return sampling


def check_mode(mode: GenerationMode | str) -> GenerationMode:
    """Return the mode as an enum member.

    Raises:
        RequestError: the mode is unknown.
    """
    try:
        return GenerationMode(mode)
    except ValueError:
        names = ", ".join(repr(m.value) for m in GenerationMode)
        raise RequestError(f"mode={mode!r} is not one of {names}") from None


def _stop_strings(stop: object) -> tuple[str, ...]:
    if stop is None:
        return ()
    if isinstance(stop, str):
        stop = (stop,)
    if not isinstance(stop, Iterable):
        raise RequestError(f"stop={stop!r} must be a string or a list of strings")
    stops = tuple(stop)
    for item in stops:
        if not isinstance(item, str) or not item:
            raise RequestError(
                f"stop holds {item!r}; each stop string must be a string with at least one "
                "character"
            )
    if len(stops) > _MAX_STOPS:
        raise RequestError(f"stop holds {len(stops)} strings; at most {_MAX_STOPS} are allowed")
    return stops


def _texts(name: str, texts: object, most: int, longest: int) -> tuple[str, ...]:
    if texts is None:
        return ()
    if isinstance(texts, str):
        texts = (texts,)
    if not isinstance(texts, Iterable):
        raise RequestError(f"{name}={texts!r} must be a list of strings")
    found = tuple(dict.fromkeys(texts))
    if len(found) > most:
        raise RequestError(f"{name} holds {len(found)} strings; at most {most} are allowed")
    for text in found:
        if not isinstance(text, str) or not 1 <= len(text) <= longest:
            raise RequestError(
                f"{name} holds {text!r}; each must be a string of 1 to {longest} characters"
            )
    return found


def _token_ids(name: str, ids: object) -> tuple[int, ...]:
    if ids is None:
        return ()
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Iterable):
        raise RequestError(f"{name}={ids!r} must be a list of token ids")
    return tuple(as_int(f"an entry of {name}", token_id) for token_id in ids)


def _logit_bias(bias: object) -> dict[int, float] | None:
    if bias is None:
        return None
    if not isinstance(bias, Mapping):
        raise RequestError(f"logit_bias={bias!r} must map token ids to numbers")
    checked: dict[int, float] = {}
    for token_id, value in bias.items():
        number = as_float(f"logit_bias[{token_id!r}]", value)
        if not abs(number) <= _MAX_LOGIT_BIAS:
            raise RequestError(
                f"logit_bias[{token_id!r}]={value!r} must be in [{-_MAX_LOGIT_BIAS:g}, "
                f"{_MAX_LOGIT_BIAS:g}]"
            )
        checked[as_int("a key of logit_bias", token_id)] = number
    return checked
