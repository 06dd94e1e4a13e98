"""A coding agent's session over HTTP: prompt tokens computed and time to first token.

Compares our server with `llama_cpp.server`. The same client sends both the same requests from
agent_sessions.py: 10,000 tokens of system prompt and tools, 12 turns with titles and side agents
between them, and a restart in the middle. Both run the same file, whose model generates one fixed
answer (data/agent_model.py). The servers run one after another, never together, and do not
speculate. llama_cpp.server caches states in memory, which a restart empties (`--peer-cache disk`
caches them on disk).

    computed   prompt tokens that a server computed. Ours reports them as usage (prompt_tokens minus
               cached_tokens), llama.cpp prints them for each request
    ttft       time from sending to the first text, thinking or call in the stream
    cold       our time to first token of the same request with `cache_prompt` false, measured after
               the session. `--cold three` measures three turns and interpolates the others by
               their prompt tokens

    python benchmarks/bench/bench_agents.py                   # 0.5B shape, Q4_0, whole session
    python benchmarks/bench/bench_agents.py --shape tiny      # the same tokens, a small model
    python benchmarks/bench/bench_agents.py --date-in system  # a date that voids tools and chat
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks import harness
from benchmarks.bench.bench_server import free_port, served
from benchmarks.data.agent_model import TEMPLATE, write_agent_model
from benchmarks.data.agent_sessions import (
    CALL,
    CONTENT,
    QUICK,
    THOUGHT,
    Answer,
    Plan,
    Request,
    session,
    texts,
)
from benchmarks.data.shapes import SHAPES, Shape

_BENCHMARKS = Path(__file__).parents[1]
_REQUEST_S = 900.0
_CONTEXT = 16384  # maximum tokens of a prompt and its answer
_BARS = {"computed": 0.10, "turn": 0.15, "restart": 0.20}
_MODELS = {"0.5b": SHAPES["0.5b"], "tiny": Shape(256, 4, 4, 2, 512, vocab=8192, context=32768)}
_TOLD = ("hit_tokens", "tokenize_ms", "queue_ms", "lookup_ms", "load_ms", "prefill_ms")
_THOUGHT = re.compile(r"<think>(.*?)</think>\s*", re.DOTALL)
_CALLED = re.compile(r'<tool_call>\{"name": "(\w+)", "arguments": (.*)\}</tool_call>')
_COUNTED = re.compile(rb"prompt eval time = +[\d.]+ ms / +(\d+) tokens")


@dataclasses.dataclass
class Seen:
    """Observations of the client for one answer. Times are in seconds from sending.

    Attributes:
        first: Time to the first output.
        total: Time to the end of the answer.
        thought: Thinking of the answer.
        answer: Text and call of the answer.
        prompt_tokens: Number of prompt tokens, or 0 if the server does not report it.
        computed: Number of computed prompt tokens.
        normalised: Normalizations that our server applied to the request.
        cause: Cause of the cache miss that our server reported.
        own: Further figures of our server: tokens found by tier, and milliseconds by kind of work.
    """

    first: float
    total: float
    thought: str
    answer: Answer
    prompt_tokens: int = 0
    computed: int = 0
    normalised: tuple[str, ...] = ()
    cause: str = ""
    own: dict[str, Any] = dataclasses.field(default_factory=dict)


class Ours:
    """kvboost_edge.server, with a separate directory for its disk tier."""

    label = "kvboost_edge"

    def __init__(self, model: Path, place: Path, options: argparse.Namespace) -> None:
        self.port = free_port()
        command = [
            sys.executable,
            "-m",
            "kvboost_edge.server",
            "--model",
            str(model),
            "--model-name",
            "own",
        ]
        command += [
            "--port",
            str(self.port),
            "--num-blocks",
            str(options.capacity // 16),
            "--log-level",
            "warning",
        ]
        command += ["--num-threads", str(options.threads), "--kv-cache-bits", options.kv_cache_bits]
        self.command = [
            *command,
            "--request-timeout",
            str(_REQUEST_S),
            "--disk-cache-dir",
            str(place / "blocks"),
            "--speculation",  # off because llama_cpp.server does not speculate
            "off",
        ]
        self.place = place

    def body(self, request: Request) -> dict[str, Any]:
        more = {
            "stream": True,
            "stream_options": {"include_usage": True},
            "kvboost": {"explain": True},
        }
        return {**request.body, **more}

    def counted(self, seen: Seen, last: dict[str, Any], log: bytes) -> None:
        """Read from the stream's last event how many tokens were computed and why."""
        usage = last["usage"]
        told = last["kvboost"]
        seen.prompt_tokens = usage["prompt_tokens"]
        seen.computed = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
        seen.normalised = tuple(told["cache"]["normalised"])
        seen.cause = told["cache"]["cause"]
        seen.own = {name: told[name] for name in _TOLD}


class LlamaCpp:
    """llama_cpp.server, with one of its state caches in addition to the active one."""

    label = "llama_cpp.server"

    def __init__(self, model: Path, place: Path, options: argparse.Namespace) -> None:
        self.port = free_port()
        command = [
            str(options.peers_python),
            "-m",
            "llama_cpp.server",
            "--model",
            str(model),
            "--model_alias",
            "peer",
        ]
        command += [
            "--port",
            str(self.port),
            "--n_ctx",
            str(_CONTEXT),
            "--interrupt_requests",
            "false",
        ]
        command += ["--n_threads", str(options.threads), "--n_threads_batch", str(options.threads)]
        # Each cached state contains the logits of a batch. With 512 tokens per batch, they take a
        # quarter of the memory of 2,048 tokens, and the speed is the same.
        command += [
            "--n_batch",
            "512",
            "--flash_attn",
            str(options.peer_flash),
            "--logits_all",
            "false",
        ]
        if options.peer_cache != "none":
            command += ["--cache", "true", "--cache_type", options.peer_cache]
            command += ["--cache_size", str(options.peer_cache_bytes)]
        self.command = command
        self.place = place

    def body(self, request: Request) -> dict[str, Any]:
        return {**request.body, "stream": True, "repeat_penalty": 1.0}

    def counted(self, seen: Seen, last: dict[str, Any], log: bytes) -> None:
        """Read from the server's log how many tokens were computed for the request."""
        seen.computed = int(_COUNTED.findall(log)[-1])


Server = Ours | LlamaCpp


def sent(server: Server, request: Request, log: Path, client: httpx.Client) -> Seen:
    """Send one request and read its stream to the end."""
    printed = log.stat().st_size
    text = ""
    thought = ""
    name = ""
    arguments = ""
    call_id = ""
    last: dict[str, Any] = {}
    first = None
    started = time.perf_counter()
    url = f"http://127.0.0.1:{server.port}/v1/chat/completions"
    with client.stream("POST", url, json=server.body(request)) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{server.label}: {response.status_code}: {response.read()[:300]!r}")
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RuntimeError(f"{server.label}: {event['error']}")
            last = {**last, **{name: value for name, value in event.items() if value}}
            for delta in (choice["delta"] for choice in event["choices"]):
                said = [
                    delta.get(field) for field in ("content", "reasoning_content", "tool_calls")
                ]
                if first is None and any(said):
                    first = time.perf_counter() - started
                text = text + (said[0] or "")
                thought = thought + (said[1] or "")
                for call in said[2] or ():
                    call_id = call.get("id") or call_id
                    name = call["function"].get("name") or name
                    arguments += call["function"].get("arguments") or ""
    total = time.perf_counter() - started
    if first is None:
        raise RuntimeError(f"{server.label} sent an empty answer")
    if not thought and not name:
        text, thought, (name, arguments) = taken_apart(text)
    seen = Seen(first, total, thought, Answer(text, (name, arguments) if name else None, call_id))
    with log.open("rb") as file:
        file.seek(printed)
        server.counted(seen, last, file.read())
    return seen


def taken_apart(text: str) -> tuple[str, str, tuple[str, str]]:
    """Split the text of a server without parsers into text, thinking and call."""
    thought = _THOUGHT.search(text)
    called = _CALLED.search(text)
    rest = _CALLED.sub("", _THOUGHT.sub("", text))
    return rest, thought[1] if thought else "", (called[1], called[2]) if called else ("", "")


def played(server: Server, plan: Plan, cold: tuple[int, ...]) -> dict[str, Any]:
    """Run the session on a server.

    Returns:
        The requests with the client's observations, the seconds of the whole session without server
            starts, and cold times by turn.
    """
    running = session(plan)
    request = next(running)
    answer = None
    done: list[tuple[Request, Seen]] = []
    starts: list[float] = []
    colds: dict[int, float] = {}
    seconds = 0.0
    with httpx.Client(timeout=_REQUEST_S) as client, contextlib.ExitStack() as stack:
        log = _started(server, stack, starts)
        warm = {
            "messages": [{"role": "user", "content": "Hello."}],
            "max_tokens": 4,
            "temperature": 0,
        }
        sent(server, Request("warm-up", 0, warm), log, client)  # compiles and starts threads
        while True:
            if request.restart:
                stack.close()
                log = _started(server, stack, starts)
            seen = sent(server, request, log, client)
            seconds += seen.total
            done.append((request, seen))
            said = f"{seen.computed} computed, {seen.first:.2f} s"
            print(f"  {server.label}, {request.kind} {request.number}: {said}", file=sys.stderr)
            answer = seen.answer
            try:
                request = running.send(answer)
            except StopIteration:
                break
        for request, _ in done:
            if request.kind == "turn" and request.number in cold and isinstance(server, Ours):
                body = {**request.body, "cache_prompt": False, "max_tokens": 4}
                colds[request.number] = sent(
                    server, dataclasses.replace(request, body=body), log, client
                ).first
    return {"done": done, "seconds": seconds, "starts": starts, "colds": colds}


def _started(server: Server, stack: contextlib.ExitStack, starts: list[float]) -> Path:
    """Start the server within `stack` and return the file of its output."""
    log = server.place / f"{len(starts)}.log"
    began = time.perf_counter()
    file = stack.enter_context(log.open("wb"))
    stack.enter_context(served(server.command, server.port, log=file, cwd=server.place))
    starts.append(time.perf_counter() - began)
    return log


def cold_of(colds: dict[int, float], tokens: dict[int, int]) -> dict[int, float]:
    """Return the cold time of each turn, interpolated by prompt tokens where not measured.

    Args:
        colds: Measured cold times by turn.
        tokens: Prompt tokens by turn.
    """
    if not colds:
        return {}
    known = sorted(colds)
    places = [tokens[turn] for turn in known]
    times = [colds[turn] for turn in known]
    return {
        turn: colds.get(turn, float(np.interp(count, places, times)))
        for turn, count in tokens.items()
    }


def rows_of(runs: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return one row for each request of the session, with medians over rounds."""
    ours = runs.get(Ours.label, [])
    peer = runs.get(LlamaCpp.label, [])
    rows = []
    for index, (request, _) in enumerate((ours or peer)[0]["done"]):
        row: dict[str, Any] = {"request": request.kind, "turn": request.number}
        row["changed"] = ", ".join([*request.changes, *["restart"] * request.restart]) or "-"
        if ours:
            seen = [run["done"][index][1] for run in ours]
            row |= {"prompt": seen[0].prompt_tokens, "computed": seen[0].computed}
            row["ttft_s"] = statistics.median(one.first for one in seen)
            row["cold_s"] = row["x_cold"] = None
            if request.kind == "turn" and all(run["colds"] for run in ours):
                row["cold_s"] = statistics.median(_cold(run)[request.number] for run in ours)
                row["x_cold"] = row["ttft_s"] / row["cold_s"]
            row |= {
                "normalised": ", ".join(seen[0].normalised) or "-",
                "cause": seen[0].cause,
                "own": seen[0].own,
            }
        if peer:
            seen = [run["done"][index][1] for run in peer]
            row["peer_computed"] = seen[0].computed
            row["peer_ttft_s"] = statistics.median(one.first for one in seen)
        rows.append(row)
    return rows


def _cold(run: dict[str, Any]) -> dict[int, float]:
    turns = {
        request.number: seen.prompt_tokens
        for request, seen in run["done"]
        if request.kind == "turn"
    }
    return cold_of(run["colds"], turns)


def summary(runs: dict[str, list[dict[str, Any]]], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the totals of each server, and each bar with the value reached."""
    servers = {}
    for label, rounds in runs.items():
        done = [seen for _, seen in rounds[0]["done"]]
        told = [seen for request, seen in rounds[0]["done"] if request.kind != "title"]
        said = sum(
            (seen.thought, seen.answer.content, seen.answer.call) == (THOUGHT, CONTENT, CALL)
            for seen in told
        )
        servers[label] = {
            "computed": sum(seen.computed for seen in done),
            "seconds": statistics.median(run["seconds"] for run in rounds),
            "ttft_s": statistics.median(statistics.median(_ttfts(run)) for run in rounds),
            "start_s": [
                statistics.median(times)
                for times in zip(*(run["starts"] for run in rounds), strict=True)
            ],
            "written_answers": f"{said} of {len(told)}",
        }
    reached: dict[str, float] = {}
    if len(servers) == 2:
        reached["computed"] = servers[Ours.label]["computed"] / servers[LlamaCpp.label]["computed"]
    later = [
        row
        for row in rows
        if row["request"] == "turn" and row["turn"] > 1 and row.get("x_cold") is not None
    ]
    if later:
        reached["turn"] = max(row["x_cold"] for row in later if "restart" not in row["changed"])
        reached["restart"] = max(row["x_cold"] for row in later if "restart" in row["changed"])
    bars = {
        name: {"reached": share, "bar": _BARS[name], "met": share <= _BARS[name]}
        for name, share in reached.items()
    }
    return {"servers": servers, "bars": bars}


def _ttfts(run: dict[str, Any]) -> Iterator[float]:
    return (
        seen.first for request, seen in run["done"] if request.kind == "turn" and request.number > 1
    )


def model_of(name: str, folder: Path) -> Path:
    """Return the model's file. It is written if it is missing."""
    said = texts(Plan())
    mark = hashlib.sha256(
        json.dumps([said, TEMPLATE, THOUGHT, CONTENT, CALL]).encode()
    ).hexdigest()[:8]
    path = folder / f"agents-{name}-{mark}-Q4_0.gguf"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_agent_model(path, _MODELS[name], said)
    return path


def options_from() -> argparse.Namespace:
    parser = harness.parser(__doc__ or "")
    parser.add_argument(
        "--shape",
        choices=tuple(_MODELS),
        help="shape of the model (default: 0.5b, or tiny with --quick)",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=1,
        help="number of sessions per server; figures are their medians",
    )
    parser.add_argument(
        "--turns",
        type=int,
        default=Plan.turns,
        help=f"{Plan.restart} or more, because the restart comes before this turn",
    )
    parser.add_argument(
        "--date-in",
        choices=("context", "system"),
        default="context",
        help="message with the date that changes at midnight (default: %(default)s)",
    )
    parser.add_argument(
        "--no-billing", action="store_true", help="omit the client's changing first line"
    )
    parser.add_argument(
        "--cold", choices=("three", "each"), default="three", help="turns to measure cold"
    )
    harness.add_threads(parser)
    parser.add_argument("--capacity", type=int, default=32768, help="size of our pool in tokens")
    parser.add_argument("--kv-cache-bits", default="16", help="bits per KV value of our server")
    parser.add_argument(
        "--peer-cache",
        choices=("none", "ram", "disk"),
        default="ram",
        help="kind of llama_cpp.server's cache of states (default: %(default)s)",
    )
    parser.add_argument(
        "--peer-cache-bytes",
        type=int,
        default=8 << 30,
        help="size of that cache in bytes (default: %(default)s)",
    )
    parser.add_argument(
        "--peer-flash",
        choices=("true", "false"),
        default="true",
        help="whether llama_cpp.server uses flash attention (default: %(default)s)",
    )
    parser.add_argument(
        "--models",
        type=Path,
        default=_BENCHMARKS / "models",
        help="directory of the model (default: benchmarks/models)",
    )
    harness.add_peers_python(parser)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=(Ours.label, LlamaCpp.label),
        help="servers to run (default: both)",
    )
    return parser.parse_args()


def wanted(options: argparse.Namespace) -> list[type[Ours] | type[LlamaCpp]]:
    """Return the requested servers that are available."""
    found: list[type[Ours] | type[LlamaCpp]] = []
    if Ours.label in (options.only or [Ours.label]):
        found.append(Ours)
    if LlamaCpp.label in (options.only or [LlamaCpp.label]):
        works = [str(options.peers_python), "-c", "import llama_cpp.server.app"]
        if (
            options.peers_python.exists()
            and not subprocess.run(works, capture_output=True, check=False).returncode
        ):
            found.append(LlamaCpp)
        else:
            print(
                f"skipped: {LlamaCpp.label}: not in {options.peers_python}, see `make "
                "bench-agents`",
                file=sys.stderr,
            )
    return found


def main() -> None:
    options = options_from()
    os.environ["HF_HUB_OFFLINE"] = "1"
    if options.turns < Plan.restart:
        sys.exit(
            f"--turns {options.turns}: {Plan.restart} is the fewest, the server is restarted in "
            "front of it"
        )
    options.shape = options.shape or ("tiny" if options.quick else "0.5b")
    changed = {
        "turns": options.turns,
        "date_in": options.date_in,
        "billing": not options.no_billing,
    }
    plan = dataclasses.replace(QUICK if options.quick else Plan(), **changed)
    turns = range(1, plan.turns + 1)
    cold = tuple(turns) if options.cold == "each" else (1, plan.restart, plan.turns)
    model = model_of(options.shape, options.models)
    runs: dict[str, list[dict[str, Any]]] = {}
    for _ in range(options.rounds):
        for kind in wanted(options):
            with tempfile.TemporaryDirectory() as place:
                run = played(kind(model, Path(place), options), plan, cold)
            runs.setdefault(kind.label, []).append(run)
    rows = rows_of(runs)
    found = summary(runs, rows)
    shown = [{name: value for name, value in row.items() if name != "own"} for row in rows]
    harness.report("bench_agents", rows, options=options, shown=shown, **found)
    for label, totals in found["servers"].items():
        print(f"{label}: {totals}", file=sys.stderr)
    for name, bar in found["bars"].items():
        print(
            f"{name}: {bar['reached']:.3f} (bar {bar['bar']:.2f}): "
            f"{'met' if bar['met'] else 'MISSED'}",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
