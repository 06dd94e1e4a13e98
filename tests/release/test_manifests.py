"""Tests of the Homebrew and winget manifests: complete, with file digests, and marked as untested."""

import hashlib

import pytest
import yaml

from release import manifests
from release.version import project_version

URL = "https://example.org/releases/v1"
VERSION = project_version()
SDIST = f"kvboost_edge-{VERSION}.tar.gz"
ZIP = f"kvboost-edge-{VERSION}-windows-x64.zip"


@pytest.fixture
def dist(tmp_path):
    for name in (SDIST, ZIP):
        (tmp_path / name).write_bytes(name.encode())
    return tmp_path


def digest(name):
    return hashlib.sha256(name.encode()).hexdigest()


def test_the_formula_names_the_sdist_and_its_digest(dist):
    [formula] = [
        path.read_text()
        for path in manifests.written(URL, dist, VERSION)
        if path.name == "kvboost-edge.rb"
    ]
    assert f'url "{URL}/{SDIST}"\n  sha256 "{digest(SDIST)}"\n' in formula
    assert f'assert_match "kvboost-edge {VERSION}"' in formula
    assert "on_macos do\n    depends_on arch: :arm64 " in formula


def test_the_winget_manifests_agree_and_name_the_archive_and_its_digest(dist):
    paths = [path for path in manifests.written(URL, dist, VERSION) if path.suffix == ".yaml"]
    found = [yaml.safe_load(path.read_text()) for path in paths]
    assert {one["ManifestType"] for one in found} == {"version", "installer", "defaultLocale"}
    for path, one in zip(paths, found, strict=True):
        assert path.name.startswith(one["PackageIdentifier"])
        assert one["PackageVersion"] == VERSION
    [installer] = [one["Installers"][0] for one in found if "Installers" in one]
    assert installer["InstallerUrl"] == f"{URL}/{ZIP}"
    assert installer["InstallerSha256"] == digest(ZIP)


def test_manifests_have_no_placeholders_and_say_that_they_are_untested(dist):
    paths = manifests.written(URL, dist, VERSION)
    assert len(paths) == 4
    for path in paths:
        text = path.read_text()
        assert "UNTESTED" in text.splitlines()[0]
        assert not manifests._PLACE.search(text)


def test_without_the_archive_for_windows_there_is_no_winget_manifest(dist):
    (dist / ZIP).unlink()
    assert [path.name for path in manifests.written(URL, dist, VERSION)] == ["kvboost-edge.rb"]


@pytest.mark.parametrize("url", ["", "http://example.org/v1", f"{URL}/", f'{URL}"', "https://"])
def test_an_invalid_address_is_refused(dist, url, capsys):
    assert manifests.main([url, "--dist", str(dist)]) == 1
    assert "is not an address of a release" in capsys.readouterr().err


def test_a_missing_sdist_is_named(tmp_path, capsys):
    assert manifests.main([URL, "--dist", str(tmp_path)]) == 1
    assert f"{SDIST} does not exist: run make release-check" in capsys.readouterr().err


def test_the_paths_are_printed(dist, capsys):
    assert manifests.main([URL, "--dist", str(dist)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
