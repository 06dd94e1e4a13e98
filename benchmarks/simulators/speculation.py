"""Simulator of speculative decoding: replays recorded answers on machines with given pass times.

    python benchmarks/simulators/speculation.py [--quick] [--out benchmarks/results/FILE.json]

Prompt lookup or a draft model proposes tokens, and the engine's own rules choose how many of them
to verify. The recorded answer decides which ones are accepted. The time of a pass comes from a
table, with noise and interruptions, which the rules only see as measured times. Answers run alone,
or eight of a kind together. For a draft model, the recording has its token after each token of the
answer, and the probability of that token.

    drafts      draft tokens verified
    accepted    draft tokens accepted
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
from kvboost_edge.engine.spec_decode.draft_chances import AcceptanceCounts, DraftChances
from kvboost_edge.engine.spec_decode.draft_lengths import (
    LEAST_GAIN,
    DraftCredit,
    DraftProposal,
    StepCosts,
    choose_lengths,
    least_chances,
    observe_pass,
)
from kvboost_edge.engine.spec_decode.pass_costs import PassCosts
from kvboost_edge.engine.spec_decode.prompt_lookup import PromptLookup, TenantHistory

__all__ = [
    "MACHINES",
    "Answer",
    "Machine",
    "Replayed",
    "Rules",
    "batches",
    "read_answers",
    "read_pair",
    "replay",
]

_DATA = Path(__file__).parents[1] / "data"
_PAIR = "Qwen2.5-Coder-1.5B-Instruct, drafts of 0.5B"
_MOST = 31  # draft tokens of a sequence
_MOST_MODELED = 8  # draft tokens of a draft model
_MAX_TOKENS = 1 << 16
_NOISE = 0.1  # standard deviation of the logarithm of a measured time
_INTERRUPTED = 0.02  # share of the passes that are measured three times as long


class Machine(NamedTuple):
    """Times of passes.

    Attributes:
        seconds: time of a pass of one row at depth 0.
        attend: time of attention to one token, relative to it.
        times: times by rows, relative to one row.
        draft_seconds: time of a pass of the draft model of one row.
    """

    seconds: float
    attend: float
    times: dict[int, float]
    draft_seconds: float = 0.0

    def pass_seconds(self, num_rows: int, depth: float) -> float:
        rows = list(self.times)
        linear = float(np.interp(num_rows, rows, list(self.times.values())))
        return self.seconds * (linear * max(1.0, num_rows / rows[-1]) + self.attend * depth)

    def drafting_seconds(self, num_rows: int) -> float:
        """Return the time of a pass of the draft model."""
        return self.draft_seconds * self.pass_seconds(num_rows, 0.0) / self.seconds


# The first three are measured (benchmarks/LOG.md), on two AVX512-VNNI cores. On the last one, each
# row costs more than half a pass.
MACHINES = {
    "0.5B": Machine(
        0.012,
        1 / 30_000,
        {1: 1.0, 2: 1.05, 3: 1.12, 4: 1.18, 5: 1.3, 6: 1.45, 8: 1.82, 9: 2.2, 10: 2.3, 12: 2.6}
        | {16: 3.3, 24: 4.5, 32: 5.8, 64: 10.8},
    ),
    "135M": Machine(
        0.0033,
        1 / 16_000,
        {1: 1.0, 2: 1.09, 3: 1.18, 4: 1.26, 5: 1.43, 6: 1.65, 8: 2.07, 9: 2.5, 10: 2.7, 12: 3.2}
        | {16: 4.2, 24: 6.1, 32: 8.1, 64: 15.2},
    ),
    "1.5B": Machine(
        0.0335,
        1 / 40_000,
        {1: 1.0, 2: 1.06, 3: 1.1, 4: 1.15, 5: 1.25, 6: 1.39, 7: 1.64, 8: 1.87, 9: 2.25, 12: 2.9}
        | {16: 3.8, 32: 7.0, 64: 13.0},
        draft_seconds=0.0132,
    ),
    "compute-bound": Machine(0.003, 1 / 20_000, {1: 1.0, 2: 1.6, 4: 2.8, 8: 5.2, 64: 40.0}),
}


class Answer(NamedTuple):
    """A recorded answer, in token ids.

    Attributes:
        kind: kind of the task.
        prompt: token ids of the prompt.
        answer: token ids of the answer.
        drafted: the draft model's token at the place of each token of the answer, or empty.
        chances: their probabilities by the draft model.
    """

    kind: str
    prompt: list[int]
    answer: list[int]
    drafted: Sequence[int] = ()
    chances: Sequence[float] = ()


@dataclasses.dataclass
class Rules:
    """An engine's measurements of its passes and drafts, which are kept across answers."""

    costs: PassCosts = dataclasses.field(default_factory=PassCosts)
    credit: DraftCredit = dataclasses.field(default_factory=DraftCredit)
    drafter: PassCosts = dataclasses.field(default_factory=PassCosts)
    accepted: AcceptanceCounts = dataclasses.field(
        default_factory=lambda: AcceptanceCounts(_MOST_MODELED)
    )


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

    def __init__(self, one: Answer, rules: Rules) -> None:
        self.one = one
        self.truth = [*one.prompt, *one.answer]
        self.known = len(one.prompt) + 1
        self.drafter = PromptLookup(b"", TenantHistory(), _MAX_TOKENS)
        self.chances = DraftChances(_MOST_MODELED, rules.accepted)
        self.least: tuple[Any, Any] = ((), ())
        self.passed_over: list[int] = []

    @property
    def is_done(self) -> bool:
        return self.known >= len(self.truth)

    def propose(self, step: StepCosts) -> DraftProposal | None:
        """Propose tokens as the engine does. Tokens of the draft model are generated later."""
        self.passed_over = []
        most = min(_MOST, len(self.truth) - self.known - 1)
        if most <= 0:
            return None
        found = self.drafter.propose(self.truth[: self.known], most)
        if not self.one.drafted:
            return found
        most = min(most, _MOST_MODELED)
        chances = self.chances.values[:most]
        planned = DraftProposal([0] * most, chances, "draft_model", ends_early=True)
        rates = step.rates(planned)
        least = LEAST_GAIN * rates[0]
        if found is not None:
            least = max(least, step.rates(found)[1:].max())
        if rates.max() <= least:
            return found
        self.least = least_chances(step, float(rates[1:].max()), _MOST_MODELED)
        self.passed_over = [] if found is None else found.token_ids
        return planned

    def draft(self, count: int) -> tuple[list[int], int]:
        """Return the tokens of the draft model, and the number of its passes."""
        first = self.known - len(self.one.prompt)
        tokens: list[int] = []
        chance = 1.0
        for place in range(count):
            chance *= self.one.chances[first + place]
            if chance < self.least[0][place]:
                return tokens, place + 1
            tokens.append(self.one.drafted[first + place])
            if chance < self.least[1][place]:
                break
        return tokens, len(tokens)

    def accept(self, tokens: Sequence[int], num_passes: int) -> int:
        """Generate the next tokens, and return how many draft tokens are accepted.

        Args:
            tokens: draft tokens.
            num_passes: passes of the draft model that made them.
        """
        count = 0
        while count < len(tokens) and tokens[count] == self.truth[self.known + count]:
            count += 1
        generated = self.truth[self.known : self.known + count + 1]
        self.known += count + 1
        is_modeled = num_passes > 0
        was_rejected = count < len(tokens) or num_passes > len(tokens)
        self.chances.learn(*((count + was_rejected, count) if is_modeled else (0, 0)))
        if tokens and not is_modeled:
            self.drafter.learn(len(tokens), count)
        else:
            self.drafter.learn_unverified(self.passed_over, generated)
        return count


def replay(group: Sequence[Answer], machine: Machine, rules: Rules, seed: int = 0) -> Replayed:
    """Replay answers that run together on a machine."""
    rng = random.Random(seed)
    if machine.draft_seconds and not rules.drafter.is_known:
        rules.drafter.observe(1, 0.0, machine.draft_seconds)
    done = Replayed(_plain_seconds(group, machine))
    everyone = [_Running(one, rules) for one in group]
    while running := [one for one in everyone if not one.is_done]:
        depth = float(sum(one.known for one in running))
        step = StepCosts(len(running), depth, rules.costs, rules.drafter)
        drafts = {index: draft for index, one in enumerate(running) if (draft := one.propose(step))}
        tokens: list[list[int]] = [[] for _ in running]
        passes = [0] * len(running)
        if drafts:
            chosen = choose_lengths(list(drafts.values()), step, rules.credit)
            for (index, draft), count in zip(drafts.items(), chosen, strict=True):
                tokens[index] = draft.token_ids[:count]
                if draft.is_modeled and count:
                    tokens[index], passes[index] = running[index].draft(count)
        seconds = _draft(passes, depth / len(running), machine, rules, rng)
        num_rows = len(running) + sum(map(len, tokens))
        depth += sum(len(one) * of.known for one, of in zip(tokens, running, strict=True))
        verifying = machine.pass_seconds(num_rows, depth)
        accepted = [
            one.accept(*drafted) for one, *drafted in zip(running, tokens, passes, strict=True)
        ]
        rules.credit.settle(accepted, len(running))
        measured = verifying * _noise(rng)
        observe_pass(rules.costs, rules.credit, len(running), num_rows, depth, measured)
        done.seconds += seconds + verifying
        done.num_drafted += sum(map(len, tokens))
        done.num_accepted += sum(accepted)
    for one in everyone:
        one.drafter.release()
    return done


def _draft(
    passes: Sequence[int], depth: float, machine: Machine, rules: Rules, rng: random.Random
) -> float:
    """Measure the passes of the draft model, and return their seconds.

    Args:
        passes: number of passes for each sequence.
        depth: average position of the sequences.
        machine: times of passes.
        rules: the engine's measurements.
        rng: random numbers.
    """
    total = 0.0
    for place in range(max(passes)):
        num_rows = sum(place < count for count in passes)
        seconds = machine.drafting_seconds(num_rows)
        rules.drafter.observe(num_rows, depth * num_rows, seconds * _noise(rng))
        total += seconds
    return total


def _noise(rng: random.Random) -> float:
    """Return the ratio of a measured time to the time of the machine."""
    return math.exp(rng.gauss(0.0, _NOISE)) * (3.0 if rng.random() < _INTERRUPTED else 1.0)


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
    recorded = json.loads((_DATA / "draft_answers.json").read_text(encoding="utf-8"))
    return {model: [Answer(**one) for one in answers] for model, answers in recorded.items()}


def read_pair() -> list[Answer]:
    """Return the recorded answers of a model with the tokens of its draft model."""
    recorded = json.loads((_DATA / "draft_model_answers.json").read_text(encoding="utf-8"))
    return [Answer(**one) for one in recorded]


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
    options = harness.parser(__doc__ or "")
    given: argparse.Namespace = options.parse_args()
    rows: list[dict[str, Any]] = []
    for model, answers in read_answers().items():
        chosen = answers[:4] if given.quick else answers
        for name in MACHINES:
            for size in (1, 8):
                rows += rows_of(model, chosen, name, size)
    for size in (1, 8):
        rows += rows_of(_PAIR, read_pair(), "1.5B", size)
    harness.report("speculation_rules", rows, options=given)


if __name__ == "__main__":
    main()
