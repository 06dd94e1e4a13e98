"""Tests of the server's log and checks while it loads a model."""

import logging
import threading

import pytest

from helpers.clocks import give_clock
from helpers.engine.fake_runner import fake_engine, runner_of
from helpers.models.tiny_models import save_tiny_model
from kvboost_edge.config import GenerationMode
from kvboost_edge.errors import ConfigError, RequestError
from kvboost_edge.server import __main__ as command
from kvboost_edge.server.flags import parse_flags
from kvboost_edge.server.models.loader import ProcessMemory
from kvboost_edge.server.work.engine_warmup import prepare


def test_packing_progress_is_logged_at_intervals(monkeypatch, caplog):
    now = [100.0]
    give_clock(monkeypatch, lambda: now[0], command)
    progress = command._log_packing()
    with caplog.at_level(logging.INFO):
        for done, seconds in ((1, 0.0), (10, 1.0), (25, 1.5), (30, 0.1), (80, 2.5), (100, 0.5)):
            now[0] += seconds
            progress(done * 10**7, 10**9)
    facts = [vars(record)["facts"] for record in caplog.records]
    assert facts == [
        {"percent": 25, "megabytes": 1000, "seconds_left": 8},
        {"percent": 80, "megabytes": 1000, "seconds_left": 1},
    ]


def test_compilation_progress_is_logged_with_an_estimate(monkeypatch, caplog):
    monkeypatch.setattr("kvboost_edge.kernels.aot.default_num_threads", lambda: 2)
    with caplog.at_level(logging.INFO):
        for done in range(8):
            command._log_compiling(done, 7)
    facts = [vars(record)["facts"] for record in caplog.records]
    assert facts == [{"done": 0, "total": 7, "seconds_left": 14}, {"done": 7, "total": 7}]


@pytest.fixture
def machine(monkeypatch):
    """Memory limits that were set; 300 MB are resident before the first model is loaded."""
    limits = []
    monkeypatch.setattr("kvboost_edge.host.memory.process_rss", lambda: 300_000_000)
    monkeypatch.setattr("kvboost_edge.host.memory.set_own_limit", limits.append)
    return limits


def test_max_memory_bounds_one_engine_or_all_models(machine):
    alone, process = command._bounded(options_of("--max-memory", "2GB"))
    assert alone.engine["max_memory"] == 2_000_000_000
    assert process == ProcessMemory(2_000_000_000, 300_000_000)
    assert machine == []
    both = options_of("--max-memory", "2GB", "--model", "a=x", "--model", "b=y")
    options, process = command._bounded(both)
    assert "max_memory" not in options.engine
    assert process == ProcessMemory(2_000_000_000, 300_000_000)
    assert machine == [1_700_000_000]
    unbound = options_of("--max-cache-bytes", "1GB")
    assert command._bounded(unbound) == (unbound, None)
    with pytest.raises(ConfigError, match="max_memory=300000000 is less than the 300000000 bytes"):
        command._bounded(options_of("--max-memory", "300MB"))


@pytest.mark.parametrize(("given", "bound"), [("1GB", 1_300_000_000), ("5GB", 2_000_000_000)])
def test_the_smaller_of_both_memory_bounds_applies(machine, caplog, given, bound):
    with caplog.at_level(logging.INFO):
        options, _ = command._bounded(options_of("--max-memory", "2GB", "--max-model-bytes", given))
    assert options.engine["max_memory"] == bound
    _deprecation, record = caplog.records
    assert "the smaller allowance applies" in record.getMessage()
    facts = vars(record)["facts"]
    assert (facts["max_memory_allows"], facts["measured_overhead"]) == (1_700_000_000, 300_000_000)


@pytest.mark.parametrize(
    "other", [(), ("--max-memory", "2GB"), ("--model", "a=x", "--model", "b=y")]
)
def test_a_deprecated_flag_is_logged_once_with_its_successor(machine, caplog, other):
    command._bounded(options_of("--max-model-bytes", "1GB", *other))
    assert [record.getMessage() for record in caplog.records] == [
        "--max-model-bytes is deprecated; use --max-memory instead"
    ]
    caplog.clear()
    command._bounded(options_of(*other))
    assert not caplog.records


def options_of(*argv):
    return parse_flags(["--no-pack-cache", "--num-blocks", "64", *argv], "kvboost-server")


def test_a_single_model_that_refuses_the_default_mode_is_an_error(tmp_path):
    model = str(save_tiny_model("lfm2", tmp_path))
    options = options_of("--model", model, "--mode", "chunk_kv_reuse")
    with pytest.raises(ConfigError, match=r"--mode chunk_kv_reuse is refused: .*; use --mode pre"):
        command._load(model, options, threading.Event())


def test_an_approximate_default_is_checked_at_startup():
    """A reason against the mode, such as the quality gate, stops the server at startup."""
    with fake_engine() as engine:
        runner_of(engine).moved_keys_refusal = "the gate says no"
        prepare(engine, (), (), ())
        with pytest.raises(RequestError, match="the gate says no"):
            prepare(engine, (), (), (), GenerationMode.CHUNK_KV_REUSE)
