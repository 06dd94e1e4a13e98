"""Block pool bookkeeping: block tables, prefix hashes, copy-on-write. Integers only, no arrays."""

from __future__ import annotations
