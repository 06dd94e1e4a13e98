"""Calls that must raise, in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def assert_raises(
    error: type[BaseException], match: str, call: Callable[..., Any], *args: Any, **options: Any
) -> None:
    """Call and expect the error, its message as `match` says."""
    with pytest.raises(error, match=match):
        call(*args, **options)
