"""Texts that different word-splitting rules split differently, and a vocabulary that shows every
split.

The vocabulary contains every substring of every text, and every merge of two substrings. Each word
always becomes one token, so the tokens are the words, whatever the order of merges.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

TEXTS = [
    "Hello, world's 12345!",
    "1234567 12 1,234.56",
    "I'LL don't WE'VE 'tis",
    "a  b   c\t\td \n\n e\r\nf  ",
    "  \n \n\tx\n\n\n",
    "CamelCase HTMLParser aB",
    "snake_case __init__()",
    "x=={y};//z /*w*/\n\n",
    "你好世界12中文",
    "こんにちはカナ",
    "한국어 안녕",
    "naïve Größe é\u0301",
    "e\u0301a\u0308 क्या हिन्दी",
    "Привет, МИР",
    "🚀🦙 👍🏽 ok",
    "½ ² Ⅷ ٣٤٥ x²",
    "\u00a0a\u3000b\u2003c",
    "«q» “x” … —y",
    "don’t l’été",
    "$100 #tag @me ~^|`",
    "ไทย ລາວ ខ្មែរ",
    "ÀÉ ǅ ʰa ªº",
    "a/b\\c\n/d",
    "٠١٢٣٤٥٦ １２３４",
]
_SPACE = "▁"
GEMMA4_TEXTS = [
    *TEXTS,
    *("\n" * count for count in range(1, 6)),
    "a\n\n\nb \n\n c\n \n",
    "<|turn>user\nhi there<turn|>\n<|turn>model\n<|channel>thought\nx<channel|>",
    '<|tool_call>call:f{x:<|"|>a b<|"|>}<tool_call|>',
    " leading",
    "▁real lower block",
    "\x00\x7f\x1b",
    "zzz qqq \U0001f9ff",
]
_VISIBLE = [
    "<|channel>",
    "<channel|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    "<tool_response|>",
    '<|"|>',
]
_CONTROL = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|turn>", "<turn|>"]


def _byte_letters(text: str) -> str:
    """Return a text in the alphabet of byte-level BPE."""
    step = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(word for word, _ in step.pre_tokenize_str(text))


def _every_piece(lines: list[str]) -> tuple[list[str], list[str]]:
    """Return all substrings of the lines, short ones first, and all merges of two of them into a
    third.
    """
    found = {
        line[a:b] for line in lines for a in range(len(line)) for b in range(a + 1, len(line) + 1)
    }
    tokens = sorted(found, key=lambda piece: (len(piece), piece))
    return tokens, [
        f"{token[:cut]} {token[cut:]}" for token in tokens for cut in range(1, len(token))
    ]


def metadata_of(pre: str) -> dict[str, Any]:
    """Return a GGUF file's metadata of a byte-level vocabulary with all substrings of TEXTS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces, merges = _every_piece([_byte_letters(text) for text in TEXTS])
    tokens = [*alphabet, *(piece for piece in pieces if len(piece) > 1), "<s>"]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([1] * (len(tokens) - 1) + [3], dtype=np.int32),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(tokens) - 1,
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
        "tokenizer.ggml.add_bos_token": False,
    }


def gemma4_metadata() -> dict[str, Any]:
    """Return the metadata of a Gemma 4 file. Its small vocabulary is learned from the first half of
    TEXTS and lacks letters of the others. It has tokens for one to five line ends, of which only
    two have a merge.
    """
    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizers.Replace(" ", _SPACE)
    trainer = trainers.BpeTrainer(vocab_size=330, show_progress=False, min_frequency=1)
    learner.train_from_iterator([text.replace("\n", "") for text in TEXTS[:13]] * 2, trainer)
    model = json.loads(learner.to_str())["model"]
    merges = [" ".join(merge) for merge in model["merges"]]
    learned = sorted(model["vocab"], key=model["vocab"].__getitem__)
    ends = ["\n" * count for count in range(1, 6)]
    tokens = [*_CONTROL, *_VISIBLE, *(f"<0x{byte:02X}>" for byte in range(256)), *ends, *learned]
    types = (
        [3] * len(_CONTROL)
        + [4] * len(_VISIBLE)
        + [6] * 256
        + [1] * (len(tokens) - len(_CONTROL + _VISIBLE) - 256)
    )
    return {
        "general.architecture": "gemma4",
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array([-1000.0] * len(tokens), dtype=np.float32),
        "tokenizer.ggml.token_type": np.array(types, dtype=np.int32),
        "tokenizer.ggml.merges": ["\n \n", *merges],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": True,
    }
