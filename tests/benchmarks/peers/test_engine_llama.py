"""Tests of llama.cpp's times in the benchmarks, with a stand-in for the library."""

import ctypes
import importlib
import sys
from types import SimpleNamespace

import pytest

from benchmarks.peers import worker

TOKENS = [5, 6, 7]


def _load_file(context, path, sequence, array, room, count):
    array[: len(TOKENS)] = TOKENS
    count._obj.value = len(TOKENS)
    return 1


@pytest.fixture
def engine(monkeypatch):
    """Return an engine without a model, in which each reading of the clock is a second later."""
    library = SimpleNamespace(
        llama_log_callback=lambda function: function,
        llama_token=ctypes.c_int32,
        llama_memory_clear=lambda memory, data: None,
        llama_memory_seq_rm=lambda memory, sequence, start, stop: None,
        llama_state_seq_load_file=_load_file,
    )
    monkeypatch.setitem(sys.modules, "llama_cpp", library)
    monkeypatch.delitem(sys.modules, "benchmarks.peers.engine_llama", raising=False)
    module = importlib.import_module("benchmarks.peers.engine_llama")
    made = module.Engine.__new__(module.Engine)
    made.context = made.memory = None
    made.is_recurrent = False
    monkeypatch.setattr(made, "_prefill", lambda tokens, start, sequence: 9)
    seconds = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(seconds)))
    yield made
    sys.modules.pop("benchmarks.peers.engine_llama", None)


def test_the_time_of_a_restored_prompt_includes_reading_the_file(engine):
    found = worker.answer(engine, {"do": "restore", "tokens": TOKENS, "path": "state"})
    assert found == {"tokens": [9], "seconds": 3.0}  # between the clock's first and last reading


def test_the_time_of_a_first_token_is_the_engines_own(engine):
    found = worker.answer(engine, {"do": "ttft", "tokens": TOKENS, "cached": 2})
    assert found == {"tokens": [9], "seconds": 1.0}
