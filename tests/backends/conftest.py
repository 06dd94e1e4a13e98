"""For the tests of backends: one torch thread, since more only slow down work as small as theirs."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(scope="module", autouse=True)
def one_thread_of_torch(request: pytest.FixtureRequest) -> None:
    if "torch" in sys.modules:
        request.getfixturevalue("one_torch_thread")
