"""Cache of tokenizers, stored next to the packed weights.

Building a tokenizer with a large vocabulary from a GGUF file takes seconds. File layout:

    8 bytes magic | u32 version | SHA-256 of the rest | u32 length | JSON | merges

    merges are i32 [n, 2]: the ids of the left and right token

The JSON contains the key, the special tokens, the chat template, the vocabulary, and tokenizer.json
without vocabulary and merges. Reading a complete tokenizer.json would need four times the
tokenizer's memory and would not release all of it.

A file is written under a temporary name and renamed when complete. Each read verifies the checksum.
A tokenizer is rebuilt if the file is damaged, has another version or model, or belongs to another
user.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import AddedToken

from kvboost_edge.host.atomic_files import new_file
from kvboost_edge.host.file_memo import NO_CACHE, cache_directory
from kvboost_edge.text.codec import FastCodec
from kvboost_edge.text.tokenizer import Tokenizer

__all__ = ["kept_tokenizer"]

_LOG = logging.getLogger(__name__)
_MAGIC = b"KVBTOK\0\0"
# Version of the layout and of the code that builds tokenizers. Increment it when either changes.
_VERSION = 3
_HEAD = len(_MAGIC) + 4 + 32


def kept_tokenizer(
    key: str, build: Callable[[], Tokenizer], *, name: str, cache_dir: Path | None = None
) -> Tokenizer:
    """Return a model's tokenizer from the cache, or build and store it.

    Args:
        key: fingerprint of the model.
        build: builds the tokenizer, which must be a FastCodec over BPE.
        name: model name shown in messages.
        cache_dir: cache directory, or None for the default one. Nothing is stored if it is
            `NO_CACHE` or not writable.
    """
    if cache_dir == NO_CACHE:
        return build()
    path = (
        (cache_dir if cache_dir is not None else cache_directory()) / "packed" / f"{key[:40]}.kvtok"
    )
    found = _read(path, key, name)
    if found is None:
        found = build()
        _keep(path, key, found)
    return found


def _read(path: Path, key: str, name: str) -> Tokenizer | None:
    try:
        with open(path, "rb") as file:
            stat = os.fstat(file.fileno())
            # A forged file could encode a prompt as a different one.
            if hasattr(os, "getuid") and (stat.st_uid != os.getuid() or stat.st_mode & 0o022):
                _LOG.warning(
                    "%s could have been written by another user, so the tokenizer is rebuilt", path
                )
                return None
            data = file.read()
    except OSError:
        return None
    head = _MAGIC + _VERSION.to_bytes(4, "little") + hashlib.sha256(data[_HEAD:]).digest()
    if data[:_HEAD] != head:
        _LOG.warning(
            "%s is damaged or was written by another version, so the tokenizer is rebuilt", path
        )
        return None
    start = _HEAD + 4 + int.from_bytes(data[_HEAD : _HEAD + 4], "little")
    fields: dict[str, Any] = json.loads(data[_HEAD + 4 : start])
    if fields["key"] != key or fields["library"] != tokenizers.__version__:
        return None
    merges = np.frombuffer(data, dtype="<i4", offset=start).reshape(-1, 2)
    backend = _joined(fields["tokenizer"], fields["vocabulary"], merges)
    return Tokenizer(
        FastCodec(backend),
        name=name,
        special_tokens=fields["special"],
        chat_template=fields["template"],
    )


def _parted(text: str) -> tuple[dict[str, Any], dict[str, int], npt.NDArray[np.int32]]:
    """Split a tokenizer's JSON into its settings, its vocabulary and its merges."""
    state = json.loads(text)
    vocabulary = state["model"].pop("vocab")
    merges = state["model"].pop("merges")
    ids = [(vocabulary[left], vocabulary[right]) for left, right in merges]
    return state, vocabulary, np.array(ids, dtype="<i4").reshape(-1, 2)


def _joined(
    state: dict[str, Any], vocabulary: dict[str, int], merges: npt.NDArray[np.int32]
) -> tokenizers.Tokenizer:
    """Rebuild the tokenizer from the output of `_parted`."""
    tokens = {number: token for token, number in vocabulary.items()}
    left = merges[:, 0].tolist()
    right = merges[:, 1].tolist()
    pairs = [(tokens[first], tokens[second]) for first, second in zip(left, right, strict=True)]
    settings = {
        name: value
        for name, value in state["model"].items()
        if name != "type" and value is not None
    }
    model = tokenizers.models.BPE(vocab=vocabulary, merges=pairs, **settings)
    added = state["added_tokens"]
    empty = {"type": "BPE", "vocab": {}, "merges": []}
    backend = tokenizers.Tokenizer.from_str(
        json.dumps({**state, "added_tokens": [], "model": empty})
    )
    backend.model = model
    backend.add_tokens(
        [
            AddedToken(**{name: value for name, value in one.items() if name != "id"})
            for one in added
        ]
    )
    return backend


def _keep(path: Path, key: str, tokenizer: Tokenizer) -> None:
    assert isinstance(tokenizer.codec, FastCodec)
    state, vocabulary, merges = _parted(tokenizer.codec.to_json())
    fields = {
        "tokenizer": state,
        "vocabulary": vocabulary,
        "key": key,
        "library": tokenizers.__version__,
        "special": tokenizer.special_tokens,
        "template": tokenizer.chat_template,
    }
    text = json.dumps(fields).encode()
    rest = len(text).to_bytes(4, "little") + text + merges.tobytes()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with new_file(path) as file:
            file.write(
                _MAGIC + _VERSION.to_bytes(4, "little") + hashlib.sha256(rest).digest() + rest
            )
    except OSError as error:
        _LOG.warning(
            "the tokenizer cannot be cached in %s (%s), so every start rebuilds it",
            path.parent,
            error,
        )
