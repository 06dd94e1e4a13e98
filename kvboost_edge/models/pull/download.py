"""Download of a model into the store, within limits."""

from __future__ import annotations

import hashlib
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvboost_edge.errors import CapacityError, ModelFormatError
from kvboost_edge.host.atomic_files import alone_in
from kvboost_edge.models.locate.hub import HubName, chosen_gguf, gguf_models, snapshot_files
from kvboost_edge.models.locate.managed import ManagedModel, ModelStore
from kvboost_edge.models.pull import MAX_PULL_BYTES
from kvboost_edge.models.pull.names import RegistryModel, checked_name, source_of
from kvboost_edge.models.pull.registry_client import PullStopped, Registry, RemoteFile

__all__ = ["PullEvent", "PullLimits", "PullStopped", "pull_model"]

_FREE_BYTES = 10**9
_MAX_FILES = 1000
_TELL_SECONDS = 0.1


class PullLimits(NamedTuple):
    """Limits of a pull.

    Attributes:
        max_bytes: maximum size of the model's files.
        free_bytes: free space in bytes that must be left on the disk.
    """

    max_bytes: int = MAX_PULL_BYTES
    free_bytes: int = _FREE_BYTES


class PullEvent(NamedTuple):
    """Progress of a pull.

    Attributes:
        status: what happens, in Ollama's words.
        digest: digest of the file that is downloaded, or "".
        total: size of that file in bytes.
        completed: bytes of it that are there.
    """

    status: str
    digest: str = ""
    total: int = 0
    completed: int = 0


def pull_model(
    name: str,
    store: ModelStore,
    *,
    registries: Iterable[str] = (),
    limits: PullLimits | None = None,
    tell: Callable[[PullEvent], None] = lambda event: None,
    stopped: threading.Event | None = None,
) -> ManagedModel:
    """Download a model and store it under `name`. An interrupted pull is resumed.

    Args:
        name: see `source_of`.
        store: the store.
        registries: URLs of further registries.
        limits: limits of the size.
        tell: called with the progress.
        stopped: event that, once set, ends the pull.

    Raises:
        ConfigError: the name is invalid.
        CapacityError: the model exceeds a limit.
        PullStopped: the pull was stopped.
        ModelFormatError: the model cannot be downloaded.
    """
    stopped = stopped or threading.Event()
    limits = limits or PullLimits()
    short = checked_name(name)
    source = source_of(short, registries)
    tell(PullEvent("pulling manifest"))
    registry = Registry(source.endpoint)
    try:
        commit, listed = registry.files(source.repo)
        files, main = _wanted(source, listed)
        folder = _folder_id(registry.endpoint, source.repo, commit)
        # Check all paths before anything is written.
        paths = [store.inside_files(folder, file.path) for file in files]
        _check_size(store, folder, files, limits)
        # Another process that pulls the same model waits here, and then finds the files.
        with alone_in(store.made("files", folder)):
            for file, path in zip(files, paths, strict=True):
                told = _tell_file(tell, file)
                if stopped.is_set():
                    raise PullStopped("the pull was stopped; pull the model again to resume it")
                if path.is_file():  # complete and verified, because it has its final name
                    told(file.size)
                    continue
                store.made("files", folder, *file.path.split("/")[:-1])
                registry.download(source.repo, commit, file, path, told, stopped)
    except OSError as error:
        raise ModelFormatError(
            f"the model directory {store.root} cannot be written: {error.strerror}"
        ) from error
    tell(PullEvent("verifying sha256 digest"))
    tell(PullEvent("writing manifest"))
    model = ManagedModel(
        name=short,
        origin=short,
        folder=folder,
        file=main,
        num_bytes=sum(file.size for file in files),
        created=time.time(),
    )
    store.put(model)
    return model


def _wanted(source: RegistryModel, listed: Sequence[RemoteFile]) -> tuple[list[RemoteFile], str]:
    """Return the files to download, and the path of the GGUF file, or "" for a directory."""
    by_path = {file.path: file for file in listed}
    hub_name = HubName(source.repo, None, None, local_files_only=False)
    names = snapshot_files(by_path)
    is_directory = "config.json" in names and any(name.endswith(".safetensors") for name in names)
    main = ""
    if source.wanted is not None or not is_directory:
        names = chosen_gguf(hub_name, gguf_models(by_path), source.wanted)
        main = names[0]
    if len(names) > _MAX_FILES:
        raise ModelFormatError(f"{source.repo} has {len(names)} files, more than {_MAX_FILES}")
    return [by_path[name] for name in names], main


def _check_size(
    store: ModelStore, folder: str, files: Sequence[RemoteFile], limits: PullLimits
) -> None:
    """Raise CapacityError if the files are too large, or the disk has too little space."""
    total = sum(file.size for file in files)
    if total > limits.max_bytes:
        raise CapacityError(
            f"the model has {total} bytes, over the limit of {limits.max_bytes} "
            "(--max-pull-bytes); choose a smaller one, or raise the limit"
        )
    there = 0
    for file in files:
        path = store.inside_files(folder, file.path)
        for one in (path, path.with_name(f"{path.name}.part")):
            there += one.stat().st_size if one.is_file() else 0
    free = shutil.disk_usage(store.made()).free
    needed = max(0, total - there)
    if needed and free - needed < limits.free_bytes:
        raise CapacityError(
            f"the disk of {store.root} has {free} free bytes; the download needs {needed}, and "
            f"{limits.free_bytes} must stay free; make room, for example with "
            "`kvboost-edge rm`"
        )


def _folder_id(endpoint: str, repo: str, commit: str) -> str:
    return hashlib.sha256(f"{endpoint}/{repo}@{commit}".encode()).hexdigest()[:32]


def _tell_file(tell: Callable[[PullEvent], None], file: RemoteFile) -> Callable[[int], None]:
    """Return a function that tells the progress of a file a few times per second."""
    due = 0.0
    digest = f"{'sha256' if file.algorithm == 'sha256' else 'sha1'}:{file.digest}"

    def told(completed: int) -> None:
        nonlocal due
        now = time.monotonic()
        if now >= due or completed >= file.size:
            due = now + _TELL_SECONDS
            tell(PullEvent(f"pulling {file.digest[:12]}", digest, file.size, completed))

    return told
