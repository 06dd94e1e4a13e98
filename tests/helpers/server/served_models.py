"""Tiny models that a server loads on demand, for tests."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from kvboost_edge import CPUPagedEngine
from kvboost_edge.config import EngineConfig
from kvboost_edge.engine.memory.check import planned_memory
from kvboost_edge.server.models.served import ModelSource

OPTIONS: dict[str, Any] = {
    "num_blocks": 64,
    "backend": "cpu",
    "dtype": "float32",
    "reuse_gate": "off",
}

ASKED = {
    "prompt": "Once there was a word. " * 8,
    "max_tokens": 8,
    "temperature": 0,
    "logprobs": 2,
    "ignore_eos": True,
}


class CountedSource:
    """A model directory. `loads` counts how often it was loaded. Loading waits while it is held."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.path = path
        self.options = {**OPTIONS, **options}
        self.loads = 0
        self._free = threading.Event()
        self._free.set()

    @property
    def source(self) -> ModelSource:
        return ModelSource(self.plan, self.load)

    def plan(self) -> int:
        return planned_memory(self.path, EngineConfig.from_options(**self.options)).nbytes

    def load(self, stopped: threading.Event) -> CPUPagedEngine:
        self.loads += 1
        assert self._free.wait(60)
        return self.open()

    def open(self) -> CPUPagedEngine:
        return CPUPagedEngine.from_pretrained(str(self.path), **self.options)

    def hold(self) -> None:
        self._free.clear()

    def release(self) -> None:
        self._free.set()
