"""Checks of the Host and Origin headers against DNS rebinding and cross-site requests.

In a DNS rebinding attack, a page of another site points its domain name at this server's address.
The Host header reveals it. The Origin header reveals requests that pages of other sites send from a
browser.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from starlette.types import Scope

from kvboost_edge.server.api_errors import ApiError
from kvboost_edge.server.settings import ServerSettings

__all__ = ["HostList"]

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_WILDCARDS = ("0.0.0.0", "::")
_ANY = "*"
_HOST = re.compile(r"(?:\[(?P<address>[^\[\]]+)\]|(?P<name>[^\[\]:@/]+))(?::[0-9]{0,5})?", re.ASCII)


class HostList:
    """List of accepted hosts and origins.

    Accepted hosts are loopback names, the bind address, `allowed_hosts`, and the local address of
    the connection.
    """

    def __init__(self, settings: ServerSettings) -> None:
        named = {host.lower() for host in (*_LOOPBACK, *settings.allowed_hosts)}
        bind = settings.host.strip("[]").lower()
        self._hosts = frozenset(named if bind in _WILDCARDS else named | {bind})
        self._origins = frozenset(settings.cors_origins)

    def check(self, scope: Scope) -> None:
        """Check the Host and Origin headers of a request.

        Raises:
            ApiError: the request does not have exactly one Host header (400), or its host (421) or
                origin (403) is not accepted.
        """
        hosts = _values(scope, b"host")
        if len(hosts) != 1 or not hosts[0]:
            raise ApiError(
                400, "the request must have exactly one Host header", code="invalid_host"
            )
        host = _without_port(hosts[0])
        # A browser sends the server's address as Host only for pages of that address, so it is
        # safe.
        address = (scope.get("server") or ("", 0))[0]
        if _ANY not in self._hosts and host not in self._hosts and host != address.lower():
            raise ApiError(
                421,
                "the request's Host header is not accepted; add the host with --allowed-host",
                code="invalid_host",
            )
        for origin in _values(scope, b"origin"):
            own = (f"http://{hosts[0].lower()}", f"https://{hosts[0].lower()}")
            if origin.lower() not in own and origin not in self._origins:
                raise ApiError(
                    403,
                    "the request's Origin header is not accepted; add the origin with "
                    "--cors-origin",
                    code="origin",
                )


def _values(scope: Scope, name: bytes) -> list[str]:
    headers: Iterable[tuple[bytes, bytes]] = scope["headers"]
    return [value.decode("latin-1").strip() for key, value in headers if key == name]


def _without_port(host: str) -> str:
    """Return the host in lower case, without brackets and port, or "" if it is invalid.

    For example, "[::1]:8000" becomes "::1".
    """
    match = _HOST.fullmatch(host)
    return (match["address"] or match["name"]).lower() if match else ""
