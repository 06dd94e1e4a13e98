"""Eviction of cached blocks: policies, eviction order, usage of blocks, and pins."""

from __future__ import annotations
