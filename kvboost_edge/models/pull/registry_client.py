"""HTTP client for a registry with the hub's API, which downloads files that it can verify.

`huggingface_hub` starts an interrupted download again from the beginning in another call, and
follows every redirect. Pulls need more: they resume, they check each address, and they are bounded.
The connections are those of `huggingface_hub`.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urljoin, urlsplit

from kvboost_edge.errors import KVBoostError, ModelFormatError
from kvboost_edge.host.atomic_files import replace_file

__all__ = ["PullStopped", "Registry", "RemoteFile"]

_REDIRECTS = (301, 302, 303, 307, 308)
_MAX_REDIRECTS = 5
_MAX_LISTING_BYTES = 32_000_000
_CHUNK_BYTES = 1 << 20
_TIMEOUT = 30.0
_ATTEMPTS = 5
_RETRY_SECONDS = 0.5
_HEX = frozenset("0123456789abcdef")


class PullStopped(KVBoostError):
    """Raised in a pull that was cancelled. What was downloaded stays, and the next pull resumes."""


class RemoteFile(NamedTuple):
    """A file in a repository.

    Attributes:
        path: path in the repository.
        size: size in bytes.
        algorithm: hash function of `digest`: "sha256", or "git" for git's hash of a blob.
        digest: digest as lower-case hex digits.
    """

    path: str
    size: int
    algorithm: str
    digest: str

    def hasher(self) -> Any:
        """Return a hash object whose final digest must equal `digest`."""
        if self.algorithm == "sha256":
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)


class Registry:
    """A server with the hub's API.

    Args:
        endpoint: URL of the server; "" for the hub, or the endpoint in HF_ENDPOINT.
    """

    def __init__(self, endpoint: str) -> None:
        from huggingface_hub import constants, get_token

        self.endpoint = endpoint or constants.ENDPOINT
        # The hub's token must not be sent to other servers.
        token = None if endpoint else get_token()
        self._headers = {"authorization": f"Bearer {token}"} if token else {}

    def files(self, repo: str) -> tuple[str, list[RemoteFile]]:
        """Return the current commit of a repository, and its files.

        Raises:
            ModelFormatError: the repository does not exist, or the answer is invalid.
        """
        url = f"{self.endpoint}/api/models/{quote(repo)}?blobs=true"
        with self._opened(url, repo, {}) as response:
            text = bytearray()
            for piece in response.iter_bytes():
                text += piece
                if len(text) > _MAX_LISTING_BYTES:
                    raise ModelFormatError(f"the list of files of {repo} is too long")
        try:
            fields = json.loads(text)
            commit = str(fields["sha"])
            files = [_remote_file(entry) for entry in fields["siblings"]]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise ModelFormatError(
                f"{self.endpoint} returned an invalid list of files for {repo}: {error!r:.200}"
            ) from error
        if len(commit) != 40 or not {*commit} <= _HEX:
            raise ModelFormatError(f"{self.endpoint} returned an invalid commit hash for {repo}")
        return commit, files

    def download(
        self,
        repo: str,
        commit: str,
        file: RemoteFile,
        path: Path,
        tell: Callable[[int], None],
        stopped: threading.Event,
    ) -> None:
        """Download a file, and verify it. A partial download at `path`.part is resumed.

        Args:
            path: path of the complete file.
            tell: called with the number of bytes that are there.
            stopped: event that, once set, ends the download.

        Raises:
            PullStopped: the download was stopped.
            ModelFormatError: the file cannot be downloaded, or is not what the registry lists.
        """
        part = path.with_name(f"{path.name}.part")
        url = f"{self.endpoint}/{quote(repo)}/resolve/{commit}/{quote(file.path)}"
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        with open(os.open(part, flags, 0o600), "r+b") as out:
            found = _hashed(out, file)
            for attempt in range(_ATTEMPTS):
                before = out.tell()
                try:
                    if before < file.size or not file.size:
                        found = self._fetch(url, repo, file, out, found, tell, stopped)
                except _Broken:
                    # A connection that delivered something is worth another try.
                    if attempt + 1 == _ATTEMPTS and out.tell() == before:
                        raise
                    stopped.wait(_RETRY_SECONDS)
                    out.flush()
                    out.seek(0)
                    found = _hashed(out, file)
                if out.tell() >= file.size:
                    break
            else:
                raise ModelFormatError(
                    f"the download of {file.path} broke off {_ATTEMPTS} times at {out.tell()} of "
                    f"{file.size} bytes; pull the model again to resume it"
                )
            out.flush()
            os.fsync(out.fileno())
        if found.hexdigest() != file.digest:
            part.unlink()
            raise ModelFormatError(
                f"{file.path} was damaged during the download: its digest is {found.hexdigest()}, "
                f"expected {file.digest}; the file was removed, pull the model again"
            )
        replace_file(part, path)

    def _fetch(
        self,
        url: str,
        repo: str,
        file: RemoteFile,
        out: Any,
        found: Any,
        tell: Callable[[int], None],
        stopped: threading.Event,
    ) -> Any:
        """Append what is missing to a partial file, and return the hash object for it."""
        start = out.tell()
        headers = {"Range": f"bytes={start}-"} if start else {}
        with self._opened(url, repo, {**headers, "Accept-Encoding": "identity"}) as response:
            if start and response.status_code != 206:  # the server starts from the beginning
                start = 0
                out.seek(0)
                out.truncate()
                found = file.hasher()
            left = file.size - start
            for piece in response.iter_raw(_CHUNK_BYTES):
                if stopped.is_set():
                    raise PullStopped("the pull was stopped; pull the model again to resume it")
                if len(piece) > left:
                    raise ModelFormatError(
                        f"the registry sends more than the {file.size} bytes of {file.path} that "
                        "it lists"
                    )
                try:
                    out.write(piece)
                except OSError as error:
                    raise ModelFormatError(
                        f"{file.path} cannot be stored: {error.strerror}"
                    ) from error
                found.update(piece)
                left -= len(piece)
                tell(file.size - left)
        return found

    @contextmanager
    def _opened(self, url: str, repo: str, headers: dict[str, str]) -> Iterator[Any]:
        """Send a request and follow redirects to public addresses.

        Raises:
            ModelFormatError: an address is refused, or the answer is an error.
            _Broken: the connection failed.
        """
        from huggingface_hub import get_session

        base = urlsplit(self.endpoint)
        sent = {**self._headers, **headers}
        session = get_session()
        for _ in range(_MAX_REDIRECTS + 1):
            is_own = urlsplit(url)[:2] == base[:2]
            if not is_own:
                _check_target(url, base.scheme)
                sent = {name: value for name, value in sent.items() if name != "authorization"}
            try:
                with session.stream(
                    "GET", url, headers=sent, follow_redirects=False, timeout=_TIMEOUT
                ) as response:
                    if not is_own:
                        _check_peer(response, url)
                    status = response.status_code
                    if status not in _REDIRECTS:
                        if status >= 500:
                            raise _Broken(f"{self.endpoint} answered with status {status}")
                        _check_status(status, repo, self.endpoint)
                        yield response
                        return
                    url = urljoin(url, response.headers.get("location", ""))
            except KVBoostError:
                raise
            except Exception as error:  # of the HTTP library, which depends on the client's version
                raise _Broken(
                    f"{repo} could not be downloaded from {self.endpoint}: "
                    f"{str(error) or type(error).__name__}"
                ) from error
        raise ModelFormatError(f"{self.endpoint} redirects too often for {repo}")


class _Broken(ModelFormatError):
    """Raised when a connection fails, which may be tried again."""


def _remote_file(entry: Any) -> RemoteFile:
    path = str(entry["rfilename"])
    lfs = entry.get("lfs")
    if lfs:
        file = RemoteFile(path, int(lfs["size"]), "sha256", str(lfs["sha256"]))
    else:
        file = RemoteFile(path, int(entry["size"]), "git", str(entry["blobId"]))
    length = 64 if file.algorithm == "sha256" else 40
    if file.size < 0 or len(file.digest) != length or not {*file.digest} <= _HEX:
        raise ValueError(f"{path[:100]} has no valid size and digest")
    return file


def _hashed(out: Any, file: RemoteFile) -> Any:
    """Return the hash object of a partial file, and move to its end."""
    found = file.hasher()
    if os.fstat(out.fileno()).st_size > file.size:
        out.truncate(0)
    while piece := out.read(_CHUNK_BYTES):
        found.update(piece)
    return found


def _check_status(status: int, repo: str, endpoint: str) -> None:
    if status in (401, 403):
        raise ModelFormatError(
            f"{endpoint} does not let this machine read {repo}; check the name, accept the model's "
            "terms on its page, and set HF_TOKEN"
        )
    if status == 404:
        raise ModelFormatError(f"{endpoint} has no model {repo}; check the name")
    if status not in (200, 206):
        raise ModelFormatError(f"{endpoint} answered with status {status} for {repo}")


def _check_target(url: str, scheme: str) -> None:
    """Check the address that a redirect leads to.

    Raises:
        ModelFormatError: the address is not public, or less secure than the registry's.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or (scheme == "https" and parts.scheme != "https"):
        raise ModelFormatError(
            f"the registry redirects to a {parts.scheme!r} URL, which is refused"
        )
    try:
        found = _addresses(parts.hostname or "")
    except (OSError, UnicodeError) as error:
        if _has_proxy(parts.scheme):
            return  # only the proxy resolves names
        raise ModelFormatError(
            f"the registry redirects to {parts.hostname!r}, which has no address"
        ) from error
    for address in found:
        _check_address(address, str(parts.hostname))


def _addresses(host: str) -> list[str]:
    """Return the addresses of a host. Raises OSError if there are none."""
    try:
        return [str(ipaddress.ip_address(host))]
    except ValueError:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return [str(one[4][0]) for one in found]


def _check_peer(response: Any, url: str) -> None:
    """Check the address of the connection, because a name may resolve differently each time."""
    stream = response.extensions.get("network_stream")
    peer = None if stream is None else stream.get_extra_info("server_addr")
    if peer and not _has_proxy(urlsplit(url).scheme):
        _check_address(str(peer[0]), str(urlsplit(url).hostname))


def _check_address(text: str, host: str) -> None:
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or address
    if not address.is_global or address.is_multicast:
        raise ModelFormatError(
            f"the registry redirects to {host!r} with the address {address}, which is not public; "
            "the download is refused"
        )


def _has_proxy(scheme: str) -> bool:
    return scheme in urllib.request.getproxies()
