"""Tests of the Dockerfile: copied files exist, the started command is valid, and it does not run as
root.
"""

import fnmatch
import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from helpers.deploy.chart import CHART
from helpers.deploy.dockerfile import read_dockerfile
from kvboost_edge.server.flags import parse_flags

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "docs" / "deploy"
STEPS = read_dockerfile(FOLDER / "Dockerfile")
IGNORED = (FOLDER / "Dockerfile.dockerignore").read_text(encoding="utf-8").split("\n")


def values(name):
    return [step.value for step in STEPS if step.name == name]


# Copied from the builder's context, not from another stage.
COPIED = [
    source
    for value in values("COPY")
    if not value.startswith("--from=")
    for source in value.split()[:-1]
]


@pytest.mark.parametrize("source", COPIED)
def test_a_copied_file_exists_and_is_sent_to_the_builder(source):
    assert (ROOT / source).exists()
    assert "*" in IGNORED
    assert f"!{source}" in IGNORED


def test_nothing_else_is_sent_to_the_builder():
    sent = {line.removeprefix("!") for line in IGNORED if line.startswith("!")}
    assert sent == set(COPIED)


def test_all_build_inputs_are_copied():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for pattern in (project["readme"], *project["license-files"]):
        assert fnmatch.filter(COPIED, pattern), f"{pattern} is not copied"


def test_the_base_image_is_pinned_by_digest():
    bases = [value for value in values("FROM") if value.split()[0] != "base"]
    assert len(bases) == 1
    assert re.fullmatch(r"python:3\.\d+-slim-\w+@sha256:[0-9a-f]{64} AS base", bases[0])


def test_the_server_does_not_run_as_root():
    assert values("USER")[-1] == "10001:10001"
    [added] = [value for value in values("RUN") if "useradd" in value]
    assert "--uid 10001 " in added
    assert "--gid 10001 " in added


def test_the_kernels_are_compiled_by_the_user_who_loads_them():
    names = [step.name for step in STEPS]
    [warmup] = [index for index, step in enumerate(STEPS) if "kvboost-edge warmup" in step.value]
    assert names.index("USER") < warmup < names.index("ENTRYPOINT")
    [variables] = values("ENV")
    [kernels] = re.findall(r"NUMBA_CACHE_DIR=(\S+)", variables)
    # A new volume is filled with the image's files from before the instruction.
    assert warmup < names.index("VOLUME")
    assert any(kernels.startswith(f"{volume}/") for volume in json.loads(values("VOLUME")[0]))


def test_the_server_accepts_its_flags(monkeypatch):
    monkeypatch.setenv("KVBOOST_API_KEY", "k" * 16)
    program, *flags = json.loads(values("ENTRYPOINT")[0])
    assert program == "kvboost-server"
    parse_flags(flags, program)


def test_the_stop_signal_drains_the_server():
    assert values("STOPSIGNAL") == ["SIGTERM"]


def test_the_health_check_asks_the_port_that_is_exposed():
    [check] = values("HEALTHCHECK")
    program, _, code = json.loads(check[check.index("[") :])
    assert program == "python"
    compile(code, "HEALTHCHECK", "exec")
    assert f":{values('EXPOSE')[0]}/ready" in code


def test_a_first_start_may_take_as_long_as_in_the_chart():
    """Compose starts Open WebUI when the server is healthy, and gives up if it is unhealthy."""
    [check] = values("HEALTHCHECK")
    [seconds] = re.findall(r"--start-period=(\d+)s", check)
    probe = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))["startupProbe"]
    assert int(seconds) >= probe["periodSeconds"] * probe["failureThreshold"]
