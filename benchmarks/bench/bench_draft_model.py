"""Draft models: speed of answers with a draft model, relative to prompt lookup and no drafts.

    python benchmarks/bench/bench_draft_model.py MODEL DRAFT [--tokens 96] [--quick] [--out FILE]

MODEL and DRAFT are GGUF files of one family with equal vocabularies, such as Qwen2.5-Coder 1.5B
and 0.5B. Two engines, one of them with the draft model, answer 40 questions of each kind greedily,
each time with an empty cache:

    off       no drafts
    lookup    speculation="auto" without the draft model
    auto      speculation="auto" with the draft model
    llama N   llama.cpp's server with at most N draft tokens of the same pair, with --llama-server
    ik N      the same of ik_llama.cpp, with --ik-server

All ways answer a question one after another. The answers of our engines must be equal. A ratio is
that of the time per token after the first one. Before each kind of question, the first one is
answered once, which is not counted. With --together, each way answers several questions at the same
time, and the ratio is that of the time after all of them have their first token.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks import harness
from benchmarks.bench.bench_server import free_port, served
from benchmarks.data.draft_questions import QUESTIONS
from benchmarks.engine_parts import pass_costs
from kvboost_edge import CPUPagedEngine

_BLOCKS = 256  # in the pool of each engine
# Options of the other servers that set the largest number of draft tokens.
_MOST_DRAFTS = {"llama": ("--spec-type", "draft-simple", "--spec-draft-n-max"), "ik": ("--draft",)}
# Further options of the other servers. ik_llama.cpp is faster with repacked weights. Without the
# other option, it writes a log file into the current folder.
_OPTIONS = {"llama": (), "ik": ("--run-time-repack", "--log-disable")}


class Answered(NamedTuple):
    """An answer's speed.

    Attributes:
        seconds: time after the first tokens of all answers, for each token of the longest one.
        drafted: draft tokens verified.
        accepted: draft tokens accepted.
        token_ids: tokens of the answers, empty for other engines.
    """

    seconds: float
    drafted: int
    accepted: int
    token_ids: tuple[tuple[int, ...], ...] = ()


Way = Callable[[Sequence[str], int], Answered]


def _ours(engine: CPUPagedEngine, speculation: str) -> Way:
    """Return the way in which one of our engines answers questions."""

    def answer(questions: Sequence[str], tokens: int) -> Answered:
        engine.reset_cache()
        prompts = [[{"role": "user", "content": question}] for question in questions]
        results = engine.generate_many(prompts, tokens, temperature=0.0, speculation=speculation)
        times = [result.token_times_ms for result in results]
        began, ended = max(one[0] for one in times), max(one[-1] for one in times)
        return Answered(
            (ended - began) / 1e3 / max(1, max(map(len, times)) - 1),
            sum(result.drafted_tokens for result in results),
            sum(result.accepted_tokens for result in results),
            tuple(tuple(result.output_token_ids) for result in results),
        )

    return answer


def _theirs(port: int) -> Way:
    """Return the way in which another server answers a single question."""

    def answer(questions: Sequence[str], tokens: int) -> Answered:
        (question,) = questions
        asked = {
            "messages": [{"role": "user", "content": question}],
            "max_tokens": tokens,
            "temperature": 0.0,
            "cache_prompt": False,
        }
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        timings = httpx.post(url, json=asked, timeout=600.0).raise_for_status().json()["timings"]
        seconds = timings["predicted_ms"] / 1e3 / timings["predicted_n"]
        return Answered(seconds, timings.get("draft_n", 0), timings.get("draft_n_accepted", 0))

    return answer


def _server_command(peer: str, options: argparse.Namespace, most: int, port: int) -> list[str]:
    """Return the command of a server that drafts at most `most` tokens, or never for 0."""
    threads = str(options.threads)
    server = {"llama": options.llama_server, "ik": options.ik_server}[peer]
    command = [
        *(str(server), "-m", str(options.model), "--port", str(port)),
        *("-t", threads, "-tb", threads, "-c", "4096", "-np", "1", *_OPTIONS[peer]),
    ]
    if not most:
        return command
    return [
        *command,
        *("-md", str(options.draft), "-td", threads, "-tbd", threads),
        *(*_MOST_DRAFTS[peer], str(most)),
    ]


def measure(
    ways: Mapping[str, Way], kind: str, tokens: int, num_questions: int, together: int
) -> list[dict[str, Any]]:
    """Return one row for each way of answering the questions of a kind."""
    questions = QUESTIONS[kind][:num_questions]
    groups = [questions[start : start + together] for start in range(0, len(questions), together)]
    answers: dict[str, list[Answered]] = {way: [] for way in ways}
    for answer in ways.values():
        answer(groups[0], tokens)
    for group in groups:
        for way, answer in ways.items():
            answers[way].append(answer(group, tokens))
        if len({found[-1].token_ids for found in answers.values() if found[-1].token_ids}) > 1:
            raise RuntimeError(f"the answers of our engines to {group!r} differ")
    rows = []
    for way, found in answers.items():
        row = {"task": kind, "speculation": way, "ms per token": 1e3 * _median(found)}
        for base in ("off", "lookup"):
            ratios = [
                one.seconds / other.seconds for one, other in zip(answers[base], found, strict=True)
            ]
            low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
            row |= {f"times {base}": statistics.median(ratios)}
            row |= {f"{base} quartiles": f"{low:.2f} to {high:.2f}"}
        row |= {"drafted": sum(one.drafted for one in found)}
        row |= {"accepted": sum(one.accepted for one in found)}
        print(row, flush=True)
        rows.append(row)
    return rows


def _median(found: list[Answered]) -> float:
    return statistics.median(one.seconds for one in found)


def _pass_rows(engine: CPUPagedEngine) -> dict[str, list[float]]:
    """Return the engine's estimates of a pass of 1 to 8 rows in ms, of both models."""
    return {
        name: [round(1e3 * of.seconds(count, 0.0), 1) for count in range(1, 9)]
        for name, of in pass_costs(engine).items()
    }


def _options() -> argparse.ArgumentParser:
    options: argparse.ArgumentParser = harness.parser(__doc__ or "")
    options.add_argument("model", type=Path, help="GGUF file of the model")
    options.add_argument("draft", type=Path, help="GGUF file of the draft model")
    options.add_argument("--tokens", type=int, default=96, help="tokens per answer (default: 96)")
    options.add_argument(
        "--questions", type=int, default=40, help="questions of each kind (default: 40)"
    )
    options.add_argument(
        "--kinds",
        nargs="+",
        choices=QUESTIONS,
        default=list(QUESTIONS),
        help="kinds of questions (default: all)",
    )
    options.add_argument(
        "--together", type=int, default=1, help="questions at the same time (default: 1)"
    )
    harness.add_threads(options)
    options.add_argument("--draft-vocabulary", type=int, help="option of the engine")
    options.add_argument(
        "--kv-cache-bits", type=int, default=16, help="option of the engines (default: 16)"
    )
    options.add_argument("--llama-server", type=Path, help="llama.cpp's server, to compare with")
    options.add_argument("--ik-server", type=Path, help="ik_llama.cpp's server, to compare with")
    options.add_argument(
        "--peer-drafts",
        type=int,
        nargs="+",
        default=[0, 3, 8],
        help="largest numbers of draft tokens of the other servers (default: 0 3 8)",
    )
    return options


def main() -> None:
    options = _options()
    chosen = options.parse_args()
    peers = [
        name
        for name, server in (("llama", chosen.llama_server), ("ik", chosen.ik_server))
        if server is not None
    ]
    if peers and chosen.together > 1:
        options.error("--together is for our engines only; leave the other servers out")
    if chosen.together < 1 or chosen.questions % chosen.together:
        options.error(
            f"--questions {chosen.questions} is not a multiple of --together {chosen.together}"
        )
    num_questions = chosen.together if chosen.quick else chosen.questions
    rows = []
    common = {
        "num_blocks": _BLOCKS,
        "num_threads": chosen.threads,
        "kv_cache_bits": chosen.kv_cache_bits,
    }
    with contextlib.ExitStack() as stack:
        alone, drafting = (
            stack.enter_context(CPUPagedEngine.from_pretrained(str(chosen.model), **common, **more))
            for more in (
                {},
                {"draft_model": str(chosen.draft), "draft_vocabulary": chosen.draft_vocabulary},
            )
        )
        ways = {
            "off": _ours(alone, "off"),
            "lookup": _ours(alone, "auto"),
            "auto": _ours(drafting, "auto"),
        }
        for peer in peers:
            for most in chosen.peer_drafts:
                port = free_port()
                stack.enter_context(served(_server_command(peer, chosen, most, port), port))
                ways[f"{peer} {most}"] = _theirs(port)
        for kind in chosen.kinds:
            rows += measure(ways, kind, chosen.tokens, num_questions, chosen.together)
        passes = _pass_rows(drafting)
    harness.report("bench_draft_model", rows, options=chosen, pass_ms=passes)


if __name__ == "__main__":
    main()
