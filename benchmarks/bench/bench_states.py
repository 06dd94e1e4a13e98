"""Hybrid models: cost of follow-up turns, reuse of shared prefixes, and cost of snapshots.

A random hybrid model of a real shape runs in this process. Figures are medians over rounds in which
the contenders alternate (minimum and maximum in the JSON). Every row has a bar:

    second turn      time to first token after 2,000 tokens of history, the last 48 of which are an
                     answer, plus 64 new tokens. It is relative to computing the same number of
                     tokens after a held prompt, and to computing them alone without context: 1.15
    shared prefix    tokens found of a shared prefix of 300 tokens: all full blocks by the second
                     prompt if the first one named the boundary (as chats do), else by the third
    snapshots        a cold prompt of 2,000 tokens, and 64 tokens after a held prompt, relative to
                     the time without snapshots: 1.01 and 1.05. Without snapshots, every slot is
                     held except the one that the request writes
    decode           GB/s of weights and states, read and written, relative to a dense model of the
                     same sizes: 0.95. Not for mixtures of experts, which read only some weights
    memory           peak RSS beyond the file, the pool and the states in MB: 300

    python benchmarks/bench/bench_states.py                             # LFM2-1.2B
    python benchmarks/bench/bench_states.py --shape qwen3.5-0.8b
    python benchmarks/bench/bench_states.py --shape qwen3.6-35b-a3b --layers 4 --rounds 3
    python benchmarks/bench/bench_states.py --shape lfm2-tiny --quick   # seconds, a smoke test
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks import harness
from benchmarks.bench.bench_peers import RandomModel, parser_for_layers
from benchmarks.bench.plain_read import runner_token_weights
from benchmarks.data.hybrid_shapes import HYBRID_SHAPES, DenseTwin
from benchmarks.data.mixture_shapes import MIXTURE_SHAPES
from benchmarks.data.random_model import kept_gguf
from benchmarks.data.shapes import Shape
from benchmarks.engine_parts import held_state_slots, runner_of
from kvboost_edge import CPUPagedEngine
from kvboost_edge.host.memory import process_peak

_HISTORY = 2000
_ANSWER = 48
_NEW = 64
_PREFIX = 300
_OWN = 100
_FIRST_TEXT_TOKEN = 300  # first id that is a text token; smaller ids are bytes and control tokens
_BLOCK = 16
STATE_SHAPES = {
    name: shape for name, shape in {**HYBRID_SHAPES, **MIXTURE_SHAPES}.items() if shape.keeps_states
}
_BARS = {"second turn": 1.15, "snapshots, prefill": 1.01, "snapshots, turn": 1.05, "memory": 300.0}
_LEAST = {"decode": 0.95}


class States:
    """The measurements on one engine.

    `seconds` and the other figures have the values of all rounds by name.
    """

    def __init__(self, engine: CPUPagedEngine, vocab: int, rounds: int) -> None:
        self.engine = engine
        self.vocab = vocab
        self.rounds = rounds
        self.figures: dict[str, list[float]] = {}
        self._seed = 0

    def tokens(self, count: int) -> list[int]:
        """Return new tokens for each call."""
        self._seed += 1
        return (
            np.random.default_rng(self._seed)
            .integers(_FIRST_TEXT_TOKEN, self.vocab, count)
            .tolist()
        )

    def note(self, what: str, value: float) -> None:
        self.figures.setdefault(what, []).append(value)

    def ask(self, tokens: list[int], count: int = 1, **options: Any) -> Any:
        return self.engine.generate(
            tokens, max_new_tokens=count, temperature=0.0, ignore_eos=True, **options
        )

    def timed(self, tokens: list[int]) -> tuple[float, int]:
        """Return the seconds to the first token, and the number of prompt tokens found."""
        started = time.perf_counter()
        found = self.ask(tokens).cached_tokens
        return time.perf_counter() - started, found

    def turns(self) -> None:
        """Time second turns of chats.

        Each is compared with the same number of computed tokens after a held prompt, and alone.
        """
        for number in range(self.rounds + 1):
            self.engine.reset_cache()
            first = self.tokens(_HISTORY - _ANSWER)
            history = first + list(self.ask(first, _ANSWER).output_token_ids)
            seconds, found = self.timed(history + self.tokens(_NEW))
            computed = _HISTORY + _NEW - found
            behind, _ = self.timed(first + self.tokens(computed))
            alone, _ = self.timed(self.tokens(computed))
            if number:  # round 0 is the warm-up
                self.note("second turn", seconds)
                self.note("as many tokens behind a prompt", behind)
                self.note("as many tokens alone", alone)
                self.note("second turn, computed", computed)

    def shared(self) -> None:
        """Measure the cached tokens and the times of prompts with a shared prefix."""
        for _ in range(self.rounds):
            self.engine.reset_cache()
            prefix = self.tokens(_PREFIX)
            for place in ("first", "second", "third"):
                seconds, found = self.timed(prefix + self.tokens(_OWN))
                self.note(f"{place} of a prefix, found", found)
                self.note(f"{place} of a prefix", seconds)
            prefix = self.tokens(_PREFIX)
            self.ask(prefix + self.tokens(_OWN), snapshot_hints=(_PREFIX,))
            _, found = self.timed(prefix + self.tokens(_OWN))
            self.note("second of a named prefix, found", found)

    def snapshots(self) -> None:
        """Time cold prompts and turns with and without snapshots."""
        ways = [
            ("with", contextlib.nullcontext),
            ("without", lambda: without_snapshots(self.engine)),
        ]
        for number in range(self.rounds):
            # The order alternates, because each run warms the CPU caches for the next.
            for name, context in ways[:: 1 if number % 2 else -1]:
                self.engine.reset_cache()
                with context():
                    seconds, _ = self.timed(self.tokens(_HISTORY))
                self.note(f"prefill {name}", seconds)
        self.engine.reset_cache()
        held = self.tokens(_HISTORY)
        self.ask(held)
        for number in range(4 * self.rounds + 1):  # repeated, because they are short
            for name, context in ways[:: 1 if number % 2 else -1]:
                with context():
                    seconds, found = self.timed(held + self.tokens(_NEW))
                if found != _HISTORY // _BLOCK * _BLOCK:
                    raise RuntimeError(f"{found} of {_HISTORY} held tokens were found")
                if number:
                    self.note(f"turn {name}", seconds)

    def decode(self, count: int) -> float:
        """Return the seconds per token after a short prompt."""
        times = self.ask(self.tokens(_BLOCK), count + 1).token_times_ms
        return float(np.median(np.diff(times))) / 1000

    def moved_gb(self) -> float:
        """Return the GB of weights and states that a step reads and writes."""
        _, nbytes = runner_token_weights(runner_of(self.engine))
        return (nbytes + 2 * self.engine.runner_info.kv_spec.bytes_per_state) / 1e9

    def median(self, what: str) -> float:
        return statistics.median(self.figures[what])

    def ratio(self, what: str, other: str) -> float:
        """Return the median ratio over rounds. A slow minute of the machine affects both sides."""
        return statistics.median(
            a / b for a, b in zip(self.figures[what], self.figures[other], strict=True)
        )


@contextlib.contextmanager
def without_snapshots(engine: CPUPagedEngine) -> Iterator[None]:
    """Hold all state slots except one, including those with a snapshot.

    A request can then write its state but store no snapshot.
    """
    with held_state_slots(engine) as slots:
        own = slots.take()
        assert own is not None
        held = list(slots.snapshots().values())
        for slot in held:
            slots.share(slot)
        held += [slot for _ in slots.free_ids() if (slot := slots.take()) is not None]
        slots.release(own)
    yield
    with held_state_slots(engine) as slots:
        for slot in held:
            slots.release(slot)


def compare_decode(states: States, dense: States, count: int) -> None:
    """Time the hybrid and a dense model of its sizes in turn.

    The GB/s are recorded as "decode" and "decode, dense".
    """
    for number in range(2 * states.rounds + 1):
        for one, name in ((states, "decode"), (dense, "decode, dense")):
            seconds = one.decode(count)
            if number:
                states.note(name, one.moved_gb() / seconds)
                states.note(f"{name}, a token", seconds)


def row(
    measure: str, value: float, beside: float | None, reached: float, what: str
) -> dict[str, Any]:
    """Return one row of the table.

    Args:
        measure: Name of the row.
        value: The figure.
        beside: The figure to compare with, or None.
        reached: Ratio or number that the bar limits.
        what: Key of the bar.
    """
    least = _LEAST.get(what)
    bar = _BARS[what] if least is None else least
    met = reached <= bar if least is None else reached >= bar
    return {
        "measure": measure,
        "ours": value,
        "beside": beside,
        "reached": reached,
        "bar": bar,
        "met": _said(met),
    }


def rows_of(states: States, beside_mb: float) -> list[dict[str, Any]]:
    """Return rows for all measurements with bars, with times in ms."""
    of = states.median
    found = []
    for what in ("as many tokens behind a prompt", "as many tokens alone"):
        measure = f"second turn, {of('second turn, computed'):.0f} tokens; {what}, ms"
        ratio = states.ratio("second turn", what)
        found.append(row(measure, 1e3 * of("second turn"), 1e3 * of(what), ratio, "second turn"))
    every = _PREFIX // _BLOCK * _BLOCK
    for what in ("second of a named prefix, found", "third of a prefix, found"):
        least = min(states.figures[what])
        found.append(
            {
                "measure": f"shared prefix, {what}",
                "ours": of(what),
                "beside": float(every),
                "reached": least,
                "bar": float(every),
                "met": _said(least >= every),
            }
        )
    for what, name in (
        ("prefill", f"{_HISTORY} tokens cold"),
        ("turn", f"{_NEW} tokens behind {_HISTORY}"),
    ):
        pair = (f"{what} with", f"{what} without")
        measure = f"snapshots, {name}, ms"
        found.append(
            row(
                measure,
                1e3 * of(pair[0]),
                1e3 * of(pair[1]),
                states.ratio(*pair),
                f"snapshots, {what}",
            )
        )
    if "decode" in states.figures:
        reached = states.ratio("decode", "decode, dense")
        found.append(
            row(
                "decode, GB/s of weights and states",
                of("decode"),
                of("decode, dense"),
                reached,
                "decode",
            )
        )
    found.append(
        row("memory beside file, pool and states, MB", beside_mb, None, beside_mb, "memory")
    )
    return found


def _said(met: bool) -> str:
    return "met" if met else "missed"


def started(model: Path, options: argparse.Namespace) -> CPUPagedEngine:
    return CPUPagedEngine.from_pretrained(
        str(model),
        num_blocks=options.capacity // _BLOCK,
        num_threads=options.threads,
        kv_cache_bits=options.kv,
        speculation="off",  # drafts are off, so that a token costs a pass
    )


def run(options: argparse.Namespace) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    """Run the benchmark; return its name, its rows and further entries of the JSON."""
    model, shape, what = RandomModel.written(options, STATE_SHAPES)
    harness.pack_beforehand(model)
    with started(model, options) as engine:
        states = States(engine, shape.vocab, options.rounds)
        parts: list[Callable[[], None]] = [states.turns, states.shared, states.snapshots]
        for part in parts:
            began = time.perf_counter()
            part()
            _say(f"{part.__name__}, {time.perf_counter() - began:.0f} s", states)
        stats = engine.paged_stats()
        known = model.stat().st_size + stats["pool_bytes"] + stats["state_bytes"]
        beside_mb = (process_peak() - known) / 1e6
        peak_mb = process_peak() / 1e6
        if not shape.is_mixture:
            with started(_twin(model, shape, options.quant), options) as other:
                compare_decode(states, States(other, shape.vocab, 0), options.tokens)
                _say("decode", states)
    keys = (
        "isa",
        "kernel_path",
        "attention_path",
        "pool_bytes",
        "state_bytes",
        "state_slots",
        "state_snapshots",
    )
    about = {
        **{key: stats[key] for key in keys},
        "peak_rss_mb": peak_mb,
        "file_mb": model.stat().st_size / 1e6,
    }
    return (
        f"bench_states {what}",
        rows_of(states, beside_mb),
        {"rounds": states.figures, "engine": about},
    )


def _say(part: str, states: States) -> None:
    """Print intermediate results, because a whole run takes minutes."""
    known = ", ".join(f"{what} {states.median(what):.4g}" for what in states.figures)
    print(f"{part}: {known}", file=sys.stderr, flush=True)


def _twin(model: Path, shape: Shape, quant: str) -> Path:
    """Return the file of a dense model with the same sizes, written if it does not exist."""
    path = kept_gguf(model.with_name(f"dense-{model.name}"), DenseTwin.of(shape), quant)
    harness.pack_beforehand(path)
    return path


def options_from(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_for_layers(__doc__, STATE_SHAPES)
    parser.set_defaults(shape="lfm2-1.2b", rounds=3)
    harness.add_threads(parser)
    parser.add_argument("--capacity", type=int, default=16384, help="size of the pool in tokens")
    parser.add_argument("--kv", type=int, default=16, choices=(16, 8), help="bits per KV value")
    parser.add_argument(
        "--tokens", type=int, default=48, help="number of tokens to decode for each figure"
    )
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds = 1
        options.tokens = 8
        options.capacity = 4096
    return options


def main() -> None:
    options = options_from()
    name, rows, more = run(options)
    harness.report(name, rows, options=options, **more)


if __name__ == "__main__":
    main()
