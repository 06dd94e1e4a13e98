"""Cases that a benchmark measures, and the figures of their repetitions."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from kvboost_edge.errors import ConfigError

__all__ = ["Case", "CaseResult", "Sample", "cases_of", "check_bounds", "mean_and_deviation"]

_MOST_REQUESTS = 1024


class Case(NamedTuple):
    """Work to time, after `n_depth` tokens that are in the cache before.

    Attributes:
        kind: "pp" computes a prompt. "tg" generates tokens. "warm" is "pp" with few tokens.
            "restart" is the same in a new engine that reads the cache from disk. "shared" answers
            several requests that share the cached tokens.
        n_prompt: number of new prompt tokens of a request.
        n_gen: number of tokens to generate.
        n_depth: number of cached tokens.
        n_requests: number of requests at the same time.
        speculation: "off", "lookup" or "draft" if these are compared, else "".
    """

    kind: str
    n_prompt: int
    n_gen: int
    n_depth: int
    n_requests: int = 1
    speculation: str = ""

    @property
    def name(self) -> str:
        """Name in the table, in llama-bench's form, such as "pp512 @ d8192"."""
        what = {
            "pp": f"pp{self.n_prompt}",
            "tg": f"tg{self.n_gen}",
            "shared": f"shared x{self.n_requests}",
        }.get(self.kind, self.kind)
        after = f" @ d{self.n_depth}" if self.n_depth else ""
        return f"{what}{after} ({self.speculation})" if self.speculation else f"{what}{after}"

    @property
    def counted_tokens(self) -> int:
        """Number of tokens that t/s counts: the generated ones, or else the prompt's new ones."""
        return self.n_requests * (self.n_gen or self.n_prompt)

    @property
    def own_tokens(self) -> int:
        """Number of prompt tokens after the cached ones. Even generation alone needs one."""
        return max(self.n_prompt, 1)

    @property
    def max_new_tokens(self) -> int:
        """Number of tokens that a request generates. "tg" does not count the first one."""
        return self.n_gen if self.kind == "shared" else self.n_gen + 1


class Sample(NamedTuple):
    """One repetition of a case.

    Attributes:
        seconds: duration of the counted work.
        num_cached: smallest number of cached prompt tokens of the requests.
        preemptions: number of times that a request lost its blocks.
    """

    seconds: float
    num_cached: int
    preemptions: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class CaseResult:
    """The repetitions of a case.

    Attributes:
        case: the case.
        seconds: duration of each repetition.
        began: time of the first repetition, in seconds since the epoch.
    """

    case: Case
    seconds: tuple[float, ...]
    began: float

    @property
    def rates(self) -> tuple[float, ...]:
        """Tokens per second of each repetition."""
        return tuple(self.case.counted_tokens / one for one in self.seconds)


def cases_of(
    prompts: Sequence[int],
    generated: Sequence[int],
    depths: Sequence[int],
    *,
    warm: int,
    is_restarted: bool,
    shared: int,
) -> list[Case]:
    """Return the cases in the order in which they are measured.

    Args:
        prompts: lengths of the prompts; 0 leaves the case out.
        generated: numbers of tokens to generate; 0 leaves the case out.
        depths: numbers of cached tokens.
        warm: number of new tokens after cached ones; 0 leaves these cases out.
        is_restarted: whether to measure after a restart too.
        shared: number of requests over one prefix; 0 leaves the case out.

    Raises:
        ConfigError: a number is out of range, or there is nothing to measure.
    """
    check_bounds("--warm", warm, 0, None)
    check_bounds("--shared", shared, 0, _MOST_REQUESTS)
    cases: list[Case] = []
    for depth in depths:
        cases += [Case("pp", count, 0, depth) for count in prompts if count]
        cases += [Case("tg", 0, count, depth) for count in generated if count]
        if depth and warm:
            cases.append(Case("warm", warm, 0, depth))
        if depth and shared:
            cases += [Case("shared", warm, count, depth, shared) for count in generated if count]
    if warm and is_restarted:
        cases += [Case("restart", warm, 0, depth) for depth in depths if depth]
    if not cases:
        raise ConfigError(
            "there is nothing to measure: give a prompt length with -p or a number of generated "
            "tokens with -n"
        )
    return cases


def check_bounds(flag: str, value: int, low: int, high: int | None) -> None:
    """Raise ConfigError if the value of a flag is out of range."""
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"in {low}..{high}"
        raise ConfigError(f"{flag} {value} must be {bounds}")


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the sample standard deviation, which is 0 for one value."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0
