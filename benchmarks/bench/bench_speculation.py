r"""Speculative decoding: speedup of answers, by the share that repeats earlier text.

    make real-model && python benchmarks/bench/bench_speculation.py
    python benchmarks/bench/bench_speculation.py --shape 1.5b --quant Q4_K_M
    python benchmarks/bench/bench_speculation.py --only random --shape qwen3.5-4b-head \
        --acceptance 0.85,0.75,0.6

The random model cannot answer, so each step's token is taken from a given answer, whatever the
logits. The computation and its time are the same. The real model answers by itself, greedily. One
engine answers each task with and without drafts in turn, each time with an empty cache. The ratio
is that of the time after the first token, for each round. "together" means eight free chats at
once, whose ratio is that of the whole time, with the prompts. First, the cost of a pass is measured
by its rows, relative to one row.

A random multi-token prediction head cannot predict the answer either. With --acceptance, each of
its draft tokens is the answer's with the given probability, by position in the draft.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks import harness
from benchmarks.bench.bench_peers import Worker, parser_for_models
from benchmarks.data.given_answers import give_answers
from benchmarks.data.hybrid_shapes import HYBRID_SHAPES
from benchmarks.data.random_model import kept_gguf
from benchmarks.data.shapes import SHAPES
from benchmarks.data.speculation_tasks import TASKS, Task
from benchmarks.engine_parts import runner_of
from kvboost_edge import CPUPagedEngine, GenerationResult
from kvboost_edge.backends.base import BatchLayout
from kvboost_edge.engine.spec_decode import model_drafts
from kvboost_edge.models.locate.stores import real_model
from kvboost_edge.runners.base import ForwardBatch

_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_DEPTH = 512
_MOST = 400
_WAYS = ("off", "auto")
_HEADS = {name: shape for name, shape in HYBRID_SHAPES.items() if "-head" in name}
_SHAPES = {**SHAPES, **_HEADS}
Script = dict[tuple[int, ...], list[int]]


class Bench:
    """The measurements on one engine. `script` has the answer to each prompt for a random model."""

    def __init__(
        self, engine: CPUPagedEngine, label: str, rounds: int, script: Script | None = None
    ) -> None:
        self.engine = engine
        self.label = label
        self.rounds = rounds
        self.script = script
        self.rows: list[dict[str, Any]] = []

    def costs(self) -> None:
        """Measure the cost of a pass by its rows after `_DEPTH` tokens, with logits for each row.

        Nothing else is computed meanwhile. Hybrid models are left out, because the passes have no
        recurrent state.
        """
        runner = runner_of(self.engine)
        if runner.info.kv_spec.states:
            return
        batches = {count: _batch(count, self.engine.config.block_size) for count in _ROWS}
        passes = {
            str(count): (lambda count=count: runner.forward(batches[count])) for count in _ROWS
        }
        seconds = harness.alternate(passes, rounds=max(5, 3 * self.rounds))
        one = statistics.median(seconds["1"])
        for count in _ROWS:
            self._row(
                f"pass of {count} rows, of one",
                [second / one for second in seconds[str(count)]],
                None,
            )

    def task(self, task: Task) -> None:
        prompt = self._prompt(task)
        ratios = list[float]()
        shares = list[float]()
        for number in range(self.rounds + 1):
            times = {}
            for way in _WAYS:
                self.engine.reset_cache()
                (result,) = self._ask([prompt], way)
                times[way] = _behind_first(result)
            if number:
                ratios.append(times["off"] / times["auto"])
                shares.append(result.accepted_tokens / max(1, result.drafted_tokens))
        self._row(f"{task.name}, times as fast", ratios, task.bar)
        self._row(f"{task.name}, accepted of drafted ({result.drafted_tokens})", shares, None)

    def together(self, task: Task) -> None:
        prompts = [[*self._prompt(task), 1000 + number] for number in range(8)]
        if self.script is not None:
            self.script.update(
                {tuple(prompt): self.script[tuple(self._prompt(task))] for prompt in prompts}
            )
        ratios = []
        for number in range(self.rounds + 1):
            times = {}
            for way in _WAYS:
                self.engine.reset_cache()
                results = self._ask(prompts, way)
                times[way] = max(result.total_ms for result in results)
            if number:
                ratios.append(times["off"] / times["auto"])
        self._row("eight free chats together, times as fast", ratios, 0.98)

    def _prompt(self, task: Task) -> list[int]:
        """Return the token ids of a task, after adding its answer to the script."""
        tokenizer = self.engine.tokenizer
        if self.script is None:
            messages = [{"role": "user", "content": task.question}]
            return tokenizer.encode_chat(messages)
        prompt = _words(task.question)
        self.script[tuple(prompt)] = _words(task.answer)
        return prompt

    def _ask(self, prompts: Sequence[list[int]], way: str) -> list[GenerationResult]:
        most = _MOST if self.script is None else len(self.script[tuple(prompts[0])])
        return self.engine.generate_batch(
            list(prompts),
            max_new_tokens=most,
            temperature=0.0,
            ignore_eos=self.script is not None,
            speculation=way,
        )

    def _row(self, measure: str, values: list[float], bar: float | None) -> None:
        low = min(values)
        high = max(values)
        self.rows.append(
            {
                "model": self.label,
                "measure": measure,
                "median": statistics.median(values),
                "bar": bar,
                "least": low,
                "most": high,
            }
        )
        print(
            f"{self.label}: {measure}: {statistics.median(values):.3f} ({low:.3f}-{high:.3f})",
            flush=True,
        )


def _batch(count: int, block_size: int) -> ForwardBatch:
    """Return tokens of one sequence after `_DEPTH` others, in the first blocks of the pool."""
    positions = np.arange(_DEPTH, _DEPTH + count, dtype=np.int64)
    layout = BatchLayout(
        cu_seqlens_q=np.array([0, count], np.int32),
        seq_lens=np.array([_DEPTH + count], np.int32),
        block_tables=np.arange(-(-(_DEPTH + count) // block_size), dtype=np.int32)[None],
        slot_mapping=positions,
    )
    return ForwardBatch(
        positions * 7919 % 40000, positions, layout, np.arange(count, dtype=np.int64)
    )


class Lookup:
    """llama.cpp with its prompt lookup, in a separate process."""

    def __init__(self, python: Path, model: Path, options: argparse.Namespace) -> None:
        script = Path(__file__).parents[1] / "peers" / "lookup.py"
        command = [
            str(python),
            str(script),
            str(model),
            str(options.threads),
            str(options.capacity // 4),
        ]
        self._worker = Worker("llama.cpp", command, dict(os.environ))

    def task(self, bench: Bench, task: Task) -> None:
        """Measure the speedup by llama.cpp's prompt lookup, and our speed relative to it."""
        prompt = bench._prompt(task)
        ratios = list[float]()
        beside = list[float]()
        for number in range(bench.rounds + 1):
            bench.engine.reset_cache()
            (ours,) = bench._ask([prompt], "auto")
            count = ours.generated_tokens
            theirs = {
                drafts: self._seconds(prompt, count, drafts=drafts) for drafts in (False, True)
            }
            if number:
                ratios.append(theirs[False] / theirs[True])
                beside.append(theirs[True] / (_behind_first(ours) / 1e3 / (count - 1)))
        bench._row(f"{task.name}, llama.cpp with its lookup, times as fast", ratios, None)
        bench._row(f"{task.name}, ours, times as fast as llama.cpp with its lookup", beside, None)

    def _seconds(self, prompt: list[int], count: int, *, drafts: bool) -> float:
        answer = self._worker.ask("generate", tokens=prompt, count=count, drafts=drafts)
        return float(answer["seconds"]) / (answer["count"] - 1)


def _behind_first(result: GenerationResult) -> float:
    return result.token_times_ms[-1] - result.token_times_ms[0]


_tokenizer: Any = None


def _words(text: str) -> list[int]:
    """Encode text with the real model's tokenizer. Its ids are valid in every random model."""
    return list(_tokenizer.encode(text))


def _draft(script: Script, acceptance: Sequence[float]) -> None:
    """Make the head draft tokens of the script with these probabilities, by position."""
    rng = np.random.default_rng(0)
    push = model_drafts.DraftStep.push
    place = 0

    def push_at_place(step: model_drafts.DraftStep, logits: Any, padded: Any) -> None:
        nonlocal place
        place = len(step.tokens)
        push(step, logits, padded)

    def chance(*_: Any) -> float:
        return acceptance[min(place, len(acceptance) - 1)]

    def sampler(*args: Any, **more: Any) -> Any:
        def sample(logits: Any, token_ids: Sequence[int], num_prompt: int, largest: Any) -> int:
            answer = script[tuple(token_ids[:num_prompt])]
            token = answer[min(len(token_ids) - num_prompt, len(answer) - 1)]
            return token if rng.random() < chance() else token + 1

        return sample

    model_drafts.make_sampler = sampler
    # The sampler does not know the position in the draft.
    model_drafts.DraftStep.push = push_at_place
    # The head's confidence equals the acceptance probability. Otherwise no draft would end early.
    model_drafts._probability = chance


def main() -> None:
    global _tokenizer  # noqa: PLW0603 - the patched sampler reads it
    options: argparse.ArgumentParser = parser_for_models(__doc__, _SHAPES)
    options.add_argument(
        "--acceptance", help="probabilities of accepted draft tokens of a head, by position"
    )
    options.add_argument("--draft-vocabulary", type=int, help="option of the engine, for a head")
    harness.add_threads(options)
    options.add_argument(
        "--capacity", type=int, default=16384, help="size of the KV cache in tokens"
    )
    options.add_argument(
        "--kv-cache-bits",
        type=int,
        default=16,
        choices=(16, 8, 4),
        help="bits per KV value (default: %(default)s)",
    )
    options.add_argument("--only", choices=("real", "random"), help="measure only this model")
    names = [task.name for task in TASKS]
    options.add_argument(
        "--task",
        action="append",
        choices=names,
        help="measure only this task; repeat for several; default: all, and eight chats together",
    )
    harness.add_peers_python(options)
    chosen = options.parse_args()
    tasks = [task for task in TASKS if task.name in (chosen.task or names)]
    if chosen.quick:
        chosen.shape = "tiny"
        chosen.rounds = 1
    common = {
        "num_blocks": chosen.capacity // 16,
        "kv_cache_bits": chosen.kv_cache_bits,
        "num_threads": chosen.threads,
    }
    rows: list[dict[str, Any]] = []
    with CPUPagedEngine.from_pretrained(str(real_model()), **common) as engine:
        _tokenizer = engine.tokenizer
        if chosen.only != "random":
            bench = Bench(engine, "SmolLM2-135M", chosen.rounds)
            bench.costs()
            for task in tasks:
                bench.task(task)
            if chosen.task is None:
                bench.together(TASKS[-1])
            if chosen.peers_python.exists():
                lookup = Lookup(chosen.peers_python, real_model(), chosen)
                for task in tasks:
                    lookup.task(bench, task)
            rows += bench.rows
    if chosen.only != "real":
        model = chosen.models / f"{chosen.shape}-{chosen.quant}.gguf"
        kept_gguf(model, _SHAPES[chosen.shape], chosen.quant)
        script: Script = {}
        give_answers(lambda prompt: script[tuple(prompt)])
        if chosen.acceptance:
            _draft(script, [float(chance) for chance in chosen.acceptance.split(",")])
        vocabulary = chosen.draft_vocabulary
        with CPUPagedEngine.from_pretrained(
            str(model), **common, draft_vocabulary=vocabulary
        ) as engine:
            bench = Bench(engine, f"{chosen.shape} {chosen.quant}", chosen.rounds, script)
            bench.costs()
            for task in tasks:
                bench.task(task)
            if chosen.task is None:
                bench.together(TASKS[-1])
            rows += bench.rows
    harness.report("bench_speculation", rows, options=chosen)


if __name__ == "__main__":
    main()
