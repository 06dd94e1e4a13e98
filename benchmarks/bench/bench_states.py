"""Models with states on this engine: what going on in a chat costs, what shared prefixes find, what
snapshots cost.

A random hybrid of a real one's shape, in this process; the figures are medians over rounds that ask
for the contenders in turn (least to most in the JSON). Every row has its bar:

  second turn      2,000 tokens of history, the last 48 of them an answer, and 64 new ones, to the
                   first token: of the time that as many tokens as were computed take behind a
                   prompt that is held up to there, and of the time that they take alone, where they
                   attend to nothing before them: 1.15
  shared prefix    tokens found of a prefix of 300 tokens that other prompts begin with: by the
                   second prompt where the first one named the border (as chats do), by the third
                   where nobody did: all full blocks
  snapshots        a cold prompt of 2,000 tokens, and 64 tokens behind one that is held, of the time
                   without any snapshot: 1.01 and 1.05. Without: every slot but the one that the
                   request writes
                     is held meanwhile
  decode           GB/s of weights and of states, read and written, of what a dense model of the
                   same sizes reaches in turn with it: 0.95. Not of mixtures of experts, which read
                   some of their weights only
  memory           peak RSS beside the file, the pool and the states, MB: 300

    python benchmarks/bench/bench_states.py                             # LFM2-1.2B
    python benchmarks/bench/bench_states.py --shape qwen3.5-0.8b
    python benchmarks/bench/bench_states.py --shape qwen3.6-35b-a3b --layers 4 --rounds 3
    python benchmarks/bench/bench_states.py --shape lfm2-tiny --quick   # seconds, a smoke run
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
from kvboost_edge import CPUPagedEngine
from kvboost_edge.host.memory import process_peak

_HISTORY = 2000
_ANSWER = 48
_NEW = 64
_PREFIX = 300
_OWN = 100
_FIRST_TEXT_TOKEN = 300  # ids below stand for bytes and control
_BLOCK = 16
STATE_SHAPES = {
    name: shape for name, shape in {**HYBRID_SHAPES, **MIXTURE_SHAPES}.items() if shape.keeps_states
}
_BARS = {"second turn": 1.15, "snapshots, prefill": 1.01, "snapshots, turn": 1.05, "memory": 300.0}
_LEAST = {"decode": 0.95}


class States:
    """The measurements on one engine; `seconds` and other figures of all rounds by what they are
    of.
    """

    def __init__(self, engine: CPUPagedEngine, vocab: int, rounds: int) -> None:
        self.engine = engine
        self.vocab = vocab
        self.rounds = rounds
        self.figures: dict[str, list[float]] = {}
        self._seed = 0

    def tokens(self, count: int) -> list[int]:
        """New tokens at every call."""
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
        """Seconds to the first token, and how many tokens of the prompt were found."""
        started = time.perf_counter()
        found = self.ask(tokens).cached_tokens
        return time.perf_counter() - started, found

    def turns(self) -> None:
        """Second turns of chats, each beside as many tokens as it computed behind a held prompt,
        and alone.
        """
        for number in range(self.rounds + 1):
            self.engine.reset_cache()
            first = self.tokens(_HISTORY - _ANSWER)
            history = first + list(self.ask(first, _ANSWER).output_token_ids)
            seconds, found = self.timed(history + self.tokens(_NEW))
            computed = _HISTORY + _NEW - found
            behind, _ = self.timed(first + self.tokens(computed))
            alone, _ = self.timed(self.tokens(computed))
            if number:  # round 0 warms up
                self.note("second turn", seconds)
                self.note("as many tokens behind a prompt", behind)
                self.note("as many tokens alone", alone)
                self.note("second turn, computed", computed)

    def shared(self) -> None:
        """What prompts that begin alike find, and how long they take."""
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
        """Cold prompts and turns, with snapshots and without."""
        ways = [
            ("with", contextlib.nullcontext),
            ("without", lambda: without_snapshots(self.engine)),
        ]
        for number in range(self.rounds):
            # Who goes first changes: what one leaves in caches is there for the next.
            for name, context in ways[:: 1 if number % 2 else -1]:
                self.engine.reset_cache()
                with context():
                    seconds, _ = self.timed(self.tokens(_HISTORY))
                self.note(f"prefill {name}", seconds)
        self.engine.reset_cache()
        held = self.tokens(_HISTORY)
        self.ask(held)
        for number in range(4 * self.rounds + 1):  # they are short
            for name, context in ways[:: 1 if number % 2 else -1]:
                with context():
                    seconds, found = self.timed(held + self.tokens(_NEW))
                if found != _HISTORY // _BLOCK * _BLOCK:
                    raise RuntimeError(f"{found} tokens of {_HISTORY} that are held were found")
                if number:
                    self.note(f"turn {name}", seconds)

    def decode(self, count: int) -> float:
        """Seconds of a token behind a short prompt."""
        times = self.ask(self.tokens(_BLOCK), count + 1).token_times_ms
        return float(np.median(np.diff(times))) / 1000

    def moved_gb(self) -> float:
        """What a step reads and writes of weights and states."""
        _, nbytes = runner_token_weights(self.engine._parts.runner)
        return (nbytes + 2 * self.engine.runner_info.kv_spec.bytes_per_state) / 1e9

    def median(self, what: str) -> float:
        return statistics.median(self.figures[what])

    def ratio(self, what: str, other: str) -> float:
        """The median of what each round found: a slow minute is in both."""
        return statistics.median(
            a / b for a, b in zip(self.figures[what], self.figures[other], strict=True)
        )


@contextlib.contextmanager
def without_snapshots(engine: CPUPagedEngine) -> Iterator[None]:
    """All slots of states but one are held, those with a snapshot too: a request has where to
    write, and keeps nothing.
    """
    assert engine._parts.manager.states is not None
    slots = engine._parts.manager.states.slots
    with engine._core.reading():
        own = slots.take()
        assert own is not None
        held = list(slots.snapshots().values())
        for slot in held:
            slots.share(slot)
        held += [slot for _ in slots.free_ids() if (slot := slots.take()) is not None]
        slots.release(own)
    yield
    with engine._core.reading():
        for slot in held:
            slots.release(slot)


def compare_decode(states: States, dense: States, count: int) -> None:
    """The hybrid and a dense model of its sizes in turn; GB/s are noted as "decode" and "decode,
    dense".
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
    """One line of the table: a figure, what it is compared with, the ratio or number that its bar
    is about.
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
    """All that was measured against the bars; times in ms."""
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
        speculation="off",  # a token costs a pass
    )


def run(options: argparse.Namespace) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    """(the name of the run, its rows, what else the JSON has)."""
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
    """What is known by now: a whole run takes minutes."""
    known = ", ".join(f"{what} {states.median(what):.4g}" for what in states.figures)
    print(f"{part}: {known}", file=sys.stderr, flush=True)


def _twin(model: Path, shape: Shape, quant: str) -> Path:
    """The file of a dense model of the same sizes, written where it is not found."""
    path = kept_gguf(model.with_name(f"dense-{model.name}"), DenseTwin.of(shape), quant)
    harness.pack_beforehand(path)
    return path


def options_from(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_for_layers(__doc__, STATE_SHAPES)
    parser.set_defaults(shape="lfm2-1.2b", rounds=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--capacity", type=int, default=16384, help="tokens of keys and values that the pool holds"
    )
    parser.add_argument("--kv", type=int, default=16, choices=(16, 8), help="bits of a KV number")
    parser.add_argument(
        "--tokens", type=int, default=48, help="decoded for each figure of decoding"
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
