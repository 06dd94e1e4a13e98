"""Pre-tokenizers of byte-level BPE, by their names in GGUF files (tokenizer.ggml.pre).

The regular expressions come from the models' tokenizer.json files, or from llama.cpp where it
defines its own. Built tokenizers are cached, so increment `_VERSION` in tokenizer_cache.py after a
change here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["PRE_TOKENIZERS", "PreTokenizer"]

_END = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = _SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _END
_QWEN2 = _SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _END
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+"
_WORD_UPPER = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_SLASH_END = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_WORD}|{_WORD_UPPER}|\p{{N}}" + _SLASH_END
# llama.cpp's default: split off punctuation, then GPT-2's words, then numbers, then groups of three
# digits.
_DEFAULT = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)
# Like `_DEFAULT`, but the grave accent is punctuation and numbers are not split off.
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _DEFAULT[1], _DEFAULT[3])
_QWEN35 = (
    _SUFFIX
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    + r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CJK = r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+"
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
# Groups of three digits counted from the end of a number, then scripts that do not separate words
# by spaces.
_AFMOE = (
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
    r"[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{F900}-\x{FAFF}\x{3040}-\x{309F}\x{30A0}-\x{30FF}"
    r"\x{FF65}-\x{FF9F}\x{2F00}-\x{2FDF}\x{0E40}-\x{0E7F}\x{0E80}-\x{0EFF}\x{1780}-\x{17FF}"
    r"\x{1000}-\x{109F}\x{AA60}-\x{AA7F}\x{A9E0}-\x{A9FF}\x{AC00}-\x{D7AF}\x{1100}-\x{11FF}]+",
    _DEEPSEEK_V3[2],
)
# Cased letters as the tokenizer lists them: ranges of code points and single code points.
_DEEPSEEK_LETTERS = "".join(
    re.sub(r"[0-9A-F]+", r"\\x{\g<0>}", each)
    for each in """
    41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376-377 37B-37D 37F 386
    388-38A 38C 38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA
    1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59
    1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC
    1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139
    213C-213F 2145-2149 214E 2183-2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2-2CF3 A640-A66D A680-A69B
    A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F
    104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943
    """.split()
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    r"\s?[" + _DEEPSEEK_LETTERS + "]+",
    r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+",
    r"\s+$",
    _CJK,
    r"\p{N}+",
)
_GPT4O = rf"{_WORD}{_SUFFIX}?|{_WORD_UPPER}{_SUFFIX}?|\p{{N}}{{1,3}}" + _SLASH_END


@dataclasses.dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Split of a text into words before BPE.

    Attributes:
        regexes: patterns applied in order, each to the words that the previous ones produced. If
            empty, GPT-2's pattern is used.
        digits: whether each digit is first split off as a separate word.
        whole: whether a word that is in the vocabulary becomes one token without merging.
        bos: whether BOS is added by default.
        nfc: whether text is first normalized to NFC.
    """

    regexes: tuple[str, ...] = ()
    digits: bool = False
    whole: bool = False
    bos: bool = False
    nfc: bool = False


_LLAMA_BPE = PreTokenizer((_LLAMA3,), whole=True, bos=True)
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = MappingProxyType(
    {
        "default": PreTokenizer(_DEFAULT),
        "falcon": PreTokenizer(_FALCON),
        **dict.fromkeys(
            "gpt-2 phi-2 olmo mpt exaone4 trillion granite-docling".split(), PreTokenizer()
        ),
        **dict.fromkeys(
            "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2".split(),
            PreTokenizer(digits=True),
        ),
        **dict.fromkeys(
            "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2".split(), _LLAMA_BPE
        ),
        **dict.fromkeys("dbrx chatglm-bpe glm4".split(), PreTokenizer((_LLAMA3,))),
        "smaug-bpe": PreTokenizer((_LLAMA3,), whole=True),
        "qwen2": PreTokenizer((_QWEN2,), nfc=True),
        "qwen35": PreTokenizer((_QWEN35,), nfc=True),
        **dict.fromkeys("deepseek-r1-qwen megrez hunyuan".split(), PreTokenizer((_QWEN2,))),
        "deepseek-llm": PreTokenizer(_DEEPSEEK_LLM),
        "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER),
        **dict.fromkeys("deepseek-v3 hunyuan-dense".split(), PreTokenizer(_DEEPSEEK_V3)),
        "afmoe": PreTokenizer(_AFMOE),
        "tekken": PreTokenizer((_TEKKEN,), whole=True, bos=True),
        **dict.fromkeys("gpt-4o llama4 kanana2".split(), PreTokenizer((_GPT4O,))),
    }
)
"""Pre-tokenizers by value of tokenizer.ggml.pre."""
