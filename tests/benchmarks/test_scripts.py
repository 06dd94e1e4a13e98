"""Tests of the benchmarks' scripts: each can be imported and explains each of its options."""

import argparse
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for folder in ("bench", "quality", "simulators")
    for path in sorted((ROOT / "benchmarks" / folder).glob("*.py"))
    if ".parse_args(" in path.read_text(encoding="utf-8")
]


class Parsed(Exception):
    pass


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_option_is_explained(name, monkeypatch):
    def stop(parser, *_):
        raise Parsed(parser)

    script = importlib.import_module(name)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    with pytest.raises(Parsed) as caught:
        script.main()
    (parser,) = caught.value.args
    assert parser.description
    assert not [action.option_strings for action in parser._actions if not action.help]
