"""Eviction of cached blocks: policies, eviction order, usage tracking and pins."""

from __future__ import annotations
