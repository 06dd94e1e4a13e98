"""Counterpart of KVBoost's module `chunk_registry`, which splits token ids into chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from kvboost_edge.config import ChunkStrategy
from kvboost_edge.errors import RequestError
from kvboost_edge.kvcache.prompt_groups import content_hash_from_tokens
from kvboost_edge.reuse.chunking import ChunkOptions, PieceOf, cut

__all__ = ["ChunkRegistry", "ChunkStrategy"]


@dataclasses.dataclass(frozen=True)
class ChunkRegistry:
    """Rules for splitting token ids into chunks.

    Attributes:
        chunk_size: Number of tokens in a chunk.
        strategy: A ChunkStrategy or its value.
        min_chunk_tokens: Minimum size of a chunk in tokens. Shorter chunks are dropped, except
            whole documents.
        boundary_window: Maximum number of tokens by which a semantic boundary may move.
        piece_of: Function that returns the text of a token, needed for semantic boundaries.
            `engine.chunk_registry` has one.
    """

    chunk_size: int = 128
    strategy: ChunkStrategy | str = ChunkStrategy.FIXED
    min_chunk_tokens: int = 32
    boundary_window: int = 0
    piece_of: PieceOf | None = dataclasses.field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "strategy", self._options().strategy)

    def split(
        self, token_ids: Sequence[int], text: str = "", boundary_tokens: object = None
    ) -> list[tuple[int, int, list[int]]]:
        """Split token ids into chunks.

        Args:
            token_ids: Token ids of the document.
            text: Ignored, because semantic boundaries are found in the text of the tokens.
            boundary_tokens: Not supported.

        Returns:
            (start, end, token ids) of each chunk in order. `end` is exclusive.

        Raises:
            RequestError: `boundary_tokens` is given, or semantic boundaries lack `piece_of`.
        """
        if boundary_tokens:
            raise RequestError(
                "boundary_tokens= is not supported: semantic boundaries are found in the "
                "text of the "
                "tokens; leave it out"
            )
        if self.strategy == ChunkStrategy.SEMANTIC and self.piece_of is None:
            raise RequestError(
                "strategy='semantic' needs the text of tokens; use engine.chunk_registry, which "
                "has a tokenizer, or give piece_of="
            )
        chunks = cut([token_ids], self._options(), self.piece_of)
        is_whole = self.strategy == ChunkStrategy.DOCUMENT
        return [
            (chunk.start, chunk.stop, list(token_ids[chunk.start : chunk.stop]))
            for chunk in chunks
            if is_whole or chunk.stop - chunk.start >= self.min_chunk_tokens
        ]

    def chunk_ids_for(self, token_ids: Sequence[int]) -> list[str]:
        """Return the content hash of each chunk."""
        return [content_hash_from_tokens(ids) for _, _, ids in self.split(token_ids)]

    def _options(self) -> ChunkOptions:
        return ChunkOptions(
            strategy=self.strategy,
            chunk_size=self.chunk_size,
            chunk_boundary_window=self.boundary_window,
            block_size=1,
        )


def __getattr__(name: str) -> Any:
    """Load a public name of KVBoost's module on first use."""
    return import_module("kvboost_edge")._load(__name__, name)
