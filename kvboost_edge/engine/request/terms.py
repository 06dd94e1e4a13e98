"""Options of a request other than its prompt and its sampling."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvboost_edge.config import (
    CHOICES,
    MAX_RECOMPUTE_OVERLAP,
    MAX_WEIGHT,
    MOST_DRAFT_TOKENS,
    GenerationMode,
    RecomputeStrategy,
)
from kvboost_edge.errors import RequestError
from kvboost_edge.options import as_float, as_int, check_options, option

__all__ = ["Terms"]

_MAX_PRIORITY = 2**31 - 1
_MAX_NAME = 1024
_MAX_SECONDS = 1e9  # some 30 years, within the range of every clock


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Options of a request other than prompt and sampling, checked on construction (RequestError).

    docs/reference/options.md lists the fields.
    """

    mode: GenerationMode | str = option(
        GenerationMode.PREFIX_CACHE,
        "Use of the cache: none (baseline; neither read nor written), exact prefixes "
        "(prefix_cache), or also chunks computed at other positions, which is approximate "
        "(chunk_kv_reuse)",
        GenerationMode,
    )
    tenant: str | None = option(
        None,
        "Tenant whose prefixes it shares; tenants cannot find out what another cached",
        str,
        high=_MAX_NAME,
        unset="the engine's own",
    )
    cache_salt: str | None = option(
        None,
        "Only requests of one tenant and salt share prefixes",
        str,
        high=_MAX_NAME,
        unset="no salt",
    )
    priority: int = option(
        0,
        "Lower runs earlier; ties go by the tenants' shares and the order of arrival",
        int,
        low=-_MAX_PRIORITY,
        high=_MAX_PRIORITY,
    )
    weight: float = option(
        1.0,
        "Share of the tenant next to other tenants, the same for all its requests",
        float,
        low=1 / MAX_WEIGHT,
        high=MAX_WEIGHT,
    )
    deadline: float | None = option(
        None,
        "Time of `time.monotonic` past which it ends with finish_reason timeout",
        float,
        unit="seconds",
        unset="none",
    )
    expect_reuse: bool = option(
        False, "Evict its blocks as late as blocks that were used twice", bool
    )
    cache_key: str | None = option(
        None,
        "Name of prompts of this tenant and salt that begin alike. The blocks that two calls "
        "under it share are retained for an hour. Only a digest of the name is kept",
        str,
        low=1,
        high=_MAX_NAME,
        unset="none",
        secret=True,
    )
    retention: float | None = option(
        None,
        "Time in which its prompt is evicted after the tenant's other blocks. Best effort: it "
        "never blocks a request; pin is a promise",
        float,
        unit="seconds",
        low=0,
        high=_MAX_SECONDS,
        open_low=True,
        unset="none",
    )
    pin: bool = option(
        False,
        "Keep the full blocks of its prompt in the pool; only the same tenant can unpin them",
        bool,
    )
    ttl: float | None = option(
        None,
        "Time until the pin ends, from the end of the request; needs pin",
        float,
        unit="seconds",
        low=0,
        high=_MAX_SECONDS,
        open_low=True,
        unset="until it is unpinned",
    )
    pins: tuple[tuple[int, float], ...] = option(
        (),
        "Pairs of tokens and seconds: pins of the prompt's first tokens, as far as other pins "
        "leave room. The handle reports what was pinned",
        unset="none",
    )
    pin_share: float = option(
        1.0,
        "Part of max_pinned_blocks that the tenant's pins may take, the same for all its requests. "
        "Below 1 there are other tenants, and no error reports what they pinned",
        float,
        low=0,
        high=1,
        open_low=True,
    )
    snapshot_hints: tuple[int, ...] = option(
        (),
        "Positions in the prompt before which hybrid models keep a snapshot, such as starts of "
        "messages",
        unset="the starts of the user's messages in the chat template",
    )
    recompute_strategy: RecomputeStrategy | str | None = option(
        None, "Tokens recomputed in chunk_kv_reuse mode", RecomputeStrategy, unset="the engine's"
    )
    recompute_overlap: int | None = option(
        None,
        "Number of tokens recomputed after each chunk boundary",
        int,
        unit="tokens",
        low=0,
        high=MAX_RECOMPUTE_OVERLAP,
        unset="the engine's",
    )
    recompute_ratio: float | None = option(
        None,
        "Share of the other reused tokens that is recomputed",
        float,
        low=0,
        high=1,
        unset="the engine's",
    )
    speculation: str | None = option(
        None, "Speculative decoding", str, choices=CHOICES["speculation"], unset="the engine's"
    )
    max_draft_tokens: int | None = option(
        None,
        "Maximum number of draft tokens in a step",
        int,
        unit="tokens",
        low=1,
        high=MOST_DRAFT_TOKENS,
        unset="the engine's",
    )

    @classmethod
    def taken_from(cls, options: dict[str, Any], terms: Terms | None = None) -> Terms:
        """Remove the fields from keyword options and return them, or return `terms`.

        Sampling options are left.

        Raises:
            RequestError: terms and fields of them are given.
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
                f"terms= and {', '.join(given)} are given; set the fields in terms, or leave "
                "terms out"
            )
        return terms

    def __post_init__(self) -> None:
        check_options(self, RequestError)
        if self.cache_salt == "":
            raise RequestError(
                "cache_salt='' must have at least one character; leave it out to share with your "
                "own"
            )
        for num_tokens, seconds in self.pins:
            if as_int("pins", num_tokens) < 0 or not 0 < as_float("pins", seconds) <= _MAX_SECONDS:
                raise RequestError(
                    f"pins={self.pins!r} must be pairs of tokens and of (0, {_MAX_SECONDS:g}] "
                    "seconds"
                )
        if any(as_int("snapshot_hints", position) < 0 for position in self.snapshot_hints):
            raise RequestError(
                f"snapshot_hints={self.snapshot_hints!r} must be positions in the prompt, from 0 on"
            )
        if self.ttl is not None and not self.pin:
            raise RequestError(f"ttl={self.ttl:g} is how long a pin lasts; give pin=True with it")
        if self.pin and self.mode is GenerationMode.BASELINE:
            raise RequestError(
                "pin=True keeps the prompt's blocks, and mode='baseline' leaves none; use "
                "mode='prefix_cache'"
            )

    @property
    def is_kept_longer(self) -> bool:
        """True if its blocks are evicted like blocks that were used twice."""
        return self.expect_reuse or self.retention is not None
