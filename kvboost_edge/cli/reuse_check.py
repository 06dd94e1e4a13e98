"""The `kvboost-edge reuse-check` command, which tests how non-prefix KV reuse changes answers."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import typer

from kvboost_edge.cli.console import open_console
from kvboost_edge.cli.session import loaded_engine

if TYPE_CHECKING:
    from kvboost_edge.reuse.quality_verdict import Verdict

__all__ = ["run_reuse_check", "verdict_words"]


def run_reuse_check(model: str, options: dict[str, Any], *, as_json: bool) -> None:
    """Run the quality gate's test or show its stored result. Exits with code 1 if it fails."""
    notes = open_console(stderr=True, quiet=as_json)
    with loaded_engine(model, options, notes) as engine:
        notes.print("testing non-prefix KV reuse: about 4,000 tokens")
        verdict = engine.check_reuse()
    if as_json:
        figures = dataclasses.asdict(verdict)
        print(json.dumps({"model": model, "passed": verdict.passed, **figures}))
    else:
        open_console().print(verdict_words(verdict))
    if not verdict.passed:
        raise typer.Exit(1)


def verdict_words(verdict: Verdict) -> str:
    """Format the result of the test and its figures as one line."""
    word = "passed" if verdict.passed else "failed"
    return f"non-prefix KV reuse {word} its quality test: {verdict}"
