"""Tests on simulated platforms that offer less: Windows, macOS and sandboxes.

Each platform is simulated in one process, which runs all scenarios.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.platform_scenarios import OPTIONS, PROMPT, SCENARIOS
from kvboost_edge import CPUPagedEngine

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the doubles are made on Linux")
DOUBLES = (
    "windows",
    pytest.param("mac", marks=pytest.mark.full),
    pytest.param("sandbox", marks=pytest.mark.full),
)


@pytest.fixture(scope="module")
def expected():
    """Output of the model on this platform, without simulation."""
    with CPUPagedEngine.from_pretrained(**OPTIONS) as engine:
        result = engine.generate(PROMPT, max_new_tokens=12, temperature=0.0)
    return {"ids": list(result.output_token_ids), "text": result.output_text}


@pytest.fixture(scope="module")
def failures(expected, tmp_path_factory):
    """Function `failures(double)`: the failures on a simulated platform, by scenario."""

    @functools.cache
    def of(double):
        home = tmp_path_factory.mktemp(double)
        (home / "expected.json").write_text(json.dumps(expected), encoding="utf-8")
        environment = {
            **os.environ,
            "KVBOOST_EDGE_CACHE": str(home / "cache"),
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        command = [sys.executable, "-W", "error", "-m", "helpers.platform_scenarios"]
        done = subprocess.run(
            [*command, double, str(home)],
            capture_output=True,
            text=True,
            env=environment,
            cwd=Path(__file__).parents[1],
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads((home / "failures.json").read_text(encoding="utf-8"))

    return of


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("double", DOUBLES)
def test_scenarios_of_other_platforms(failures, double, name):
    assert name not in failures(double), failures(double)[name]
