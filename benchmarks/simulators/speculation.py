"""Simulator of speculative decoding: replays recorded answers on machines with given pass times.

    python benchmarks/simulators/speculation.py [--quick] [--out benchmarks/results/FILE.json]

Prompt lookup proposes tokens, and the engine's own rules choose how many of them to verify. The
recorded answer decides which ones are accepted. The time of a pass comes from a table, with noise
and interruptions, which the rules only see as measured times. Answers run alone, or eight of a
kind together.

    drafts      draft tokens verified
    accepted    of them accepted
    gain        time without drafts divided by the time with them, for all answers of a kind
    least       the same for the answer or batch with the least gain

Nothing is timed, so a run gives the same figures on every machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks import harness
from kvboost_edge.engine.spec_decode.draft_lengths import (
    DraftCredit,
    DraftProposal,
    StepCosts,
    choose_lengths,
    observe_pass,
)
from kvboost_edge.engine.spec_decode.drafting import Drafter, TenantHistory
from kvboost_edge.engine.spec_decode.pass_costs import PassCosts

__all__ = [
    "MACHINES",
    "Answer",
    "Machine",
    "Replayed",
    "Rules",
    "batches",
    "read_answers",
    "replay",
]

_ANSWERS = Path(__file__).parents[1] / "data" / "draft_answers.json"
_MOST = 31  # draft tokens of a sequence
_MAX_TOKENS = 1 << 16
_NOISE = 0.1  # standard deviation of the logarithm of a measured time
_INTERRUPTED = 0.02  # share of the passes that are measured three times as long


class Machine(NamedTuple):
    """Times of passes.

    Attributes:
        seconds: time of a pass of one row at depth 0.
        attend: time of attention to one token, relative to it.
        times: times by rows, relative to one row.
    """

    seconds: float
    attend: float
    times: dict[int, float]

    def pass_seconds(self, num_rows: int, depth: float) -> float:
        rows = list(self.times)
        linear = float(np.interp(num_rows, rows, list(self.times.values())))
        return self.seconds * (linear * max(1.0, num_rows / rows[-1]) + self.attend * depth)


# The first two are measured (benchmarks/LOG.md), on two AVX512-VNNI cores. On the third one, each
# row costs more than half a pass.
MACHINES = {
    "0.5B": Machine(
        0.012,
        1 / 30_000,
        {1: 1.0, 2: 1.05, 3: 1.35, 4: 1.17, 5: 1.5, 6: 1.55, 8: 1.6, 9: 2.1, 10: 2.2, 12: 2.5}
        | {16: 3.2, 24: 4.3, 32: 5.6, 64: 10.2},
    ),
    "135M": Machine(
        0.0033,
        1 / 16_000,
        {1: 1.0, 2: 1.18, 3: 1.6, 4: 1.54, 6: 2.3, 8: 2.67, 9: 2.9, 10: 3.1, 12: 3.5}
        | {16: 4.4, 24: 6.4, 32: 8.4, 64: 16.0},
    ),
    "compute-bound": Machine(0.003, 1 / 20_000, {1: 1.0, 2: 1.6, 4: 2.8, 8: 5.2, 64: 40.0}),
}


class Answer(NamedTuple):
    """A recorded answer, in token ids."""

    kind: str
    prompt: list[int]
    answer: list[int]


@dataclasses.dataclass
class Rules:
    """What an engine learns about its passes and drafts. It outlives the answers."""

    costs: PassCosts = dataclasses.field(default_factory=PassCosts)
    credit: DraftCredit = dataclasses.field(default_factory=DraftCredit)


@dataclasses.dataclass
class Replayed:
    """The result of answers that ran together.

    Attributes:
        plain: seconds without drafts.
        seconds: seconds with drafts.
    """

    plain: float = 0.0
    seconds: float = 0.0
    num_drafted: int = 0
    num_accepted: int = 0

    @property
    def gain(self) -> float:
        return self.plain / self.seconds


class _Running:
    """An answer in progress."""

    def __init__(self, one: Answer) -> None:
        self.truth = [*one.prompt, *one.answer]
        self.known = len(one.prompt) + 1
        self.drafter = Drafter(b"", TenantHistory(), _MAX_TOKENS)

    @property
    def is_done(self) -> bool:
        return self.known >= len(self.truth)

    def propose(self) -> DraftProposal | None:
        most = min(_MOST, len(self.truth) - self.known - 1)
        return self.drafter.propose(self.truth[: self.known], most) if most > 0 else None

    def accept(self, tokens: Sequence[int]) -> int:
        """Generate the next tokens, and return how many draft tokens are accepted."""
        count = 0
        while count < len(tokens) and tokens[count] == self.truth[self.known + count]:
            count += 1
        self.known += count + 1
        self.drafter.learn(len(tokens), count)
        return count


def replay(group: Sequence[Answer], machine: Machine, rules: Rules, seed: int = 0) -> Replayed:
    """Replay answers that run together on a machine."""
    rng = random.Random(seed)
    done = Replayed(_plain_seconds(group, machine))
    everyone = [_Running(one) for one in group]
    while running := [one for one in everyone if not one.is_done]:
        depth = float(sum(one.known for one in running))
        drafts = {index: draft for index, one in enumerate(running) if (draft := one.propose())}
        lengths = dict.fromkeys(range(len(running)), 0)
        if drafts:
            step = StepCosts(len(running), depth, rules.costs)
            chosen = choose_lengths(list(drafts.values()), step, rules.credit)
            lengths.update(zip(drafts, chosen, strict=True))
        num_rows = len(running) + sum(lengths.values())
        depth += sum(lengths[index] * one.known for index, one in enumerate(running))
        seconds = machine.pass_seconds(num_rows, depth)
        accepted = [
            one.accept(drafts[index].token_ids[: lengths[index]] if index in drafts else [])
            for index, one in enumerate(running)
        ]
        noise = math.exp(rng.gauss(0.0, _NOISE)) * (3.0 if rng.random() < _INTERRUPTED else 1.0)
        rules.credit.settle(accepted, len(running))
        measured = seconds * noise
        observe_pass(rules.costs, rules.credit, len(running), num_rows, depth, measured)
        done.seconds += seconds
        done.num_drafted += sum(lengths.values())
        done.num_accepted += sum(accepted)
    for one in everyone:
        one.drafter.release()
    return done


def _plain_seconds(group: Sequence[Answer], machine: Machine) -> float:
    """Return the time of the same answers without drafts, after their first tokens."""
    seconds = 0.0
    for step in range(1, max(len(one.answer) for one in group)):
        running = [one for one in group if len(one.answer) > step]
        depth = float(sum(len(one.prompt) + step for one in running))
        seconds += machine.pass_seconds(len(running), depth)
    return seconds


def read_answers() -> dict[str, list[Answer]]:
    """Return the recorded answers by model."""
    recorded = json.loads(_ANSWERS.read_text(encoding="utf-8"))
    return {model: [Answer(**one) for one in answers] for model, answers in recorded.items()}


def batches(answers: Sequence[Answer], size: int) -> list[list[Answer]]:
    """Return batches of answers of one kind. If there are too few, some appear more than once."""
    if size == 1:
        return [[one] for one in answers]
    kinds: dict[str, list[Answer]] = {}
    for one in answers:
        kinds.setdefault(one.kind, []).append(one)
    return [(of_kind * size)[:size] for of_kind in kinds.values()]


def rows_of(model: str, answers: Sequence[Answer], name: str, size: int) -> list[dict[str, Any]]:
    """Return one row for each kind of answer, on a machine with batches of `size`."""
    rules = Rules()
    found: dict[str, list[Replayed]] = {}
    for number, group in enumerate(batches(answers, size)):
        result = replay(group, MACHINES[name], rules, seed=number)
        found.setdefault(group[0].kind, []).append(result)
    rows = []
    for kind, results in found.items():
        gain = sum(one.plain for one in results) / sum(one.seconds for one in results)
        row = {
            "answers of": model,
            "times of": name,
            "together": size,
            "kind": kind,
            "drafts": sum(one.num_drafted for one in results),
            "accepted": sum(one.num_accepted for one in results),
            "gain": round(gain, 3),
            "least": round(min(one.gain for one in results), 3),
        }
        rows.append(row)
    return rows


def main() -> None:
    options = harness.parser(__doc__.splitlines()[0] if __doc__ else "")
    given: argparse.Namespace = options.parse_args()
    rows: list[dict[str, Any]] = []
    for model, answers in read_answers().items():
        chosen = answers[:4] if given.quick else answers
        for name in MACHINES:
            for size in (1, 8):
                rows += rows_of(model, chosen, name, size)
    harness.report("speculation_rules", rows, options=given)


if __name__ == "__main__":
    main()
