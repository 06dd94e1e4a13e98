"""Byte-level vocabulary without merges. Token i < 256 is a byte, so every text has exactly one
tokenization.
"""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def byte_level(*, use_regex: bool = False) -> Tokenizer:
    """Return the tokenizer without special tokens. `use_regex` splits words as GPT-2 does first."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    raw.decoder = decoders.ByteLevel()
    return raw
