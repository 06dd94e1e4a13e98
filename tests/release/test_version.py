"""Tests of the version: pyproject.toml defines it, and other files that state it must agree."""

import json
import re
import shutil
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

import pytest

import kvboost_edge
from release import version as checks

ROOT = Path(__file__).parents[2]
# Files that state the version.
PLACES = (
    "CHANGELOG.md",
    "CITATION.cff",
    "cuda_ext/pyproject.toml",
    "docs/deploy/helm/kvboost-edge/Chart.yaml",
    "docs/deploy/kubernetes/serving-runtime.yaml",
    "docs/how-to/docker.md",
)


@pytest.fixture
def tree(tmp_path):
    """Folder with copies of the files that state the version."""
    for name in ("pyproject.toml", *PLACES):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.fixture
def released(tree):
    """The same folder, with a date in the changelog."""
    path = tree / "CHANGELOG.md"
    path.write_text(re.sub(r"^(## \[.*\]).*", r"\1 - 2026-12-24", path.read_text(), flags=re.M))
    return tree


def test_all_places_agree():
    assert checks.problems() == []
    assert checks.main([]) == 0


def test_the_package_reads_its_installed_metadata(monkeypatch):
    assert kvboost_edge.__version__ == version("kvboost-edge")
    assert not re.search(r"^__version__ =", Path(kvboost_edge.__file__).read_text(), re.MULTILINE)

    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    assert kvboost_edge.__version__ == "0+unknown"


def test_an_installation_of_this_tree_is_up_to_date():
    origin = json.loads(distribution("kvboost-edge").read_text("direct_url.json") or "{}")
    if origin.get("url") != ROOT.as_uri():
        pytest.skip("the installed package is not this tree")
    assert version("kvboost-edge") == checks.project_version(), (
        "the installed version is outdated: run make setup"
    )


@pytest.mark.parametrize("prefix", ["", "refs/tags/"])
def test_a_tag_of_this_version_is_accepted(released, prefix):
    assert checks.problems(released, f"{prefix}v{checks.project_version()}") == []


@pytest.mark.parametrize("end", [" - unreleased", "", " - soon", " - 2026-12-24 (unreleased)"])
def test_a_tag_needs_a_date_in_the_changelog(released, end):
    heading = f"## [{checks.project_version()}]{end}"
    older = "## [0.0.1] - 2026-01-01"
    (released / "CHANGELOG.md").write_text(f"# Changelog\n\n{heading}\n\n{older}\n")
    assert checks.problems(released) == []
    assert checks.problems(released, f"v{checks.project_version()}") == [
        f"CHANGELOG.md begins with {heading!r}; end the heading with the date"
    ]


@pytest.mark.parametrize("name", ["README.md", "docs/how-to/install.md"])
def test_no_page_of_a_tag_says_that_the_package_is_not_published(released, name):
    path = released / name
    path.write_text("The package is not on PyPI\nyet, so install the wheel.\n")
    assert checks.problems(released) == []
    assert checks.problems(released, f"v{checks.project_version()}") == [
        f"{name} says that the package is not on PyPI yet; remove the sentence"
    ]


@pytest.mark.parametrize("tag", ["v1.0.0", "1.0.0rc1", "v1.0.0rc2", "v1.0.0-rc1", "main", "v", ""])
def test_another_tag_is_refused_with_both_versions(tree, tag):
    (tree / "pyproject.toml").write_text('[project]\nversion = "1.0.0rc1"\n')
    for name in PLACES:
        (tree / name).unlink()
    [problem] = checks.problems(tree, tag)
    assert problem == (f"the tag is {tag}; pyproject.toml states 1.0.0rc1, so tag it v1.0.0rc1")


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("how", ["other", "none"])
def test_another_version_elsewhere_is_named(tree, name, how):
    path = tree / name
    own = checks.project_version()
    text = path.read_text().replace(own, "9.9.9", 1) if how == "other" else ""
    path.write_text(text)
    stated = "version 9.9.9" if how == "other" else "no version"
    assert checks.problems(tree) == [f"{name} states {stated}; pyproject.toml states {own}"]


def test_the_exit_code_stops_a_workflow(capsys):
    assert checks.main([]) == 0
    assert checks.main(["v0.0.1"]) == 1
    assert "the tag is v0.0.1" in capsys.readouterr().err
    for wrong in (["v1", "v2"], ["--tag"]):
        with pytest.raises(SystemExit, match=r"python -m release\.version"):
            checks.main(wrong)
