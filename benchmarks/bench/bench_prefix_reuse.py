"""Prefix reuse of this engine (torch runner, CPU backend) against transformers' DynamicCache.

The model is random in Qwen2-0.5B's shape, in bf16 and fp32. Each contender is a separate process.
In each round they run in turn and measure the time to the first token of a cold prompt (prefix +
suffix), the same with a cached prefix, and the time per decoded token at that depth. Finally, they
measure the memory that 8 requests with a shared prefix add. Both get the same seeded prompts and
report their tokens, which must be equal in fp32.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks import harness
from kvboost_edge.host.memory import process_peak, process_rss

CONTENDERS = ("kvboost_edge", "transformers")
NUM_SHARING = 8


@dataclasses.dataclass(frozen=True)
class Size:
    """Shape of the model, and lengths in tokens."""

    config: dict[str, int]
    prefix: int
    suffix: int
    decode: int
    rounds: int


FULL = Size(
    config={
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
    },
    prefix=2048,
    suffix=64,
    decode=32,
    rounds=5,
)
QUICK = Size(
    config={
        "vocab_size": 1024,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    },
    prefix=256,
    suffix=16,
    decode=8,
    rounds=2,
)


def build_model(size: Size, dtype: str) -> Any:
    """Return the seeded random model, with tied embeddings as in Qwen2-0.5B."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    torch.manual_seed(0)
    config = Qwen2Config(
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, **size.config
    )
    return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()


def prompt(size: Size, number: int, length: int) -> list[int]:
    """Return the token ids of prompt `number`, which are the same for both contenders."""
    return np.random.default_rng(number).integers(0, size.config["vocab_size"], length).tolist()


class Contender(Protocol):
    """Interface of a contender in the worker process. Timings return (seconds, tokens)."""

    def cold(self, token_ids: list[int]) -> tuple[float, list[int]]: ...
    def hold_prefix(self, token_ids: list[int]) -> None: ...
    def warm(self, prefix: list[int], suffix: list[int]) -> tuple[float, list[int]]: ...
    def decode(
        self, prefix: list[int], suffix: list[int], num_tokens: int
    ) -> tuple[float, list[int]]: ...
    def share(self, prefix: list[int], suffixes: Sequence[list[int]], num_tokens: int) -> None: ...
    def close(self) -> None: ...


class OurEngine:
    """CPUPagedEngine with a pool just large enough for the prefix and eight readers."""

    def __init__(self, size: Size, dtype: str) -> None:
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast

        from kvboost_edge import CPUPagedEngine

        blocks = (size.prefix + (NUM_SHARING + 2) * (size.suffix + size.decode)) // 16 + 16
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
        )
        self.engine = CPUPagedEngine(
            build_model(size, dtype), tokenizer, num_blocks=blocks, backend="cpu", strict=False
        )

    def _generate(self, token_ids: list[int], num_tokens: int) -> Any:
        return self.engine.generate(
            token_ids, max_new_tokens=num_tokens, temperature=0.0, ignore_eos=True
        )

    def cold(self, token_ids: list[int]) -> tuple[float, list[int]]:
        self.engine.reset_cache()
        started = time.perf_counter()
        result = self._generate(token_ids, 1)
        seconds = time.perf_counter() - started
        assert result.cached_tokens == 0
        return seconds, list(result.output_token_ids)

    def hold_prefix(self, token_ids: list[int]) -> None:
        self.engine.reset_cache()
        self._generate(token_ids, 1)

    def warm(self, prefix: list[int], suffix: list[int]) -> tuple[float, list[int]]:
        started = time.perf_counter()
        result = self._generate(prefix + suffix, 1)
        seconds = time.perf_counter() - started
        assert result.cached_tokens == len(prefix), result.cached_tokens
        return seconds, list(result.output_token_ids)

    def decode(
        self, prefix: list[int], suffix: list[int], num_tokens: int
    ) -> tuple[float, list[int]]:
        result = self._generate(prefix + suffix, num_tokens + 1)
        return float(np.median(np.diff(result.token_times_ms))) / 1000, list(
            result.output_token_ids
        )

    def share(self, prefix: list[int], suffixes: Sequence[list[int]], num_tokens: int) -> None:
        options = {"max_new_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True}
        self.engine.generate_batch([prefix + suffix for suffix in suffixes], **options)

    def close(self) -> None:
        self.engine.close()


class Transformers:
    """The same model in transformers.

    Its DynamicCache is cropped back to the prefix after each answer with a cached prefix.
    """

    def __init__(self, size: Size, dtype: str) -> None:
        from transformers import DynamicCache

        self.model = build_model(size, dtype)
        self.new_cache = DynamicCache
        self.cache = DynamicCache()

    def _next(self, rows: list[list[int]], cache: Any) -> list[int]:
        import torch

        with torch.inference_mode():
            out = self.model(
                torch.tensor(rows), past_key_values=cache, use_cache=True, logits_to_keep=1
            )
            return list(out.logits[:, -1].argmax(-1).tolist())

    def cold(self, token_ids: list[int]) -> tuple[float, list[int]]:
        started = time.perf_counter()
        tokens = self._next([token_ids], self.new_cache())
        return time.perf_counter() - started, tokens

    def hold_prefix(self, token_ids: list[int]) -> None:
        self.cache = self.new_cache()
        self._next([token_ids], self.cache)

    def warm(self, prefix: list[int], suffix: list[int]) -> tuple[float, list[int]]:
        started = time.perf_counter()
        tokens = self._next([suffix], self.cache)
        seconds = time.perf_counter() - started
        self.cache.crop(
            len(prefix) - self.cache.get_seq_length()
        )  # a negative number removes tokens
        return seconds, tokens

    def decode(
        self, prefix: list[int], suffix: list[int], num_tokens: int
    ) -> tuple[float, list[int]]:
        tokens = self._next([suffix], self.cache)
        times = []
        for _ in range(num_tokens):
            started = time.perf_counter()
            tokens += self._next([tokens[-1:]], self.cache)
            times.append(time.perf_counter() - started)
        self.cache.crop(
            len(prefix) - self.cache.get_seq_length()
        )  # a negative number removes tokens
        return statistics.median(times), tokens

    def share(self, prefix: list[int], suffixes: Sequence[list[int]], num_tokens: int) -> None:
        self.cache.batch_repeat_interleave(len(suffixes))
        rows = list(suffixes)
        for _ in range(num_tokens):
            rows = [[token] for token in self._next(rows, self.cache)]

    def close(self) -> None:
        """Do nothing, because there are no background threads."""


def work(contender: Contender, size: Size) -> None:
    """Answer JSON lines of standard input, each [measurement, round]."""
    prefix = prompt(size, 0, size.prefix)
    for line in sys.stdin:
        measurement, number = json.loads(line)
        suffix = prompt(size, 1000 + number, size.suffix)
        answer: dict[str, Any] = {}
        if measurement == "cold":
            answer["seconds"], answer["tokens"] = contender.cold(
                prompt(size, 500 + number, size.prefix + size.suffix)
            )
        elif measurement == "hold":
            contender.hold_prefix(prefix)
        elif measurement == "warm":
            answer["seconds"], answer["tokens"] = contender.warm(prefix, suffix)
        elif measurement == "decode":
            answer["seconds"], answer["tokens"] = contender.decode(prefix, suffix, size.decode)
        else:
            before = process_rss()
            contender.share(
                prefix,
                [prompt(size, 2000 + i, size.suffix) for i in range(NUM_SHARING)],
                size.decode,
            )
            answer = {"added_mb": (process_rss() - before) / 1e6, "peak_mb": process_peak() / 1e6}
        print(json.dumps(answer), flush=True)


class Worker:
    """Client of a contender's process."""

    def __init__(self, contender: str, dtype: str, quick: bool) -> None:
        command = [
            sys.executable,
            __file__,
            "--contender",
            contender,
            "--dtype",
            dtype,
            *(["--quick"] if quick else []),
        ]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, measurement: str, number: int = 0) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([measurement, number]) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the worker ended with {self.process.wait()} during {measurement}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self.process.communicate()


def compare(dtype: str, size: Size, quick: bool) -> list[dict[str, Any]]:
    """Return one row per contender.

    It has medians in milliseconds, memory in MB, and the ratio to transformers.
    """
    workers = {name: Worker(name, dtype, quick) for name in CONTENDERS}
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in CONTENDERS}
    equal = True
    for measurement in ("cold", "warm", "decode"):
        if measurement == "warm":
            for worker in workers.values():
                worker.ask("hold")
        for number in range(size.rounds + 1):  # round 0 is the warm-up
            shift = {"cold": 0, "warm": 100, "decode": 200}[measurement]
            answers = {
                name: worker.ask(measurement, shift + number) for name, worker in workers.items()
            }
            first, second = (answers[name]["tokens"] for name in CONTENDERS)
            equal = equal and first == second
            for name in CONTENDERS:
                if number:
                    seconds[name].setdefault(measurement, []).append(answers[name]["seconds"])
    memory = {name: worker.ask("share") for name, worker in workers.items()}
    for worker in workers.values():
        worker.close()
    if dtype == "float32" and not equal:
        raise RuntimeError("the two contenders generated different tokens in float32")
    medians = {
        name: {m: statistics.median(s) for m, s in by.items()} for name, by in seconds.items()
    }
    rival = medians[CONTENDERS[1]]
    return [
        {
            "dtype": dtype,
            "contender": name,
            **{f"{m}_ms": medians[name][m] * 1000 for m in rival},
            **{f"{m}_ratio": medians[name][m] / rival[m] for m in rival},
            "tokens_equal": "yes" if equal else "no",
            f"added_by_{NUM_SHARING}_mb": memory[name]["added_mb"],
            "peak_rss_mb": memory[name]["peak_mb"],
        }
        for name in CONTENDERS
    ]


def main() -> None:
    """Compare both dtypes, or (with --contender) run as one contender's process."""
    parser: argparse.ArgumentParser = harness.parser(__doc__ or "")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), help="measure only this dtype (default: both)"
    )
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    size = QUICK if options.quick else FULL
    if options.contender:
        made: Contender = (OurEngine if options.contender == CONTENDERS[0] else Transformers)(
            size, options.dtype
        )
        work(made, size)
        made.close()
        return
    dtypes = [options.dtype] if options.dtype else ["bfloat16", "float32"]
    rows = [row for dtype in dtypes for row in compare(dtype, size, options.quick)]
    harness.report("bench_prefix_reuse", rows, options=options, shape=dataclasses.asdict(size))


if __name__ == "__main__":
    main()
