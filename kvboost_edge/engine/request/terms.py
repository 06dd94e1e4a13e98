"""Request options other than the prompt and sampling."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvboost_edge.config import (
    BACKGROUND,
    CHOICES,
    MAX_RECOMPUTE_OVERLAP,
    MAX_WEIGHT,
    MOST_DRAFT_TOKENS,
    PREFILLS,
    GenerationMode,
    RecomputeStrategy,
)
from kvboost_edge.errors import RequestError
from kvboost_edge.options import as_float, as_int, check_options, option

__all__ = ["Terms"]

_MAX_PRIORITY = 2**31 - 1
_BACKGROUND_LEVEL = 2**32  # larger than the difference of any two priorities
_MAX_NAME = 1024
_MAX_SECONDS = 1e9  # about 30 years, which every clock can represent


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Request options other than prompt and sampling, which raise RequestError if invalid.

    The fields are listed in docs/reference/options.md.
    """

    mode: GenerationMode | str = option(
        GenerationMode.PREFIX_CACHE,
        "How the request uses the cache: baseline neither reads nor writes it, prefix_cache "
        "reuses exact prefixes, and chunk_kv_reuse also reuses chunks computed at other "
        "positions. Answers in chunk_kv_reuse mode are approximate",
        GenerationMode,
    )
    prefill: str | None = option(
        None,
        "How the prompt is computed, where the engine's option prefill allows a choice. Requests "
        "share prefixes only with requests of the same prefill. Answers to long prompts are "
        "approximate with sparse",
        str,
        choices=PREFILLS,
        unset='sparse with the engine\'s prefill="sparse", otherwise exact',
    )
    tenant: str | None = option(
        None,
        "Tenant that the request belongs to. Only requests of the same tenant share prefixes, "
        "and no tenant can find out what another tenant cached",
        str,
        high=_MAX_NAME,
        unset="the engine's tenant",
    )
    cache_salt: str | None = option(
        None,
        "Salt of the prefix cache. Requests share prefixes only with requests of the same "
        "tenant and salt",
        str,
        high=_MAX_NAME,
        unset="no salt",
    )
    priority: int = option(
        0,
        "Priority of the request. Lower values run earlier. The tenants' weights and the order "
        "of arrival decide between equal priorities",
        int,
        low=-_MAX_PRIORITY,
        high=_MAX_PRIORITY,
    )
    background: str | None = option(
        None,
        "Run the request in the background. spare_time computes it in the time that other "
        "requests leave in each step, and idle only while no other request runs. Other requests "
        "take its blocks and its place in the batch when they need them",
        str,
        choices=BACKGROUND,
        unset="no",
    )
    weight: float = option(
        1.0,
        "Relative share of compute for the tenant. All requests of a tenant must give the same "
        "value",
        float,
        low=1 / MAX_WEIGHT,
        high=MAX_WEIGHT,
    )
    deadline: float | None = option(
        None,
        "Time after which the request ends with finish_reason timeout, on the clock of "
        "`time.monotonic`",
        float,
        unit="seconds",
        unset="none",
    )
    expect_reuse: bool = option(
        False, "Evict the prompt's blocks as late as blocks that were used twice", bool
    )
    cache_key: str | None = option(
        None,
        "Name of a group of prompts with a common prefix, within the tenant and salt. The "
        "blocks that two requests of the group share are retained for an hour. Only a digest "
        "of the name is stored",
        str,
        low=1,
        high=_MAX_NAME,
        unset="none",
        secret=True,
    )
    retention: float | None = option(
        None,
        "Time during which the prompt's blocks are evicted only after the tenant's other "
        "blocks. Unlike a pin, retention does not guarantee that they stay in the pool and "
        "never delays another request",
        float,
        unit="seconds",
        low=0,
        high=_MAX_SECONDS,
        open_low=True,
        unset="none",
    )
    pin: bool = option(
        False,
        "Keep the full blocks of the prompt in the pool. Only the same tenant can unpin them",
        bool,
    )
    ttl: float | None = option(
        None,
        "Duration of the pin after the end of the request. Requires pin",
        float,
        unit="seconds",
        low=0,
        high=_MAX_SECONDS,
        open_low=True,
        unset="until the blocks are unpinned",
    )
    pins: tuple[tuple[int, float], ...] = option(
        (),
        "Pins for the beginning of the prompt, as pairs of a number of tokens and a duration "
        "in seconds. Pins for which no room is left are skipped, and the handle reports the "
        "others. A pin does not shorten a longer one of the same blocks",
        unset="none",
    )
    pin_holder: str = option(
        "",
        "Name of the holder of pins. Its latest duration replaces the earlier ones, and unpin can "
        "end its pins alone",
        str,
        high=_MAX_NAME,
        unset="none",
        secret=True,
    )
    pin_share: float = option(
        1.0,
        "Fraction of max_pinned_blocks that the tenant may pin. All requests of a tenant must "
        "give the same value. Below 1, error messages do not reveal how many blocks other "
        "tenants pinned",
        float,
        low=0,
        high=1,
        open_low=True,
    )
    snapshot_hints: tuple[int, ...] = option(
        (),
        "Positions in the prompt at which a hybrid model keeps a snapshot of its recurrent "
        "state, such as the starts of messages",
        unset="the starts of user messages, found by the chat template",
    )
    recompute_strategy: RecomputeStrategy | str | None = option(
        None,
        "Which reused tokens chunk_kv_reuse mode recomputes",
        RecomputeStrategy,
        unset="the engine's value",
    )
    recompute_overlap: int | None = option(
        None,
        "Number of tokens to recompute after each chunk boundary",
        int,
        unit="tokens",
        low=0,
        high=MAX_RECOMPUTE_OVERLAP,
        unset="the engine's value",
    )
    recompute_ratio: float | None = option(
        None,
        "Fraction of the remaining reused tokens to recompute",
        float,
        low=0,
        high=1,
        unset="the engine's value",
    )
    speculation: str | None = option(
        None,
        "Whether to use speculative decoding. auto decides by the expected gain",
        str,
        choices=CHOICES["speculation"],
        unset="the engine's value",
    )
    max_draft_tokens: int | None = option(
        None,
        "Maximum number of draft tokens of a sequence in one step",
        int,
        unit="tokens",
        low=1,
        high=MOST_DRAFT_TOKENS,
        unset="the engine's value",
    )
    min_draft_tokens: int = option(
        0,
        "Minimum number of draft tokens of a sequence in one step, up to max_draft_tokens. Shorter "
        "drafts are not verified",
        int,
        unit="tokens",
        low=0,
        high=MOST_DRAFT_TOKENS,
    )
    draft_p_min: float | None = option(
        None,
        "Minimum probability of a token by the draft model or multi-token prediction head. A draft "
        "ends before a less likely token. Needs an engine with a draft_model or head",
        float,
        low=0,
        high=1,
        unset="the minimum that is expected to save time",
    )

    @classmethod
    def taken_from(cls, options: dict[str, Any], terms: Terms | None = None) -> Terms:
        """Remove the fields of `Terms` from keyword options and return them as an object.

        If `terms` is given, return it instead. Sampling options stay in `options`.

        Raises:
            RequestError: both terms and some of its fields are given.
        """
        given = {
            field.name: options.pop(field.name)
            for field in dataclasses.fields(cls)
            if field.name in options
        }
        if terms is None:
            return cls(**given)
        if not isinstance(terms, cls):
            raise RequestError(f"terms={terms!r:.200} must be a Terms object")
        if given:
            raise RequestError(
                f"terms= and {', '.join(given)} are both given; set the fields in terms, or omit "
                "terms"
            )
        return terms

    def __post_init__(self) -> None:
        check_options(self, RequestError)
        if self.cache_salt == "":
            raise RequestError(
                "cache_salt='' must have at least one character; omit it to share prefixes with "
                "your requests that have no salt"
            )
        for num_tokens, seconds in self.pins:
            if as_int("pins", num_tokens) < 0 or not 0 < as_float("pins", seconds) <= _MAX_SECONDS:
                raise RequestError(
                    f"pins={self.pins!r} must be pairs of a token count and seconds in (0, "
                    f"{_MAX_SECONDS:g}]"
                )
        if any(as_int("snapshot_hints", position) < 0 for position in self.snapshot_hints):
            raise RequestError(
                f"snapshot_hints={self.snapshot_hints!r} must be prompt positions of at least 0"
            )
        if self.ttl is not None and not self.pin:
            raise RequestError(f"ttl={self.ttl:g} has no effect without a pin; add pin=True")
        if self.pin and self.mode is GenerationMode.BASELINE:
            raise RequestError(
                "pin=True keeps the prompt's blocks, but mode='baseline' does not cache them; use "
                "mode='prefix_cache'"
            )

    @property
    def level(self) -> int:
        """The priority, in an order that puts background requests after all others."""
        return self.priority + (0 if self.background is None else _BACKGROUND_LEVEL)

    @property
    def is_kept_longer(self) -> bool:
        """True if the request's blocks are evicted later, like blocks that were used twice."""
        return self.expect_reuse or self.retention is not None
