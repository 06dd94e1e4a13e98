"""Tokenizers built from the metadata of a GGUF file.

Three kinds are supported: byte-level BPE ("gpt2"), sentencepiece BPE with scores ("llama"), and
sentencepiece BPE with merges ("gemma4"). The result encodes like the tokenizer that the file was
converted from. A file names its pre-tokenizer (tokenizer.ggml.pre) but does not describe it.
Unknown names are rejected, because a wrong split silently changes the tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.text.codec import FastCodec
from kvboost_edge.text.pre_tokenizers import PRE_TOKENIZERS
from kvboost_edge.text.tokenizer import Tokenizer

__all__ = ["check_vocabulary_kind", "gguf_tokenizer"]

_NORMAL = 1
_UNKNOWN = 2
_CONTROL = 3
_USER_DEFINED = 4
_UNUSED = 5
_BYTE = 6
_NO_ID = (1 << 32) - 1  # some converters write this value for "no token"
_SPACE = "▁"


class _Fields:
    """Tokenizer metadata of a file, with checks whose errors name the key."""

    def __init__(self, metadata: Mapping[str, Any], name: str) -> None:
        self.metadata = metadata
        self.name = name

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        value = self.metadata.get(f"tokenizer.ggml.{key}")
        if value is None:
            return default
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.error(key, f"must be of type {kind.__name__}, got {type(value).__name__}")
        return value

    def strings(self, key: str) -> list[str]:
        value = self.metadata.get(f"tokenizer.ggml.{key}")
        if value is None:
            raise self.error(key, "is missing; the file has no tokenizer")
        if not isinstance(value, list) or not value:
            raise self.error(key, "must be a non-empty list of strings")
        return value

    def numbers(self, key: str, count: int) -> list[Any] | None:
        """Return a list with one number per token, or None if the key is missing."""
        value = self.metadata.get(f"tokenizer.ggml.{key}")
        if value is None:
            return None
        found = value.tolist() if hasattr(value, "tolist") else value
        if (
            not isinstance(found, list)
            or len(found) != count
            or not all(isinstance(n, (int, float)) for n in found)
        ):
            raise self.error(key, f"must have one number for each of the {count} tokens")
        return found

    def token_id(self, key: str, count: int) -> int | None:
        value = self.get(f"{key}_token_id", int)
        if value is None or value == _NO_ID:
            return None
        if not 0 <= value < count:
            raise self.error(f"{key}_token_id", f"is {value}, but the file has {count} tokens")
        return int(value)

    def error(self, key: str, what: str) -> ModelFormatError:
        return ModelFormatError(f"{self.name}: tokenizer.ggml.{key} {what}")


def gguf_tokenizer(metadata: Mapping[str, Any], *, name: str) -> Tokenizer:
    """Build the tokenizer of a GGUF file.

    Args:
        metadata: key-value pairs of the file, with arrays of strings as lists.
        name: file name shown in error messages.

    Raises:
        ModelFormatError: a key is missing, damaged or has an unknown value.
    """
    model = check_vocabulary_kind(metadata, name=name)
    # Some Gemma 4 files disable BOS. Like llama.cpp, this ignores the setting.
    believed = {**metadata, "tokenizer.ggml.add_bos_token": True} if model == "gemma4" else metadata
    fields = _Fields(believed, name)
    tokens = fields.strings("tokens")
    types = [
        int(kind) for kind in fields.numbers("token_type", len(tokens)) or [_NORMAL] * len(tokens)
    ]
    special = _special(fields, tokens, model)
    try:
        backend, adds_bos = _KINDS[model](fields, tokens, types)
        backend.add_tokens(_added_tokens(metadata, tokens, types, special))
        _check_ids(backend, fields, tokens, types)
        _add_ends(backend, fields, special, adds_bos)
    except ModelFormatError:
        raise
    except Exception as error:  # the library raises a plain Exception for every error
        raise ModelFormatError(
            f"{name}: the tokenizer in the file cannot be built: {error}"
        ) from error
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ModelFormatError(
            f"{name}: tokenizer.chat_template must be a string, got {type(template).__name__}"
        )
    return Tokenizer(FastCodec(backend), name=name, special_tokens=special, chat_template=template)


def check_vocabulary_kind(metadata: Mapping[str, Any], *, name: str) -> str:
    """Return the kind of vocabulary in a GGUF file, a key of `_KINDS`, without reading arrays.

    Raises:
        ModelFormatError: `gguf_tokenizer` does not support the kind or its pre-tokenizer.
    """
    fields = _Fields(metadata, name)
    model = fields.get("model", str)
    if model is None:
        raise fields.error("model", "is missing; the file has no tokenizer")
    if model not in _KINDS:
        known = (
            "'gpt2' (byte-level BPE), 'llama' (sentencepiece BPE) and 'gemma4' (the same with "
            "merges)"
        )
        raise fields.error("model", f"is {model!r}, which is not supported; supported: {known}")
    pre = fields.get("pre", str)
    if model == "gpt2" and pre is None:
        raise fields.error(
            "pre", "is missing; convert the model again with a current version of llama.cpp"
        )
    if model == "gpt2" and pre not in PRE_TOKENIZERS:
        raise fields.error(
            "pre",
            f"is {pre!r}, which is not supported; supported: {', '.join(sorted(PRE_TOKENIZERS))}",
        )
    return str(model)


def _special(fields: _Fields, tokens: Sequence[str], model: str) -> dict[str, str]:
    """Return the special tokens by name, such as 'bos_token'.

    Sentencepiece vocabularies default to the ids 0 (unknown), 1 (BOS) and 2 (EOS).
    """
    defaults = {"unknown": 0, "bos": 1, "eos": 2} if model == "llama" else {}
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    found = {}
    for key, name in names.items():
        given = f"tokenizer.ggml.{key}_token_id" in fields.metadata
        token_id = fields.token_id(key, len(tokens)) if given else defaults.get(key)
        if token_id is not None and token_id < len(tokens):
            found[name] = tokens[token_id]
    return found


def _vocabulary(fields: _Fields, tokens: Sequence[str], types: Sequence[int]) -> dict[str, int]:
    """Return the ids by token, without tokens marked as unused.

    The original tokenizer does not contain unused tokens either.
    """
    found: dict[str, int] = {}
    for index, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind == _UNUSED:
            continue
        if token in found:
            raise fields.error(
                "tokens", f"has {token!r} twice, with the ids {found[token]} and {index}"
            )
        found[token] = index
    return found


def _byte_level(
    fields: _Fields, tokens: Sequence[str], types: Sequence[int]
) -> tuple[tokenizers.Tokenizer, bool]:
    pre = PRE_TOKENIZERS[fields.get("pre", str)]
    merges = _merges(fields, tokens, types)
    vocabulary = _vocabulary(fields, tokens, types)
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre.whole)
    )
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if pre.digits else []
    steps += [pre_tokenizers.Split(Regex(regex), behavior="isolated") for regex in pre.regexes]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pre.regexes))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend, pre.bos


def _merges(fields: _Fields, tokens: Sequence[str], types: Sequence[int]) -> list[tuple[str, str]]:
    """Return the merges of the file.

    The key may be missing if all tokens are single characters, because GGUF writers omit empty
    arrays.
    """
    if "tokenizer.ggml.merges" not in fields.metadata:
        normal = (token for token, kind in zip(tokens, types, strict=True) if kind == _NORMAL)
        longest = max(normal, key=len, default="")
        if len(longest) > 1:
            raise fields.error(
                "merges",
                f"is missing, but tokens such as {longest!r} need merges",
            )
        return []
    found = []
    for index, merge in enumerate(fields.strings("merges")):
        # BPE replaces spaces within tokens by another letter, so the first space is the separator.
        left, separator, right = merge.partition(" ")
        if not (left and separator and right):
            raise fields.error(
                "merges", f"has the entry {merge!r} at index {index}, which is not two tokens"
            )
        found.append((left, right))
    return found


def _merged(
    fields: _Fields, tokens: Sequence[str], types: Sequence[int]
) -> tuple[tokenizers.Tokenizer, bool]:
    """Build Gemma 4's tokenizer: sentencepiece with the file's merges, over the whole text.

    Runs of newlines that are one token are encoded as that token even without a merge, as in
    llama.cpp.
    """
    merges = _merges(fields, tokens, types)
    ends = sorted({token for token in tokens if token and not token.strip("\n")}, key=len)
    pairs = [(one, other) for one in ends for other in ends if one + other in ends]
    known = set(merges)
    merges += [pair for pair in pairs if pair not in known]
    if fields.get("add_space_prefix", bool, False):
        raise fields.error(
            "add_space_prefix", "is true, which is not supported for this kind of tokenizer"
        )
    return _sentencepiece(fields, tokens, types, merges, prefix=False), True


def _scored(
    fields: _Fields, tokens: Sequence[str], types: Sequence[int]
) -> tuple[tokenizers.Tokenizer, bool]:
    """Build a sentencepiece tokenizer, which first merges the pair whose result scores highest.

    The scores are converted to a list of merges in that order.
    """
    if fields.get("remove_extra_whitespaces", bool, False):
        raise fields.error("remove_extra_whitespaces", "is true, which is not supported")
    scores = fields.numbers("scores", len(tokens))
    if scores is None:
        raise fields.error("scores", "is missing; a tokenizer of kind 'llama' needs it")
    vocabulary = _vocabulary(fields, tokens, types)
    mergeable = {
        token: float(scores[index])
        for token, index in vocabulary.items()
        if types[index] in (_NORMAL, _USER_DEFINED)
    }
    found: list[tuple[float, int, int, int, str, str]] = []
    for token, score in mergeable.items():
        for cut in range(1, len(token)):
            left = token[:cut]
            right = token[cut:]
            if left in mergeable and right in mergeable:
                found.append((-score, -len(left), -len(right), len(found), left, right))
    found.sort()
    prefix = fields.get("add_space_prefix", bool, True)
    merges = [(left, right) for *_, left, right in found]
    return _sentencepiece(fields, tokens, types, merges, prefix=prefix), True


def _sentencepiece(
    fields: _Fields,
    tokens: Sequence[str],
    types: Sequence[int],
    merges: list[tuple[str, str]],
    *,
    prefix: bool,
) -> tokenizers.Tokenizer:
    """Build a BPE over whole texts that replaces spaces with "▁" and falls back to bytes."""
    unknown = next(
        (token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None
    )
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=_vocabulary(fields, tokens, types),
            merges=merges,
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=_BYTE in types,
        )
    )
    replace = normalizers.Replace(" ", _SPACE)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE), replace]) if prefix else replace
    )
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


_KINDS: dict[
    str, Callable[[_Fields, Sequence[str], Sequence[int]], tuple[tokenizers.Tokenizer, bool]]
] = {
    "gpt2": _byte_level,
    "llama": _scored,
    "gemma4": _merged,
}
"""Functions that build a tokenizer, by tokenizer.ggml.model.

Each returns the tokenizer and whether BOS is added by default.
"""


def _added_tokens(
    metadata: Mapping[str, Any],
    tokens: Sequence[str],
    types: Sequence[int],
    special: Mapping[str, str],
) -> list[AddedToken]:
    """Return the tokens that are matched before BPE: control and user-defined tokens.

    Control tokens are special.
    """
    # Phi-3's control tokens consume the whitespace after them. The file does not record this, so
    # it is assumed, as in llama.cpp. "</s>" does the same whatever its type, because the original
    # model has it as an ordinary added token.
    strips = (
        metadata.get("general.architecture") == "phi3"
        and metadata.get("tokenizer.ggml.model") == "llama"
    )
    keeps = ("<unk>", "<s>", "<|endoftext|>")
    named = set(special.values())
    found = []
    for token, kind in zip(tokens, types, strict=True):
        if kind == _CONTROL or (kind == _UNKNOWN and token in named):
            rstrip = strips and kind == _CONTROL and token not in keeps
            found.append(AddedToken(token, special=True, normalized=False, rstrip=rstrip))
        elif kind == _USER_DEFINED:
            found.append(
                AddedToken(
                    token, special=False, normalized=False, rstrip=strips and token == "</s>"
                )
            )
    return found


def _check_ids(
    backend: tokenizers.Tokenizer, fields: _Fields, tokens: Sequence[str], types: Sequence[int]
) -> None:
    for index, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind != _UNUSED and backend.token_to_id(token) != index:
            raise fields.error(
                "tokens",
                f"has {token!r} with id {index}, but the tokenizer gives it id "
                f"{backend.token_to_id(token)}",
            )


def _add_ends(
    backend: tokenizers.Tokenizer, fields: _Fields, special: Mapping[str, str], adds_bos: bool
) -> None:
    """Add BOS and EOS to encoded texts where the file's settings ask for it."""
    begin = fields.get("add_bos_token", bool, adds_bos)
    end = fields.get("add_eos_token", bool, False)
    for wanted, key in ((begin, "bos"), (end, "eos")):
        if wanted and f"{key}_token" not in special:
            raise fields.error(f"{key}_token_id", f"is missing, but add_{key}_token is true")
    if not (begin or end):
        return
    parts = ["$A"]
    if begin:
        parts.insert(0, special["bos_token"])
    if end:
        parts.append(special["eos_token"])
    # Built as JSON, because a token's text may contain characters of the template syntax that the
    # constructor parses.
    single: list[dict[str, Any]] = [
        {"Sequence": {"id": "A", "type_id": 0}}
        if part == "$A"
        else {"SpecialToken": {"id": part, "type_id": 0}}
        for part in parts
    ]
    known = {
        token: {"id": token, "ids": [backend.token_to_id(token)], "tokens": [token]}
        for token in parts
        if token != "$A"
    }
    ends = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": known}
    backend.post_processor = tokenizers.Tokenizer.from_str(
        json.dumps({**_EMPTY, "post_processor": ends})
    ).post_processor


_EMPTY: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": None,
    "decoder": None,
    "model": {"type": "BPE", "vocab": {}, "merges": []},
}
"""JSON of an empty tokenizer, into which one component is put for the library to parse."""
