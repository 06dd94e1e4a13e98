"""Bookkeeping of the KV block pool in integers: block tables, prefix hashes, copy-on-write."""

from __future__ import annotations
