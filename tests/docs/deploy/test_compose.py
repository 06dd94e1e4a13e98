"""Tests of the Compose file: the server and Open WebUI, reachable from this machine only."""

import re
from pathlib import Path

import pytest
import yaml

from kvboost_edge.cli.launch import CLIENTS, RunningServer
from kvboost_edge.server.flags import parse_flags

FOLDER = Path(__file__).parents[3] / "docs" / "deploy"
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))
SERVICES = COMPOSE["services"]


def without_variables(text):
    """Return the text with ${NAME:-value} replaced by the value."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def test_the_image_is_built_from_the_dockerfile():
    build = SERVICES["server"]["build"]
    assert (FOLDER / build["context"] / build["dockerfile"]).samefile(FOLDER / "Dockerfile")


def test_the_server_accepts_its_flags():
    parse_flags([without_variables(word) for word in SERVICES["server"]["command"]], "server")


@pytest.mark.parametrize("name", SERVICES)
def test_ports_are_published_on_loopback_only(name):
    assert all(port.startswith("127.0.0.1:") for port in SERVICES[name]["ports"])


@pytest.mark.parametrize("name", SERVICES)
def test_volumes_are_declared(name):
    sources = [without_variables(volume).split(":")[0] for volume in SERVICES[name]["volumes"]]
    assert {one for one in sources if not one.startswith(".")} <= set(COMPOSE["volumes"])


def test_a_key_is_required():
    for service, name in (("server", "KVBOOST_API_KEY"), ("open-webui", "OPENAI_API_KEY")):
        assert SERVICES[service]["environment"][name].startswith("${KVBOOST_API_KEY:?")


def test_the_page_gets_the_settings_that_launch_prints():
    server = RunningServer("http://server:8000", "key", "my-model", 4096)
    printed = CLIENTS["openwebui"](server).environment
    settings = SERVICES["open-webui"]["environment"]
    # The model is unknown before the server starts, and the key comes from the environment.
    assert set(printed) - {"DEFAULT_MODELS"} <= set(settings)
    for name in ("OPENAI_API_BASE_URL", "ENABLE_OLLAMA_API"):
        assert settings[name] == printed[name]


def test_answers_in_progress_can_finish():
    drain = parse_flags([], "server").settings.drain_seconds
    assert float(SERVICES["server"]["stop_grace_period"].removesuffix("s")) >= drain + 10
