"""API keys, stored only as digests and compared in constant time.

The digest of a request's key identifies its tenant and is the root of its prefix hashes. Requests
with one key therefore never find blocks cached with another key.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from kvboost_edge.server.api_errors import ApiError
from kvboost_edge.server.settings import tenant_of_key

__all__ = ["KeyRing"]

_MAX_HEADER = 4096


class KeyRing:
    """Accepted API keys, as SHA-256 digests.

    An empty ring is false. Requests then need no key and have no tenant. Admin keys also work as
    ordinary keys.
    """

    def __init__(self, keys: Iterable[str], admin_keys: Iterable[str] = ()) -> None:
        self._admins = frozenset(map(tenant_of_key, admin_keys))
        tenants = [*map(tenant_of_key, keys), *self._admins]
        self._digests = tuple(map(bytes.fromhex, tenants))

    def __bool__(self) -> bool:
        return bool(self._digests)

    def tenant(self, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """Return the tenant that a request's Authorization or x-api-key header identifies.

        Raises:
            ApiError: the request has no valid key (401).
        """
        given = [
            (name, value) for name, value in headers if name in (b"authorization", b"x-api-key")
        ]
        found_keys = {_key_of(name, value) for name, value in given}
        if len(found_keys) != 1 or len(given) != len(dict(given)):
            raise _unauthorized(
                "the request has no API key or more than one; send one key as "
                "'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            )
        (key,) = found_keys
        digest = hashlib.sha256(key).digest()
        found = 0
        # Compare with all keys. Stopping at a match would reveal its position by the time taken.
        for known in self._digests:
            found |= hmac.compare_digest(digest, known)
        if not found:
            raise _unauthorized("the API key is not valid; send a key that the server accepts")
        return digest.hex()

    def check_admin(self, tenant: str) -> None:
        """Raise ApiError 403 unless the tenant may access the data of all tenants.

        Tenants with an admin key may, and so may the tenant of the only key.
        """
        if len(self._digests) > 1 and tenant not in self._admins:
            raise ApiError(
                403,
                "this route shows or changes the data of all API keys, so it needs an admin "
                "key (--admin-api-key)",
                code="admin_key_required",
            )


def _key_of(name: bytes, value: bytes) -> bytes:
    """Return the key in one of the two headers. Raises ApiError 401 for an invalid header."""
    if len(value) > _MAX_HEADER:
        raise _unauthorized("the header with the API key is too long; send only the key")
    if name == b"x-api-key":
        return value.strip(b" ")
    scheme, _, key = value.partition(b" ")
    if scheme.lower() != b"bearer":
        raise _unauthorized("the Authorization header must have the form 'Bearer KEY'")
    return key.strip(b" ")


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
