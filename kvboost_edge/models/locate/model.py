"""Where a model is: the bundled one, a local directory, or a snapshot from the Hugging Face hub.

The network is touched only for a name that is neither the bundled model nor a path, and never in offline mode.
"""

from __future__ import annotations

import re
from pathlib import Path

from kvboost_edge.errors import ConfigError, ModelFormatError

__all__ = ["BUNDLED_MODEL", "locate_model"]

BUNDLED_MODEL = "kvboost-edge/demo"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_WANTED = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
# Subfolders hold other formats of the same weights, `consolidated` a second copy of them.
_UNWANTED = ["*/*", "consolidated*"]


def locate_model(
    path_or_id: str | Path,
    *,
    revision: str | None = None,
    token: str | None = None,
    local_files_only: bool = False,
) -> Path:
    """Directory that holds the model's files, or the GGUF file that is the model.

    `path_or_id`: 'kvboost-edge/demo' (part of the package), a directory, a file that ends in .gguf, or a hub id such as
    'owner/name', of which
    only configuration, tokenizer and safetensors files are fetched. Raises ConfigError for what is neither a string
    nor a path, ModelFormatError when there is no such model or it cannot be fetched.
    """
    if not isinstance(path_or_id, (str, Path)):
        raise ConfigError(f"the model {path_or_id!r} must be a string or a Path: a directory or a hub id")
    name = str(path_or_id)
    if not name:
        raise ModelFormatError("the model's name is empty; give a directory or a hub id such as 'owner/name'")
    if name == BUNDLED_MODEL:
        return _bundled()
    directory = Path(name).expanduser()
    if directory.is_dir():
        return directory.resolve()
    if directory.is_file():
        if directory.suffix.lower() == ".gguf":
            return directory.resolve()
        raise ModelFormatError(
            f"{name} is a file; give the model directory with config.json and model.safetensors, or a .gguf file"
        )
    if directory.suffix.lower() == ".gguf":
        raise ModelFormatError(f"there is no file {name}")
    if isinstance(path_or_id, Path) or not _HUB_ID.fullmatch(name) or ".." in name:
        raise ModelFormatError(f"there is no model directory {name}, and it is not a hub id such as 'owner/name'")
    return _snapshot(name, revision=revision, token=token, local_files_only=local_files_only)


def _bundled() -> Path:
    directory = Path(__file__).resolve().parents[2] / "assets" / "demo"
    if not (directory / "config.json").is_file():
        raise ModelFormatError(f"the bundled model is missing from {directory}; reinstall the package")
    return directory


def _snapshot(name: str, *, revision: str | None, token: str | None, local_files_only: bool) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    at = f"{name} at revision {revision}" if revision else name
    try:
        found = huggingface_hub.snapshot_download(
            name,
            revision=revision,
            token=token,
            local_files_only=local_files_only,
            allow_patterns=_WANTED,
            ignore_patterns=_UNWANTED,
        )
    except errors.GatedRepoError as error:
        raise ModelFormatError(f"hub model {at} is gated: accept its terms there and give token=...") from error
    except errors.RevisionNotFoundError as error:
        raise ModelFormatError(f"hub model {name} has no revision {revision!r}; check revision=") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelFormatError(
            f"there is no directory {name} and no hub model of that name that this token may read; "
            "check the name, or give token=..."
        ) from error
    except errors.HFValidationError as error:
        raise ModelFormatError(f"{name!r} is neither a directory nor a valid hub id: {error}") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, OSError) as error:
        raise ModelFormatError(_unreachable(at, local_files_only, error)) from error
    return Path(found)


def _unreachable(at: str, local_files_only: bool, error: Exception) -> str:
    from huggingface_hub import constants

    if local_files_only:
        return (
            f"there is no directory {at}, it is not in the local hub cache, and local_files_only=True forbids to fetch "
            "it; set local_files_only=False, or give a directory"
        )
    if constants.HF_HUB_OFFLINE:
        return (
            f"there is no directory {at}, it is not in the local hub cache, and HF_HUB_OFFLINE forbids to fetch it; "
            "unset HF_HUB_OFFLINE, or give a directory"
        )
    return f"there is no directory {at}, and it could not be fetched from the hub: {error}"
