"""`make quality`: quality cost of non-prefix KV reuse (mode="chunk_kv_reuse").

A round warms texts exactly, then asks prompts that contain them in another context. For each
prompt, the full computation answers greedily with 24 tokens. Each recompute rule then computes the
same prompt and the same answer, token by token.

KL(full || rule) in nats and the agreement of the top token cover all logits of the answer's first
16 tokens. A rule is "right" if its own greedy answer contains what was asked for. "other order" is
a full computation of the same documents in another order, which shows the effect of reordering
alone.

Two shares of the documents' tokens are reported. "found" tokens were reused, exactly (possible at
the start of a first document) or at another position. "recomputed" tokens were recomputed.

The rules and texts were developed with other seeds than those of the reported figures.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks.data import reuse_prompts
from benchmarks.data.real_model import is_whole
from benchmarks.data.reuse_prompts import Asked, Round
from benchmarks.engine_parts import logits_with
from benchmarks.harness import parser, report
from kvboost_edge import CPUPagedEngine
from kvboost_edge.config import RecomputeStrategy
from kvboost_edge.models.locate.stores import real_model
from kvboost_edge.reuse.recompute import Repair

__all__ = ["RULES", "Answered", "ask_round", "row_of"]

NUM_COMPARED = 16
NUM_ANSWERED = 24
RULES = {
    "none": Repair(strategy=RecomputeStrategy.NONE),
    "blocks": Repair(strategy=RecomputeStrategy.CACHEBLEND, overlap=0, ratio=0.15),
    "selective": Repair(strategy=RecomputeStrategy.SELECTIVE, overlap=16),
    "overlap 8": Repair(strategy=RecomputeStrategy.SELECTIVE, overlap=8),
    "default": Repair(),
    "query": Repair(strategy=RecomputeStrategy.QUERY),
}
OTHER_ORDER = "full, other order"
_EXACT = "exact"  # cache salt of full computations, which keeps them out of reuse
Floats = npt.NDArray[np.float32]


class Series(NamedTuple):
    """Rounds of one kind, with the rules to try for each way of warming."""

    case: str
    make: Callable[[CPUPagedEngine, str, int], Round]
    rules: dict[str, tuple[str, ...]]
    rounds: int
    model: str = ""
    kv_bits: int = 16


DEMO = "kvboost-edge/demo"
_BOTH = ("none", "default")
_ALL = ("none", "selective", "blocks", "default", "query")
SERIES = (
    Series("bundled, re-ordered", reuse_prompts.facts_moved, {"one prompt": _BOTH}, 8, DEMO),
    Series(
        "bundled, cut",
        reuse_prompts.facts_cut,
        {"facts": ("none", "overlap 8", *_ALL[1:])},
        25,
        DEMO,
    ),
    Series(
        "bundled, re-ordered, KV 8", reuse_prompts.facts_moved, {"one prompt": _BOTH}, 8, DEMO, 8
    ),
    Series(
        "bundled, cut, KV 8",
        reuse_prompts.facts_cut,
        {"facts": ("none", "overlap 8", "default")},
        25,
        DEMO,
        8,
    ),
    Series("passages", reuse_prompts.passages, {"like passages": _ALL}, 16),
    Series(
        "passages, other harvests",
        reuse_prompts.passages_unjudged,
        {"one prompt": _BOTH, "prose": _BOTH, "descriptions": _BOTH},
        4,
    ),
    Series(
        "passages, KV 8", reuse_prompts.passages_unjudged, {"like passages": _BOTH}, 4, kv_bits=8
    ),
    Series("own documents", reuse_prompts.docs, {"prose": _BOTH, "one prompt": _BOTH}, 4),
    Series("agents", reuse_prompts.agents, {"one prompt": _BOTH}, 6),
    Series("chats", reuse_prompts.chats, {"one prompt": _BOTH}, 6),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Answered:
    """Comparison of one rule with the full computation, for one prompt.

    Attributes:
        harvest: Way in which the texts were warmed.
        rule: Name of the recompute rule.
        kl: KL divergence of each compared token.
        same: Whether the top token is equal, for each compared token.
        found: Share of the documents' tokens that were reused.
        recomputed: Share of the documents' tokens that were recomputed.
        right: Whether the rule's answer is right, or None if it is not judged.
        full_right: Whether the full computation's answer is right, or None.
    """

    harvest: str
    rule: str
    kl: list[float]
    same: list[bool]
    found: float
    recomputed: float
    right: bool | None
    full_right: bool | None


def ask_round(
    engine: CPUPagedEngine, made: Round, rules: Mapping[str, Sequence[str]]
) -> Iterator[Answered]:
    """Warm the texts of a round, ask its prompts, and yield the comparisons.

    For each prompt, the other order is computed first, if there is one, then the rules of each way
    of warming.
    """
    engine.reset_cache()
    for harvest in rules:
        for prompt in made.harvests[harvest]:
            engine.generate(prompt, max_new_tokens=0, cache_salt=harvest)
    for asked in made.asked:
        result = engine.generate(asked.prompt, max_new_tokens=NUM_ANSWERED, cache_salt=_EXACT)
        answer = list(result.output_token_ids)
        text = result.output_text
        full = _logits(engine, asked.prompt + answer[:-1], len(answer))[0]
        if asked.other:
            rows, counts = _logits(engine, asked.other + answer[:-1], len(answer))
            own = text
            if asked.gold and not _agree(rows, answer):
                own = engine.generate(
                    asked.other, max_new_tokens=NUM_ANSWERED, cache_salt=_EXACT
                ).output_text
            yield _answered(("", OTHER_ORDER), asked, full, rows, (0, 0, 0), text, own)
        for harvest, rule in ((harvest, rule) for harvest, some in rules.items() for rule in some):
            rows, counts = _logits(
                engine, asked.prompt + answer[:-1], len(answer), harvest, RULES[rule]
            )
            own = text
            if asked.gold and not _agree(rows, answer):
                own = _generate(engine, asked.prompt, harvest, RULES[rule])
            yield _answered((harvest, rule), asked, full, rows, counts, text, own)


def _logits(
    engine: CPUPagedEngine,
    tokens: list[int],
    count: int,
    salt: str = _EXACT,
    repair: Repair | None = None,
) -> tuple[Floats, tuple[int, int, int]]:
    """Return the logits of the last tokens, and how much of the prompt was cached.

    Returns:
        Logits [count, vocab], and the number of tokens that were cached exactly, reused at another
            position, and recomputed.
    """
    rows, result = logits_with(engine, tokens, len(tokens) - count, salt, repair)
    return np.concatenate(rows), (
        result.exact_cached_tokens,
        result.reused_span_tokens,
        result.recomputed_tokens,
    )


def _generate(engine: CPUPagedEngine, prompt: list[int], salt: str, repair: Repair) -> str:
    return engine.generate(
        prompt,
        max_new_tokens=NUM_ANSWERED,
        mode="chunk_kv_reuse",
        cache_salt=salt,
        recompute_strategy=repair.strategy,
        recompute_overlap=repair.overlap,
        recompute_ratio=repair.ratio,
    ).output_text


def _agree(rows: Floats, answer: list[int]) -> bool:
    """Return whether greedy decoding with these logits gives this answer."""
    return rows.argmax(axis=1).tolist() == answer


def _answered(
    name: tuple[str, str],
    asked: Asked,
    full: Floats,
    rows: Floats,
    counts: tuple[int, int, int],
    full_text: str,
    text: str,
) -> Answered:
    first, second = (_log_softmax(each[:NUM_COMPARED]) for each in (full, rows))
    kl = np.maximum(0.0, (np.exp(first) * (first - second)).sum(axis=1))
    same = first.argmax(axis=1) == second.argmax(axis=1)
    served, shared, recomputed = counts
    right, full_right = (
        all(gold in each for gold in asked.gold) if asked.gold else None
        for each in (text, full_text)
    )
    found = (max(0, served - asked.before) + shared + recomputed) / asked.documents
    return Answered(
        *name, kl.tolist(), same.tolist(), found, recomputed / asked.documents, right, full_right
    )


def _log_softmax(rows: Floats) -> npt.NDArray[np.float64]:
    wide = rows.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return np.asarray(wide, np.float64)


def row_of(case: str, harvest: str, rule: str, all_answered: Sequence[Answered]) -> dict[str, Any]:
    """Return means over all compared tokens and accuracies over the judged prompts.

    The 95% intervals of KL and of the accuracy relative to the full computation are bootstrapped
    over prompts. Those of accuracies are Wilson intervals.
    """
    judged = [one for one in all_answered if one.right is not None]
    right = sum(bool(one.right) for one in judged)
    full_right = sum(bool(one.full_right) for one in judged)
    tokens = sum(len(one.kl) for one in all_answered)
    return {
        "case": case,
        "harvest": harvest,
        "rule": rule,
        "n": len(all_answered),
        "found": _mean([one.found for one in all_answered]),
        "recomputed": _mean([one.recomputed for one in all_answered]),
        "KL": _mean_kl(all_answered),
        "KL 95%": _drawn(all_answered, _mean_kl),
        "same top": sum(sum(one.same) for one in all_answered) / tokens,
        "judged": len(judged),
        "right": right / len(judged) if judged else None,
        "right 95%": wilson(right, len(judged)),
        "full right": full_right / len(judged) if judged else None,
        "of full": right / full_right if full_right else None,
        "of full 95%": _drawn(judged, _share_of_full) if full_right else None,
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _mean_kl(some: Sequence[Answered]) -> float:
    return _mean([kl for one in some for kl in one.kl])


def _share_of_full(some: Sequence[Answered]) -> float:
    full = sum(bool(one.full_right) for one in some)
    return sum(bool(one.right) for one in some) / full if full else 1.0


def _drawn(
    some: Sequence[Answered], figure: Callable[[Sequence[Answered]], float]
) -> list[float] | None:
    """Return the bootstrap 95% interval of a figure, or None for fewer than two prompts."""
    if len(some) < 2:
        return None
    rng = random.Random(0)
    values = sorted(figure(rng.choices(some, k=len(some))) for _ in range(1000))
    return [values[24], values[974]]


def wilson(right: int, total: int) -> tuple[float, float] | None:
    """Return the Wilson 95% interval of a share, or None without samples."""
    if not total:
        return None
    z = 1.959964
    share = right / total
    middle = share + z * z / (2 * total)
    half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total**2))
    scale = 1 + z * z / total
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


class Kept:
    """File of completed rounds, from which an interrupted run continues.

    The file is valid for one version of the code. Delete it after a change.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.rounds: dict[tuple[str, int], list[Answered]] = {}
        if path is not None and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                case, number, found = json.loads(line)
                self.rounds[case, number] = [Answered(**one) for one in found]

    def keep(self, case: str, number: int, found: list[Answered]) -> None:
        self.rounds[case, number] = found
        if self._path is not None:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(
                    json.dumps([case, number, [dataclasses.asdict(one) for one in found]]) + "\n"
                )

    def rows(self, series: Sequence[Series]) -> list[dict[str, Any]]:
        found = []
        for one in series:
            everything = [
                each for (case, _), some in self.rounds.items() if case == one.case for each in some
            ]
            for name in dict.fromkeys((each.harvest, each.rule) for each in everything):
                chosen = [each for each in everything if (each.harvest, each.rule) == name]
                found.append(row_of(one.case, *name, chosen))
        return found


def _run(series: Series, seed: str, kept: Kept, until: float) -> None:
    numbers = [
        number for number in range(series.rounds) if (series.case, number) not in kept.rounds
    ]
    if not numbers or time.monotonic() > until:
        return
    model = series.model or str(real_model())
    with CPUPagedEngine.from_pretrained(
        model, num_blocks=1024, kv_cache_bits=series.kv_bits
    ) as engine:
        for number in numbers:
            if time.monotonic() > until:
                return
            kept.keep(
                series.case,
                number,
                list(ask_round(engine, series.make(engine, seed, number), series.rules)),
            )
        for row in kept.rows([series]):
            print(json.dumps(row), flush=True)


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument(
        "--only", nargs="*", default=[], help="prefixes of the cases to run (default: all)"
    )
    options.add_argument(
        "--seed", default="reported", help="seed of the texts; use others for development only"
    )
    options.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        help="time after which no round starts (default: no limit)",
    )
    options.add_argument(
        "--partial", type=Path, help="file of completed rounds, to continue an interrupted run"
    )
    given = options.parse_args()
    if not is_whole(real_model()):
        raise SystemExit(f"{real_model()} is missing; run `make real-model`")
    series = [one for one in SERIES if not given.only or one.case.startswith(tuple(given.only))]
    if given.quick:
        series = [one._replace(rounds=1) for one in series]
    kept = Kept(given.partial)
    until = time.monotonic() + 60 * given.minutes
    for one in series:
        _run(one, given.seed, kept, until)
    rows = kept.rows(series)
    shown = [{name: _shown(value) for name, value in row.items()} for row in rows]
    report("quality-reuse", rows, options=given, shown=shown, model=real_model().name)


def _shown(value: Any) -> Any:
    if isinstance(value, list):
        return "-".join(f"{end:.3g}" for end in value)
    return value


if __name__ == "__main__":
    main()
