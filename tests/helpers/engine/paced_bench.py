"""A bench on a simulated machine with known step times."""

from __future__ import annotations

import random
from typing import Any

from helpers.engine.fake_runner import Bench
from kvboost_edge.engine.handle import RequestHandle
from kvboost_edge.engine.schedule.step_cost import StepShape

LONG = 4000


def machine(shape: StepShape) -> float:
    """Return the time of a step: 10 ms, 0.5 ms per stream and 1 ms per token, more with depth."""
    return (
        0.010
        + 0.0005 * shape.sequences
        + 5e-7 * shape.decode_depth
        + 0.001 * shape.tokens
        + 5e-7 * shape.prompt_depth
    )


class Paced(Bench):
    """A bench whose steps take `machine` seconds; `steps` lists their shapes and times."""

    def __init__(
        self, target_tpot: float | None = None, noise: float = 0.0, **options: Any
    ) -> None:
        options = {"num_blocks": 3000, "max_batch_tokens": 512, "debug_checks": False} | options
        super().__init__(target_tpot=target_tpot, **options)
        self.steps: list[tuple[StepShape, float]] = []
        rng = random.Random(1)
        pacing = self.scheduler.pacing
        observe = pacing.observe

        def timed(work: Any, seconds: float) -> None:
            shape = StepShape.of(work)
            seconds = machine(shape) * (1 + noise * rng.uniform(-1, 1))
            self.steps.append((shape, seconds))
            observe(work, seconds)

        pacing.observe = timed  # type: ignore[method-assign]

    def long_prompt(self, count: int = LONG, **options: Any) -> RequestHandle:
        rng = random.Random(self.num_requests)
        return self.submit([rng.randrange(256) for _ in range(count)], 1, **options)

    def streams(self, count: int) -> None:
        """Start streams and let them decode for a while."""
        for _ in range(count):
            self.stream()
        for _ in range(10):
            self.step()
        self.steps.clear()

    def stream(self, max_new_tokens: int = 5000) -> RequestHandle:
        """Submit a request with a short prompt and a long answer."""
        rng = random.Random(self.num_requests)
        return self.submit([rng.randrange(256) for _ in range(30)], max_new_tokens)

    def check(self) -> None:
        """Skip the invariant checks after each step, since these runs are long."""
