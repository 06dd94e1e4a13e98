"""Native and ONNX runner against onnxruntime-genai, on the files of genai's builder.

    python benchmarks/bench/bench_onnx.py

Needs the extra [bench]. A random model of Qwen2-0.5B's shape is written once and converted to int4
(blocks of 32, accuracy level 4) by onnxruntime-genai's builder. Both are kept in the cache
directory. Contenders are separate processes, which run in turn in each round:

    native   this engine, with the file's weights on its own kernels
    onnx     this engine with runner="onnx"
    genai    onnxruntime-genai's generator
    bare     a loop over onnxruntime alone: one buffer for past and present, greedy, nothing else

cold_ttft_ms is the time from the call to the first token of a new prompt. decode_tok_s is the
number of tokens per second after a prompt of that length, without the first token.

The builder's graph computes the logits of all prompt tokens, native only those of the last. The KV
cache of native has 16 bits, that of the others float32.

Bars: native decodes at least twice as fast as genai and needs at most 0.3 of its time to the first
token. onnx decodes at least at 0.9 of bare's speed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks import harness

CONTENDERS = ("native", "onnx", "genai", "bare")
_DEPTH = 512
_COUNT = 64
_ROUNDS = 5
_KV = "past_key_values.{}.{}"


def prompt(seed: int, length: int, vocab: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab, length).tolist()


# ---- model


def made(shape_name: str) -> Path:
    """Return the builder's output folder for a random model, which is built if it is missing."""
    from kvboost_edge.host.file_memo import cache_directory

    target = cache_directory() / "bench" / f"onnx-{shape_name}-int4"
    if not (target / "genai_config.json").is_file():
        source = target.with_name(f"onnx-{shape_name}-source")
        write_source(source, shape_name)
        options = ["-p", "int4", "-e", "cpu", "-c", str(target.with_name("builder-cache"))]
        options += ["--extra_options", "int4_block_size=32", "int4_accuracy_level=4"]
        command = [
            sys.executable,
            "-m",
            "onnxruntime_genai.models.builder",
            "-i",
            str(source),
            "-o",
            str(target),
        ]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        subprocess.run([*command, *options], check=True, env=environment, stdout=subprocess.DEVNULL)
    return target


def write_source(folder: Path, shape_name: str) -> None:
    """Write a checkpoint of random weights for transformers, with a byte tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    from benchmarks.data.shapes import SHAPES

    shape = SHAPES[shape_name]
    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.wide,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=min(shape.context, 4096),
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=alphabet[0]).save_pretrained(
        folder
    )


# ---- contenders: processes that answer {"tokens": [...], "count": n} with seconds ----


class Ours:
    """Contenders `native` and `onnx`: an engine with a pool for the prompt.

    Drafts are off, because the other contenders do not speculate.
    """

    def __init__(self, folder: Path, threads: int, runner: str) -> None:
        from kvboost_edge import CPUPagedEngine

        self.engine = CPUPagedEngine.from_pretrained(
            folder, runner=runner, num_threads=threads, num_blocks=128, speculation="off"
        )

    def run(self, tokens: list[int], count: int) -> dict[str, float]:
        self.engine.reset_cache()
        result = self.engine.generate(
            tokens, max_new_tokens=count, temperature=0.0, ignore_eos=True
        )
        times = result.token_times_ms
        return {"ttft": times[0] / 1e3, "decode": (times[-1] - times[0]) / 1e3}


class GenAI:
    """onnxruntime-genai, used as in its examples."""

    def __init__(self, folder: Path, threads: int) -> None:
        import onnxruntime_genai

        config = onnxruntime_genai.Config(str(folder))
        session = {"intra_op_num_threads": threads}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
        self.genai = onnxruntime_genai
        self.model = onnxruntime_genai.Model(config)

    def run(self, tokens: list[int], count: int) -> dict[str, float]:
        total = len(tokens) + count
        started = time.perf_counter()
        params = self.genai.GeneratorParams(self.model)
        params.set_search_options(max_length=total, min_length=total, do_sample=False)
        generator = self.genai.Generator(self.model, params)
        generator.append_tokens(tokens)
        generator.generate_next_token()
        first = time.perf_counter()
        for _ in range(count - 1):
            generator.generate_next_token()
        return {"ttft": first - started, "decode": time.perf_counter() - first}


class Bare:
    """onnxruntime alone, with the same kind of binding as the ONNX runner."""

    def __init__(self, folder: Path, threads: int) -> None:
        import onnxruntime

        fields = json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))["model"]
        decoder = fields["decoder"]
        self.vocab = fields["vocab_size"]
        self.layers = decoder["num_hidden_layers"]
        self.shape = (decoder["num_key_value_heads"], decoder["head_size"])
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        path = str(folder / decoder["filename"])
        self.session = onnxruntime.InferenceSession(
            path, options, providers=["CPUExecutionProvider"]
        )

    def run(self, tokens: list[int], count: int) -> dict[str, float]:
        started = time.perf_counter()
        heads, dim = self.shape
        capacity = len(tokens) + count
        names = [
            (_KV.format(i, kind), f"present.{i}.{kind}")
            for i in range(self.layers)
            for kind in ("key", "value")
        ]
        memory = [np.zeros((1, heads, capacity, dim), np.float32) for _ in names]
        binding = self.session.io_binding()
        for (past, present), array in zip(names, memory, strict=True):
            bind(binding.bind_input, past, array)
            bind(binding.bind_output, present, array)
        ones = np.ones((1, capacity), np.int64)
        done = 0
        times = []
        new = np.array([tokens], dtype=np.int64)
        for _ in range(count):
            done += new.shape[1]
            bind(binding.bind_input, "input_ids", new)
            bind(binding.bind_input, "attention_mask", ones[:, :done])
            logits = np.empty((1, new.shape[1], self.vocab), np.float32)
            bind(binding.bind_output, "logits", logits)
            self.session.run_with_iobinding(binding)
            new = logits[:, -1:].argmax(axis=2)
            times.append(time.perf_counter())
        return {"ttft": times[0] - started, "decode": times[-1] - times[0]}


def bind(method: Any, name: str, array: np.ndarray) -> None:
    method(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)


def serve(name: str, folder: Path, threads: int) -> None:
    """Answer requests, one JSON line each."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of the engines must not mix with the answers
    contender: Any
    if name in ("native", "onnx"):
        contender = Ours(folder, threads, name)
    else:
        contender = GenAI(folder, threads) if name == "genai" else Bare(folder, threads)
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(
            json.dumps(contender.run(request["tokens"], request["count"])), file=answers, flush=True
        )


class Contender:
    """Client of a process that runs `serve`."""

    def __init__(self, name: str, folder: Path, threads: int) -> None:
        command = [
            sys.executable,
            __file__,
            "--serve",
            name,
            "--folder",
            str(folder),
            "--threads",
            str(threads),
        ]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()

    def ask(self, tokens: list[int], count: int) -> dict[str, float]:
        assert self.process.stdin is not None
        print(json.dumps({"tokens": tokens, "count": count}), file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, float]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a contender ended with {self.process.wait()}; its message is above")
        return dict(json.loads(line))

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


def main() -> None:
    parser = harness.parser(__doc__ or "")
    parser.add_argument(
        "--shape", default=None, help='"0.5b" or "tiny" (default: 0.5b, or tiny with --quick)'
    )
    parser.add_argument("--depth", type=int, default=_DEPTH, help="length of the prompt in tokens")
    harness.add_threads(parser)
    parser.add_argument("--serve", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.folder, options.threads)
        return
    shape = options.shape or ("tiny" if options.quick else "0.5b")
    folder = made(shape)
    count, rounds = (8, 1) if options.quick else (_COUNT, _ROUNDS)
    vocab = json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))["model"][
        "vocab_size"
    ]
    contenders = {name: Contender(name, folder, options.threads) for name in CONTENDERS}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
    try:
        for number in range(rounds + 1):  # round 0 is the warm-up
            for name, contender in contenders.items():
                answer = contender.ask(prompt(number, options.depth, vocab), count)
                if number:
                    found[name].append(answer)
    finally:
        for contender in contenders.values():
            contender.close()
    rows = [row(name, answers, count) for name, answers in found.items()]
    by_name = {one["contender"]: one for one in rows}
    bars = {
        "native decode / genai (bar: at least 2)": ratio(
            by_name, "decode_tok_s", "native", "genai"
        ),
        "native cold TTFT / genai (bar: at most 0.3)": ratio(
            by_name, "cold_ttft_ms", "native", "genai"
        ),
        "onnx decode / bare (bar: at least 0.9)": ratio(by_name, "decode_tok_s", "onnx", "bare"),
    }
    for name, value in bars.items():
        print(f"{name}: {value:.2f}")
    harness.report(f"ONNX {shape} int4, depth {options.depth}", rows, options=options, bars=bars)


def row(name: str, answers: list[dict[str, float]], count: int) -> dict[str, Any]:
    decode = [(count - 1) / one["decode"] for one in answers]
    return {
        "contender": name,
        "cold_ttft_ms": statistics.median(one["ttft"] for one in answers) * 1e3,
        "decode_tok_s": statistics.median(decode),
        "slowest_tok_s": min(decode),
        "rounds": len(answers),
    }


def ratio(rows: dict[str, dict[str, Any]], key: str, ours: str, theirs: str) -> float:
    return float(rows[ours][key] / rows[theirs][key])


if __name__ == "__main__":
    main()
