"""Fixtures that run a command, check its exit status or error, and simulate typed input."""

import io
import json
import sys

import pytest

from kvboost_edge.cli.app import run


@pytest.fixture
def printed(capsys):
    """Function `printed(*argv, code=0)` that checks the exit status and returns the output: `out`
    and `err`.
    """

    def call(*argv, code=0):
        capsys.readouterr()
        assert run([str(word) for word in argv]) == code, argv
        return capsys.readouterr()

    return call


@pytest.fixture
def answered(printed):
    """Function `answered(*argv, code=0)` that returns the parsed output of the command with --json."""
    return lambda *argv, code=0: json.loads(printed(*argv, "--json", code=code).out)


@pytest.fixture
def refused(printed):
    """Function `refused(*argv, code=2)` that returns the error of a failing command, which is its
    last line.
    """

    def call(*argv, code=2):
        line = printed(*argv, code=code).err.strip().splitlines()[-1]
        assert line.startswith("kvboost-edge: error: ")
        return line

    return call


@pytest.fixture
def typed(monkeypatch):
    """Function `typed(text)` that puts the text on standard input."""
    return lambda text: monkeypatch.setattr(sys, "stdin", io.StringIO(text))
