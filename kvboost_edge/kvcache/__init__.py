"""Blocks, tables, prefix hashes: bookkeeping on integers. No arrays of keys and values live
here.
"""

from __future__ import annotations
