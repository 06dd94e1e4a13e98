"""Limits for a tokenizer.json, checked before the library parses it.

A few normalizer steps can turn a short text into gigabytes, for example 30 steps that each replace
"a" by "aa". The library normalizes the added tokens while it reads the file, and later each prompt.
The maximum growth of a text is therefore computed from the steps.
"""

from __future__ import annotations

import base64
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kvboost_edge.errors import ModelFormatError

__all__ = ["read_tokenizer_file"]

# A vocabulary of a million tokens takes about 60 MB.
_MAX_BYTES = 100_000_000
# Real tokenizers have up to 10 steps.
_MAX_STEPS = 64
# Maximum characters per character of encoded text, and tokens per token. Both sentencepiece's table
# and Unicode's NFKC turn U+FDFA into 18 characters. Decoders mostly shorten a text, so their limit
# is lower.
_MAX_GROWTH = 256
_MAX_DECODED = 16
# Maximum characters that all steps produce from the added tokens while the library reads the file.
_MAX_ADDED = 1 << 23
_PARTS = ("added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder")
_INNER = ("normalizers", "pretokenizers", "processors", "decoders")
_UNICODE = frozenset({"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt"})
# Characters that a step without settings makes from one. A byte-level step writes one per byte,
# BERT's puts spaces around ideographs, and the others write one between tokens.
_FACTORS = {
    "ByteLevel": 4,
    "BertNormalizer": 3,
    **dict.fromkeys(("Metaspace", "BPEDecoder", "CTC", "WordPiece"), 2),
}
_NEXT = re.compile(r'\s*[{,]\s*(?=")')
_COLON = re.compile(r"\s*:\s*")
_PART = re.compile(rf'"(?:{"|".join(_PARTS)})"\s*:\s*[{{\[]')
_ESCAPED = re.compile(r"\\u00[2-7]")  # an escaped letter, which could hide the name of a part
# A regular expression without alternatives whose first atom must match a character. Any other
# regular expression might match nothing and write its content between any two characters.
_CONSUMES = re.compile(
    r"(?:[^\\\[\](){}|^$.*+?]|\.|\\[sSdDwWntr]|\\[pP]\{\^?\w+\}|\\[\[\](){}|^$.*+?\\/\"-]"
    r"|\[\^?(?:[^\[\]\\^]|\\.)(?:[^\[\]\\]|\\.)*\])"
    r"(?:\+|\{[1-9]\d*(?:,\d*)?\})?(?![*?+{])(?:(?!\(\?#)[^|])*",
    re.DOTALL,
)

Step = dict[str, Any]


def read_tokenizer_file(path: Path, listed: object = None) -> bytes:
    """Read a tokenizer.json and return its bytes.

    Args:
        path: path of tokenizer.json.
        listed: added_tokens_decoder of tokenizer_config.json. Its tokens are added too.

    Raises:
        ModelFormatError: the file is too large, has too many steps, or could expand a text too
            much.
        OSError, ValueError, RecursionError: the file is not readable JSON.
    """
    size = path.stat().st_size
    if size > _MAX_BYTES:
        raise ModelFormatError(f"{path} has {size} bytes, over the limit of {_MAX_BYTES} bytes")
    data = path.read_bytes()
    parts = _parts(data.decode())
    added = parts.get("added_tokens")
    tokens = [
        *(added if isinstance(added, list) else ()),
        *(listed.values() if isinstance(listed, dict) else ()),
    ]
    _check_parts(path, parts, sum(map(_normalized_length, tokens)))
    return data


def _check_parts(path: Path, parts: Step, num_chars: int) -> None:
    """Check the number of steps in each part and how much the part can expand a text.

    Args:
        path: path shown in error messages.
        parts: parts of tokenizer.json by name.
        num_chars: total characters of the added tokens that the library normalizes.
    """
    steps = {name: _steps(parts.get(name)) for name in _PARTS[1:]}
    for name, found in steps.items():
        if len(found) > _MAX_STEPS:
            raise ModelFormatError(
                f"{path}: its {name} has {len(found)} steps, over the limit of {_MAX_STEPS}"
            )
    normalizer = steps["normalizer"]
    for name, chain, limit in (
        ("normalizer", normalizer, _MAX_GROWTH),
        ("pre_tokenizer", [*normalizer, *steps["pre_tokenizer"]], _MAX_GROWTH),
        ("decoder", steps["decoder"], _MAX_DECODED),
    ):
        if _growth(chain) > limit:
            raise ModelFormatError(
                f"{path}: its {name} can turn one character into more than {limit}, which no real "
                "tokenizer does"
            )
    if _num_tokens(steps["post_processor"]) > _MAX_GROWTH:
        raise ModelFormatError(
            f"{path}: its post_processor can turn one token into more than {_MAX_GROWTH}, which no "
            "real tokenizer does"
        )
    if num_chars * _growth(normalizer) * len(normalizer) > _MAX_ADDED:
        raise ModelFormatError(
            f"{path}: its {num_chars} characters of added tokens can expand to more than "
            f"{_MAX_ADDED} by normalization, which no real tokenizer does"
        )


def _parts(text: str) -> Step:
    """Return the members of the file, if possible without parsing the large model.

    The model is skipped if it is the last member. Otherwise the whole file is parsed.
    """
    decoder = json.JSONDecoder()
    found: Step = {}
    at = 0
    while (begin := _NEXT.match(text, at)) is not None:
        name, at = decoder.raw_decode(text, begin.end())
        colon = _COLON.match(text, at)
        if colon is None:
            break
        if name == "model":
            if _PART.search(text, colon.end()) or _ESCAPED.search(text, colon.end()):
                break
            return found
        found[name], at = decoder.raw_decode(text, colon.end())
    value = json.loads(text)
    return value if isinstance(value, dict) else {}


def _steps(part: object) -> list[Step]:
    """Return the steps of a part in order, with nested sequences expanded."""
    steps: list[Step] = []
    waiting = [part]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, dict):
            continue
        inner = [node[name] for name in _INNER if isinstance(node.get(name), list)]
        if inner and node.get("type") in (None, "Sequence"):
            waiting += reversed([step for steps in inner for step in steps])
        else:
            steps.append(node)
    return steps


class _Lengths:
    """Maximum number of characters that each character becomes in the following steps.

    Attributes:
        chars: numbers by character.
        other: number for all characters that are not in `chars`.
        added: characters that are written regardless of the text.
    """

    def __init__(self) -> None:
        self.chars: dict[str, float] = {}
        self.other = 1.0
        self.added = 0.0

    def of(self, text: str) -> float:
        return sum(self.chars.get(char, self.other) for char in text)

    def longest(self) -> float:
        return max(self.other, *self.chars.values()) if self.chars else self.other

    def multiply(self, factor: float) -> None:
        """Apply a step that turns each character into up to `factor` arbitrary characters."""
        self.other = factor * self.longest()
        self.chars = {}

    def replace(self, pattern: object, content: str) -> None:
        written = self.of(content)
        fields = pattern if isinstance(pattern, dict) else {}
        literal = fields.get("String")
        if isinstance(literal, str) and literal:
            for char in literal:
                known = self.chars.get(char, self.other)
                self.chars[char] = max(known, written / len(literal))
            return
        regex = fields.get("Regex")
        between = 0.0 if isinstance(regex, str) and _CONSUMES.fullmatch(regex) else written
        self.chars = {char: max(n, written) + between for char, n in self.chars.items()}
        self.other = max(self.other, written) + between
        self.added += between


def _growth(steps: Sequence[Step]) -> float:
    """Return an upper bound of the characters that one character becomes.

    The steps are processed in reverse. The loop stops at any number above the limit. Unicode
    normalization expands a text only once, to at most 18 characters per character. It counts only
    for characters that other steps write.
    """
    lengths = _Lengths()
    for index in reversed(range(len(steps))):
        step = steps[index]
        kind = str(step.get("type"))
        content, prefix, table = map(step.get, ("content", "prepend", "precompiled_charsmap"))
        if isinstance(content, str) and "pattern" in step:
            lengths.replace(step.get("pattern"), content)
        if isinstance(prefix, str):
            lengths.added += lengths.of(prefix)
        if isinstance(table, str):
            lengths.multiply(max(1, *map(len, _texts_of(table))))
        if kind in _UNICODE:
            lengths.multiply(_expansion(_written_before(steps, index)))
        if kind in _FACTORS:
            lengths.multiply(_FACTORS[kind])
        if lengths.longest() + lengths.added > _MAX_GROWTH:
            break
    return lengths.longest() + lengths.added


def _written_before(steps: Sequence[Step], index: int) -> set[str]:
    """Return the characters that the settings of steps before `index` write.

    Steps before the last Unicode normalization are ignored, because it has expanded their output.
    """
    found: set[str] = set()
    for step in reversed(steps[:index]):
        if str(step.get("type")) in _UNICODE:
            break
        for name in ("content", "prepend"):
            found.update(step[name] if isinstance(step.get(name), str) else "")
        if isinstance(table := step.get("precompiled_charsmap"), str):
            found.update(*_texts_of(table))
    return found


def _expansion(chars: Iterable[str]) -> int:
    """Return the most characters into which Unicode normalization expands one of these."""
    forms = (unicodedata.normalize("NFKD", one) for char in chars for one in (char, char.lower()))
    return max(map(len, forms), default=1)


def _texts_of(table: str) -> list[str]:
    """Return the replacement texts of a sentencepiece table.

    Layout: u32 size | trie | texts, each terminated by NUL.
    """
    try:
        data = base64.b64decode(table)
    except ValueError:
        return []
    start = 4 + int.from_bytes(data[:4], "little")
    return data[start:].decode(errors="replace").split("\0")


def _num_tokens(steps: Iterable[Step]) -> int:
    """Return an upper bound of the tokens that post-processors make from one token."""
    count = 1
    for step in steps:
        special = step.get("special_tokens")
        sizes = {
            name: len(token["ids"])
            for name, token in (special.items() if isinstance(special, dict) else ())
            if isinstance(token, dict) and isinstance(token.get("ids"), list)
        }
        most = count
        for name in ("single", "pair"):
            pieces = step.get(name)
            texts: Counter[str] = Counter()
            added = 0
            for piece in pieces if isinstance(pieces, list) else ():
                named = piece if isinstance(piece, dict) else {}
                for kind, value in named.items():
                    shown = str(value.get("id")) if isinstance(value, dict) else ""
                    if kind == "Sequence":
                        texts[shown] += 1
                    else:
                        added += sizes.get(shown, 1)
            most = max(most, count * max(texts.values(), default=1) + added)
        count = most
        if count > _MAX_GROWTH:
            break
    return count


def _normalized_length(token: object) -> int:
    """Return the length of an added token that the library normalizes, or 0."""
    fields = token if isinstance(token, dict) else {}
    content = fields.get("content")
    return len(content) if fields.get("normalized", True) and isinstance(content, str) else 0
