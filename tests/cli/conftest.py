"""Calls of a command: what it prints or answers, how it is refused, and the lines typed at it."""

import io
import json
import sys

import pytest

from kvboost_edge.cli.app import run


@pytest.fixture
def printed(capsys):
    """`printed(*argv, code=0)` checks the exit status and returns what the command wrote: `out` and
    `err`.
    """

    def call(*argv, code=0):
        capsys.readouterr()
        assert run([str(word) for word in argv]) == code, argv
        return capsys.readouterr()

    return call


@pytest.fixture
def answered(printed):
    """`answered(*argv, code=0)` returns what the command answers with --json."""
    return lambda *argv, code=0: json.loads(printed(*argv, "--json", code=code).out)


@pytest.fixture
def refused(printed):
    """`refused(*argv)` returns the one line with which the command is refused, its last."""

    def call(*argv):
        line = printed(*argv, code=1).err.strip().splitlines()[-1]
        assert line.startswith("kvboost-edge: error: ")
        return line

    return call


@pytest.fixture
def typed(monkeypatch):
    """`typed(text)` puts it on standard input."""
    return lambda text: monkeypatch.setattr(sys, "stdin", io.StringIO(text))
