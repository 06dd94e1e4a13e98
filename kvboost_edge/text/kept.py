"""Tokenizers kept beside the packed weights: building one of a large vocabulary from a GGUF file takes seconds.

    8 bytes magic | u32 version | SHA-256 of the rest | u32 length | JSON: key, specials, template | tokenizer.json

A file is written under another name and renamed when complete, and checked whole each time it is read. One that is
damaged, of another version, model or user is built again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers

from kvboost_edge.host.file_memo import cache_directory
from kvboost_edge.host.unfinished import finish_file, open_unfinished
from kvboost_edge.text.codec import FastCodec
from kvboost_edge.text.tokenizer import Tokenizer

__all__ = ["kept_tokenizer"]

_LOG = logging.getLogger(__name__)
_MAGIC = b"KVBTOK\0\0"
_VERSION = 1  # of the form and of how tokenizers are built: with either changed, older files are built again
_HEAD = len(_MAGIC) + 4 + 32


def kept_tokenizer(key: str, build: Callable[[], Tokenizer], *, name: str, cache_dir: Path | None = None) -> Tokenizer:
    """The tokenizer of the model with the fingerprint `key`: as it was kept, else what `build` gives, which is kept
    where the cache directory can be written. `build` must give a FastCodec; `name` is used in messages."""
    path = (cache_dir if cache_dir is not None else cache_directory()) / "packed" / f"{key[:40]}.kvtok"
    found = _read(path, key, name)
    if found is None:
        found = build()
        _keep(path, key, found)
    return found


def _read(path: Path, key: str, name: str) -> Tokenizer | None:
    try:
        with open(path, "rb") as file:
            stat = os.fstat(file.fileno())
            # A forged one would encode a prompt as another.
            if hasattr(os, "getuid") and (stat.st_uid != os.getuid() or stat.st_mode & 0o022):
                _LOG.warning("%s could have been written by another user; the tokenizer is built again", path)
                return None
            data = file.read()
    except OSError:
        return None
    head = _MAGIC + _VERSION.to_bytes(4, "little") + hashlib.sha256(data[_HEAD:]).digest()
    if data[:_HEAD] != head:
        _LOG.warning("%s is of another version or damaged; the tokenizer is built again", path)
        return None
    start = _HEAD + 4 + int.from_bytes(data[_HEAD : _HEAD + 4], "little")
    fields: dict[str, Any] = json.loads(data[_HEAD + 4 : start])
    if fields["key"] != key or fields["library"] != tokenizers.__version__:
        return None
    backend = tokenizers.Tokenizer.from_buffer(data[start:])
    return Tokenizer(FastCodec(backend), name=name, special_tokens=fields["special"], chat_template=fields["template"])


def _keep(path: Path, key: str, tokenizer: Tokenizer) -> None:
    assert isinstance(tokenizer.codec, FastCodec)
    fields = {
        "key": key,
        "library": tokenizers.__version__,
        "special": tokenizer.special_tokens,
        "template": tokenizer.chat_template,
    }
    text = json.dumps(fields).encode()
    rest = len(text).to_bytes(4, "little") + text + tokenizer.codec.to_json().encode()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = open_unfinished(path.parent)
        try:
            with file:
                file.write(_MAGIC + _VERSION.to_bytes(4, "little") + hashlib.sha256(rest).digest() + rest)
                finish_file(file, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(file.name)
            raise
    except OSError as error:
        _LOG.warning("the tokenizer cannot be kept in %s (%s); it is built at every start", path.parent, error)
