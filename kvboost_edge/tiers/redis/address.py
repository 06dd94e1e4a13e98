"""Strict parser for Redis URLs. User names and passwords never appear in messages or reprs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from kvboost_edge.errors import ConfigError

__all__ = ["URL_SCHEMES", "ServerAddress", "parse_url"]

_SCHEMES = {
    "redis": "redis",
    "valkey": "redis",
    "rediss": "rediss",
    "valkeys": "rediss",
    "unix": "unix",
}
URL_SCHEMES = tuple(f"{scheme}://" for scheme in _SCHEMES)
_TLS_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_PORT = 6379


@dataclasses.dataclass(frozen=True, slots=True)
class ServerAddress:
    """Address of a Redis server.

    Attributes:
        place: URL without user name and password, for messages.
        options: keyword arguments for `redis.Redis`.
    """

    place: str
    options: Mapping[str, Any] = dataclasses.field(repr=False)


def parse_url(url: str, password: str = "") -> ServerAddress:
    """Parse the URL of a Redis or Valkey server.

    rediss:// and valkeys:// use TLS and verify the certificate.

    User, password and database are optional. For TLS, the query may set the paths ssl_ca_certs,
    ssl_certfile and ssl_keyfile.

    Args:
        url: the URL.
        password: password to use if the URL contains none.

    Raises:
        ConfigError: the URL is invalid. The message never quotes the URL, because any part of it
            may be a password.
    """
    scheme = url.partition("://")[0].lower() if "://" in url else ""
    if "cluster" in scheme or "sentinel" in scheme or ("," in url and scheme in _SCHEMES):
        raise ConfigError(
            "redis_url names a cluster, which is not supported; give the URL of a single server"
        )
    if scheme not in _SCHEMES:
        raise ConfigError(f"redis_url must begin with one of {', '.join(URL_SCHEMES)}")
    try:
        parts = urlsplit(url)
        user = unquote(parts.username or "")
        secret = unquote(parts.password or "") or password
        kind = _SCHEMES[scheme]
        query = {
            name: values[-1]
            for name, values in parse_qs(parts.query, keep_blank_values=True).items()
        }
        place, options = _socket(parts, query) if kind == "unix" else _host(parts, kind)
    except ConfigError:
        raise
    except ValueError:  # its text quotes parts of the URL
        raise _malformed(scheme) from None
    if kind == "rediss":
        options |= {name: query.pop(name) for name in _TLS_FILES if name in query}
        options |= {"ssl": True, "ssl_cert_reqs": "required", "ssl_check_hostname": True}
    if query or parts.fragment:
        known = {"unix": "?db=", "rediss": ", ".join(f"?{name}=" for name in _TLS_FILES)}.get(
            kind, "none"
        )
        raise ConfigError(
            f"redis_url contains options that a {scheme}:// URL does not support; supported: "
            f"{known}"
        )
    if user and not secret:
        raise ConfigError("redis_url contains a user but no password; give both or neither")
    if secret:
        options |= {"username": user or None, "password": secret}
    return ServerAddress(place, options)


def _host(parts: SplitResult, kind: str) -> tuple[str, dict[str, Any]]:
    host = parts.hostname
    port = parts.port if parts.port is not None else _PORT
    database = parts.path.removeprefix("/") or "0"
    if not host or port < 1 or not _is_database(database):
        raise ValueError
    shown = f"[{host}]" if ":" in host else host
    return f"{kind}://{shown}:{port}/{database}", {
        "host": unquote(host),
        "port": port,
        "db": int(database),
    }


def _socket(parts: SplitResult, query: dict[str, str]) -> tuple[str, dict[str, Any]]:
    path = unquote(parts.path)
    database = query.pop("db", "0")
    if parts.hostname or not path.startswith("/") or path == "/" or not _is_database(database):
        raise ValueError
    return f"unix://{path}?db={database}", {"unix_socket_path": path, "db": int(database)}


def _is_database(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 6


def _malformed(scheme: str) -> ConfigError:
    form = "/path/to.sock[?db=N]" if scheme == "unix" else "host[:port][/database]"
    return ConfigError(
        f"redis_url cannot be read; write {scheme}://[user:password@]{form}, with %40 for @, %2F "
        "for / and %3A for : in a user or password"
    )
