"""The engine: requests, scheduling, sampling, and the public class `CPUPagedEngine`."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """Load a public name of the KVBoost compatibility module on first use."""
    return import_module("kvboost_edge")._load(__name__, name)
