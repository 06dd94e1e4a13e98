"""Chunk boundaries of documents: each token once, at ends of sentences within reach, and valid
options.
"""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvboost_edge.config import ChunkStrategy
from kvboost_edge.errors import ConfigError
from kvboost_edge.reuse.chunking import ChunkOptions, cut


class Words:
    """Tokenizer of words with their leading space; punctuation marks and line ends are tokens of
    their own.
    """

    def __init__(self):
        self.pieces = []

    def encode(self, text):
        ids = []
        for piece in re.findall(r" ?\w+|\n+|.", text):
            if piece not in self.pieces:
                self.pieces.append(piece)
            ids.append(self.pieces.index(piece))
        return ids

    def piece_of(self, token):
        return self.pieces[token]

    def texts(self, document, chunks):
        return ["".join(map(self.piece_of, document[chunk.start : chunk.stop])) for chunk in chunks]


def semantic(text, size, window):
    words = Words()
    options = ChunkOptions(
        strategy="semantic", chunk_size=size, chunk_boundary_window=window, block_size=1
    )
    document = words.encode(text)
    return words.texts(document, cut([document], options, words.piece_of))


def bounds(chunks):
    return [(chunk.document, chunk.start, chunk.stop) for chunk in chunks]


def test_fixed_chunks_restart_at_each_document():
    options = ChunkOptions(chunk_size=16)
    lengths = [0, 1, 16, 17, 40]
    expected = [
        (1, 0, 1),
        (2, 0, 16),
        (3, 0, 16),
        (3, 16, 17),
        (4, 0, 16),
        (4, 16, 32),
        (4, 32, 40),
    ]
    assert bounds(cut([[5] * length for length in lengths], options)) == expected


def test_document_chunks_are_whole_documents():
    options = ChunkOptions(strategy=ChunkStrategy.DOCUMENT)
    assert bounds(cut([[1] * 1000, [], [2]], options)) == [(0, 0, 1000), (2, 0, 1)]


def test_overlap_and_sink_tokens_do_not_intersect():
    options = ChunkOptions(chunk_size=16, overlap_k=6, sink_tokens=12)
    document = list(range(100, 140))
    first, second, third = cut([[1] * 20, document], options)[2:]
    assert (first.num_context_tokens, first.tokens(document)) == (0, document[:16])
    assert (second.num_sink_tokens, second.overlap_start, second.num_context_tokens) == (10, 10, 16)
    assert second.tokens(document) == document[:32]
    assert (third.num_sink_tokens, third.overlap_start, third.num_context_tokens) == (12, 26, 18)
    assert third.tokens(document) == document[:12] + document[26:40]


def test_semantic_chunks_end_at_the_nearest_sentence_end():
    text = "One two three. Four five six seven. Eight nine ten! Is it? Yes. So."
    assert semantic(text, 6, 3) == [
        "One two three.",
        " Four five six seven.",
        " Eight nine ten! Is it?",
        " Yes. So.",
    ]


def test_a_paragraph_end_is_preferred_to_a_nearer_sentence_end():
    text = "One two.\n\nThree four. Five six seven eight nine ten."
    assert semantic(text, 7, 4) == [
        "One two.\n\n",
        "Three four.",
        " Five six seven eight nine ten.",
    ]


def test_without_a_sentence_end_a_chunk_has_the_chunk_size():
    text = "one two three four five six seven eight nine ten. eleven"
    assert semantic(text, 4, 2) == [
        "one two three four",
        " five six seven eight",
        " nine ten. eleven",
    ]


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("it costs 3.14 in all. Then more of it", "it costs 3.14 in all."),
        ('he said "no more." And then he left it', 'he said "no more."'),
        ("see (that is all.) And then he left it", "see (that is all.)"),
        ("a b c d。e f g h i j k l m n", "a b c d。"),
        ("a b c d e\nf g h i j k l m", "a b c d e\nf"),
    ],
)
def test_sentence_ends_are_recognised(text, first):
    assert semantic(text, 7, 3)[0] == first


def test_separate_line_end_tokens_stay_with_the_paragraph():
    pieces = ["a", " b", ".", "\n", "\n", "c", " d", " e", " f", " g"]
    options = ChunkOptions(strategy="semantic", chunk_size=4, chunk_boundary_window=2, block_size=1)
    chunks = cut([list(range(10))], options, pieces.__getitem__)
    assert (chunks[0].start, chunks[0].stop) == (0, 5)


@given(st.data())
def test_every_token_is_in_one_chunk(data):
    pieces = ["", "a", " b", ".", ". ", "\n", "\n\n", "。", "\ufffd"]
    documents = data.draw(
        st.lists(st.lists(st.integers(0, len(pieces) - 1), max_size=80), max_size=4)
    )
    strategy = data.draw(st.sampled_from(list(ChunkStrategy)))
    size = data.draw(st.integers(2, 20))
    window = data.draw(st.integers(1, size - 1)) if strategy == "semantic" else 0
    overlap, sink = (
        data.draw(st.integers(0, size - 1)) if strategy != "document" else 0 for _ in range(2)
    )
    options = ChunkOptions(
        strategy=strategy,
        chunk_size=size,
        chunk_boundary_window=window,
        overlap_k=overlap,
        sink_tokens=sink,
        block_size=2,
    )
    chunks = cut(documents, options, pieces.__getitem__)
    kept = [(chunk.document, place) for chunk in chunks for place in range(chunk.start, chunk.stop)]
    assert kept == [
        (number, place)
        for number, document in enumerate(documents)
        for place in range(len(document))
    ]
    for chunk in chunks:
        assert 0 <= chunk.num_sink_tokens <= chunk.overlap_start <= chunk.start < chunk.stop
        assert (
            len(chunk.tokens(documents[chunk.document]))
            == chunk.num_context_tokens + chunk.stop - chunk.start
        )
        is_last = chunk.stop == len(documents[chunk.document])
        if strategy == "fixed":
            assert chunk.stop - chunk.start == size or is_last
        if strategy == "semantic":
            assert chunk.stop - chunk.start >= size - window or is_last
            assert chunk.stop - chunk.start <= size + window


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "gear"}, "chunk_strategy='gear' must be one of fixed, semantic, document"),
        ({"strategy": None}, "chunk_strategy=None must be"),
        ({"chunk_size": 15}, "chunk_size=15 must be an integer of at least block_size=16"),
        ({"chunk_size": 128.0}, "chunk_size=128.0 must be"),
        ({"chunk_size": True, "block_size": 1}, "chunk_size=True must be"),
        ({"block_size": 0}, "block_size=0 must be an integer of at least 1"),
        (
            {"chunk_boundary_window": -1},
            "chunk_boundary_window=-1 must be an integer of at least 0",
        ),
        (
            {"strategy": "semantic", "chunk_boundary_window": 128},
            "window=128 must be less than chunk_size=128",
        ),
        (
            {"chunk_boundary_window": 8},
            "chunk_boundary_window=8 is not supported with chunk_strategy='fixed'",
        ),
        (
            {"strategy": "document", "chunk_boundary_window": 8},
            "chunk_boundary_window=8 is not supported with chunk_strategy='document'",
        ),
        ({"overlap_k": -1}, "overlap_k=-1 must be"),
        ({"overlap_k": 128}, "overlap_k=128 must be less than chunk_size=128"),
        ({"sink_tokens": 200}, "sink_tokens=200 must be less than chunk_size=128"),
        ({"sink_tokens": "4"}, "sink_tokens='4' must be an integer"),
        (
            {"strategy": "document", "sink_tokens": 4},
            "sink_tokens=4 are not supported with chunk_strategy='document'",
        ),
    ],
)
def test_options_are_checked_by_name(options, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        ChunkOptions(**options)


def test_defaults_equal_the_engines():
    options = ChunkOptions()
    assert (
        options.chunk_size,
        options.chunk_boundary_window,
        options.overlap_k,
        options.sink_tokens,
    ) == (128, 0, 0, 0)
    assert options.strategy is ChunkStrategy.FIXED
    assert ChunkOptions(strategy="document").strategy is ChunkStrategy.DOCUMENT


@pytest.mark.parametrize(("size", "window"), [(128, 64), (33, 16), (1, 0)])
def test_only_semantic_chunking_has_a_boundary_window(size, window):
    options = ChunkOptions(strategy="semantic", chunk_size=size, block_size=1)
    assert options.chunk_boundary_window == window
    document = list(range(size * 3))
    assert cut([document], options, lambda token: "x")[0].stop == size


def test_semantic_chunking_needs_token_texts():
    options = ChunkOptions(strategy="semantic", chunk_boundary_window=16)
    with pytest.raises(ConfigError, match="piece_of"):
        cut([[1, 2]], options)
