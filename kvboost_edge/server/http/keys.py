"""API keys. They are compared as digests, all of them, in constant time; a key is never kept in
text nor logged.

The digest of a request's key is its tenant: the root of its hash chain, so that no key sees what
another one cached.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from kvboost_edge.server.errors import ApiError
from kvboost_edge.server.settings import tenant_of_key

__all__ = ["KeyRing"]

_MAX_HEADER = 4096


class KeyRing:
    """The accepted keys, as SHA-256 digests. An empty ring lets everybody in as one and the same
    tenant. Admin keys are keys like the others, and more.
    """

    def __init__(self, keys: Iterable[str], admin_keys: Iterable[str] = ()) -> None:
        self._admins = frozenset(map(tenant_of_key, admin_keys))
        tenants = [*map(tenant_of_key, keys), *self._admins]
        self._digests = tuple(map(bytes.fromhex, tenants))

    def __bool__(self) -> bool:
        return bool(self._digests)

    def tenant(self, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """The tenant of a request by its header Authorization or x-api-key; raises ApiError 401.
        Takes as long for a wrong key as for a right one, whichever it is.
        """
        given = [
            (name, value) for name, value in headers if name in (b"authorization", b"x-api-key")
        ]
        found_keys = {_key_of(name, value) for name, value in given}
        if len(found_keys) != 1 or len(given) != len(dict(given)):
            raise _unauthorized("send one key, as Authorization: Bearer KEY or as x-api-key: KEY")
        (key,) = found_keys
        digest = hashlib.sha256(key).digest()
        found = 0
        for known in self._digests:
            found |= hmac.compare_digest(digest, known)
        if not found:
            raise _unauthorized("the API key is not valid")
        return digest.hex()

    def check_admin(self, tenant: str) -> None:
        """ApiError 403 unless this key may see what all tenants share: an admin key, or the only
        key there is.
        """
        if len(self._digests) > 1 and tenant not in self._admins:
            raise ApiError(
                403,
                "this route shows or changes what several API keys share; it needs a key of "
                "--admin-api-key",
                code="admin_key_required",
            )


def _key_of(name: bytes, value: bytes) -> bytes:
    """The key in one of the two headers; ApiError 401 for one that holds none."""
    if len(value) > _MAX_HEADER:
        raise _unauthorized("the header with the API key is too long")
    if name == b"x-api-key":
        return value.strip(b" ")
    scheme, _, key = value.partition(b" ")
    if scheme.lower() != b"bearer":
        raise _unauthorized("the Authorization header must begin with Bearer")
    return key.strip(b" ")


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
