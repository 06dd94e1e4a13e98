"""Model kinds, for the tests that run with each of them."""

import pytest

from helpers.engine.model_kinds import ModelKind


@pytest.fixture(params=ModelKind, ids=lambda kind: kind.value)
def kind(request):
    """Model kind: plain or hybrid."""
    return request.param
