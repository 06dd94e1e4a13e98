"""Both kinds of models, for the tests that take one."""

import pytest

from helpers.engine.model_kinds import ModelKind


@pytest.fixture(params=ModelKind, ids=lambda kind: kind.value)
def kind(request):
    """A plain or a hybrid model."""
    return request.param
