"""Tests that material of other authors is named and that licences of dependencies are known."""

import re
import subprocess
from importlib.metadata import distribution
from pathlib import Path

import pytest

from docs_site.reference import licences

ROOT = Path(__file__).parents[2]
NOTICES = (ROOT / "THIRD_PARTY_NOTICES.md").read_text(encoding="utf-8")
STATIC = ROOT / "kvboost_edge" / "server" / "http" / "static"


def tracked():
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_files_with_another_authors_copyright_are_named():
    """This includes minified scripts, which have very long lines."""
    others = set()
    for name in tracked():
        text = (ROOT / name).read_bytes().decode("utf-8", "replace")
        holders = re.findall(r"Copyright \(c\) [\d-]+ (.+)", text)
        is_minified = name.endswith((".js", ".css")) and max(map(len, text.splitlines())) > 1000
        if is_minified or any("kvboost_edge" not in holder for holder in holders):
            others.add(name)
    others -= {"THIRD_PARTY_NOTICES.md", "tests/release/test_notices.py"}
    licence_files = {name for name in others if name.endswith("-LICENSE.txt")}
    assert others - licence_files == {"docs_site/theme/assets/iframe-worker.js"}
    for name in others - licence_files:
        assert f"`{name}`" in NOTICES
    for name in licence_files:
        assert (ROOT / name).read_text(encoding="utf-8").strip() in NOTICES


def test_the_servers_page_has_no_script_from_elsewhere():
    for path in STATIC.iterdir():
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"(?:src|href)=\"(?:https?:)?//", text), path.name
        assert not re.search(r"(?:import|from)\s*\(?[\"'](?:https?:)?//", text), path.name


@pytest.mark.parametrize("name", ["numpy", "numba", "typer", "uvicorn"])
def test_a_package_states_its_licence(name):
    assert licences.licence_of(distribution(name))


class Stated:
    """Distribution with the given metadata."""

    def __init__(self, **fields):
        self.metadata = self
        self.json = {"name": "some-package", **fields}


@pytest.mark.parametrize(
    ("fields", "licence"),
    [
        ({"license_expression": "MIT OR Apache-2.0", "license": "other"}, "MIT OR Apache-2.0"),
        ({"classifier": ["License :: OSI Approved :: MIT License"]}, "MIT"),
        ({"classifier": ["Typing :: Typed"], "license": "Apache 2.0"}, "Apache-2.0"),
        ({"license": "Some Licence"}, "Some Licence"),
        ({"name": "httpx", "license": "BSD"}, "BSD-3-Clause"),
    ],
)
def test_a_licence_is_read_from_expression_classifiers_or_text(fields, licence):
    assert licences.licence_of(Stated(**fields)) == licence


@pytest.mark.parametrize("fields", [{}, {"license": "A whole text\nof many lines"}])
def test_a_package_without_a_stated_licence_must_be_read(fields):
    with pytest.raises(LookupError, match="some-package states no licence: read its licence file"):
        licences.licence_of(Stated(**fields))


def test_dependencies_are_followed_and_torchs_are_not():
    found = licences.dependencies(["rich>=1", "no-such-package; python_version < '3'"])
    assert {"rich", "pygments", "mdurl"} <= found.keys()
    assert "mpmath" not in licences.dependencies(["torch"])
    with pytest.raises(LookupError, match="no-such-package is not installed: run make setup"):
        licences.dependencies(["no-such-package"])
