"""Frozen engine options and the public enums. Pure data: importing this loads no heavy
dependency.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import os
from typing import Any

from kvboost_edge.errors import ConfigError

__all__ = [
    "CHOICES",
    "DEFAULT_DRAFT_TOKENS",
    "KV_BIT_PAIRS",
    "MAX_WEIGHT",
    "MOST_DRAFT_TOKENS",
    "ChunkStrategy",
    "EngineConfig",
    "GenerationMode",
    "RecomputeStrategy",
    "kv_bits_from_text",
]

MAX_WEIGHT = 1000.0  # of a tenant beside others; the least is its inverse


class GenerationMode(enum.StrEnum):
    """How a request may use cached keys and values.

    BASELINE reads nothing from the cache, PREFIX_CACHE reuses exact prefixes. CHUNK_KV_REUSE reuses
    exact prefixes and, behind them, runs of tokens that were computed at other positions: what
    follows is approximate, and says so.
    """

    BASELINE = "baseline"
    PREFIX_CACHE = "prefix_cache"
    CHUNK_KV_REUSE = "chunk_kv_reuse"


class RecomputeStrategy(enum.StrEnum):
    """Which tokens found at other positions are computed all the same: NONE; SELECTIVE, the first
    `recompute_overlap` behind every seam; CACHEBLEND, those and the `recompute_ratio` of blocks
    whose values deviate most (after Yao et al., "CacheBlend", EuroSys 2025); QUERY, those and the
    `recompute_ratio` of blocks that the end of the prompt attends to most.
    """

    NONE = "none"
    SELECTIVE = "selective"
    CACHEBLEND = "cacheblend"
    QUERY = "query"


class ChunkStrategy(enum.StrEnum):
    """Where a document is cut.

    FIXED     after every chunk_size tokens
    SEMANTIC  at the end of a paragraph or a sentence within chunk_boundary_window tokens of that,
              else there
    DOCUMENT  nowhere: a document is a chunk
    """

    FIXED = "fixed"
    SEMANTIC = "semantic"
    DOCUMENT = "document"


CHOICES: dict[str, tuple[str, ...]] = {  # of the options of these names
    "runner": ("auto", "native", "torch", "onnx"),
    "backend": ("auto", "cpu", "torch", "mps", "cuda", "reference"),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "weights": ("auto", "int8", "int4", "int4-asym", "bf16", "f32"),
    "rope_range": ("short", "long"),
    "reuse_gate": ("auto", "off"),
    "speculation": ("auto", "on", "off"),
}
_LEAST_DISK_BYTES = 1 << 20
# More than any machine has cores: each takes a stack, and beyond some number the system refuses.
_MAX_THREADS = 1024
_MOST_PRIMER_TOKENS = 65536
DEFAULT_DRAFT_TOKENS = 31
MOST_DRAFT_TOKENS = 63
_MOST_CHUNK_TOKENS = 65536

KV_BIT_PAIRS = ((16, 16), (8, 8), (8, 4), (4, 8), (4, 4))
"""(bits of keys, bits of values) that a cache can have; 16 means not quantized."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All options of `CPUPagedEngine`; unknown names are refused by `EngineConfig.from_options`.

    Sizes: `max_cache_bytes` (bytes, floats such as 4e9 allowed), `num_blocks` and `max_chunks`
      (blocks) size the pool, at most one of them; none given: min(25% of the memory available,
      context x max_num_seqs, 16 if not given). `max_num_seqs` None: as many sequences run together
      as the pool has 512 tokens for, at least 1 and at most 64. `max_state_bytes` (bytes, floats
      too): room for the states of models that have layers with a state instead of keys and values
      (LFM2, Qwen3.5), and for what drafts bring to them; None: a quarter of the pool's bytes, and 4
      + 2 x max_num_seqs states at least, with the drafts beside. Where `max_num_seqs` is not given
      there run no more sequences together than have room for theirs.
    `max_pinned_blocks` None: half of the pool, which is also the most that can be given; 0: nothing
    can be pinned. `kv_cache_bits` 16 or None means "not quantized": float32 KV where the compute is
    float32, bfloat16 for bfloat16 models, else float16. 8, 4 or a pair (bits of keys, bits of
    values) such as (8, 4) quantizes; the native runner does that. `weights` is the native runner's
    format and asks for that runner; "auto" keeps the formats of a quantized checkpoint and makes
    int8 of a float one if weights and pool take at most half of the memory, else int4; "int4-asym"
    (a scale and a minimum per group of 32) is had only by asking, or from files that are quantized
    so.
    `rope_range`: models with rope of type longrope (Phi-3, Phi-4-mini) have other factors beyond
      their original length: "short" pins the context to that length; "long" takes the factors for
      longer sequences, for short ones too, up to the whole context (native runner). Blocks of the
      two are never shared.
    `pack_cache`: packed weights, and what else is found out about a model's files, are kept in the
      cache directory and mapped at later starts; False keeps and reads nothing there: the weights
      are converted at every start, into memory of this process alone (native runner).
    `seed`: None draws a random seed for each request that names none; a number makes those seeds,
      and with them sampled answers, the same in every run in which a tenant sends the same requests
      in the same order. `disk_cache_dir` keeps blocks of keys and values below that directory, so
      that they survive a restart; None or "off": nowhere. `max_disk_bytes` (floats such as 8e9
      allowed) bounds it; None: min(16 GiB, 20% of what is free). `redis_url` shares blocks with
      other machines through a Redis or Valkey server (extra [redis]). Its values are sealed with
      the secret in KVBOOST_EDGE_REDIS_SECRET, the same on all machines; without a secret the URL is
      refused, unless `redis_trust` says that whoever writes to the server is believed.
      `recompute_strategy`, `recompute_overlap` (tokens) and `recompute_ratio` (of the tokens
      shared) repair what a request with mode="chunk_kv_reuse" shares at other positions;
      `min_chunk_tokens` is the shortest run it looks for. `reuse_gate` "auto": the first such
      request waits for a test of this model on built-in text, whose outcome is kept, and the mode
      is refused where reuse changes answers more than another order of the documents does; "off":
      untested. `chunk_strategy`, `chunk_size`, `chunk_boundary_window`, `overlap_k`, `sink_tokens`
      (see `ChunkOptions`) say how `warm(documents=…)` cuts documents, `primer_tokens` how many
      tokens of the others, or of neutral text, stand before each while it is computed.
    `speculation`: what followed a text's last tokens where they stood before, in the request or in
      what its tenant was answered lately, is computed along with the next token, and kept as far as
      it is what would have been sampled: the same answers, sooner. "auto": with the native runner,
      where it is expected to pay; "on": whenever something is proposed; "off". `max_draft_tokens`:
      most in a step, of a model with states those of all sequences together; with a quantized cache
      to the end of a block at most. None: 31; under "auto" fewer, down to none, where the states of
      a model leave no room for what so many bring to them.
    `chunk_strategy` None: by the others, semantic with a window, fixed with a chunk_size, overlap_k
    or sink_tokens, else document. `chunk_size` None: 128.
    """

    runner: str = "auto"
    backend: str = "auto"
    device: str | None = None
    dtype: str = "auto"
    weights: str = "auto"
    max_cache_bytes: int | None = None
    max_state_bytes: int | None = None
    num_blocks: int | None = None
    max_chunks: int | None = None
    block_size: int = 16
    kv_cache_bits: int | tuple[int, int] | None = 16
    max_num_seqs: int | None = None
    max_pinned_blocks: int | None = None
    max_batch_tokens: int = 512
    num_threads: int | None = None
    strict: bool = True
    revision: str | None = None
    token: str | None = dataclasses.field(default=None, repr=False)
    local_files_only: bool = False
    rope_range: str = "short"
    pack_cache: bool = True
    tenant: str = ""
    seed: int | None = None
    debug_checks: bool = False
    disk_cache_dir: str | os.PathLike[str] | None = None
    max_disk_bytes: int | None = None
    redis_url: str | None = dataclasses.field(default=None, repr=False)
    redis_trust: bool = False
    recompute_strategy: RecomputeStrategy | str = RecomputeStrategy.CACHEBLEND
    recompute_overlap: int = 16
    recompute_ratio: float = 0.10
    min_chunk_tokens: int = 32
    reuse_gate: str = "auto"
    chunk_strategy: ChunkStrategy | str | None = None
    chunk_size: int | None = None
    chunk_boundary_window: int = 0
    overlap_k: int = 0
    sink_tokens: int = 0
    primer_tokens: int = 256
    speculation: str = "auto"
    max_draft_tokens: int | None = None

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        """Build a config from keyword options; an unknown name raises ConfigError that lists the
        known ones.
        """
        known = [f.name for f in dataclasses.fields(cls)]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise ConfigError(f"unknown option {unknown[0]!r}; known options: {', '.join(known)}")
        return cls(**options)

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if not isinstance(value, str):
                raise ConfigError(f"{name}={value!r} must be a string, one of {choices}")
            if value not in choices:
                raise ConfigError(f"{name}={value!r} is not one of {choices}")
        self._check_sizes()
        self._check_tiers()
        self._check_reuse()
        if self.max_draft_tokens is not None:
            _check_int("max_draft_tokens", self.max_draft_tokens, low=1, high=MOST_DRAFT_TOKENS)
        if self.device is not None and not isinstance(self.device, str):
            raise ConfigError(
                f"device={self.device!r} must be a string such as 'cpu', 'mps', 'cuda' or 'cuda:0'"
            )
        for name in ("strict", "local_files_only", "pack_cache", "redis_trust", "debug_checks"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r} must be True or False")
        if not isinstance(self.tenant, str):
            raise ConfigError(f"tenant={self.tenant!r} must be a string")
        if self.revision is not None and not isinstance(self.revision, str):
            raise ConfigError(
                f"revision={self.revision!r} must be a string such as 'main', or None"
            )
        if self.token is not None and not isinstance(self.token, str):
            # The value stays out of the message: it may be a secret all the same.
            raise ConfigError(f"token must be a string or None, not {type(self.token).__name__}")

    def _check_sizes(self) -> None:
        for name in ("max_cache_bytes", "max_state_bytes", "max_disk_bytes"):
            value = getattr(self, name)
            if isinstance(value, float):
                if not math.isfinite(value):
                    raise ConfigError(f"{name}={value!r} must be a finite number of bytes")
                object.__setattr__(self, name, int(value))
        for name in (
            *("max_cache_bytes", "max_state_bytes", "max_disk_bytes", "num_blocks", "max_chunks"),
            *("num_threads", "max_num_seqs"),
        ):
            value = getattr(self, name)
            if value is not None:
                _check_int(name, value, low=1)
        if self.num_threads is not None and self.num_threads > _MAX_THREADS:
            raise ConfigError(f"num_threads={self.num_threads} must be at most {_MAX_THREADS}")
        for name in ("block_size", "max_batch_tokens"):
            _check_int(name, getattr(self, name), low=1)
        for name in ("seed", "max_pinned_blocks"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), low=0)
        given = [
            n
            for n in ("max_cache_bytes", "num_blocks", "max_chunks")
            if getattr(self, n) is not None
        ]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} both size the pool; give only one of them")
        if self.block_size % 16 or self.block_size > 256:
            raise ConfigError(f"block_size={self.block_size} must be a multiple of 16, at most 256")
        self._check_kv_bits()

    def _check_tiers(self) -> None:
        value = self.disk_cache_dir
        if value is not None and not isinstance(value, (str, os.PathLike)):
            raise ConfigError(f"disk_cache_dir={value!r} must be a path, 'off' or None")
        if value is not None and not os.fspath(value):
            raise ConfigError("disk_cache_dir='' names no directory; give a path, 'off' or None")
        if value == "off":
            object.__setattr__(self, "disk_cache_dir", None)
        if self.max_disk_bytes is not None and self.max_disk_bytes < _LEAST_DISK_BYTES:
            raise ConfigError(
                f"max_disk_bytes={self.max_disk_bytes} must be at least {_LEAST_DISK_BYTES}, or "
                "None"
            )
        if self.disk_cache_dir is None and self.max_disk_bytes is not None:
            raise ConfigError(
                f"max_disk_bytes={self.max_disk_bytes} needs a disk_cache_dir, which is off"
            )
        if self.redis_url is not None and (
            not isinstance(self.redis_url, str) or not self.redis_url
        ):
            # The value stays out of the message: it may hold a password.
            raise ConfigError("redis_url must be a URL such as redis://localhost:6379/0, or None")
        if self.redis_trust and self.redis_url is None:
            raise ConfigError("redis_trust=True needs a redis_url, and there is none")

    def _check_reuse(self) -> None:
        try:
            object.__setattr__(
                self, "recompute_strategy", RecomputeStrategy(self.recompute_strategy)
            )
        except ValueError:
            names = ", ".join(repr(one.value) for one in RecomputeStrategy)
            raise ConfigError(
                f"recompute_strategy={self.recompute_strategy!r} is not one of {names}"
            ) from None
        _check_int("recompute_overlap", self.recompute_overlap, low=0)
        _check_int("min_chunk_tokens", self.min_chunk_tokens, low=1, high=_MOST_CHUNK_TOKENS)
        ratio = self.recompute_ratio
        if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 <= ratio <= 1:
            raise ConfigError(f"recompute_ratio={ratio!r} must be a number in [0, 1]")
        _check_int("primer_tokens", self.primer_tokens, low=0, high=_MOST_PRIMER_TOKENS)

    def _check_kv_bits(self) -> None:
        value: object = self.kv_cache_bits
        numbers = tuple(value) if isinstance(value, (tuple, list)) else (value,) * 2
        if value is not None and (
            len(numbers) != 2 or any(type(number) is not int for number in numbers)
        ):
            raise ConfigError(
                f"kv_cache_bits={value!r} must be 16 (or None), 8, 4, or a pair such as (8, 4): "
                "bits of keys, of values"
            )
        if value is not None and numbers not in KV_BIT_PAIRS:
            raise ConfigError(
                f"kv_cache_bits={value!r} is not offered: keys and values have 16 bits both, or 8 "
                "or 4 each"
            )
        if isinstance(value, list):
            object.__setattr__(self, "kv_cache_bits", numbers)

    @property
    def kv_bits(self) -> tuple[int, int]:
        """(bits of keys, bits of values); (16, 16): not quantized."""
        value = self.kv_cache_bits
        if isinstance(value, tuple):
            return value
        return (16, 16) if value is None else (value, value)


def kv_bits_from_text(text: str) -> int | tuple[int, int]:
    """`kv_cache_bits` as people write it: "16", "8", "4", or "8,4" for keys and values."""
    parts = text.split(",")
    if not 1 <= len(parts) <= 2 or not all(part.strip().isdecimal() for part in parts):
        raise ConfigError(
            f"kv_cache_bits={text!r} must be 16, 8, 4, or a pair such as 8,4: bits of keys, of "
            "values"
        )
    first = int(parts[0])
    last = int(parts[-1])
    return (first, last) if len(parts) == 2 else first


def _check_int(name: str, value: object, *, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name}={value!r} must be an integer")
    if value < low:
        raise ConfigError(f"{name}={value} must be at least {low}")
    if high is not None and value > high:
        raise ConfigError(f"{name}={value} must be at most {high}")
