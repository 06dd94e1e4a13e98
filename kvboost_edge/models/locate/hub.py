"""Models on the Hugging Face hub: whole snapshots, and single GGUF files.

`huggingface_hub` downloads and caches files, shows progress, and resumes interrupted downloads.
"""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import hashlib
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.host.file_memo import FileStamp, recall, remember
from kvboost_edge.models.locate.split_files import part_name

__all__ = ["HubName", "chosen_gguf", "gguf_file", "gguf_models", "snapshot", "snapshot_files"]

_LOG = logging.getLogger(__name__)
_WANTED = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
# Most subfolders contain other formats of the same weights. Numbered folders of
# sentence-transformers (1_Pooling, 2_Dense) are needed. `consolidated` files are a second copy of
# the weights.
_UNWANTED = ["[!0-9]*/*", "[0-9][!_]*/*", "[0-9]_[!PD]*/*", "consolidated*"]
_SHA256 = re.compile(r"[0-9a-f]{64}")
# GGUF files that are not language models: image projectors and importance matrices.
_NO_MODELS = re.compile(r"mmproj|imatrix", re.IGNORECASE)
_MAX_NAMED = 20


class HubName(NamedTuple):
    """Name of a hub model, with its revision, a token, and whether downloads are forbidden."""

    name: str
    revision: str | None
    token: str | None
    local_files_only: bool

    @property
    def at(self) -> str:
        return f"{self.name} at revision {self.revision}" if self.revision else self.name


def snapshot(model: HubName) -> Path:
    """Return the directory with the config, tokenizer and safetensors of a hub model.

    Missing files are downloaded.
    """
    return _fetched(model, _WANTED, _UNWANTED)


def gguf_file(model: HubName, wanted: str | None) -> Path:
    """Return a GGUF file of a hub model, or the first file of a split one. Missing files are
    downloaded.

    No other files are downloaded, and the digest of the file is checked.

    Args:
        model: hub model.
        wanted: quantization such as Q4_K_M, or a file name. None for the only GGUF file.

    Raises:
        ModelFormatError: no file or more than one matches; the message names the files on the hub.
    """
    digests = _listed(model)
    names = chosen_gguf(model, gguf_models(digests), wanted)
    folder = _fetched(model, [glob.escape(name) for name in names], None)
    for name in names:
        _check_digest(folder / name, digests[name])
    return folder / names[0]


def gguf_models(names: Iterable[str]) -> dict[str, list[str]]:
    """Group GGUF files by model.

    The key is the stem of a split model, or the name of a single file.
    """
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.lower().endswith(".gguf") and not _NO_MODELS.search(PurePosixPath(name).name):
            part = part_name(name)
            found.setdefault(name if part is None else part.stem, []).append(name)
    return found


def snapshot_files(names: Iterable[str]) -> list[str]:
    """Return the files of a repository that `snapshot` downloads."""
    return [
        name
        for name in names
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in _WANTED)
        and not any(fnmatch.fnmatchcase(name, pattern) for pattern in _UNWANTED)
    ]


def chosen_gguf(model: HubName, models: Mapping[str, list[str]], wanted: str | None) -> list[str]:
    """Return all files of the only model that matches `wanted`, see `gguf_file`.

    Args:
        model: hub model, for errors.
        models: GGUF files of each model, from `gguf_models`.
        wanted: quantization or file name; None for the only model.
    """
    found = [
        stem for stem, names in models.items() if wanted is None or _is_meant(stem, names, wanted)
    ]
    there = ", ".join([PurePosixPath(stem).name for stem in models][:_MAX_NAMED]) or "none"
    if not found:
        raise ModelFormatError(
            f"hub model {model.at} contains no GGUF file for {wanted!r}; it contains: {there}"
        )
    if len(found) > 1:
        several = ", ".join(PurePosixPath(stem).name for stem in found[:_MAX_NAMED])
        raise ModelFormatError(
            f"hub model {model.at} contains {len(found)} matching GGUF files: {several}; add the "
            f"quantization or the file name, as in {model.name}:{PurePosixPath(found[0]).name}"
        )
    names = models[found[0]]
    part = part_name(names[0])
    if part is None:
        return names
    missing = sorted(set(part.names()) - set(names))
    if missing:
        raise ModelFormatError(
            f"hub model {model.at} lacks {', '.join(missing[:5])}; the model has {part.total} parts"
        )
    return part.names()


def _is_meant(stem: str, names: Iterable[str], wanted: str) -> bool:
    """Return whether a model matches `wanted`.

    `wanted` is a file name, or a quantization at the end of the file or directory name.
    """
    wanted = wanted.lower()
    if wanted.endswith(".gguf"):
        return any(wanted in (name.lower(), PurePosixPath(name).name.lower()) for name in names)
    path = PurePosixPath(stem.lower().removesuffix(".gguf"))
    ending = re.compile(rf"(.*[-._])?{re.escape(wanted)}", re.DOTALL)
    return any(ending.fullmatch(text) for text in path.parts)


def _listed(model: HubName) -> dict[str, str | None]:
    """Return the files of a hub model, each with its SHA-256 (None if unknown).

    If the hub cannot be reached, the result lists the cached files.
    """
    import huggingface_hub
    from huggingface_hub import constants, errors

    if model.local_files_only or constants.HF_HUB_OFFLINE:
        return _cached(model)
    known = (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError)
    try:
        with _clear_errors(model):
            api = huggingface_hub.HfApi()
            info = api.model_info(
                model.name, revision=model.revision, token=model.token, files_metadata=True
            )
    except ModelFormatError as error:
        if isinstance(error.__cause__, known):
            raise
        try:
            found = _cached(model._replace(local_files_only=True))
        except ModelFormatError:
            raise error from error.__cause__
        _LOG.warning("%s; using the copy in the hub cache", error)
        return found
    return {file.rfilename: file.lfs.sha256 if file.lfs else None for file in info.siblings or ()}


def _cached(model: HubName) -> dict[str, str | None]:
    folder = _fetched(model, [], None)
    files = [path for path in folder.rglob("*.gguf") if path.is_file()]
    # The hub cache names large files by their digest.
    return {
        path.relative_to(folder).as_posix(): path.resolve().name
        if _SHA256.fullmatch(path.resolve().name)
        else None
        for path in files
    }


def _fetched(model: HubName, allowed: list[str], ignored: list[str] | None) -> Path:
    import huggingface_hub

    with _clear_errors(model):
        return Path(
            huggingface_hub.snapshot_download(
                model.name,
                revision=model.revision,
                token=model.token,
                local_files_only=model.local_files_only,
                allow_patterns=allowed,
                ignore_patterns=ignored,
            )
        )


def _check_digest(path: Path, expected: str | None) -> None:
    """Check the digest of a downloaded file. A damaged file is deleted, and ModelFormatError is
    raised.
    """
    try:
        stamp = FileStamp.of(path)
        if expected is None or recall(stamp).get("sha256") == expected:
            return
        with open(path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != expected:
            path.resolve().unlink()
            path.unlink(missing_ok=True)
            raise ModelFormatError(
                f"{path.name} was damaged during the download: its SHA-256 is {found}, expected "
                f"{expected}; the file was removed, download it again"
            )
    except OSError as error:
        raise ModelFormatError(f"{path} cannot be read: {error}") from error
    remember(stamp, {"sha256": expected})


@contextlib.contextmanager
def _clear_errors(model: HubName) -> Iterator[None]:
    """Convert errors of the hub client to ModelFormatErrors that say what to do."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise ModelFormatError(
            f"hub model {model.at} is gated; accept its terms on its page, then give token=..."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelFormatError(
            f"hub model {model.name} has no revision {model.revision!r}; give an existing branch, "
            "tag or commit"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelFormatError(
            f"there is no directory {model.at} and no hub model with this name that the token "
            "can read; check the name, or give token=..."
        ) from error
    except errors.HFValidationError as error:
        raise ModelFormatError(
            f"{model.name!r} is neither a directory nor a valid hub id: {error}"
        ) from error
    except Exception as error:  # from the HTTP library, which depends on the client's version
        raise ModelFormatError(_unreachable(model, error)) from error


def _unreachable(model: HubName, error: Exception) -> str:
    from huggingface_hub import constants

    if model.local_files_only:
        return (
            f"there is no directory {model.at}, it is not in the local hub cache, and "
            "local_files_only=True forbids the download; set local_files_only=False, or give a "
            "directory"
        )
    if constants.HF_HUB_OFFLINE:
        return (
            f"there is no directory {model.at}, it is not in the local hub cache, and "
            "HF_HUB_OFFLINE forbids the download; unset HF_HUB_OFFLINE, or give a directory"
        )
    said = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return (
        f"there is no directory {model.at}, and it could not be downloaded from the hub: "
        f"{said.strip().removeprefix('Got: ')}"
    )
