"""Seeds of requests that name none: they reproduce the request and tell nothing of the others."""

from __future__ import annotations

import hashlib
import itertools
import secrets

__all__ = ["Seeds"]


class Seeds:
    """Hands out seeds in [0, 2^64). Safe to use from any thread.

    seed   None: each seed is random. Given: it depends on this number, the tenant and how many
           seeds that tenant drew before, and on nothing that other tenants do. Who knows the number
           can work out a tenant's seeds from its name, so a server of several tenants leaves it
           out.
    """

    def __init__(self, seed: int | None) -> None:
        self._key: bytes | None = None
        self._counts: dict[bytes, itertools.count[int]] = {}
        if seed is not None:
            self._key = hashlib.blake2b(
                seed.to_bytes(seed.bit_length() // 8 + 1, "little")
            ).digest()

    def draw(self, tenant: bytes) -> int:
        """The next seed of a tenant."""
        if self._key is None:
            return secrets.randbits(64)
        number = next(self._counts.setdefault(tenant, itertools.count()))
        digest = hashlib.blake2b(
            tenant + number.to_bytes(8, "little"), digest_size=8, key=self._key
        ).digest()
        return int.from_bytes(digest, "little")
