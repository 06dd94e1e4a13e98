"""Engine options, and the public enums. Importing this loads no heavy dependency."""

from __future__ import annotations

import dataclasses
import enum
import os
from typing import Any

from kvboost_edge.errors import ConfigError
from kvboost_edge.options import check_options, option, refuse_unknown

__all__ = [
    "CHOICES",
    "DEFAULT_DRAFT_TOKENS",
    "KV_BIT_PAIRS",
    "MAX_RECOMPUTE_OVERLAP",
    "MAX_WEIGHT",
    "MOST_DRAFT_TOKENS",
    "ChunkStrategy",
    "EngineConfig",
    "GenerationMode",
    "RecomputeStrategy",
    "kv_bits_from_text",
]

MAX_RECOMPUTE_OVERLAP = 4096
MAX_WEIGHT = 1000.0  # largest weight of a tenant; the smallest is its inverse


class GenerationMode(enum.StrEnum):
    """The use of cached KV by a request.

    Attributes:
        BASELINE: Neither read nor write the cache and the history of prompt lookup.
        PREFIX_CACHE: Reuse exact prefixes.
        CHUNK_KV_REUSE: Reuse exact prefixes and, after them, chunks that were computed at other
            positions. The answer is approximate and marked as such.
    """

    BASELINE = "baseline"
    PREFIX_CACHE = "prefix_cache"
    CHUNK_KV_REUSE = "chunk_kv_reuse"


class RecomputeStrategy(enum.StrEnum):
    """The tokens to recompute among those reused at other positions.

    Attributes:
        NONE: No tokens.
        SELECTIVE: The first `recompute_overlap` tokens after each chunk boundary.
        CACHEBLEND: As SELECTIVE, and the `recompute_ratio` of blocks whose values deviate most
            (after Yao et al., "CacheBlend", EuroSys 2025).
        QUERY: As SELECTIVE, and the `recompute_ratio` of blocks that the prompt's end attends to
            most.
    """

    NONE = "none"
    SELECTIVE = "selective"
    CACHEBLEND = "cacheblend"
    QUERY = "query"


class ChunkStrategy(enum.StrEnum):
    """The positions where documents are cut into chunks.

    Attributes:
        FIXED: After every chunk_size tokens.
        SEMANTIC: As FIXED, but moved to the end of a paragraph or sentence within
            chunk_boundary_window tokens.
        DOCUMENT: No cuts: a document is one chunk.
    """

    FIXED = "fixed"
    SEMANTIC = "semantic"
    DOCUMENT = "document"


CHOICES: dict[str, tuple[str, ...]] = {  # by option
    "runner": ("auto", "native", "torch", "onnx"),
    "backend": ("auto", "cpu", "torch", "mps", "cuda", "reference"),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "weights": ("auto", "int8", "int4", "int4-asym", "bf16", "f32"),
    "rope_range": ("short", "long"),
    "reuse_gate": ("auto", "off"),
    "speculation": ("auto", "on", "off"),
    "generation_config": ("model", "none"),
}
_LEAST_DISK_BYTES = 1 << 20
# More than the cores of any machine: each thread takes a stack, and the system limits their number.
_MAX_THREADS = 1024
_MOST_PRIMER_TOKENS = 65536
DEFAULT_DRAFT_TOKENS = 31
MOST_DRAFT_TOKENS = 63
_MOST_CHUNK_TOKENS = 65536
_DEFAULT_CHUNK_TOKENS = 128
_REUSE = "Non-prefix KV reuse"
_SPECULATION = "Speculative decoding"

KV_BIT_PAIRS = ((16, 16), (8, 8), (8, 4), (4, 8), (4, 4))
"""Supported (bits of keys, bits of values) of the cache; 16 means not quantized."""


def _backend(text: str) -> str:
    """Parse a backend, also by the names of earlier programs."""
    return {"default": "auto", "cpu-paged": "cpu"}.get(text, text)


def _kv_bits(text: str) -> int | tuple[int, ...]:
    """Parse "8", or "8,4" for keys and values."""
    parts = tuple(int(part) for part in text.split(","))
    return parts[0] if len(parts) == 1 else parts


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of `CPUPagedEngine`, checked on construction (ConfigError).

    `max_cache_bytes`, `num_blocks` and `max_chunks` limit the pool; the smallest limit applies.
    docs/reference/options.md lists all options.
    """

    runner: str = option(
        "auto",
        "Runner of the model: the project's kernels (native), transformers (torch) or onnxruntime "
        "(onnx)",
        str,
        group="Model",
        choices=CHOICES["runner"],
    )
    backend: str = option(
        "auto",
        "Storage of the KV cache and its attention kernels; 'default' is an alias of auto, "
        "'cpu-paged' of cpu",
        str,
        group="Model",
        choices=CHOICES["backend"],
        read=_backend,
    )
    device: str | None = option(
        None,
        "Device for the computation: cpu, mps, cuda or cuda:1",
        str,
        group="Model",
        unset="the device of the backend",
        advice=" such as 'cpu', 'mps', 'cuda' or 'cuda:0'",
    )
    dtype: str = option(
        "auto",
        "Data type of the computation, torch runner. In the native runner, float32 and bfloat16 "
        "select the weight formats f32 and bf16; float16 has no effect and is logged",
        str,
        group="Model",
        choices=CHOICES["dtype"],
    )
    weights: str = option(
        "auto",
        "Weight format, native runner. auto keeps the format of a quantized file; float weights "
        "become int8 if weights and pool take at most half of the memory, else int4. int4-asym "
        "stores a scale and a minimum per group of 32",
        str,
        group="Model",
        choices=CHOICES["weights"],
    )
    max_model_len: int | None = option(
        None,
        "Context length: maximum of prompt plus answer, up to the model's context. Also sizes the "
        "automatic pool",
        int,
        group="Model",
        unit="tokens",
        low=1,
        unset="the model's context",
        flag="--max-model-len --ctx-size",
    )
    max_memory: int | None = option(
        None,
        "Memory limit of the process, native runner. The pool takes the memory that weights and "
        "measured overhead leave, up to its default size. The model is rejected if one context of "
        "max_model_len does not fit",
        int,
        group="Cache",
        unit="bytes",
        low=1,
        unset="no limit",
    )
    max_cache_bytes: int | None = option(
        None,
        "Size of the block pool, such as 4GB",
        int,
        group="Cache",
        unit="bytes",
        low=1,
        unset="the smaller of 25% of the available memory and max_num_seqs (16 if not given) "
        "contexts",
    )
    max_state_bytes: int | None = option(
        None,
        "Memory for the recurrent state of hybrid models such as LFM2 and Qwen3.5",
        int,
        group="Cache",
        unit="bytes",
        low=1,
        unset="25% of the pool, at least 4 + 2 x max_num_seqs states",
    )
    num_blocks: int | None = option(
        None,
        "Size of the block pool in blocks",
        int,
        group="Cache",
        unit="blocks",
        low=1,
        unset="as many as max_cache_bytes holds",
    )
    max_chunks: int | None = option(
        None,
        "Size of the block pool in chunks of chunk_size tokens (128 if not given)",
        int,
        group="Cache",
        unit="chunks",
        low=1,
        unset="as many as max_cache_bytes holds",
        flag=None,
    )
    recency_window_chunks: int = option(
        0,
        "Number of each tenant's most recently used chunks, of chunk_size tokens (128 if not "
        "given), that are evicted last; at most half of the pool",
        int,
        group="Cache",
        unit="chunks",
        low=0,
        flag=None,
    )
    block_size: int = option(
        16,
        "Number of tokens in a block of the KV cache",
        int,
        group="Cache",
        unit="tokens",
        low=1,
        high=256,
        multiple=16,
    )
    kv_cache_bits: int | tuple[int, int] | None = option(
        16,
        "Bits per number of the KV cache: 16 (not quantized), 8, 4, or separate values for K and "
        "V, such as 8,4; 8 and 4 need the native runner",
        group="Cache",
        read=_kv_bits,
        metavar="BITS",
    )
    max_num_seqs: int | None = option(
        None,
        "Maximum number of sequences computed together",
        int,
        group="Engine",
        unit="sequences",
        low=1,
        unset="one per 512 tokens of the pool, 1 to 64; fewer where recurrent state needs the room",
        flag=None,
    )
    max_pinned_blocks: int | None = option(
        None,
        "Maximum number of pinned blocks; 0 forbids pins",
        int,
        group="Cache",
        unit="blocks",
        low=0,
        unset="half of the pool, which is also the maximum",
    )
    max_batch_tokens: int = option(
        512,
        "Maximum number of tokens computed in one step",
        int,
        group="Engine",
        unit="tokens",
        low=1,
    )
    target_tpot: float | None = option(
        None,
        "Target time per output token. While answers are being generated, prompts are computed in "
        "smaller steps to meet it. 0: no target",
        float,
        group="Engine",
        unit="ms",
        low=0,
        high=60_000,
        unset="1.75 times the measured step without prompts, plus 40 ms",
    )
    num_threads: int | None = option(
        None,
        "Number of compute threads",
        int,
        group="Engine",
        unit="threads",
        low=1,
        high=_MAX_THREADS,
        unset="the number of CPUs available to this process",
        flag="--num-threads --threads",
    )
    strict: bool = option(
        True, "Refuse unsupported models and warn of untested ones", bool, group="Model", flag=None
    )
    revision: str | None = option(
        None,
        "Branch, tag or commit of a hub model",
        str,
        group="Model",
        unset="its main branch",
        advice=" such as 'main', or None",
    )
    token: str | None = option(
        None,
        "Access token of the hub",
        str,
        group="Model",
        unset="the one of huggingface_hub",
        secret=True,
        flag=None,
    )
    local_files_only: bool = option(
        False, "Download nothing from the hub", bool, group="Model", flag=None
    )
    rope_range: str = option(
        "short",
        "Factors of longrope models (Phi-3, Phi-4-mini), native runner: short limits the context "
        "to the original length, long allows the full context. KV blocks are not shared between "
        "the two",
        str,
        group="Model",
        choices=CHOICES["rope_range"],
    )
    pack_cache: bool = option(
        True,
        "Store packed weights and digests of model files in the cache directory, native runner",
        bool,
        off="Store nothing in the cache directory; weights are packed in memory at every start",
        group="Model",
    )
    tenant: str = option("", "Tenant of requests that name none", str, group="Engine", flag=None)
    seed: int | None = option(
        None,
        "Seed from which requests without a seed get theirs. Sampled answers then repeat in every "
        "run in which a tenant sends the same requests in the same order",
        int,
        group="Engine",
        low=0,
        unset="random seeds",
        flag=None,
    )
    generation_config: str = option(
        "model",
        "Sampling defaults of requests: those of the model's generation config, if it has any "
        "(model), or always temperature 0.7, top_p 0.95 and min_p 0.05 (none)",
        str,
        group="Engine",
        choices=CHOICES["generation_config"],
    )
    default_temperature: float | None = option(
        None,
        "Temperature of requests that give none; 0 takes the most likely token",
        float,
        group="Engine",
        low=0,
        high=2,
        unset="the model's, else 0.7",
        flag="--temperature",
    )
    debug_checks: bool = option(
        False, "Check the block pool after every step (slow)", bool, group="Engine", flag=None
    )
    disk_cache_dir: str | os.PathLike[str] | None = option(
        None,
        "Directory of the disk tier, which keeps KV blocks across restarts; off: none",
        group="Cache",
        unset="none for an engine, the user cache directory for a server",
        metavar="DIR",
    )
    max_disk_bytes: int | None = option(
        None,
        "Size of the disk tier, such as 8GB",
        int,
        group="Cache",
        unit="bytes",
        low=_LEAST_DISK_BYTES,
        unset="the smaller of 16 GiB and 20% of the free space",
    )
    redis_url: str | None = option(
        None,
        "Redis or Valkey server that shares KV blocks between machines (extra [redis]); put a "
        "password in KVBOOST_EDGE_REDIS_URL. Blocks are signed with KVBOOST_EDGE_REDIS_SECRET, "
        "the same on all machines",
        group="Cache",
        unset="none",
        metavar="URL",
        secret=True,
    )
    redis_trust: bool = option(
        False,
        "Trust every client that can write to the Redis server; no secret is needed",
        bool,
        group="Cache",
    )
    recompute_strategy: RecomputeStrategy | str = option(
        RecomputeStrategy.CACHEBLEND,
        "Tokens recomputed in chunks reused at another position",
        RecomputeStrategy,
        group=_REUSE,
    )
    recompute_overlap: int = option(
        16,
        "Number of tokens recomputed after each chunk boundary",
        int,
        group=_REUSE,
        unit="tokens",
        low=0,
        high=MAX_RECOMPUTE_OVERLAP,
    )
    recompute_ratio: float = option(
        0.10,
        "Share of the other reused tokens that cacheblend and query recompute",
        float,
        group=_REUSE,
        low=0,
        high=1,
    )
    min_chunk_tokens: int = option(
        32,
        "Minimum length of a run of tokens reused at another position",
        int,
        group=_REUSE,
        unit="tokens",
        low=1,
        high=_MOST_CHUNK_TOKENS,
        flag=None,
    )
    reuse_gate: str = option(
        "auto",
        "Quality gate of non-prefix KV reuse. auto: refuse the mode if a stored test showed that "
        "reuse changes the model's answers more than reordering the documents does; off: never "
        "refuse",
        str,
        group=_REUSE,
        choices=CHOICES["reuse_gate"],
    )
    chunk_strategy: ChunkStrategy | str | None = option(
        None,
        "Chunk boundaries in warmed documents: every chunk_size tokens (fixed), at the end of a "
        "sentence near them (semantic), or none (document)",
        ChunkStrategy,
        group=_REUSE,
        unset="semantic with a boundary window; fixed with chunk_size, overlap_k or sink_tokens; "
        "else document",
        flag=None,
    )
    chunk_size: int | None = option(
        None,
        "Chunk size. Documents are split into chunks, and warm and max_chunks count chunks",
        int,
        group=_REUSE,
        unit="tokens",
        low=1,
        unset="128, or block_size if larger; with the default, documents are split only if "
        "overlap_k, sink_tokens, chunk_boundary_window or chunk_strategy requires it",
    )
    chunk_boundary_window: int = option(
        0,
        "How many tokens a chunk boundary may move to reach the end of a sentence. With "
        "chunk_strategy=semantic, 0 means half of chunk_size",
        int,
        group=_REUSE,
        unit="tokens",
        low=0,
    )
    overlap_k: int = option(
        0,
        "Number of tokens before a chunk that are computed with it and then dropped",
        int,
        group=_REUSE,
        unit="tokens",
        low=0,
    )
    sink_tokens: int = option(
        0,
        "Number of tokens from the start of the document that are computed with each chunk and "
        "then dropped",
        int,
        group=_REUSE,
        unit="tokens",
        low=0,
    )
    primer_tokens: int = option(
        256,
        "Number of tokens from other documents, or neutral text, placed before each warmed "
        "document while it is computed, then dropped",
        int,
        group=_REUSE,
        unit="tokens",
        low=0,
        high=_MOST_PRIMER_TOKENS,
    )
    speculation: str = option(
        "auto",
        "Speculative decoding by prompt lookup; answers do not change. auto: if it is expected to "
        "be faster, native runner; on: whenever drafts are found; off: never",
        str,
        group=_SPECULATION,
        choices=CHOICES["speculation"],
    )
    max_draft_tokens: int | None = option(
        None,
        "Maximum number of draft tokens in a step; for hybrid models, of all sequences together",
        int,
        group=_SPECULATION,
        unit="tokens",
        low=1,
        high=MOST_DRAFT_TOKENS,
        unset=f"{DEFAULT_DRAFT_TOKENS}, or fewer if recurrent state leaves less room",
    )

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        """Build a config from keyword options; raise ConfigError for an unknown name."""
        refuse_unknown("option", options, (f.name for f in dataclasses.fields(cls)), ConfigError)
        return cls(**options)

    def __post_init__(self) -> None:
        check_options(self, ConfigError)
        self._check_kv_bits()
        self._check_tiers()

    def _check_tiers(self) -> None:
        value = self.disk_cache_dir
        if value is not None and not isinstance(value, (str, os.PathLike)):
            raise ConfigError(f"disk_cache_dir={value!r} must be a path, 'off' or None")
        if value is not None and not os.fspath(value):
            raise ConfigError("disk_cache_dir='' is empty; give a path, 'off' or None")
        if value == "off":
            object.__setattr__(self, "disk_cache_dir", None)
        if self.disk_cache_dir is None and self.max_disk_bytes is not None:
            raise ConfigError(
                f"max_disk_bytes={self.max_disk_bytes} needs a disk_cache_dir, which is off"
            )
        if self.redis_url is not None and (
            not isinstance(self.redis_url, str) or not self.redis_url
        ):
            # Without the value, because it may contain a password.
            raise ConfigError("redis_url must be a URL such as redis://localhost:6379/0, or None")
        if self.redis_trust and self.redis_url is None:
            raise ConfigError("redis_trust=True needs a redis_url; give one, or leave it out")

    def _check_kv_bits(self) -> None:
        value: object = self.kv_cache_bits
        numbers = tuple(value) if isinstance(value, (tuple, list)) else (value,) * 2
        if value is not None and (
            len(numbers) != 2 or any(type(number) is not int for number in numbers)
        ):
            raise ConfigError(
                f"kv_cache_bits={value!r} must be 16 (or None), 8, 4, or a pair such as (8, 4) for "
                "keys and values"
            )
        if value is not None and numbers not in KV_BIT_PAIRS:
            raise ConfigError(
                f"kv_cache_bits={value!r} is not supported: keys and values have both 16 bits, or "
                "8 or 4 each"
            )
        if isinstance(value, list):
            object.__setattr__(self, "kv_cache_bits", numbers)

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk."""
        if self.chunk_size is None:
            return max(_DEFAULT_CHUNK_TOKENS, self.block_size)
        return self.chunk_size

    @property
    def counted_blocks(self) -> int | None:
        """Blocks by num_blocks and max_chunks, the smaller number; None without both."""
        counts = [] if self.num_blocks is None else [self.num_blocks]
        if self.max_chunks is not None:
            counts.append(self._blocks_of(self.max_chunks))
        return min(counts, default=None)

    @property
    def recency_blocks(self) -> int:
        """Blocks of recency_window_chunks."""
        return self._blocks_of(self.recency_window_chunks)

    def _blocks_of(self, num_chunks: int) -> int:
        return -(-num_chunks * self.chunk_tokens // self.block_size)

    @property
    def kv_bits(self) -> tuple[int, int]:
        """Bits of keys and of values; (16, 16) if not quantized."""
        value = self.kv_cache_bits
        if isinstance(value, tuple):
            return value
        return (16, 16) if value is None else (value, value)


def kv_bits_from_text(text: str) -> int | tuple[int, int]:
    """Parse a value of `kv_cache_bits`: "16", "8", "4", or "8,4" for keys and values."""
    parts = text.split(",")
    if not 1 <= len(parts) <= 2 or not all(part.strip().isdecimal() for part in parts):
        raise ConfigError(
            f"kv_cache_bits={text!r} must be 16, 8, 4, or a pair such as 8,4 for keys and values"
        )
    first = int(parts[0])
    last = int(parts[-1])
    return (first, last) if len(parts) == 2 else first
