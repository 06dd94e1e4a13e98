"""Sampling parameters and the frozen request."""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from kvboost_edge.config import GenerationMode
from kvboost_edge.engine.request.grammar import Grammar
from kvboost_edge.errors import RequestError
from kvboost_edge.reuse.recompute import Repair

__all__ = [
    "Request",
    "RequestArrival",
    "SamplingParams",
    "as_float",
    "as_int",
    "check_mode",
    "resolve_sampling",
]

_SAMPLING_KEYWORDS = ("temperature", "top_p", "top_k", "min_p", "seed")
_MAX_LOGPROBS = 100
_MAX_STOPS = 64
# Bounds far outside any use that keep the arithmetic on logits finite.
_MAX_TEMPERATURE = 1e3
_MAX_REPETITION_PENALTY = 1e3
_MAX_LOGIT_BIAS = 1e4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when to stop. Every range is checked on construction
    (RequestError).

    `temperature`, `top_p`, `top_k`, `min_p` and `seed` are "not given" when None and then mean 1.0,
    1.0, 0 (off), 0.0 (off) and a seed drawn by the engine. `do_sample=None` samples if any of the
    five is given and the temperature is above 0; temperature 0 is greedy. `max_new_tokens=None`
    fills the context, 0 only computes the prompt.

    temperature          [0, 1000]
    repetition_penalty   [0.001, 1000]; over prompt and output; logits above 0 are divided by it,
                         others multiplied
    presence_penalty, frequency_penalty   [-2, 2]; over the output only, subtracted once / per
                                          occurrence
    logit_bias           token id -> value in [-10000, 10000] added to its logit
    logprobs             None, or how many of the most likely tokens to report beside the chosen one
                         (0-100), from the model's own logits before penalties and temperature
    prompt_logprobs      the same for the prompt's tokens; the prompt is then computed, not taken
                         from the cache
    stop                 strings that end the output; they are not part of it
    stop_token_ids       tokens that end the output like EOS; they end even when `ignore_eos` is set
    json_schema, regex, grammar, choice   one of them, which the whole output fits: a JSON schema (a
                                          dict, or its JSON),
                         a regular expression, a grammar in Lark or GBNF, a list of strings; extra
                         [structured]
    """

    temperature: float | None = None
    do_sample: bool | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_new_tokens: int | None = 64
    json_schema: Mapping[str, Any] | str | bool | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: tuple[str, ...] | None = None

    @classmethod
    def from_options(cls, **options: Any) -> SamplingParams:
        """Build from keyword options; an unknown name raises RequestError that lists the known
        ones.
        """
        known = [f.name for f in dataclasses.fields(cls)]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise RequestError(
                f"unknown sampling option {unknown[0]!r}; known options: {', '.join(known)}"
            )
        return cls(**options)

    def __post_init__(self) -> None:
        _real(self, "temperature", low=0.0, high=_MAX_TEMPERATURE)
        _real(self, "top_p", low=0.0, high=1.0, open_low=True)
        _real(self, "min_p", low=0.0, high=1.0)
        _real(
            self,
            "repetition_penalty",
            low=1 / _MAX_REPETITION_PENALTY,
            high=_MAX_REPETITION_PENALTY,
        )
        _real(self, "presence_penalty", low=-2.0, high=2.0)
        _real(self, "frequency_penalty", low=-2.0, high=2.0)
        _integer(self, "top_k", low=0)
        _integer(self, "seed", low=0, high=2**64 - 1)
        _integer(self, "logprobs", low=0, high=_MAX_LOGPROBS)
        _integer(self, "prompt_logprobs", low=0, high=_MAX_LOGPROBS)
        _integer(self, "max_new_tokens", low=0)
        if self.do_sample is not None and not isinstance(self.do_sample, bool):
            raise RequestError(f"do_sample={self.do_sample!r} must be True, False or None")
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos={self.ignore_eos!r} must be True or False")
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(
            self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids)
        )
        object.__setattr__(self, "logit_bias", _logit_bias(self.logit_bias))

    @property
    def samples(self) -> bool:
        """True if tokens are drawn at random, False if the most likely one is taken."""
        if self.temperature == 0.0:
            return False
        if self.do_sample is not None:
            return self.do_sample
        return any(getattr(self, name) is not None for name in _SAMPLING_KEYWORDS)

    @property
    def fits(self) -> bool:
        """True if the answer has to fit something, which takes a while to compile."""
        return any(
            each is not None for each in (self.json_schema, self.regex, self.grammar, self.choice)
        )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse token ids outside the model's vocabulary (RequestError)."""
        for name, ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("logit_bias", tuple(self.logit_bias or ())),
        ):
            for token_id in ids:
                if not 0 <= token_id < vocab_size:
                    raise RequestError(
                        f"{name} holds token id {token_id}; the vocabulary is 0..{vocab_size - 1}"
                    )


class RequestArrival(NamedTuple):
    """The arrival of a request.

    at            when the caller's call began, seconds of `time.perf_counter`
    prompt_text   what the result's `prompt` says; None: the text, or the token ids decoded
    prefix_hashes   of the prompt's full blocks, or of the first of them, 32 bytes each in one
                    piece, where the caller
                  has hashed them; see `hashing.known_hash` for what becomes of wrong ones
    """

    at: float
    prompt_text: str | None = None
    prefix_hashes: bytes = b""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request as it was asked, checked and resolved. Times are seconds of `time.perf_counter`.

    index            arrival number in this engine; earlier requests are served first
    prompt_ids       the prompt's token ids
    max_tokens       longest the sequence may become, prompt included
    seed             the seed in use: the caller's, or one drawn for it, see `Seeds`
    stop_ids         tokens that end the output: the model's EOS ids unless ignored, plus
                     `stop_token_ids`
    logits_start     None for generation; else the request returns the logits of tokens
                     [logits_start, n)
    wants_states     of those tokens the hidden states behind the last norm instead
    stores_nothing   all of it is one pass whose keys and values nobody finds
    prefill_only     the prompt is computed and nothing is generated
    root             where its prefix hashes start; tenant and salt are in it
    prefix_hashes    of the prompt's first full blocks, as the caller gave them (`RequestArrival`)
    tenant           whose it is: the root without the salt
    weight           the tenant's share beside other tenants'
    priority         lower runs earlier
    deadline         seconds of `time.monotonic` past which it ends with finish_reason "timeout"
    expect_reuse     its blocks are kept as if they had been used again
    cache_key        digest of the caller's key for prompts that begin alike, see
                     engine/schedule/retention.py; None without one
    retention        seconds that its prompt outlives the tenant's other blocks, as long as there is
                     room
    snapshot_hints   positions of the prompt behind which others may go on differently: states are
                     kept there
    repair           how what it shares at other positions is repaired; None: its mode shares
                     nothing there
    gate             whether that was tested on this model before, see `GenerationResult`
    max_draft_tokens   most tokens guessed ahead in a step, 0: none; always_drafts: whatever that
                       costs
    grammar          what its answer fits
    pin              its prompt stays in the pool once it is done, for `ttl` seconds; None: until it
                     is unpinned
    pins             beginnings of the prompt, (tokens, seconds), that stay so where other pins
                     leave room
    suppressed       tokens that the model's files say are never an answer's
    pin_share        the part of `max_pinned_blocks` that the tenant's pins may take; below 1 there
                     are other tenants
    """

    index: int
    prompt: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    mode: GenerationMode
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
    tenant: bytes = b""
    weight: float = 1.0
    priority: int = 0
    deadline: float | None = None
    expect_reuse: bool = False
    cache_key: bytes | None = None
    retention: float | None = None
    pin: bool = False
    ttl: float | None = None
    pins: tuple[tuple[int, float], ...] = ()
    pin_share: float = 1.0
    snapshot_hints: tuple[int, ...] = ()
    repair: Repair | None = None
    gate: str = ""
    max_draft_tokens: int = 0
    grammar: Grammar | None = None
    always_drafts: bool = False
    prefix_hashes: bytes = b""

    @property
    def rank(self) -> tuple[int, int]:
        """Who goes first: the smaller one."""
        return self.priority, self.index

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def shares_prompt(self) -> bool:
        """Whether the cache may serve all of the prompt but its last token."""
        bypassed = self.logits_start is not None or self.params.prompt_logprobs is not None
        return self.uses_cache and not bypassed

    @property
    def uses_cache(self) -> bool:
        """Whether the cache may serve any of it."""
        return self.mode is not GenerationMode.BASELINE and not self.stores_nothing

    @property
    def publishes(self) -> bool:
        """Whether what it computes can be found by others. Who only looks at logits behind shared
        spans leaves the prompt as it was: the next look would find more of it computed.
        """
        return not self.stores_nothing and (self.repair is None or self.logits_start is None)

    @property
    def max_slots(self) -> int:
        """Most slots the request can ever need: the KV of the last sampled token is never
        computed.
        """
        return max(self.max_tokens - 1, len(self.prompt_ids))


def resolve_sampling(sampling: SamplingParams | None, options: Mapping[str, Any]) -> SamplingParams:
    """`sampling=` or keyword options, never both (RequestError)."""
    if sampling is None:
        return SamplingParams.from_options(**options)
    if not isinstance(sampling, SamplingParams):
        raise RequestError(f"sampling={sampling!r} must be a SamplingParams")
    if options:
        raise RequestError(
            f"sampling= and {sorted(options)[0]}= are both given; put all options into one of them"
        )
    return sampling


def check_mode(mode: GenerationMode | str) -> GenerationMode:
    """The mode as an enum; RequestError for an unknown one."""
    try:
        return GenerationMode(mode)
    except ValueError:
        names = ", ".join(repr(m.value) for m in GenerationMode)
        raise RequestError(f"mode={mode!r} is not one of {names}") from None


def _real(
    params: SamplingParams, name: str, *, low: float, high: float, open_low: bool = False
) -> None:
    value = getattr(params, name)
    if value is None and name in _SAMPLING_KEYWORDS:
        return
    number = as_float(name, value)
    inside = (number > low if open_low else number >= low) and number <= high  # NaN is never inside
    if not inside:
        raise RequestError(
            f"{name}={value!r} must be in {'(' if open_low else '['}{low:g}, {high:g}]"
        )
    object.__setattr__(params, name, number)


def as_float(name: str, value: object) -> float:
    """`value` as float; NumPy's scalars pass, booleans, strings and arrays raise RequestError. An
    integer too large for a float counts as infinite, which is outside of every range.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise RequestError(f"{name}={value!r} must be a number")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _integer(params: SamplingParams, name: str, *, low: int, high: int | None = None) -> None:
    value = getattr(params, name)
    if value is None:
        return
    number = as_int(name, value)
    if number < low or (high is not None and number > high):
        bounds = f"at least {low}" if high is None else f"in {low}..{high}"
        raise RequestError(f"{name}={value!r} must be {bounds}")
    object.__setattr__(params, name, number)


def as_int(name: str, value: object) -> int:
    """`value` as int; NumPy integers pass, booleans, floats and strings raise RequestError."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise RequestError(f"{name}={value!r} must be an integer")
    try:
        return operator.index(value)
    except TypeError:  # an array of one element has __index__ but is no integer
        raise RequestError(f"{name}={value!r} must be an integer") from None


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
