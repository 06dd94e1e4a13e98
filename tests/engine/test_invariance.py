"""Bit invariance: a token has the same logits however it was computed, for every model, format and
cache width.

Each way of computing a prompt is compared by `==`, on all rows of logits or on tokens and log
probabilities, with the prompt alone, uncached, in one pass of one thread.

`make test` runs the rows of invariance_pairs.csv, in which every possible pair of values of two
factors occurs; `make test-all` runs all others too. If a way has several lengths, sizes or numbers
of threads, a row of `make test` takes every eighth one, at least one, and the next rows of that way
the others. To write the table again after a factor has changed:

    cd tests && ../.venv/bin/python -m engine.test_invariance
"""

from __future__ import annotations

import csv
import dataclasses
import itertools
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from helpers.engine.hand_io_thread import DictTier
from helpers.engine.hostile_drafts import CutDrafter
from helpers.engine.native_bench import BLOCK, Cold, NativeBench, assert_begins
from helpers.engine.native_kinds import FORMATS, KINDS, STATES, machine_of, packages_for
from helpers.runners.paged_driver import PagedDriver
from helpers.runners.recurrent_driver import StateDriver
from kvboost_edge.engine.request.request import SamplingParams

TABLE = Path(__file__).with_name("invariance_pairs.csv")
TEXT, ONE, OTHER, SHORT = (
    np.random.default_rng(seed).integers(3, 250, length).tolist()
    for seed, length in enumerate((90, 1, 40, 17), 11)
)
NEW = 24
NUM_DRAFTS = 6
PARTS = 8  # of the values of a way
GREEDY = SamplingParams(max_new_tokens=NEW, temperature=0.0, logprobs=2)
SAMPLED = SamplingParams(max_new_tokens=NEW, temperature=1.1, top_p=0.95, seed=5, logprobs=2)
NOTHING = SamplingParams(max_new_tokens=0)


class Case:
    """Model at one width of its cache.

    - part: number of the row, for every eighth value from there on, or None for all
    """

    def __init__(self, machine, bits):
        self.machine = machine
        self.bits = bits
        self.cold = Cold(machine, bits)
        self.is_hybrid = machine.states is not None
        self.part = None

    def some(self, *values):
        return values if self.part is None else values[self.part % min(PARTS, len(values)) :: PARTS]

    def bench(self, *, every_block=False, **options):
        """Build a bench. With `every_block`, a hybrid keeps a state after each block."""
        states = STATES._replace(every_block=every_block) if self.is_hybrid else None
        return NativeBench(self.machine, bits=self.bits, states=states, **options)

    def driver(self, threads):
        """Build a driver over a pool that holds NaN wherever nothing was written."""
        parts = self.machine.parts(self.bits, threads, 64, 9, self.machine.states)
        return (StateDriver if self.is_hybrid else PagedDriver)(*parts)


def same(found, expected, where):
    np.testing.assert_array_equal(found, expected, err_msg=where)


def cached(case):
    """Compute after a cached prefix of any length, up to its last full block. A hybrid needs a
    state there, too.
    """
    expected = case.cold.logits(TEXT)
    for cut in case.some(0, 1, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 79, 80, 81, 89):
        start = cut // BLOCK * BLOCK
        every_block = cut % 2 == 0
        bench = case.bench(every_block=every_block)
        bench.generate([*TEXT[:cut], 251, 252], NOTHING)
        handle, rows = bench.submit_logits(TEXT, start)
        bench.run()
        found = handle.result(0)
        assert found.cached_tokens == start or (case.is_hybrid and not every_block), f"cut {cut}"
        assert found.matched_tokens == start, f"cut {cut}"
        same(np.concatenate(rows), expected[start:], f"cut {cut}")
        for again in (40, 80, 89) if cut % BLOCK == 1 else ():
            same(bench.logits(TEXT, again), expected[again:], f"cut {cut}, from {again}")
        bench.generate(TEXT[:80], NOTHING)
        whole = bench.generate(TEXT[:80], NOTHING)
        assert whole.cached_tokens == (
            79 if case.bits == (16, 16) and not case.is_hybrid else 64
        ), f"cut {cut}"
        same(bench.logits(TEXT[:80], 79), expected[79:80], f"cut {cut}, cached to its end")
        bench.assert_clean()


def chunked(case):
    expected = case.cold.logits(TEXT)
    for budget in case.some(1, 2, 3, 5, 7, 8, 13, 15, 16, 17, 31, 64):
        bench = case.bench(max_batch_tokens=budget)
        same(bench.logits(TEXT), expected, f"passes of {budget} tokens")
        bench.assert_clean()


def threads(case):
    expected = case.cold.logits(TEXT)
    for budget in case.some(1, 7, 17, 512):
        same(
            case.bench(threads=2, max_batch_tokens=budget).logits(TEXT),
            expected,
            f"passes of {budget} tokens",
        )


def batched(case):
    """Compute prompts of different lengths in one pass, and a prompt in chunks next to two answers."""
    prompts = (TEXT, ONE, OTHER, SHORT)
    answers = ((OTHER, GREEDY), (SHORT, SAMPLED))
    expected = [case.cold.logits(prompt) for prompt in prompts]
    alone = [case.cold.answer(*answer) for answer in answers]
    for number in case.some(1, 2):
        bench = case.bench(threads=number, max_batch_tokens=512)
        parts = [bench.submit_logits(prompt)[1] for prompt in prompts]
        bench.step()
        for rows, of_prompt in zip(parts, expected, strict=True):
            same(
                np.concatenate(rows),
                of_prompt,
                f"{len(of_prompt)} tokens in one pass, {number} threads",
            )
        bench = case.bench(threads=number, max_batch_tokens=7)
        handles = [bench.submit(*answer) for answer in answers]
        while (
            any(not one.output_token_ids for one in bench.scheduler.running)
            or bench.scheduler.waiting
        ):
            bench.step()
        _, rows = bench.submit_logits(TEXT)
        bench.run()
        same(np.concatenate(rows), expected[0], f"next to answers, {number} threads")
        for handle, one in zip(handles, alone, strict=True):
            assert_begins(handle.result(0), one, f"next to a prompt, {number} threads")


def preempted(case):
    """Recompute after preemptions for lack of blocks, and after the whole cache was dropped."""
    wanted = [(TEXT[:33], GREEDY), (TEXT[40:75], SAMPLED), (OTHER, GREEDY)]
    expected = case.cold.logits(TEXT)
    alone = [case.cold.answer(*each) for each in wanted]
    bench = case.bench(num_blocks=7, max_num_seqs=3, max_batch_tokens=20)
    handles = [bench.submit(*each) for each in wanted]
    bench.run()
    assert bench.scheduler.num_preemptions > 0
    for index, (handle, one) in enumerate(zip(handles, alone, strict=True)):
        assert handle.result(0).generated_tokens == NEW
        assert_begins(handle.result(0), one, f"prompt {index}")
    bench.assert_clean()
    bench = case.bench(max_batch_tokens=29)
    dropped = bench.submit(TEXT, GREEDY)
    bench.step()
    bench.step()
    dropped.cancel()
    bench.step()
    bench.manager.reset()
    handle, rows = bench.submit_logits(TEXT, 80)
    bench.run()
    assert handle.result(0).cached_tokens == 0
    same(np.concatenate(rows), expected[80:], "after the cache was dropped")


def speculative(case):
    """Decode two answers at once, one of them sampled, with any number of correct drafts, and reuse
    their blocks.
    """
    asked = [(TEXT[:25], GREEDY), (TEXT[40:70], SAMPLED)]
    alone = [case.cold.answer(*each) for each in asked]
    wholes = [
        [*prompt, *one.output_token_ids] for (prompt, _), one in zip(asked, alone, strict=True)
    ]
    expected = [case.cold.logits([*whole, 7, 8]) for whole in wholes]
    for cut in case.some(0, 1, 3, 4, 6):
        rights = cut, NUM_DRAFTS - cut
        drafters = [
            CutDrafter(whole, right, NUM_DRAFTS, 256)
            for whole, right in zip(wholes, rights, strict=True)
        ]
        bench = case.bench(every_block=cut % 2 == 1, threads=1 + cut % 2)
        of_request = dict(enumerate(drafters, 1))
        bench.scheduler.speculation.prompt_lookup = lambda request, known=of_request: known[
            request.index
        ]
        handles = [
            bench.submit(*each, max_draft_tokens=NUM_DRAFTS, always_drafts=True) for each in asked
        ]
        bench.run()
        for handle, one in zip(handles, alone, strict=True):
            assert_begins(handle.result(0), one, f"{rights} drafts are right")
        for right, one in zip(rights, drafters, strict=True):
            assert all(accepted == min(right, drafted) for drafted, accepted in one.outcomes)
            assert max(accepted for _, accepted in one.outcomes) == right
        bench.scheduler.speculation.prompt_lookup = lambda request: None
        for whole, logits in zip(wholes, expected, strict=True):
            handle, rows = bench.submit_logits([*whole, 7, 8], len(whole) - 1)
            bench.run()
            assert handle.result(0).cached_tokens == (len(whole) - 1) // BLOCK * BLOCK
            same(np.concatenate(rows), logits[len(whole) - 1 :], f"after {rights} right drafts")
        bench.assert_clean()


def restored(case):
    """Restore from a tier into a new engine, and once more after the tier lost the third block."""
    answer = case.cold.answer(TEXT[:60], GREEDY)
    turn = [*TEXT[:60], *answer.output_token_ids, *OTHER[:9]]
    expected = case.cold.logits(turn)
    for every_block in case.some(False, True) if case.is_hybrid else (False,):
        tier = DictTier()
        bench = case.bench(every_block=every_block, tiers=[tier])
        bench.generate(TEXT[:40], NOTHING)
        bench.generate(TEXT[:60], GREEDY)
        for number, lost in ((1, 0), (2, 1)):
            bench = case.bench(
                every_block=every_block, tiers=[tier], threads=number, max_batch_tokens=33
            )
            bench.backend.poison_blocks(range(bench.manager.num_blocks))
            handle, rows = bench.submit_logits(turn, 83)
            bench.run()
            hits = handle.result(0).hit_tokens["shelf"]
            assert hits == (2 if lost else 5) * BLOCK
            same(np.concatenate(rows), expected[83:], f"{hits} tokens from a tier")
            size = bench.backend.spec.bytes_per_block  # states are in the tier, too
            tier.drop([key for key, (_, data) in tier.blocks.items() if len(data) == size][2:3])


def next_turn(case):
    """Compare KV and states of decoding, one token at a time, with those of one pass."""
    for number, budget in case.some((1, 64), (2, 7)):
        bench = case.bench(threads=number, max_batch_tokens=budget)
        first = bench.generate(TEXT[:25], dataclasses.replace(GREEDY, max_new_tokens=45))
        turn = [*TEXT[:25], *first.output_token_ids, *TEXT[60:80]]
        handle, rows = bench.submit_logits(turn, 69)
        bench.run()
        assert handle.result(0).cached_tokens == 64
        expected = case.cold.logits(turn)
        assert first.output_token_ids == tuple(expected[24:69].argmax(axis=1).tolist())
        same(np.concatenate(rows), expected[69:], f"{number} threads")


def some_rows(case):
    """Compute logits and hidden states of some rows of a pass, after chunks without wanted rows."""
    expected, longer, other = (case.cold.logits(each) for each in (TEXT, [*TEXT, 7], OTHER))
    driver = case.driver(1)
    _, hidden = driver.step_for([(driver.open(TEXT), 90)], [], range(90))
    for number in case.some(1, 2):
        for wanted in (
            [],
            [89],
            [0],
            [0, 1, 2, 30, 31, 88, 89],
            [15, 16, 17, 47],
            [*range(10, 89)],
        ):
            driver = case.driver(number)
            text = driver.open(TEXT)
            logits, _ = driver.step_for([(text, 90)], wanted)
            same(logits, expected[wanted], f"rows {wanted}, {number} threads")
            text.token_ids.append(7)
            same(driver.step([(text, 1)])[0], longer[-1:], f"after rows {wanted}, {number} threads")
        driver = case.driver(number)
        text = driver.open(TEXT)
        late = driver.open(OTHER)
        for count in (1, 20, 30):
            driver.step_for([(text, count)], [])
        logits, states = driver.step_for([(text, 39), (late, 38)], [3, 20, 38, 76], [0, 38])
        same(
            logits,
            np.concatenate([expected[[54, 71, 89]], other[37:38]]),
            f"rows of two, {number} threads",
        )
        same(states, hidden[[51, 89]], f"hidden states, {number} threads")
        same(driver.prefill(late), other[38:], f"the rest, {number} threads")


def forked(case):
    """Continue two sequences that share a block in one pass."""
    expected = case.cold.logits(TEXT)
    for number, cut in case.some((1, 33), (2, 37), (2, 47)):
        driver = case.driver(number)
        parent = driver.open(TEXT[:cut])
        driver.prefill(parent)
        child = driver.fork(parent)
        parent.token_ids += OTHER
        child.token_ids += TEXT[cut:]
        same(
            driver.step([(parent, 20), (child, 90 - cut)])[1],
            expected[cut:],
            f"cut {cut}, {number} threads",
        )


WAYS = {
    "cached": cached,
    "chunked": chunked,
    "threads": threads,
    "batched": batched,
    "preempted": preempted,
    "speculative": speculative,
    "restored": restored,
    "next turn": next_turn,
    "some rows": some_rows,
    "forked": forked,
}


class Row(NamedTuple):
    """Case of the table."""

    kind: str
    weights: str
    kv_bits: str
    way: str


VALUES = Row(tuple(KINDS), tuple(FORMATS), ("16-16", "8-8", "8-4", "4-4"), tuple(WAYS))


def is_possible(row):
    """Return whether the first values of a row are compatible."""
    kind, weights, _, way = [*row, *[""] * 4][:4]
    if kind == "gemma4-alike" and weights.isupper():
        return False  # a GGUF file identifies its layers by their shapes
    return way != "forked" or not KINDS[kind].states  # the engine does not fork hybrids


def committed():
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    return [Row(*line) for line in csv.reader(lines[1:])]


def parts_of(row, size=2):
    """Return the values of each `size` factors: ((factor, value), (factor, value))."""
    return set(itertools.combinations(zip(Row._fields, row, strict=True), size))


PAIRS = committed()
ALL = [Row(*row) for row in itertools.product(*VALUES) if is_possible(row)]
MODELS = list(dict.fromkeys((row.kind, row.weights) for row in ALL))


def test_the_table_covers_every_pair():
    assert set(PAIRS) <= set(ALL), "a row is unknown or impossible"
    assert len(set(PAIRS)) == len(PAIRS)
    assert not set().union(*map(parts_of, ALL)) - set().union(*map(parts_of, PAIRS))


class Models:
    """The model in use. It is closed when another one is requested; cases of one model follow each
    other.
    """

    def __init__(self, folder):
        self._folder = folder
        self._key = ("", "")
        self._machine = None
        self._cases = {}

    def case(self, row):
        if self._key != (row.kind, row.weights):
            self.close()
            self._key = (row.kind, row.weights)
            self._machine = machine_of(row.kind, row.weights, self._folder)
        assert self._machine is not None
        if row.kv_bits not in self._cases:
            keys, _, values = row.kv_bits.partition("-")
            case = self._cases[row.kv_bits] = Case(self._machine, (int(keys), int(values)))
            stored = set(case.bench().core._runner.info.dtype.split("+"))
            assert stored >= FORMATS[row.weights], "the packed weights have another format"
        return self._cases[row.kv_bits]

    def close(self):
        if self._machine is not None:
            self._machine.close()
        self._machine = None
        self._cases.clear()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    models = Models(tmp_path_factory.mktemp("models"))
    yield models
    models.close()


def run(models, row, part=None):
    for package in packages_for(row.kind, row.weights):
        pytest.importorskip(package)
    case = models.case(row)
    case.part = part
    WAYS[row.way](case)


def numbered(rows):
    """Number each row among the rows of the same way."""
    counts = Counter()
    for row in rows:
        yield row, counts[row.way]
        counts[row.way] += 1


NUMBERS = dict(numbered(PAIRS))


@pytest.mark.parametrize("row", PAIRS, ids=" ".join)
def test_bits_do_not_depend_on_how_a_token_is_computed(models, row, scale):
    run(models, row, scale(NUMBERS[row], None))


@pytest.mark.full
@pytest.mark.parametrize("model", MODELS, ids=" ".join)
def test_bits_do_not_depend_on_it_in_the_rest_of_the_product(models, model):
    known = set(PAIRS)
    failed = []
    for row in ALL:
        if (row.kind, row.weights) == model and row not in known:
            try:
                run(models, row)
            except AssertionError as error:
                failed.append(f"{' '.join(row)}: {error}")
    assert not failed, "\n".join(failed)


def write_table():
    """Choose the row with the most new pairs until none is missing. Among equal rows, take the one
    with the rarest way and width.
    """
    pairs = {row: parts_of(row) for row in ALL}
    missing = set().union(*pairs.values())
    used = Counter[str]()
    chosen = set[Row]()
    while missing:
        row = max(
            ALL, key=lambda row: (len(pairs[row] & missing), -used[row.way] - used[row.kv_bits])
        )
        chosen.add(row)
        missing -= pairs[row]
        used.update((row.way, row.kv_bits))
    with TABLE.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(
            [Row._fields, *(row for row in ALL if row in chosen)]
        )


if __name__ == "__main__":
    write_table()
