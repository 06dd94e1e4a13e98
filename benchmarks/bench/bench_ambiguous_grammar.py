"""Latency of one tenant while another tenant's ambiguous grammar is computed.

Both tenants use one server process with separate API keys. Times are from sending a request of four
tokens to the end of its answer. A pair consists of one request alone and one during the other
tenant's requests. Their order alternates.

    python benchmarks/bench/bench_ambiguous_grammar.py --model FILE.gguf --pairs 20
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks import harness
from benchmarks.bench.bench_server import free_port, served

_GRAMMAR = 'start: e\ne: e e | e e e | "a" | ""'
_KEYS = ("sk-hostile", "sk-other")
# seconds from the first hostile request to the measured one, while its masks become slower
_LEAD_SECONDS = (0.1, 1.5)


def ask(client: httpx.Client, prompt: str) -> float:
    """Send a request of four tokens and return its milliseconds."""
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    began = time.perf_counter()
    response = client.post("/v1/completions", json=body)
    response.raise_for_status()
    return (time.perf_counter() - began) * 1e3


class Hostile:
    """Client that keeps a number of requests with the ambiguous grammar running."""

    def __init__(self, port: int, streams: int) -> None:
        self.answers: dict[int, int] = {200: 0, 400: 0}
        self._port = port
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(streams)]

    def __enter__(self) -> Hostile:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        with client_of(self._port, _KEYS[0]) as client:
            while not self._stopped.is_set():
                body: dict[str, Any] = {
                    "prompt": f"Write a. {number} {time.perf_counter()}",
                    "max_tokens": 400,
                    "temperature": 1.5,
                    "guided_grammar": _GRAMMAR,
                    "ignore_eos": True,
                }
                response = client.post("/v1/completions", json=body)
                # 400 means that its masks took too long
                if response.status_code not in self.answers:
                    raise RuntimeError(f"{response.status_code}: {response.text[:200]}")
                self.answers[response.status_code] += 1


def client_of(port: int, key: str) -> httpx.Client:
    """Return a client with one of the API keys."""
    return httpx.Client(
        base_url=f"http://127.0.0.1:{port}", headers={"Authorization": f"Bearer {key}"}, timeout=120
    )


def main() -> None:
    """Measure and print the results."""
    parser = harness.parser(__doc__ or "")
    parser.add_argument("--model", required=True, help="GGUF file or directory")
    parser.add_argument("--pairs", type=int, default=20, help="number of pairs (default: 20)")
    parser.add_argument(
        "--streams", type=int, default=1, help="number of concurrent hostile requests (default: 1)"
    )
    options: argparse.Namespace = parser.parse_args()
    if options.quick:
        options.pairs = 2
    port = free_port()
    command = [sys.executable, "-m", "kvboost_edge.server", "--model", options.model]
    command += ["--port", str(port), "--model-name", "m", "--disk-cache-dir", "off"]
    rng = random.Random(1)
    alone: list[float] = []
    beside: list[float] = []
    answers = {200: 0, 400: 0}
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        keys = Path(place) / "keys"
        keys.write_text("\n".join(_KEYS), encoding="utf-8")
        keys.chmod(0o600)
        stack.enter_context(served([*command, "--api-key-file", str(keys)], port))
        client = stack.enter_context(client_of(port, _KEYS[1]))
        for number in range(3):
            ask(client, f"Warm up {number}.")
        with Hostile(port, 1):
            ask(client, "Warm up with the grammar.")
        for number in range(options.pairs):
            for is_beside in (False, True) if number % 2 else (True, False):
                prompt = f"Question {number}, {'ab'[is_beside]}: name a colour of the sky."
                if not is_beside:
                    alone.append(ask(client, prompt))
                    continue
                with Hostile(port, options.streams) as hostile:
                    time.sleep(rng.uniform(*_LEAD_SECONDS))
                    beside.append(ask(client, prompt))
                answers = {status: n + hostile.answers[status] for status, n in answers.items()}
    ratios = [b / a for a, b in zip(alone, beside, strict=True)]
    rows = [
        {
            "other tenant": name,
            "median": statistics.median(values),
            "least": min(values),
            "most": max(values),
        }
        for name, values in (
            ("alone, ms", alone),
            ("during the grammar, ms", beside),
            ("ratio of a pair", ratios),
        )
    ]
    print(f"hostile requests: {answers[200]} ended by length, {answers[400]} refused while running")
    harness.report("bench_ambiguous_grammar", rows, options=options, hostile=answers)


if __name__ == "__main__":
    main()
