"""Engine options and public enums. Importing this module loads no heavy dependency."""

from __future__ import annotations

import dataclasses
import enum
import os
from pathlib import Path
from typing import Any

from kvboost_edge.errors import ConfigError, RequestError
from kvboost_edge.options import check_options, option, refuse_unknown

__all__ = [
    "BACKGROUND",
    "CHOICES",
    "DEFAULT_DRAFT_TOKENS",
    "KV_BIT_PAIRS",
    "MAX_RECOMPUTE_OVERLAP",
    "MAX_SESSIONS",
    "MAX_SESSION_BYTES",
    "MAX_WEIGHT",
    "MOST_DRAFT_TOKENS",
    "PREFILLS",
    "SESSION_SECONDS",
    "ChunkStrategy",
    "EngineConfig",
    "GenerationMode",
    "RecomputeStrategy",
    "disk_cache_root",
    "kv_bits_from_text",
    "resolve_prefill",
]

BACKGROUND = ("spare_time", "idle")
"""Ways to run a request in the background."""
PREFILLS = ("exact", "sparse")
"""Ways to compute a prompt."""

MAX_RECOMPUTE_OVERLAP = 4096
MAX_SESSIONS = 64  # of a tenant, by default
MAX_SESSION_BYTES = 4 << 30  # of a tenant's sessions by default, KV and records together
SESSION_SECONDS = 24 * 3600.0  # default lifetime of a session after it was saved or restored
MAX_WEIGHT = 1000.0  # largest weight of a tenant; the smallest weight is 1/1000


class GenerationMode(enum.StrEnum):
    """Use of the KV cache by a request.

    Attributes:
        BASELINE: Neither use nor fill the KV cache and the history of prompt lookup.
        PREFIX_CACHE: Reuse exact prefixes.
        CHUNK_KV_REUSE: Reuse exact prefixes, then chunks that were computed at other positions. The
            answer is approximate and marked as such.
    """

    BASELINE = "baseline"
    PREFIX_CACHE = "prefix_cache"
    CHUNK_KV_REUSE = "chunk_kv_reuse"


class RecomputeStrategy(enum.StrEnum):
    """Choice of the tokens to recompute in chunks that are reused at another position.

    Attributes:
        NONE: Recompute nothing.
        SELECTIVE: Recompute the first `recompute_overlap` tokens after each chunk boundary.
        CACHEBLEND: Like SELECTIVE, plus the fraction `recompute_ratio` of blocks whose values
            deviate most (Yao et al., "CacheBlend", EuroSys 2025).
        QUERY: Like SELECTIVE, plus the fraction `recompute_ratio` of blocks that the end of the
            prompt attends to most.
    """

    NONE = "none"
    SELECTIVE = "selective"
    CACHEBLEND = "cacheblend"
    QUERY = "query"


class ChunkStrategy(enum.StrEnum):
    """Choice of the positions where documents are split into chunks.

    Attributes:
        FIXED: Split after every chunk_size tokens.
        SEMANTIC: Like FIXED, but move each boundary to the end of a paragraph or sentence within
            chunk_boundary_window tokens.
        DOCUMENT: Do not split documents.
    """

    FIXED = "fixed"
    SEMANTIC = "semantic"
    DOCUMENT = "document"


CHOICES: dict[str, tuple[str, ...]] = {  # allowed values by option
    "runner": ("auto", "native", "torch", "onnx"),
    "backend": ("auto", "cpu", "torch", "mps", "cuda", "reference"),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "weights": ("auto", "int8", "int4", "int4-asym", "bf16", "f32"),
    "rope_range": ("short", "long"),
    "reuse_gate": ("auto", "off"),
    "speculation": ("auto", "on", "off"),
    "mtp": ("auto", "off"),
    "arithmetic": ("exact", "wide"),
    "prefill": ("exact", "on-request", "sparse"),
    "generation_config": ("model", "none"),
}
_LEAST_DISK_BYTES = 1 << 20
# More threads than any machine has cores. Each thread takes a stack, and the system limits their
# number.
_MAX_THREADS = 1024
_MOST_PRIMER_TOKENS = 65536
DEFAULT_DRAFT_TOKENS = 31
MOST_DRAFT_TOKENS = 63
_MOST_CHUNK_TOKENS = 65536
_DEFAULT_CHUNK_TOKENS = 128
_FEW_BYTES = 1000  # a smaller size was probably meant in another unit
_DRAFT_WEIGHTS = "int4"
_REUSE = "Non-prefix KV reuse"
_SPECULATION = "Speculative decoding"

KV_BIT_PAIRS = ((16, 16), (8, 8), (8, 4), (4, 8), (4, 4))
"""Supported (bits of keys, bits of values) of the cache; 16 means not quantized."""


def _backend(text: str) -> str:
    """Parse a backend name, which may be one of an earlier program."""
    return {"default": "auto", "cpu-paged": "cpu"}.get(text, text)


def kv_bits_from_text(text: str) -> int | tuple[int, int]:
    """Parse `kv_cache_bits`: "16", "8", "4", or a pair for keys and values such as "8,4"."""
    parts = text.split(",")
    if not 1 <= len(parts) <= 2 or not all(part.strip().isdecimal() for part in parts):
        raise ConfigError(
            f"kv_cache_bits={text!r} must be 16, 8, 4, or a pair such as 8,4 for keys and values"
        )
    first = int(parts[0])
    last = int(parts[-1])
    return (first, last) if len(parts) == 2 else first


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of `CPUPagedEngine`. Invalid options raise ConfigError.

    `max_cache_bytes`, `num_blocks` and `max_chunks` limit the pool, and the smallest limit applies.
    All options are listed in docs/reference/options.md.
    """

    runner: str = option(
        "auto",
        "Library that runs the model: native (this project's kernels), torch (transformers) or "
        "onnx (onnxruntime)",
        str,
        group="Model",
        choices=CHOICES["runner"],
    )
    backend: str = option(
        "auto",
        "Where the KV cache is stored, and with it the attention kernels. 'default' is an "
        "alias of auto, and 'cpu-paged' of cpu",
        str,
        group="Model",
        choices=CHOICES["backend"],
        read=_backend,
    )
    device: str | None = option(
        None,
        "Device to compute on, such as cpu, mps, cuda or cuda:1",
        str,
        group="Model",
        unset="the backend's device",
        advice=" such as 'cpu', 'mps', 'cuda' or 'cuda:0'",
    )
    dtype: str = option(
        "auto",
        "Data type that the torch runner computes in. In the native runner, float32 and "
        "bfloat16 select the weight formats f32 and bf16, and float16 has no effect except for "
        "a log message",
        str,
        group="Model",
        choices=CHOICES["dtype"],
    )
    weights: str = option(
        "auto",
        "Weight format of the native runner. auto keeps the format of a quantized file. It "
        "converts float weights to int8 if weights and pool then take at most half of the "
        "memory, otherwise to int4. int4-asym stores a scale and a minimum for each group of "
        "32 weights",
        str,
        group="Model",
        choices=CHOICES["weights"],
    )
    arithmetic: str = option(
        "exact",
        "Arithmetic of prompts in the native runner. wide is faster: it quantizes activations and "
        "weights to 8 bits with one scale per 128 inputs. Answers are then approximate and marked "
        "as such",
        str,
        group="Model",
        choices=CHOICES["arithmetic"],
    )
    prefill: str = option(
        "exact",
        "Attention of prompts in the native runner. sparse is faster for long prompts: from 8,192 "
        "tokens on, prompt tokens attend only to the blocks with the highest estimated weight. "
        "The last tokens of a prompt and the answer attend to all tokens. Answers to such prompts "
        "are approximate and marked as such. With on-request, only the requests that ask for it "
        "are computed this way. With sparse, all requests are, except those that ask for exact",
        str,
        group="Model",
        choices=CHOICES["prefill"],
    )
    max_model_len: int | None = option(
        None,
        "Maximum length of a prompt and its answer together, up to the model's context length. "
        "The default pool size depends on it",
        int,
        group="Model",
        unit="tokens",
        low=1,
        unset="the model's context length",
        flag="--max-model-len --ctx-size",
    )
    max_memory: int | None = option(
        None,
        "Memory limit of the process in the native runner, such as 1GB. The pool gets the memory "
        "that remains after the weights and the measured overhead, up to its default size. A model "
        "is rejected if the pool cannot hold one context of max_model_len tokens",
        int,
        group="Cache",
        unit="bytes",
        low=1,
        unset="no limit",
    )
    max_cache_bytes: int | None = option(
        None,
        "Size of the block pool in bytes, such as 4GB",
        int,
        group="Cache",
        unit="bytes",
        low=1,
        unset="25% of the available memory, or the size of max_num_seqs contexts (16 if not "
        "given) if that is smaller",
    )
    max_state_bytes: int | None = option(
        None,
        "Memory for the recurrent state of hybrid models, such as LFM2 and Qwen3.5",
        int,
        group="Cache",
        unit="bytes",
        low=1,
        unset="25% of the pool, but at least 4 + 2 x max_num_seqs states",
    )
    num_blocks: int | None = option(
        None,
        "Size of the block pool in blocks",
        int,
        group="Cache",
        unit="blocks",
        low=1,
        unset="the number that fits in max_cache_bytes",
    )
    max_chunks: int | None = option(
        None,
        "Size of the block pool in chunks of chunk_size tokens (128 if chunk_size is not given)",
        int,
        group="Cache",
        unit="chunks",
        low=1,
        unset="the number that fits in max_cache_bytes",
        flag=None,
    )
    recency_window_chunks: int = option(
        0,
        "Number of most recently used chunks of each tenant that are evicted last, up to half "
        "of the pool. A chunk has chunk_size tokens (128 if chunk_size is not given)",
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
        "Bits per value in the KV cache: 16 (not quantized), 8 or 4, or two numbers for K and "
        "V, such as 8,4. 8 and 4 need the native runner",
        group="Cache",
        read=kv_bits_from_text,
        metavar="BITS",
        optional=True,
    )
    max_num_seqs: int | None = option(
        None,
        "Maximum number of sequences in a batch",
        int,
        group="Engine",
        unit="sequences",
        low=1,
        unset="one per 512 tokens in the pool, from 1 to 64, or fewer if a hybrid model's "
        "recurrent state needs the memory",
        flag=None,
    )
    max_pinned_blocks: int | None = option(
        None,
        "Maximum number of pinned blocks. 0 forbids pins",
        int,
        group="Cache",
        unit="blocks",
        low=0,
        unset="half of the pool, which is also the upper limit",
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
        "Target time per output token. While answers are being generated, the engine computes "
        "prompts in smaller steps to meet the target. 0 turns the target off",
        float,
        group="Engine",
        unit="ms",
        low=0,
        high=60_000,
        unset="1.75 times the measured duration of a step without prompts, plus 40 ms",
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
        True,
        "Reject unsupported models and warn about untested ones",
        bool,
        group="Model",
        flag=None,
    )
    revision: str | None = option(
        None,
        "Branch, tag or commit of a model on the Hugging Face Hub",
        str,
        group="Model",
        unset="main",
        advice=" such as 'main', or None",
    )
    token: str | None = option(
        None,
        "Access token for the Hugging Face Hub",
        str,
        group="Model",
        unset="the token that huggingface_hub finds",
        secret=True,
        flag=None,
    )
    local_files_only: bool = option(
        False,
        "Use only files on this machine and download nothing from the Hugging Face Hub",
        bool,
        group="Model",
        flag=None,
    )
    rope_range: str = option(
        "short",
        "RoPE scaling factors of longrope models (Phi-3, Phi-4-mini) in the native runner. "
        "short limits the context to the length of the original training, and long allows the "
        "full context. KV blocks computed with one are not reused with the other",
        str,
        group="Model",
        choices=CHOICES["rope_range"],
    )
    pack_cache: bool = option(
        True,
        "Store the native runner's packed weights, and the digests of model files, in the "
        "cache directory",
        bool,
        off="Store nothing in the cache directory, and pack the weights in memory at every start",
        group="Model",
    )
    tenant: str = option(
        "", "Tenant of requests that do not name one", str, group="Engine", flag=None
    )
    seed: int | None = option(
        None,
        "Seed for requests that do not give their own. If each tenant sends the same requests "
        "in the same order, sampled answers are the same in every run",
        int,
        group="Engine",
        low=0,
        unset="a random seed for each request",
        flag=None,
    )
    generation_config: str = option(
        "model",
        "Source of the sampling defaults. model uses the model's generation config if there is "
        "one. none always uses temperature 0.7, top_p 0.95 and min_p 0.05",
        str,
        group="Engine",
        choices=CHOICES["generation_config"],
    )
    default_temperature: float | None = option(
        None,
        "Sampling temperature for requests that do not give one. 0 always takes the most "
        "likely token",
        float,
        group="Engine",
        low=0,
        high=2,
        unset="the model's own, otherwise 0.7",
        flag="--temperature",
    )
    debug_checks: bool = option(
        False,
        "Check the consistency of the block pool after every step, which is slow",
        bool,
        group="Engine",
        flag=None,
    )
    disk_cache_dir: str | os.PathLike[str] | None = option(
        None,
        "Directory of the disk tier, which keeps KV blocks across restarts. off disables it. A "
        "leading ~ stands for the home directory",
        group="Cache",
        unset="off for an engine, the user cache directory for a server",
        metavar="DIR",
    )
    max_disk_bytes: int | None = option(
        None,
        "Maximum size of the disk tier in bytes, such as 8GB",
        int,
        group="Cache",
        unit="bytes",
        low=_LEAST_DISK_BYTES,
        unset="16 GiB, or 20% of the free disk space if that is smaller",
    )
    redis_url: str | None = option(
        None,
        "URL of a Redis or Valkey server that shares KV blocks between machines (extra "
        "[redis]). To hide a password, give the URL in KVBOOST_EDGE_REDIS_URL. Blocks are "
        "signed with KVBOOST_EDGE_REDIS_SECRET, which must be the same on all machines",
        group="Cache",
        unset="none",
        metavar="URL",
        secret=True,
    )
    redis_trust: bool = option(
        False,
        "Trust every client that can write to the Redis server, so that no "
        "KVBOOST_EDGE_REDIS_SECRET is needed",
        bool,
        group="Cache",
    )
    recompute_strategy: RecomputeStrategy | str = option(
        RecomputeStrategy.CACHEBLEND,
        "Which tokens to recompute in chunks that are reused at another position",
        RecomputeStrategy,
        group=_REUSE,
    )
    recompute_overlap: int = option(
        16,
        "Number of tokens to recompute after each chunk boundary",
        int,
        group=_REUSE,
        unit="tokens",
        low=0,
        high=MAX_RECOMPUTE_OVERLAP,
    )
    recompute_ratio: float = option(
        0.10,
        "Fraction of the remaining reused tokens that the strategies cacheblend and query "
        "recompute",
        float,
        group=_REUSE,
        low=0,
        high=1,
    )
    min_chunk_tokens: int = option(
        32,
        "Minimum number of consecutive tokens to reuse at another position",
        int,
        group=_REUSE,
        unit="tokens",
        low=1,
        high=_MOST_CHUNK_TOKENS,
        flag=None,
    )
    reuse_gate: str = option(
        "auto",
        "Quality gate of non-prefix KV reuse. auto rejects chunk_kv_reuse mode if a stored "
        "test showed that reuse changes the model's answers more than reordering the documents "
        "does. off never rejects it",
        str,
        group=_REUSE,
        choices=CHOICES["reuse_gate"],
    )
    chunk_strategy: ChunkStrategy | str | None = option(
        None,
        "How to split warmed documents into chunks: fixed (every chunk_size tokens), semantic "
        "(at the end of a sentence near these positions) or document (no splits)",
        ChunkStrategy,
        group=_REUSE,
        unset="semantic if chunk_boundary_window is given, fixed if chunk_size, overlap_k or "
        "sink_tokens is given, otherwise document",
        flag=None,
    )
    chunk_size: int | None = option(
        None,
        "Number of tokens in a chunk. Documents are split into chunks, and max_chunks and warm "
        "count chunks",
        int,
        group=_REUSE,
        unit="tokens",
        low=1,
        unset="128, or block_size if larger. With the default, documents are split only if "
        "overlap_k, sink_tokens, chunk_boundary_window or chunk_strategy requires it",
    )
    chunk_boundary_window: int = option(
        0,
        "Maximum number of tokens by which a chunk boundary may move to reach the end of a "
        "sentence. With chunk_strategy=semantic, 0 means half of chunk_size",
        int,
        group=_REUSE,
        unit="tokens",
        low=0,
    )
    overlap_k: int = option(
        0,
        "Number of tokens before each chunk that are computed with it as context and not stored",
        int,
        group=_REUSE,
        unit="tokens",
        low=0,
    )
    sink_tokens: int = option(
        0,
        "Number of tokens from the start of the document that are computed with each chunk as "
        "context and not stored",
        int,
        group=_REUSE,
        unit="tokens",
        low=0,
    )
    primer_tokens: int = option(
        256,
        "Number of tokens of other documents, or of neutral text, that are computed before "
        "each warmed document as context and not stored",
        int,
        group=_REUSE,
        unit="tokens",
        low=0,
        high=_MOST_PRIMER_TOKENS,
    )
    speculation: str = option(
        "auto",
        "Speculative decoding, by prompt lookup, with a draft_model or with an mtp head. It does "
        "not change the answers. auto uses it in the native runner when it is expected to be "
        "faster, on whenever drafts are found, and off never",
        str,
        group=_SPECULATION,
        choices=CHOICES["speculation"],
    )
    max_draft_tokens: int | None = option(
        None,
        "Maximum number of draft tokens of a sequence in one step; for hybrid models, of all "
        "sequences together",
        int,
        group=_SPECULATION,
        unit="tokens",
        low=1,
        high=MOST_DRAFT_TOKENS,
        unset=f"{DEFAULT_DRAFT_TOKENS}, or fewer if a hybrid model's recurrent state needs the "
        "memory",
    )
    draft_model: str | os.PathLike[str] | None = option(
        None,
        "Draft model for speculative decoding: a directory, GGUF file or hub id of a smaller model "
        "with the same vocabulary, of a Gemma 4 assistant, or of a multi-token prediction head "
        "alone. It does not change the answers. Needs the native runner",
        group=_SPECULATION,
        unset="none",
        flag="--draft-model --model-draft",
        metavar="MODEL",
    )
    draft_weights: str = option(
        _DRAFT_WEIGHTS,
        "Weight format of the draft model, with the values of weights",
        str,
        group=_SPECULATION,
        choices=CHOICES["weights"],
    )
    draft_vocabulary: int | None = option(
        None,
        "Number of token ids, the lowest ones, that a draft model or mtp head chooses from; 0 for "
        "all. Fewer ids make drafting faster. All are used where higher ids are frequent",
        int,
        group=_SPECULATION,
        unit="ids",
        low=0,
        unset="65536, or all if there are fewer",
    )
    mtp: str = option(
        "auto",
        "Multi-token prediction head of the model, which drafts tokens without changing the "
        "answers. auto uses the head if the model's files contain one and there is no draft_model. "
        "Needs the native runner",
        str,
        group=_SPECULATION,
        choices=CHOICES["mtp"],
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
        self._check_draft_model()
        bound = self.max_memory
        if bound is not None and bound < _FEW_BYTES:
            raise ConfigError(f"max_memory={bound} is a number of bytes; did you mean {bound}GB?")

    def _check_draft_model(self) -> None:
        value = self.draft_model
        count = self.draft_vocabulary
        if count is not None and self.speculation == "off":
            raise ConfigError(
                f"draft_vocabulary={count} has no effect with speculation='off'; leave one of them "
                "out"
            )
        if count is not None and value is None and self.mtp == "off":
            raise ConfigError(
                f"draft_vocabulary={count} has no effect without draft_model or mtp='auto'; give "
                "one of them, or leave draft_vocabulary out"
            )
        if value is None:
            if self.draft_weights != _DRAFT_WEIGHTS:
                raise ConfigError(
                    f"draft_weights={self.draft_weights!r} has no effect without draft_model; give "
                    "a draft_model, or leave draft_weights out"
                )
            return
        if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
            raise ConfigError(f"draft_model={value!r} must be a path, a hub id or None")
        if self.speculation == "off":
            raise ConfigError(
                f"draft_model={os.fspath(value)!r} has no effect with speculation='off'; leave one "
                "of them out"
            )

    def _check_tiers(self) -> None:
        value = self.disk_cache_dir
        if value is not None and not isinstance(value, (str, os.PathLike)):
            raise ConfigError(f"disk_cache_dir={value!r} must be a path, 'off' or None")
        if value in ("true", "false"):
            raise ConfigError(
                f"disk_cache_dir={value!r} must be a path, 'off' or None; write './{value}' for a "
                "directory of this name"
            )
        if value is not None and not os.fspath(value):
            raise ConfigError("disk_cache_dir='' is empty; give a path, 'off' or None")
        if value is not None:
            found = None if value == "off" else disk_cache_root(value)
            object.__setattr__(self, "disk_cache_dir", found)
        if self.disk_cache_dir is None and self.max_disk_bytes is not None:
            raise ConfigError(
                f"max_disk_bytes={self.max_disk_bytes} has no effect, because disk_cache_dir is "
                "off; give a directory, or leave max_disk_bytes out"
            )
        if self.redis_url is not None and (
            not isinstance(self.redis_url, str) or not self.redis_url
        ):
            # The value is omitted, because it may contain a password.
            raise ConfigError("redis_url must be a URL such as redis://localhost:6379/0, or None")
        if self.redis_trust and self.redis_url is None:
            raise ConfigError(
                "redis_trust=True has no effect without redis_url; give a redis_url, or leave "
                "redis_trust out"
            )

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
                f"kv_cache_bits={value!r} is not supported; use 16 for both keys and values, or 8 "
                "or 4 for each"
            )
        if isinstance(value, list):
            object.__setattr__(self, "kv_cache_bits", numbers)

    @property
    def approximations(self) -> tuple[str, ...]:
        """Labels of the options that make answers approximate by default."""
        return self.approximations_of(self.prefill_of(None))

    def approximations_of(self, prefill: str) -> tuple[str, ...]:
        """Return the labels of the options that make answers with this prefill approximate."""
        labels = {
            "wide_arithmetic": self.arithmetic == "wide",
            "sparse_prefill": prefill == "sparse",
        }
        return tuple(label for label, applies in labels.items() if applies)

    def prefill_of(self, choice: str | None) -> str:
        """Return how the prompt of a request is computed, see `resolve_prefill`."""
        return resolve_prefill(self.prefill, choice)

    @property
    def chunk_tokens(self) -> int:
        """Number of tokens in a chunk."""
        if self.chunk_size is None:
            return max(_DEFAULT_CHUNK_TOKENS, self.block_size)
        return self.chunk_size

    @property
    def counted_blocks(self) -> int | None:
        """Number of blocks that num_blocks and max_chunks allow, or None if neither is set."""
        counts = [] if self.num_blocks is None else [self.num_blocks]
        if self.max_chunks is not None:
            counts.append(self._blocks_of(self.max_chunks))
        return min(counts, default=None)

    @property
    def recency_blocks(self) -> int:
        """Number of blocks in recency_window_chunks."""
        return self._blocks_of(self.recency_window_chunks)

    def _blocks_of(self, num_chunks: int) -> int:
        return -(-num_chunks * self.chunk_tokens // self.block_size)

    @property
    def kv_bits(self) -> tuple[int, int]:
        """Bits per value of keys and of values. (16, 16) means not quantized."""
        value = self.kv_cache_bits
        if isinstance(value, tuple):
            return value
        return (16, 16) if value is None else (value, value)


def resolve_prefill(option: str, choice: str | None) -> str:
    """Return how the prompt of a request is computed: "exact" or "sparse".

    Args:
        option: the engine's option `prefill`.
        choice: the request's choice, or None for the engine's default.

    Raises:
        RequestError: the engine does not support the choice.
    """
    if choice == "sparse" and option == "exact":
        raise RequestError(
            "prefill='sparse' is refused, because the engine computes all prompts with "
            "prefill='exact'; start it with prefill='on-request' (--prefill on-request), or leave "
            "out prefill"
        )
    return choice or ("sparse" if option == "sparse" else "exact")


def disk_cache_root(directory: str | os.PathLike[str]) -> Path:
    """Return the absolute path of the disk cache, with a leading ~ replaced.

    Raises:
        ConfigError: the path is invalid.
    """
    try:
        root = Path(directory).expanduser().absolute()
        if b"\0" not in os.fsencode(root):
            return root
        why = "embedded null byte"
    # The path names an unknown user after ~, or has characters that are invalid in a file name.
    except (RuntimeError, ValueError) as error:
        why = str(error)
    raise ConfigError(f"disk_cache_dir={os.fspath(directory)!r} is not a valid path: {why}")
