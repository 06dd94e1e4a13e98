"""Invalid figures are refused, and the error names them."""

import math

import pytest

from kvboost_edge.errors import ConfigError
from kvboost_edge.serve_ray.routing.cache_records import ReplicaReport

WRONG = {
    "seconds_per_token": [0.0, -1.0, math.inf, math.nan],
    "decode_seconds": [-1.0, math.nan],
    "answer_seconds": [-1.0, math.inf],
    "disk_token_seconds": [-1.0, math.nan],
    "shared_token_seconds": [-1.0, math.inf],
    "serial": [-1],
    "queued_tokens": [-1],
    "num_running": [-1],
    "num_waiting": [-1],
    "free_blocks": [-1],
    "step_tokens": [0],
    "max_running": [0],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values]
)
def test_an_invalid_value_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=name):
        ReplicaReport(**{"serial": 0, "seconds_per_token": 1e-3, name: value})
