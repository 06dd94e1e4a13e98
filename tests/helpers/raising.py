"""One-line assertion that a call raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def assert_raises(
    error: type[BaseException], match: str, call: Callable[..., Any], *args: Any, **options: Any
) -> None:
    """Call and expect the error, with a message that matches `match`."""
    with pytest.raises(error, match=match):
        call(*args, **options)
