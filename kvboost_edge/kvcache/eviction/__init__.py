"""Eviction of cached blocks: policies, their order, usage counts and pins."""

from __future__ import annotations
