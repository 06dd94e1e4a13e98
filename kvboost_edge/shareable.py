"""The part of a prompt's KV that other requests may share.

With some options, the KV at the end of a prompt depends on more than the tokens before it. It then
stays out of the prefix cache. The KV of a cached block, and so every answer, depends on the tokens
alone, not on what is cached.
"""

from __future__ import annotations

from kvboost_edge.config import EngineConfig

__all__ = ["ALL_TOKENS", "DENSE_TAIL", "FIRST_POSITION", "shareable_end", "sparse_end"]

ALL_TOKENS = 1 << 62
"""Result of `shareable_end` if all KV is shared."""
FIRST_POSITION = 8192
"""First position whose query may attend to selected blocks; a multiple of every block size."""
DENSE_TAIL = 128
"""Tokens at the end of a prompt that attend to all tokens."""


def shareable_end(config: EngineConfig, num_prompt_tokens: int, prefill: str | None = None) -> int:
    """Return the number of leading tokens of a sequence whose KV may be shared.

    Generated tokens count too if they are shared. The result is a multiple of the block size, or
    ALL_TOKENS.

    Args:
        config: the engine's options.
        num_prompt_tokens: length of the prompt.
        prefill: the request's choice of prefill, or None for the engine's default.
    """
    size = config.block_size
    if config.prefill_of(prefill) == "sparse":
        return sparse_end(num_prompt_tokens, size)
    if config.arithmetic == "wide":
        return max(0, num_prompt_tokens - 1) // size * size
    return ALL_TOKENS


def sparse_end(num_prompt_tokens: int, block_size: int) -> int:
    """Return the end of a prompt's sparse range: `FIRST_POSITION` if the range is empty."""
    end = (num_prompt_tokens - DENSE_TAIL) // block_size * block_size
    return max(FIRST_POSITION, end)
