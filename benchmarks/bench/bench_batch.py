"""Batches: lines in random order against sorted lines, and a stream next to a batch.

The batch service runs in this process over the routes, as in `kvboost-edge serve`.

Order: questions over several documents, in a pool that holds only some of the documents.

    sorted     the lines of each document next to each other in the file
    random     the same lines in random order
    unordered  the same random order, computed as in the file

Stream: a user asks questions with pauses, and reads each answer as a stream, alone and next to a
batch in both settings of `--batch-background`.

    gap        milliseconds between two tokens of the stream
    first      milliseconds to the first token of an answer
    lines      lines of the batch per minute, while answers stream and over the whole session

Each contender runs in a separate process, in alternating rounds. Figures are medians over rounds,
except for the median and the maximum of the gaps, which are those of all rounds together.

    python benchmarks/bench/bench_batch.py --model FILE.gguf
    python benchmarks/bench/bench_batch.py --quick
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks import harness
from benchmarks.bench.bench_peers import ALL_SHAPES, RandomModel, parser_for_layers
from kvboost_edge import CPUPagedEngine
from kvboost_edge.engine.handle import TokenEvent
from kvboost_edge.server.app import create_app
from kvboost_edge.server.batches import service as service_module
from kvboost_edge.server.settings import ServerSettings

_PATH = "/v1/completions"
_ORDERS = ("sorted", "random", "unordered")
_STREAMS = ("alone", "spare_time", "idle")
_BLOCK = 16
_LOOK_S = 0.02
_SETTLE_S = 3.0  # seconds of the batch before the first question


def lines_of(options: argparse.Namespace, vocab: int) -> list[dict[str, Any]]:
    """Return the lines of all questions, sorted by document."""
    rng = np.random.default_rng(1)

    def ids(count: int) -> list[int]:
        found: list[int] = rng.integers(min(1000, vocab // 2), min(40_000, vocab), count).tolist()
        return found

    documents = [ids(options.document) for _ in range(options.documents)]
    return [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": _PATH,
            "body": {
                "prompt": [
                    *documents[number * options.documents // options.questions],
                    *ids(options.question),
                ],
                "max_tokens": options.answer,
                "temperature": 0,
                "ignore_eos": True,
            },
        }
        for number in range(options.questions)
    ]


@contextmanager
def _engine(options: argparse.Namespace, num_blocks: int) -> Iterator[CPUPagedEngine]:
    with CPUPagedEngine.from_pretrained(
        options.model,
        kv_cache_bits=8,
        num_blocks=num_blocks,
        max_num_seqs=options.places,
        speculation="off",
    ) as engine:
        engine.generate(list(range(100, 200)), max_new_tokens=8, ignore_eos=True)
        engine.reset_cache()
        yield engine


class _Client:
    """Client of the batch API of an app."""

    def __init__(self, engine: CPUPagedEngine, directory: str, background: str) -> None:
        settings = ServerSettings(
            batch_dir=directory, batch_background=background, request_history=0
        )
        self._app = create_app(engine, settings)
        self.service = self._app.state.kv.batches
        transport = httpx.ASGITransport(app=self._app)
        self._http = httpx.AsyncClient(transport=transport, base_url="http://localhost")

    async def begin(self, lines: list[dict[str, Any]]) -> str:
        """Upload lines, create a batch and return its id."""
        content = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        file = await self._http.post(
            "/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"}
        )
        body = {
            "input_file_id": file.raise_for_status().json()["id"],
            "endpoint": _PATH,
            "completion_window": "24h",
        }
        created = await self._http.post("/v1/batches", json=body)
        batch_id: str = created.raise_for_status().json()["id"]
        return batch_id

    async def batch(self, batch_id: str) -> dict[str, Any]:
        found: dict[str, Any] = (await self._http.get(f"/v1/batches/{batch_id}")).json()
        return found

    async def done(self, batch_id: str) -> int:
        """Return the number of answered lines."""
        counts = (await self.batch(batch_id))["request_counts"]
        assert not counts["failed"], counts
        return int(counts["completed"])

    async def close(self) -> None:
        await self._http.aclose()
        await self.service.close()


async def _order(options: argparse.Namespace, order: str) -> dict[str, Any]:
    """Return the seconds of a batch whose lines are in this order."""
    per_line = options.document + options.question + options.answer
    blocks = -(-options.document * options.pool_documents // _BLOCK)
    blocks += options.places * (-(-(per_line - options.document) // _BLOCK) + 2)
    with _engine(options, blocks) as engine, tempfile.TemporaryDirectory() as directory:
        lines = lines_of(options, engine.tokenizer.vocab_size)
        if order != "sorted":
            lines = [lines[i] for i in np.random.default_rng(2).permutation(len(lines))]
        if order == "unordered":
            service_module.by_prefix = lambda found: found  # type: ignore[assignment]
        client = _Client(engine, directory, "spare_time")
        started = time.perf_counter()
        batch_id = await client.begin(lines)
        while (await client.batch(batch_id))["status"] not in ("completed", "failed"):
            await asyncio.sleep(_LOOK_S)
        seconds = time.perf_counter() - started
        assert await client.done(batch_id) == len(lines)
        await client.close()
        stats = engine.cache_stats()
    return {"seconds": seconds, "hit_rate": stats["hit_rate"]}


async def _stream(options: argparse.Namespace, setting: str) -> dict[str, Any]:
    """Return the times of a user's stream next to a batch, and the batch's rate."""
    per_line = options.document + options.question + options.answer
    blocks = (options.places + options.documents + 2) * (-(-per_line // _BLOCK) + 2)
    rng = np.random.default_rng(3)
    found: dict[str, Any] = {"gaps": [], "firsts": [], "streaming": 0, "seconds": 0.0}
    with _engine(options, blocks) as engine, tempfile.TemporaryDirectory() as directory:
        vocab = engine.tokenizer.vocab_size
        client = _Client(engine, directory, "idle" if setting == "alone" else setting)
        batch_id = ""
        if setting != "alone":
            batch_id = await client.begin(lines_of(options, vocab))
            await asyncio.sleep(_SETTLE_S)
        begun = await client.done(batch_id) if batch_id else 0
        started = time.perf_counter()
        for _ in range(options.turns):
            prompt = rng.integers(min(1000, vocab // 2), min(40_000, vocab), options.prompt)
            before = await client.done(batch_id) if batch_id else 0
            handle = engine.submit(prompt.tolist(), max_new_tokens=options.reply, ignore_eos=True)
            # The engine's times: the event loop takes several tokens of a small model at once.
            times = [
                one.time_ms
                async for events in handle.abatches()
                for one in events
                if isinstance(one, TokenEvent)
            ]
            found["firsts"].append(times[0])
            found["gaps"] += np.diff(times)[1:].tolist()
            found["seconds"] += times[-1] / 1e3
            if batch_id:
                found["streaming"] += await client.done(batch_id) - before
            await asyncio.sleep(options.pause)
        whole = time.perf_counter() - started
        total = await client.done(batch_id) - begun if batch_id else 0
        if batch_id:
            assert (await client.batch(batch_id))["status"] == "in_progress", "more --questions"
        await client.close()
    return {
        **found,
        "lines_streaming": 60 * found["streaming"] / found["seconds"],
        "lines_whole": 60 * total / whole,
    }


def _in_a_process(contender: str) -> dict[str, Any]:
    command = [sys.executable, __file__, *sys.argv[1:], "--contender", contender]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def order_rows(runs: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return a row for each order, with its time relative to the sorted lines of its round."""
    return [
        {
            "order": name,
            "seconds": statistics.median(one["seconds"] for one in found),
            "times sorted": statistics.median(
                one["seconds"] / base["seconds"]
                for one, base in zip(found, runs["sorted"], strict=True)
            ),
            "hit rate": statistics.median(one["hit_rate"] for one in found),
        }
        for name, found in runs.items()
    ]


def stream_rows(runs: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return a row for each setting, with p95 relative to the stream alone in its round."""

    def p95(run: dict[str, Any]) -> float:
        return float(np.percentile(run["gaps"], 95))

    rows = []
    for name, found in runs.items():
        gaps = np.concatenate([run["gaps"] for run in found])
        rows.append(
            {
                "setting": name,
                "gap p50 ms": float(np.percentile(gaps, 50)),
                "gap p95 ms": statistics.median(map(p95, found)),
                "times alone": statistics.median(
                    p95(one) / p95(base) for one, base in zip(found, runs["alone"], strict=True)
                ),
                "gap max ms": float(gaps.max()),
                "first p50 ms": float(np.median([one for run in found for one in run["firsts"]])),
                "lines/min streaming": statistics.median(run["lines_streaming"] for run in found),
                "lines/min": statistics.median(run["lines_whole"] for run in found),
            }
        )
    return rows


def options_from() -> argparse.Namespace:
    parser = parser_for_layers(__doc__, ALL_SHAPES)
    parser.set_defaults(rounds=3)
    parser.add_argument("--model", help="GGUF file or model directory (default: a random model)")
    parser.add_argument("--only", choices=("order", "stream"), help="part to run (default: both)")
    parser.add_argument("--documents", type=int, default=10, help="default: 10")
    parser.add_argument("--questions", type=int, default=200, help="default: 200")
    parser.add_argument("--document", type=int, default=1000, help="tokens of a document")
    parser.add_argument("--question", type=int, default=24, help="tokens of a question")
    parser.add_argument("--answer", type=int, default=16, help="tokens of an answer")
    parser.add_argument("--places", type=int, default=8, help="sequences in a batch (default: 8)")
    parser.add_argument(
        "--pool-documents", type=int, default=4, help="documents that fit in the pool (default: 4)"
    )
    parser.add_argument("--turns", type=int, default=6, help="questions of the user (default: 6)")
    parser.add_argument("--prompt", type=int, default=100, help="tokens of the user's questions")
    parser.add_argument("--reply", type=int, default=200, help="tokens of an answer to the user")
    parser.add_argument(
        "--pause", type=float, default=2.0, help="seconds between the user's questions (default: 2)"
    )
    parser.add_argument("--contender", choices=(*_ORDERS, *_STREAMS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.documents, options.questions, options.document = 4, 24, 300
        options.pool_documents, options.turns, options.reply, options.rounds = 2, 2, 60, 1
        options.pause = 1.0
        options.layers = options.layers or 4
    if options.model is None:
        options.model = str(RandomModel.written(options, ALL_SHAPES).path)
    return options


def main() -> None:
    """Run all contenders in alternating rounds and print two tables."""
    options = options_from()
    if options.contender:
        run = _order if options.contender in _ORDERS else _stream
        if run is _stream:
            options.questions *= 10  # the batch must not end before the session
        print(json.dumps(asyncio.run(run(options, options.contender))))
        return
    harness.pack_beforehand(options.model)
    parts = {"order": _ORDERS, "stream": _STREAMS}
    found: dict[str, list[dict[str, Any]]] = {}
    for part, contenders in parts.items():
        if options.only in (None, part):
            runs: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
            for _ in range(options.rounds):
                for name in contenders:
                    runs[name].append(_in_a_process(name))
            found[part] = (order_rows if part == "order" else stream_rows)(runs)
            # A later report replaces the file of an earlier one, so it contains its rows too.
            harness.report(f"batch {part}", found[part], options=options, parts=found)


if __name__ == "__main__":
    main()
