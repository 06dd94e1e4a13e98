"""Tests of the mode of requests that do not choose one."""

import dataclasses
import logging

import pytest

from helpers.engine.fake_runner import fake_engine, runner_of
from kvboost_edge.config import GenerationMode
from kvboost_edge.engine.tasks.quality_gate import QualityGate
from kvboost_edge.errors import ConfigError
from kvboost_edge.reuse.quality_verdict import Verdict
from kvboost_edge.server.default_mode import check_default_mode, log_default_mode
from kvboost_edge.server.flags import parse_flags
from kvboost_edge.server.serve_options import NamedModel


def options_of(*argv):
    return parse_flags(["--no-pack-cache", "--num-blocks", "64", *argv], "kvboost-server")


def test_a_model_that_refuses_the_default_mode_is_exact_and_logged(caplog):
    options = options_of("--mode", "chunk_kv_reuse")
    several = dataclasses.replace(options, others=(NamedModel(("b",), "b"),))
    with fake_engine() as engine, caplog.at_level(logging.WARNING):
        assert check_default_mode(engine, "a", several) is GenerationMode.CHUNK_KV_REUSE
        assert not caplog.records
        runner_of(engine).moved_keys_refusal = "it cannot"
        assert check_default_mode(engine, "a", several) is GenerationMode.PREFIX_CACHE
    assert vars(caplog.records[0])["facts"] == {"model": "a", "reason": "it cannot"}


def test_a_stored_quality_verdict_is_a_refusal(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("KVBOOST_EDGE_CACHE", str(tmp_path))
    bad = Verdict(0.5, 0.1, 0.9, 59, 0.8)
    monkeypatch.setattr(QualityGate, "_measure", lambda *arguments: bad)
    options = options_of("--mode", "chunk_kv_reuse")
    several = dataclasses.replace(options, others=(NamedModel(("b",), "b"),))
    with fake_engine(reuse_gate="auto") as engine:
        engine.check_reuse()
        assert check_default_mode(engine, "a", several) is GenerationMode.PREFIX_CACHE
        with pytest.raises(ConfigError, match=r"--mode chunk_kv_reuse is refused: .*this model"):
            check_default_mode(engine, "a", options)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ((), []),
        (
            ("--mode", "chunk_kv_reuse", "--recompute-ratio", "0.1"),
            ["answers are approximate by default"],
        ),
        (
            ("--recompute-strategy", "none"),
            ["options only for requests with kvboost.mode chunk_kv_reuse"],
        ),
    ],
)
def test_startup_logs_the_default_mode(caplog, argv, said):
    with caplog.at_level(logging.INFO):
        log_default_mode(options_of(*argv))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == len(said)
    assert all(line.startswith(words) for line, words in zip(lines, said, strict=True))
