"""Signals that ask this process to end."""

from __future__ import annotations

import signal

__all__ = ["ENDING_SIGNALS", "TERMINATING_SIGNALS"]

TERMINATING_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGBREAK") if hasattr(signal, name)
)
"""SIGTERM, and on Windows also SIGBREAK, which the system sends for Ctrl-Break and at logoff."""
ENDING_SIGNALS = (signal.SIGINT, *TERMINATING_SIGNALS)
"""`TERMINATING_SIGNALS` and SIGINT (Ctrl-C)."""
