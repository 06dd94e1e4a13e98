"""Fingerprints of models: SHA-256 of the config, the tokenizer files and all weights.

Models with different weights have different fingerprints, so they never share KV blocks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.host.file_digest import digest_in_parts
from kvboost_edge.host.file_memo import FileStamp, recall, remember
from kvboost_edge.host.processor import default_num_threads
from kvboost_edge.models.weights.safetensors_check import weight_files

__all__ = [
    "are_remembered",
    "fingerprint_of_directory",
    "fingerprint_of_files",
    "fingerprint_of_module",
    "fingerprint_of_onnx",
    "fingerprinted_files",
]

# Files that affect how a prompt is interpreted. Those that exist are hashed.
_SMALL_FILES = (
    "config.json",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "chat_template.jinja",
    "genai_config.json",
    "hf_quant_config.json",
)
_PART_BYTES = 64 << 20


def fingerprint_of_directory(model_dir: Path, *, cache_dir: Path | None = None) -> str:
    """Return the fingerprint of a model directory, 64 hexadecimal digits.

    Digests of weight files are cached in `cache_dir` (default: KVBOOST_EDGE_CACHE or the platform's
    cache directory). A digest is recomputed when the file's size, times or inode change.

    Raises:
        ModelFormatError: a file is missing or cannot be read.
    """
    return _of_all(b"kvboost-edge model 1", model_dir, weight_files(model_dir), cache_dir)


def fingerprint_of_onnx(root: Path, files: Sequence[Path], *, cache_dir: Path | None = None) -> str:
    """Return the fingerprint of an ONNX model, computed as in `fingerprint_of_directory`.

    Args:
        root: directory of the configs and the tokenizer.
        files: the ONNX file and its external data.
        cache_dir: see `fingerprint_of_directory`.
    """
    return _of_all(b"kvboost-edge onnx 1", root, files, cache_dir)


def _of_all(kind: bytes, root: Path, weights: Sequence[Path], cache_dir: Path | None) -> str:
    digest = hashlib.sha256(kind)
    for path in _small_files(root):
        _add(digest, path.name.encode())
        _add(digest, _read(path))
    for path in weights:
        _add(digest, path.name.encode())
        _add(digest, _file_digest(path, cache_dir).encode())
    return digest.hexdigest()


def fingerprint_of_files(paths: Sequence[Path], *, cache_dir: Path | None = None) -> str:
    """Return the fingerprint of a GGUF model, given its file or its split files in order."""
    digests = "".join(_file_digest(path, cache_dir) for path in paths)
    return hashlib.sha256(b"kvboost-edge gguf 1" + digests.encode()).hexdigest()


def fingerprinted_files(model_dir: Path, weights: Sequence[Path] | None = None) -> list[Path]:
    """Return all files that the fingerprint of a model directory covers.

    Args:
        model_dir: directory of the model.
        weights: weight files; by default, the directory's safetensors.
    """
    return [*_small_files(model_dir), *(weight_files(model_dir) if weights is None else weights)]


def are_remembered(paths: Sequence[Path], *, cache_dir: Path | None = None) -> bool:
    """Return whether the digests of all these files are cached, which makes a fingerprint cheap."""
    try:
        return all(recall(FileStamp.of(path), cache_dir).get("digest") for path in paths)
    except OSError:
        return False


def _small_files(directory: Path) -> list[Path]:
    return [directory / name for name in _SMALL_FILES if (directory / name).is_file()]


def fingerprint_of_module(model: Any, tokenizer: Any) -> str:
    """Return the fingerprint of a loaded transformers model and its tokenizer.

    It covers the config, parameters, buffers and vocabulary, which are read once, in parallel. The
    model must not change afterwards.
    """
    digest = hashlib.sha256(b"kvboost-edge module 1")
    config = model.config.to_dict()
    # The path from which the model was loaded is not part of its identity.
    config = {
        key: value
        for key, value in config.items()
        if key not in ("_name_or_path", "transformers_version")
    }
    _add(digest, json.dumps(config, sort_keys=True, default=str).encode())
    backend = getattr(tokenizer, "backend_tokenizer", None)
    _add(
        digest, (backend.to_str() if backend is not None else type(tokenizer).__qualname__).encode()
    )
    state = sorted(model.state_dict().items())
    with ThreadPoolExecutor(default_num_threads()) as pool:
        for (name, tensor), found in zip(
            state, pool.map(_tensor_digest, (t for _, t in state)), strict=True
        ):
            _add(digest, f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            _add(digest, found)
    return digest.hexdigest()


def _file_digest(path: Path, cache_dir: Path | None) -> str:
    try:
        stamp = FileStamp.of(path)
        known = recall(stamp, cache_dir).get("digest")
        if isinstance(known, str):
            return known
        with open(path, "rb", buffering=0) as file:
            found = digest_in_parts(
                file, stamp.size, part_bytes=_PART_BYTES, num_threads=default_num_threads()
            )
        if FileStamp.of(path) != stamp:
            raise ModelFormatError(
                f"{path} changed while it was being read; load it again when it is complete"
            )
    except OSError as error:
        raise ModelFormatError(f"{path} cannot be read: {error}") from error
    remember(stamp, {"digest": found}, cache_dir)
    return found


def _tensor_digest(tensor: Any) -> bytes:
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy()).digest()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelFormatError(f"{path} cannot be read: {error}") from error


def _add(digest: Any, data: bytes) -> None:
    """Hash the length of a field, then the field.

    With the lengths, different lists of fields always hash different bytes.
    """
    digest.update(len(data).to_bytes(8, "little"))
    digest.update(data)
