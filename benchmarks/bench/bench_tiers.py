"""Disk tier: cost of a restart and of writing, against llama.cpp's state files.

    python benchmarks/bench/bench_tiers.py                                   # 0.5B shape, Q4_0
    python benchmarks/bench/bench_tiers.py --shape 1.5b --quant Q4_K_M --rounds 3
    python benchmarks/bench/bench_tiers.py --redis-url redis://127.0.0.1:6379/0

The model is random (see bench_peers.py). Each round runs these steps in order, with each engine in
a separate process:

    cold      an 8,192-token prompt and 64 more tokens, in an engine without a tier and in one that
              writes to a new directory. The figures are the time to first token, and the tokens per
              second directly after it, while the last blocks are being written
    pool      the same prompt again, in the engine that has it in its pool
    restart   that engine after closing and starting again, with its files dropped from the page
              cache and without
    redis     another engine that has only the Redis server of the first one, if one is given
    llama.cpp the same prompt cold, saving its state to a file, and restoring it, with the file
              dropped from the page cache and without

The last figures are the time from starting a process to readiness with 10 GB of records (whose
payloads are holes, as the start does not read them) and without a tier, and an agent
(agent_turns.py) whose pool holds little more than its head.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks import harness
from benchmarks.bench.bench_peers import Worker, parser_for_models, worker_or_none
from benchmarks.data.agent_turns import AGENT, Outcome, Turns, play
from benchmarks.data.random_model import kept_gguf
from benchmarks.data.shapes import SHAPES
from kvboost_edge.kvcache.hashing import BlockAddress
from kvboost_edge.tiers.disk.system_calls import Files
from kvboost_edge.tiers.disk.tier import DiskTier

_BENCHMARKS = Path(__file__).parents[1]
_DECODED = 64
_BARS = {
    "restart, page cache dropped, of cold": 0.10,
    "restart, page cache warm, of cold": 0.10,
    "prefill while writing, slower by": 0.03,
    "decode while writing, slower by": 0.03,
    "ready with records, later by s": 0.3,
    "disk bytes a token, of the pool's": 1.05,
    "agent: most full blocks computed twice in a turn": 1,
}


class SparseFiles(Files):
    """Files whose payloads are holes, for records that are never read."""

    def write(self, handle: int, buffers: Sequence[memoryview], offset: int) -> int:
        super().write(handle, buffers[:1], offset)
        return sum(buffer.nbytes for buffer in buffers)

    def sync(self, handle: int) -> None:
        pass


class Bench:
    """Figures by name, each a list with one value per round."""

    def __init__(self, options: argparse.Namespace, model: Path, scratch: Path) -> None:
        self.options = options
        self.model = model
        self.scratch = scratch
        self.figures: dict[str, list[float]] = {}
        self._number = 0
        self._vocab = SHAPES[options.shape].vocab

    def tokens(self, count: int) -> list[int]:
        """Return new tokens for each call."""
        self._number += 1
        return np.random.default_rng(self._number).integers(300, self._vocab, count).tolist()

    def note(self, name: str, value: float) -> None:
        self.figures.setdefault(name, []).append(value)
        print(
            f"{name}: {value:.4g}", file=sys.stderr, flush=True
        )  # printed at once, in case the run is interrupted

    def median(self, name: str) -> float:
        return statistics.median(self.figures[name])

    @contextlib.contextmanager
    def engine(
        self, disk: Path | None = None, *, capacity: int | None = None, redis: str | None = None
    ) -> Iterator[Worker]:
        """Start our engine and warm it up. When it ends, all its blocks are in its tier."""
        tier = [] if disk is None else ["--disk", str(disk), "--disk-bytes", str(16e9)]
        tier += [] if redis is None else ["--redis", redis]
        worker = self._start(
            Path(sys.executable), "kvboost_edge", capacity or self.options.capacity, tier
        )
        worker.ask("decode", tokens=self.tokens(64), count=8)
        yield worker
        worker.close()

    def _start(self, python: Path, engine: str, capacity: int, more: Sequence[str] = ()) -> Worker:
        return Worker(engine, self._command(python, engine, capacity, more), dict(os.environ))

    def _command(
        self, python: Path, engine: str, capacity: int, more: Sequence[str] = ()
    ) -> list[str]:
        command = [str(python), str(_BENCHMARKS / "peers" / "worker.py"), engine, str(self.model)]
        return [
            *command,
            "--threads",
            str(self.options.threads),
            "--capacity",
            str(capacity),
            *more,
        ]

    def round(self, number: int) -> None:
        prompt = self.tokens(self.options.length)
        disk = self.scratch / f"disk-{number}"
        with self.engine() as plain, self.engine(disk) as kept:
            # The order alternates between rounds.
            for name, worker in sorted((("off", plain), ("on", kept)), reverse=bool(number % 2)):
                found = worker.ask("ask", tokens=prompt, count=_DECODED)
                self.note(f"cold, tier {name}, s", found["ttft_s"])
                self.note(f"decode, tier {name}, tok/s", 1 / found["step_s"])
            expected = found["tokens"]
            for _ in range(2):  # the first answer recomputes the logits of a block's last token
                found = kept.ask("ask", tokens=prompt, count=2)
            self.note("pool, s", found["ttft_s"])
            assert found["tokens"] == expected[:2]
            stats = kept.ask("stats")
        self._disk_bytes(disk, stats["bytes_per_block"])
        for state in ("dropped", "warm"):
            if state == "dropped":
                _drop_from_page_cache(disk)
            with self.engine(disk) as worker:
                found = worker.ask("ask", tokens=prompt, count=2)
                assert found["tokens"] == expected[:2]
                assert found["hits"]["disk"] >= self.options.length - 32, found
                self.note(f"restart, page cache {state}, s", found["ttft_s"])
                self.note(f"restart, page cache {state}, of it loading, s", found["load_s"])
        if self.options.redis_url:
            self._redis(prompt, expected)
        self._llama(prompt)

    def _redis(self, prompt: list[int], expected: list[int]) -> None:
        """Measure an engine that reads from Redis what another one computed and wrote."""
        with self.engine(redis=self.options.redis_url) as worker:
            worker.ask("ask", tokens=prompt, count=2)
        with self.engine(redis=self.options.redis_url) as worker:
            found = worker.ask("ask", tokens=prompt, count=2)
        assert found["tokens"] == expected[:2]
        assert found["hits"]["redis"] >= self.options.length - 32, found
        self.note("from redis, s", found["ttft_s"])
        self.note("from redis, of it loading, s", found["load_s"])

    def _disk_bytes(self, disk: Path, bytes_per_block: int) -> None:
        space = next(path for path in disk.iterdir() if path.is_dir())
        nbytes = sum(path.stat().st_blocks * 512 for path in space.iterdir())
        tier = DiskTier.open(disk, bytes.fromhex(space.name))
        blocks = tier.stat().blocks
        tier.close()
        self.note("disk bytes a token, of the pool's", nbytes / (blocks * bytes_per_block))

    def _llama(self, prompt: list[int]) -> None:
        if not self.options.peers_python.exists():
            return
        path = self.scratch / "llama.state"
        command = self._command(self.options.peers_python, "llama.cpp", self.options.capacity)
        worker = worker_or_none("llama.cpp", command)
        if worker is None:
            return
        worker.ask("ttft", tokens=self.tokens(64), cached=0)
        worker.ask("hold", tokens=self.tokens(64))
        self.note("llama.cpp cold, s", worker.ask("ttft", tokens=prompt, cached=0)["seconds"])
        saved = worker.ask("save", tokens=prompt, path=str(path))
        self.note("llama.cpp save, s", saved["seconds"])
        _drop_from_page_cache(path)
        for state in ("dropped", "warm"):
            found = worker.ask("restore", tokens=prompt, path=str(path))
            self.note(f"llama.cpp restore, page cache {state}, s", found["seconds"])
        worker.close()
        path.unlink()

    def ready(self) -> None:
        """Measure the time from starting a process to readiness.

        It is measured with many records and without a tier.
        """
        disk = self.scratch / "many"
        with self.engine(disk, capacity=1024) as worker:
            worker.ask("ask", tokens=self.tokens(64), count=1)
            bytes_per_block = worker.ask("stats")["bytes_per_block"]
        blocks = fill(
            next(path for path in disk.iterdir() if path.is_dir()),
            bytes_per_block,
            self.options.fill,
        )
        print(f"{blocks} records", file=sys.stderr)
        for number in range(self.options.rounds + 1):
            for name, where in (("without", None), ("with", disk)):
                started = time.perf_counter()
                tier = (
                    []
                    if where is None
                    else ["--disk", str(where), "--disk-bytes", str(2 * self.options.fill)]
                )
                worker = self._start(Path(sys.executable), "kvboost_edge", 1024, tier)
                if number:
                    self.note(f"ready {name} records, s", time.perf_counter() - started)
                    self.note(f"load {name} records, s", worker.about["load_s"])
                worker.close()

    def agent(self, turns: Turns) -> Outcome:
        """Measure an agent whose pool holds one chat and one side request at a time."""
        longest = turns.head + turns.turns * (turns.message + turns.answer)
        with self.engine(self.scratch / "agent", capacity=longest + turns.side // 2) as worker:

            def ask(prompt: list[int], count: int) -> tuple[int, list[int]]:
                found = worker.ask("ask", tokens=prompt, count=count)
                self.note("agent: first token of a request, s", found["ttft_s"])
                return found["cached"], found["tokens"]

            return play(turns, ask)

    def derive(self) -> None:
        """Compute ratios for each round."""
        both = self.figures
        for state in ("dropped", "warm"):
            pairs = zip(
                both[f"restart, page cache {state}, s"], both["cold, tier off, s"], strict=True
            )
            self.figures[f"restart, page cache {state}, of cold"] = [a / b for a, b in pairs]
        pairs = zip(both["cold, tier on, s"], both["cold, tier off, s"], strict=True)
        self.figures["prefill while writing, slower by"] = [a / b - 1 for a, b in pairs]
        pairs = zip(both["decode, tier off, tok/s"], both["decode, tier on, tok/s"], strict=True)
        self.figures["decode while writing, slower by"] = [a / b - 1 for a, b in pairs]
        pairs = zip(both["ready with records, s"], both["ready without records, s"], strict=True)
        self.figures["ready with records, later by s"] = [a - b for a, b in pairs]

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "measure": name,
                "median": statistics.median(values),
                "least": min(values),
                "most": max(values),
                "bar": _BARS.get(name),
            }
            for name, values in self.figures.items()
        ]


def fill(space: Path, bytes_per_block: int, nbytes: int) -> int:
    """Fill a space's directory with records up to a size, and return their number."""
    tier = DiskTier.open(
        space.parent, bytes.fromhex(space.name), max_bytes=2 * nbytes, files=SparseFiles()
    )
    payload = memoryview(bytes(bytes_per_block))
    parent = bytes(32)
    draw = np.random.default_rng(0)
    while (tier.stat().bytes or 0) < nbytes:
        blocks = []
        for _ in range(256):
            tokens = draw.bytes(64)
            blocks.append(BlockAddress(hashlib.sha256(parent + tokens).digest(), parent, tokens))
            parent = blocks[-1].prefix_hash
        if tier.write(blocks, [payload] * len(blocks)) < len(blocks):
            raise RuntimeError(tier.stat().state)
    count = tier.stat().blocks or 0
    tier.close()
    return count


def _drop_from_page_cache(path: Path) -> None:
    for file in [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]:
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def options_from() -> argparse.Namespace:
    parser = parser_for_models(__doc__)
    harness.add_threads(parser)
    parser.add_argument("--length", type=int, default=8192, help="length of the prompt in tokens")
    parser.add_argument(
        "--capacity", type=int, default=16384, help="size of every engine's KV cache in tokens"
    )
    parser.add_argument(
        "--fill",
        type=float,
        default=10e9,
        help="size of the records for the time to readiness, in bytes",
    )
    harness.add_peers_python(parser)
    parser.add_argument("--redis-url", help="URL of a Redis server to share blocks (default: none)")
    parser.add_argument(
        "--scratch",
        type=Path,
        help="directory on the disk to measure (default: the system's temporary directory)",
    )
    options = parser.parse_args()
    if options.quick:
        options.shape = "tiny"
        options.rounds = 2
        options.length = 1024
        options.capacity = 4096
        options.fill = 256e6
    options.fill = int(options.fill)
    return options


def main() -> None:
    options = options_from()
    model = options.models / f"{options.shape}-{options.quant}.gguf"
    kept_gguf(model, SHAPES[options.shape], options.quant)
    turns = AGENT
    if options.quick:
        turns = Turns(
            head=1000, chats=2, turns=3, message=40, answer=8, side=300, sides=3, vocab=1000
        )
    with tempfile.TemporaryDirectory(dir=options.scratch, ignore_cleanup_errors=True) as scratch:
        bench = Bench(options, model, Path(scratch))
        for number in range(options.rounds):
            bench.round(number)
        bench.ready()
        bench.derive()
        outcome = bench.agent(turns)
    bench.note("agent: full blocks computed twice", sum(outcome.twice))
    bench.note("agent: most full blocks computed twice in a turn", max(outcome.twice))
    bench.note(
        "agent: prompt tokens computed, of all", outcome.computed_tokens / outcome.prompt_tokens
    )
    name = f"bench_tiers {options.shape} {options.quant}"
    harness.report(name, bench.rows(), options=options, figures=bench.figures)


if __name__ == "__main__":
    main()
