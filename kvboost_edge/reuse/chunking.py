"""Chunking: divides documents into chunks that are computed and cached separately."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvboost_edge.config import ChunkStrategy, EngineConfig
from kvboost_edge.errors import ConfigError

__all__ = ["CHUNK_OPTIONS", "Chunk", "ChunkOptions", "chunk_options", "cut"]

CHUNK_OPTIONS = (
    "chunk_strategy",
    "chunk_size",
    "chunk_boundary_window",
    "overlap_k",
    "sink_tokens",
)
"""Names of the chunking options of an engine, which a call can override."""

PieceOf = Callable[[int], str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChunkOptions:
    """Options that control how documents are divided into chunks.

    Attributes:
        strategy: a `ChunkStrategy` or its value.
        chunk_size: tokens per chunk, at least `block_size`. DOCUMENT ignores it.
        chunk_boundary_window: number of tokens by which SEMANTIC chunks may be shorter or longer
            than chunk_size. It must be less than chunk_size, and 0 means half of chunk_size. Other
            strategies accept only 0.
        overlap_k: number of tokens directly before a chunk that are computed with it but not
            cached. It must be less than chunk_size.
        sink_tokens: number of tokens at the start of the document that are computed before the
            overlap but not cached. It must be less than chunk_size.
        block_size: tokens per block in the pool.

    Raises:
        ConfigError: a value is out of range or contradicts another value.
    """

    strategy: ChunkStrategy | str = ChunkStrategy.FIXED
    chunk_size: int = 128
    chunk_boundary_window: int = 0
    overlap_k: int = 0
    sink_tokens: int = 0
    block_size: int = 16

    def __post_init__(self) -> None:
        names = [strategy.value for strategy in ChunkStrategy]
        if self.strategy not in names:
            raise ConfigError(f"chunk_strategy={self.strategy!r} must be one of {', '.join(names)}")
        object.__setattr__(self, "strategy", ChunkStrategy(self.strategy))
        _check_range("block_size", self.block_size, 1)
        _check_range(
            "chunk_size", self.chunk_size, self.block_size, f"block_size={self.block_size}"
        )
        for name in ("chunk_boundary_window", "overlap_k", "sink_tokens"):
            _check_range(name, getattr(self, name), 0)
            if getattr(self, name) >= self.chunk_size:
                raise ConfigError(
                    f"{name}={getattr(self, name)} must be less than chunk_size={self.chunk_size}"
                )
        if self.strategy == ChunkStrategy.SEMANTIC:
            window = self.chunk_boundary_window or self.chunk_size // 2
            object.__setattr__(self, "chunk_boundary_window", window)
        elif self.chunk_boundary_window:
            raise ConfigError(
                f"chunk_boundary_window={self.chunk_boundary_window} is not supported with "
                f"chunk_strategy='{self.strategy}'; set chunk_strategy='semantic' or "
                "chunk_boundary_window=0"
            )
        if self.strategy == ChunkStrategy.DOCUMENT and (self.overlap_k or self.sink_tokens):
            raise ConfigError(
                f"overlap_k={self.overlap_k} and sink_tokens={self.sink_tokens} are not supported "
                "with chunk_strategy='document', because no tokens precede a document; set both "
                "to 0"
            )


def chunk_options(config: EngineConfig, given: Mapping[str, Any] | None = None) -> ChunkOptions:
    """Return the chunk options of an engine, overridden by those `given` in a call.

    Raises:
        ConfigError: the options contradict one another.
    """
    values = {name: getattr(config, name) for name in CHUNK_OPTIONS} | dict(given or {})
    strategy = values.pop("chunk_strategy")
    size = values.pop("chunk_size")
    if strategy is None:
        cuts = size is not None or any(values[name] for name in ("overlap_k", "sink_tokens"))
        strategy = ChunkStrategy.FIXED if cuts else ChunkStrategy.DOCUMENT
        if values["chunk_boundary_window"]:
            strategy = ChunkStrategy.SEMANTIC
    size = config.chunk_tokens if size is None else size
    return ChunkOptions(strategy=strategy, chunk_size=size, **values, block_size=config.block_size)


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """Part of a document that is cached, with context tokens that are computed but not cached.

    Positions are those in the document, with 0 <= num_sink_tokens <= overlap_start <= start < stop.

    Attributes:
        document: index of the document.
        start: position of the first cached token.
        stop: end of the cached tokens, exclusive.
        overlap_start: start of the context directly before the chunk, tokens [overlap_start,
            start).
        num_sink_tokens: number of sink tokens, [0, num_sink_tokens), which are computed first.
    """

    document: int
    start: int
    stop: int
    overlap_start: int
    num_sink_tokens: int

    @property
    def num_context_tokens(self) -> int:
        """Total number of context tokens."""
        return self.num_sink_tokens + self.start - self.overlap_start

    def tokens(self, document: Sequence[int]) -> list[int]:
        """Return the tokens to compute: first the context, then the tokens to cache."""
        return [*document[: self.num_sink_tokens], *document[self.overlap_start : self.stop]]


def cut(
    documents: Sequence[Sequence[int]], options: ChunkOptions, piece_of: PieceOf | None = None
) -> list[Chunk]:
    """Divide documents into chunks, which cover each token exactly once and in order.

    The last chunk of a document may be short. An empty document has no chunks.

    Args:
        documents: the token ids of each document.
        options: chunk options.
        piece_of: function that returns the text of a token, including whitespace. Only SEMANTIC
            uses it. The results for special tokens and partial characters do not matter.

    Raises:
        ConfigError: the strategy is SEMANTIC, but `piece_of` is missing.
    """
    if options.strategy == ChunkStrategy.SEMANTIC and piece_of is None:
        raise ConfigError("chunk_strategy='semantic' needs the text of tokens; pass piece_of")
    chunks: list[Chunk] = []
    for number, document in enumerate(documents):
        if options.strategy == ChunkStrategy.DOCUMENT:
            stops = [len(document)] if document else []
        elif piece_of is None or options.strategy == ChunkStrategy.FIXED:
            stops = (
                [*range(options.chunk_size, len(document), options.chunk_size), len(document)]
                if document
                else []
            )
        else:
            stops = _semantic_stops(document, options, piece_of)
        for start, stop in itertools.pairwise([0, *stops]):
            overlap_start = max(0, start - options.overlap_k)
            chunks.append(
                Chunk(number, start, stop, overlap_start, min(options.sink_tokens, overlap_start))
            )
    return chunks


_PARAGRAPH, _SENTENCE, _NO_END = range(3)  # lower is better
# Number of tokens on each side of a position that show whether a sentence ends there.
_TOKENS_AROUND = 8
# End punctuation, and closing quotes or brackets. The punctuation in the group needs no space
# before the next sentence.
_END = re.compile(r"""(?:[.!?…]|([。！？]))["'”’»)\]」』）*_]*$""")


def _semantic_stops(document: Sequence[int], options: ChunkOptions, piece_of: PieceOf) -> list[int]:
    """Return the end positions of a document's chunks.

    A chunk ends at the end of a paragraph in the window, or else at the end of a sentence. Among
    several, the one nearest to chunk_size is chosen. Without any, the chunk has exactly chunk_size
    tokens.
    """
    stops: list[int] = []
    target = options.chunk_size
    window = options.chunk_boundary_window
    while target < len(document):
        places = range(target - window, min(target + window, len(document) - 1) + 1)
        kinds = _ends(document, places, piece_of)
        stops.append(min((kind, abs(place - target), place) for place, kind in kinds.items())[-1])
        target = stops[-1] + options.chunk_size
    return [*stops, len(document)] if document else []


def _ends(document: Sequence[int], places: range, piece_of: PieceOf) -> dict[int, int]:
    """Map each position to the kind of text unit that ends just before it."""
    first = max(0, places[0] - _TOKENS_AROUND)
    pieces = [piece_of(token) for token in document[first : places[-1] + _TOKENS_AROUND]]
    text = "".join(pieces)
    offsets = list(itertools.accumulate(map(len, pieces), initial=0))
    return {place: _end_at(text, offsets[place - first]) for place in places}


def _end_at(text: str, offset: int) -> int:
    """Return the kind of text unit that ends at `offset`.

    Newlines after a paragraph belong to it. Spaces may be on either side of the end.
    """
    left = text[:offset]
    right = text[offset:]
    body = left.rstrip()
    begin = right.lstrip()
    space_left = left[len(body) :]
    space_right = right[: len(right) - len(begin)]
    if not body or "\n" in space_right:
        return _NO_END
    if space_left.count("\n") >= 2:
        return _PARAGRAPH
    end = _END.search(body)
    return _SENTENCE if end and (end[1] or space_left or space_right) else _NO_END


def _check_range(name: str, value: object, least: int, limit: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name}={value!r} must be an integer of at least {limit or least}")
