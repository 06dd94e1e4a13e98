"""The command that hints tell a user to run."""

import os
import sysconfig

import pytest

from kvboost_edge.cli.demo import command_name


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    """Directory of the programs of this environment."""
    made = tmp_path / "project" / ".venv" / "bin"
    made.mkdir(parents=True)
    program = made / "kvboost-edge"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setattr(sysconfig, "get_path", {"scripts": str(made)}.__getitem__)
    return made


def test_a_program_on_the_path_is_named_without_its_path(scripts, monkeypatch):
    monkeypatch.setenv("PATH", f"{scripts}{os.pathsep}/usr/bin")
    assert command_name() == "kvboost-edge"


@pytest.mark.parametrize(("below", "shown"), [("project", ".venv/bin/kvboost-edge"), (".", None)])
def test_a_program_off_the_path_is_named_with_its_path(
    scripts, tmp_path, monkeypatch, below, shown
):
    other = tmp_path / "other"
    other.mkdir()
    (other / "kvboost-edge").write_text("#!/bin/sh\n")
    (other / "kvboost-edge").chmod(0o755)
    monkeypatch.setenv("PATH", str(other))  # of another environment
    monkeypatch.chdir(tmp_path / below if shown else other)
    assert command_name() == (shown or str(scripts / "kvboost-edge"))


def test_without_a_program_the_plain_name_is_used(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_path", {"scripts": str(tmp_path)}.__getitem__)
    assert command_name() == "kvboost-edge"
