"""Train the bundled demo model: a small Llama-family model that answers from documents.

    python training/train_demo_model.py --work-dir demo_train            # train, or resume
    python training/train_demo_model.py --work-dir demo_train --export kvboost_edge/assets/demo
    python training/train_demo_model.py --eval-only kvboost_edge/assets/demo

The texts are generated (demo_corpus.py). The first two layers start as an induction circuit
(demo_init.py); a few steps of repeated random tokens make it work. Then come texts of 2 to 12
facts, at first often with the facts only repeated in another order. The number of facts grows to
128 as soon as the answers are right.

Checkpoints are safetensors and JSON; a run resumes from its last one. On a busy machine set
OMP_WAIT_POLICY=PASSIVE: threads that spin while they wait made steps three times slower.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

import demo_corpus as corpus
import demo_export
import demo_init

MAX_LENGTH = 2048
MAX_FACTS = 128
ROPE_THETA = 1e6  # slow enough that content is comparable at any distance


@dataclass
class Progress:
    """State of a resumed run other than tensors."""

    step: int = 0
    max_facts: float = 12.0
    right: float = 0.0
    seconds: float = 0.0
    runs: list[str] = field(default_factory=list)


@dataclass
class Batch:
    """Token ids, and targets, weights and answer numbers of the positions that carry loss."""

    ids: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor
    answers: torch.Tensor
    facts: int


class Encoder:
    """Encoder of pieces one by one, with a cache; fragments start at pre-token boundaries."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.size = tokenizer.get_vocab_size()
        self.fragment = lru_cache(maxsize=200_000)(
            lambda text: tuple(tokenizer.encode(text, add_special_tokens=False).ids)
        )

    def pieces(self, pieces: list[corpus.Piece]) -> tuple[list[int], list[float]]:
        """Return the token ids and loss weights of a text."""
        ids: list[int] = []
        weights: list[float] = []
        for fragment, weight in pieces:
            part = self.fragment(fragment)
            ids.extend(part)
            weights.extend([weight] * len(part))
        return ids, weights


def make_batch(
    texts: list[tuple[list[int], list[float]]], facts: int, spare: float, rng: np.random.Generator
) -> Batch:
    """Pad texts to one batch; a share `spare` of the tokens outside answers gets the weight 0.1."""
    length = min(MAX_LENGTH, max(len(ids) for ids, _ in texts))
    ids = np.zeros((len(texts), length), dtype=np.int64)
    weights = np.zeros((len(texts), length), dtype=np.float32)
    filled = np.zeros((len(texts), length), dtype=bool)
    for row, (tokens, shares) in enumerate(texts):
        size = min(length, len(tokens))
        ids[row, :size] = tokens[:size]
        weights[row, :size] = shares[:size]
        filled[row, :size] = True
    inside = weights > 0
    starts = inside & ~np.pad(inside, ((0, 0), (1, 0)))[:, :-1]
    answers = np.where(inside, np.cumsum(starts.reshape(-1)).reshape(starts.shape) - 1, -1)
    extra = filled & ~inside & (rng.random(ids.shape) < spare)
    weights[extra] = 0.1
    weights[:, 0] = 0.0
    rows, columns = np.nonzero(weights)
    return Batch(
        ids=torch.from_numpy(ids),
        positions=torch.from_numpy(rows * length + columns - 1),
        targets=torch.from_numpy(ids[rows, columns]),
        weights=torch.from_numpy(weights[rows, columns]),
        answers=torch.from_numpy(answers[rows, columns]),
        facts=facts,
    )


def repeat_batch(encoder: Encoder, rng: np.random.Generator, tokens: int, step: int) -> Batch:
    """Return random tokens repeated once; the second copy carries the loss."""
    length = int(rng.integers(10, min(24 + step // 2, 200)))
    first = len(corpus.SPECIAL_TOKENS)
    texts = []
    for _ in range(max(1, tokens // (2 * length))):
        run = rng.integers(first, encoder.size, length).tolist()
        texts.append(([1, *run, *run], [0.0] * (length + 2) + [1.0] * (length - 1)))
    return make_batch(texts, 0, 0.0, rng)


def fact_batch(
    encoder: Encoder, rng: random.Random, tokens: int, facts: int, fresh: float, drill: bool
) -> Batch:
    """Return texts of about `facts` facts, `tokens` tokens in total.

    A share `fresh` of them has names that are in no pool.
    """
    questions = min(24, facts) if drill else max(3, min(12, facts))
    texts: list[tuple[list[int], list[float]]] = []
    longest = 0
    while True:
        count = max(2, round(facts * rng.uniform(0.85, 1.0)))
        style = "drill" if drill else None
        sample = corpus.make_sample(rng, count, questions, style=style, fresh_share=fresh)
        text = encoder.pieces(corpus.text_pieces(rng, sample))
        longest = max(longest, len(text[0]))
        if texts and longest * (len(texts) + 1) > tokens:
            break
        texts.append(text)
    return make_batch(
        texts, facts, 0.0 if drill else 0.05, np.random.default_rng(rng.getrandbits(32))
    )


def next_batch(encoder: Encoder, options: argparse.Namespace, progress: Progress) -> Batch:
    """Return the batch of this step; it depends only on seed, step and number of facts reached."""
    rng = random.Random(f"{options.seed} {progress.step}")
    after = progress.step - options.repeat_steps
    tokens = options.tokens if progress.max_facts >= 48 else options.tokens // 2
    if after < 0 or rng.random() < 0.04:
        return repeat_batch(
            encoder, np.random.default_rng(rng.getrandbits(32)), tokens, progress.step
        )
    low = math.log(2)
    high = math.log(progress.max_facts)
    facts = round(math.exp(low + (high - low) * rng.random() ** 0.5))
    drill = after < options.drill_steps and rng.random() < 0.6
    fresh = 0.1 if progress.step < options.steps / 2 else 0.2
    return fact_batch(encoder, rng, tokens, facts, fresh, drill)


def forward(
    body: torch.nn.Module, head: torch.nn.Linear, batch: Batch
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weighted loss, and for each answer whether all its tokens were the likeliest."""
    hidden = body(input_ids=batch.ids, use_cache=False).last_hidden_state
    logits = head(hidden.reshape(-1, hidden.shape[-1])[batch.positions]).float()
    losses = functional.cross_entropy(logits, batch.targets, reduction="none")
    loss = (losses * batch.weights).sum() / batch.weights.sum()
    with torch.no_grad():
        inside = batch.answers >= 0
        hits = (logits.argmax(-1) == batch.targets)[inside].float()
        right = torch.ones(int(batch.answers.max()) + 1)
        right.scatter_reduce_(0, batch.answers[inside], hits, "amin")
    return loss, right


def quick_accuracy(
    body: torch.nn.Module,
    head: torch.nn.Linear,
    encoder: Encoder,
    facts: int,
    answers: int,
    seed: int,
) -> float:
    """Return the share of right held-out answers, judged in one pass.

    It equals the exact match of greedy decoding.
    """
    rng = random.Random(f"{seed} quick {facts}")
    right: list[float] = []
    while len(right) < answers:
        sample = corpus.make_sample(rng, facts, 8, training=False, fresh_share=0.0)
        text = encoder.pieces(corpus.text_pieces(rng, sample, small_talk=0.0))
        batch = make_batch([text], facts, 0.0, np.random.default_rng(0))
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            right += forward(body, head, batch)[1].tolist()
    return sum(right) / len(right)


def build_model(vocabulary: int, seed: int, layers: int) -> LlamaForCausalLM:
    """Return the untrained model."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config)
    demo_init.initialise(model)
    return model


def save_checkpoint(
    folder: Path, model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, progress: Progress
) -> None:
    """Save weights, optimizer moments and progress; each file is replaced atomically."""
    tensors = {f"model.{name}": tensor for name, tensor in model.model.state_dict().items()}
    for index, parameter in enumerate(optimizer.param_groups[0]["params"]):
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer.{index}.{key}"] = value
    temporary = folder / "checkpoint.tmp"
    save_file(
        {key: value.detach().contiguous() for key, value in tensors.items()},
        temporary,
        metadata={"progress": json.dumps(asdict(progress))},
    )
    os.replace(temporary, folder / "checkpoint.safetensors")
    (folder / "progress.json").write_text(json.dumps(asdict(progress)))


def load_checkpoint(
    folder: Path, model: LlamaForCausalLM, optimizer: torch.optim.Optimizer | None
) -> Progress:
    """Restore a checkpoint if there is one."""
    path = folder / "checkpoint.safetensors"
    if not path.exists():
        return Progress()
    tensors = load_file(path)
    model.model.load_state_dict(
        {
            key.removeprefix("model."): value
            for key, value in tensors.items()
            if key.startswith("model.")
        }
    )
    if optimizer is not None:
        for index, parameter in enumerate(optimizer.param_groups[0]["params"]):
            prefix = f"optimizer.{index}."
            optimizer.state[parameter] = {
                key.removeprefix(prefix): value
                for key, value in tensors.items()
                if key.startswith(prefix)
            }
    return Progress(**json.loads((folder / "progress.json").read_text()))


def learning_rate(step: int, options: argparse.Namespace) -> float:
    """Return the learning rate: warm-up over 100 steps, then cosine down to a fortieth."""
    share = min(1.0, step / options.steps)
    return (
        float(options.lr)
        * min(1.0, (step + 1) / 100)
        * (0.025 + 0.975 * 0.5 * (1 + math.cos(math.pi * share)))
    )


def grow(progress: Progress, options: argparse.Namespace, facts: int, right: float) -> None:
    """Raise the number of facts once long texts are mostly answered, and always late in the run."""
    if facts * 2 >= progress.max_facts:
        progress.right = 0.9 * progress.right + 0.1 * right
    if progress.right > 0.8:
        progress.max_facts = min(float(MAX_FACTS), progress.max_facts * 1.04)
    late = (progress.step / options.steps - 0.5) / 0.3
    if late > 0:
        progress.max_facts = max(
            progress.max_facts, min(float(MAX_FACTS), 12 * (MAX_FACTS / 12) ** late)
        )


def train(options: argparse.Namespace) -> None:
    """Train until `--steps`, resuming from the work directory's checkpoint."""
    folder = options.work_dir
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = demo_export.load_or_train_tokenizer(folder, options.seed)
    encoder = Encoder(tokenizer)
    demo_export.check_pieces(tokenizer, encoder.pieces, options.seed)
    model = build_model(encoder.size, options.seed, options.layers)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=options.lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    progress = load_checkpoint(folder, model, optimizer)
    body = torch.compile(model.model, dynamic=True) if options.compile else model.model
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"{parameters} parameters, vocabulary {encoder.size}, from step {progress.step}", flush=True
    )
    progress.runs.append(
        f"from step {progress.step}: --tokens {options.tokens} --steps {options.steps}"
    )
    loss_sum = 0.0
    started = time.perf_counter()
    while progress.step < options.steps:
        batch = next_batch(encoder, options, progress)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress.step, options)
        with torch.autocast("cpu", torch.bfloat16, enabled=not options.fp32):
            loss, right = forward(body, model.lm_head, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss_sum += loss.item()
        if batch.facts:
            grow(progress, options, batch.facts, right.mean().item())
        progress.step += 1
        if progress.step % options.report == 0:
            now = time.perf_counter()
            progress.seconds += now - started
            report(
                body, model, encoder, options, progress, loss_sum / options.report, now - started
            )
            save_checkpoint(folder, model, optimizer, progress)
            loss_sum = 0.0
            started = time.perf_counter()


def report(
    body: torch.nn.Module,
    model: LlamaForCausalLM,
    encoder: Encoder,
    options: argparse.Namespace,
    progress: Progress,
    loss: float,
    seconds: float,
) -> None:
    """Print one line of progress, with the accuracy on held-out combinations."""
    sizes = [4, 16] + [size for size in (64, 128) if progress.max_facts >= size / 2]
    parts = (model.model, model.lm_head, encoder)
    figures = (
        " ".join(f"{size}:{quick_accuracy(*parts, size, 60, options.seed):.0%}" for size in sizes)
        if progress.step >= options.repeat_steps
        else ""
    )
    print(
        f"step {progress.step} loss {loss:.3f} {seconds / options.report:.2f} s/step facts<="
        f"{progress.max_facts:.0f} running {progress.right:.0%} held-out {figures}",
        flush=True,
    )


def main() -> None:
    """Parse the command line and train, export or evaluate."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--work-dir",
        type=Path,
        default=Path("demo_train"),
        help="directory of the tokenizer and the checkpoints (default: %(default)s)",
    )
    parser.add_argument(
        "--steps", type=int, default=2000, help="steps of the whole run (default: %(default)s)"
    )
    parser.add_argument(
        "--repeat-steps",
        type=int,
        default=60,
        help="first steps, on repeated random tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--drill-steps",
        type=int,
        default=300,
        help="next steps, where 60%% of the texts only repeat their facts (default: %(default)s)",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=6000,
        help="tokens per step, halved while texts have under 48 facts (default: %(default)s)",
    )
    parser.add_argument(
        "--layers",
        type=int,
        default=6,
        help="layers of the model, at least 2 (default: %(default)s)",
    )
    parser.add_argument(
        "--lr", type=float, default=2e-3, help="peak learning rate (default: %(default)s)"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=7,
        help="seed of weights, texts and tests (default: %(default)s)",
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=os.cpu_count() or 2,
        help="PyTorch's threads (default: the number of CPUs)",
    )
    parser.add_argument(
        "--report",
        type=int,
        default=100,
        help="steps between progress lines and checkpoints (default: %(default)s)",
    )
    parser.add_argument(
        "--compile", action="store_true", help="use torch.compile, about 10%% faster"
    )
    parser.add_argument("--fp32", action="store_true", help="train without bf16 autocast")
    parser.add_argument(
        "--export",
        type=Path,
        metavar="DIR",
        help="write the last checkpoint to DIR as a model directory, without training",
    )
    parser.add_argument(
        "--eval-only", type=Path, metavar="DIR", help="measure the accuracy of the model in DIR"
    )
    parser.add_argument(
        "--questions",
        type=int,
        default=400,
        help="held-out questions per number of facts (default: %(default)s)",
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.eval_only:
        demo_export.evaluate(options.eval_only, options.questions, options.seed)
    elif options.export:
        tokenizer = demo_export.load_or_train_tokenizer(options.work_dir, options.seed)
        model = build_model(tokenizer.get_vocab_size(), options.seed, options.layers)
        progress = load_checkpoint(options.work_dir, model, None)
        demo_export.export(options.export, model, tokenizer, asdict(progress), options)
    else:
        train(options)


if __name__ == "__main__":
    main()
