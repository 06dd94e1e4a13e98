"""A byte-level vocabulary without merges: token i < 256 is a byte, so every text has one way to be
cut.
"""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def byte_level(*, use_regex: bool = False) -> Tokenizer:
    """Without special tokens. use_regex: words are cut as GPT-2 cuts them before."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    raw.decoder = decoders.ByteLevel()
    return raw
