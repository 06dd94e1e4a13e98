"""Local HTTP server that imitates the Hugging Face hub, with one repository of given files and a
log of the requests.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """A hub with the repository `name`.

    Attributes:
        files: contents by path.
        asked: method, path and range of every request for a file.
        cut: the next download ends after this many bytes.
        damaged: the last byte of downloads is changed.
        more: bytes sent after the end of a file.
        redirects: new locations of files, by path.
        authorized: received Authorization headers.
    """

    def __init__(self, name: str, files: Mapping[str, bytes]) -> None:
        self.name = name
        self.files = dict(files)
        self.asked: list[tuple[str, str, str | None]] = []
        self.cut: int | None = None
        self.damaged = False
        self.more = b""
        self.redirects: dict[str, str] = {}
        self.authorized: list[str | None] = []
        self.endpoint = ""

    def downloads(self) -> list[str]:
        """Return the paths of downloaded files, in order."""
        return [path for method, path, _ in self.asked if method == "GET"]

    def entry(self, path: str, *, sibling: bool) -> dict[str, object]:
        data = self.files[path]
        digest = hashlib.sha256(data).hexdigest()
        if sibling:
            lfs = {"sha256": digest, "size": len(data), "pointerSize": 134}
            return {"rfilename": path, "size": len(data), "blobId": "0" * 40, "lfs": lfs}
        lfs = {"oid": digest, "size": len(data), "pointerSize": 134}
        return {"type": "file", "path": path, "size": len(data), "oid": "0" * 40, "lfs": lfs}


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            resolve = f"/{hub.name}/resolve/"
            if path.startswith(f"/api/models/{hub.name}/tree/"):
                self._json([hub.entry(name, sibling=False) for name in hub.files])
            elif path in (f"/api/models/{hub.name}", f"/api/models/{hub.name}/revision/main"):
                self._json(
                    {
                        "id": hub.name,
                        "sha": COMMIT,
                        "siblings": [hub.entry(name, sibling=True) for name in hub.files],
                    }
                )
            elif (
                path.startswith(resolve)
                and path.removeprefix(resolve).partition("/")[2] in hub.files
            ):
                self._file(path.removeprefix(resolve).partition("/")[2])
            else:
                self._send(404, b"", {"X-Error-Code": "RepoNotFound"})

        def _json(self, value: object) -> None:
            self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def _file(self, name: str) -> None:
            data = hub.files[name]
            wanted = self.headers.get("Range")
            hub.authorized.append(self.headers.get("Authorization"))
            if name in hub.redirects:
                self._send(302, b"", {"Location": hub.redirects[name]})
                return
            hub.asked.append((self.command, name, wanted))
            headers = {
                "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
                "X-Repo-Commit": COMMIT,
                "Accept-Ranges": "bytes",
            }
            if hub.damaged:
                data = data[:-1] + bytes([data[-1] ^ 1])
            start = int(wanted.removeprefix("bytes=").partition("-")[0]) if wanted else 0
            if start:
                headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            self._send(206 if start else 200, data[start:] + hub.more, headers)

        def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
            self.send_response(status)
            for name, value in {
                **headers,
                "Content-Length": str(len(body)),
                "Connection": "close",
            }.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "HEAD":
                return
            if hub.cut is not None and len(body) > hub.cut:
                body = body[: hub.cut]
                hub.cut = None
            self.wfile.write(body)

    return Handler


@contextlib.contextmanager
def fake_hub(
    name: str, files: Mapping[str, bytes], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeHub]:
    """Yield a hub that this process's client uses, with its cache in `cache`."""
    hub = FakeHub(name, files)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    hub.endpoint = endpoint
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        endpoint + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
