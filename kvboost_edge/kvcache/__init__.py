"""Block pool bookkeeping: block tables, prefix hashes and copy-on-write, in integers only."""

from __future__ import annotations
