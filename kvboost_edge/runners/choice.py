"""Which runner a model gets, and why. Decisions only: nothing is loaded, torch is not asked.

A runner is a folder and a row of the table. Its `plan` (`RunnerPlan`) decides and is light to
import; its `runner` has `load`, and is imported for the runner that was chosen.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast

from kvboost_edge.backends.base import KVSpec
from kvboost_edge.config import EngineConfig
from kvboost_edge.errors import ConfigError, ModelFormatError
from kvboost_edge.runners.base import LoadOptions, ModelTraits, Runner

if TYPE_CHECKING:
    from kvboost_edge.models.checkpoint import Checkpoint

__all__ = ["RUNNERS", "RunnerChoice", "RunnerPlan", "choose_runner", "load_runner", "plan_of"]

# In order of preference.
RUNNERS = {
    "native": "kvboost_edge.runners.native",
    "torch": "kvboost_edge.runners.torch",
    "onnx": "kvboost_edge.runners.onnx",
}


class RunnerPlan(Protocol):
    """What the module `plan` of a runner offers.

    Attributes:
        WORKS_WITH: the backends it takes, for people.
        AUTO_BACKEND: what backend="auto" means for it, and AUTO_BACKEND_REASON why; "" where the
            choice says it.
    """

    WORKS_WITH: str
    AUTO_BACKEND: str
    AUTO_BACKEND_REASON: str

    def wish(self, config: EngineConfig, model: ModelTraits) -> str:
        """The option, or the form of the checkpoint, that only this runner serves; "" if none
        does.
        """
        ...

    def unsupported_reason(self, model: ModelTraits) -> str | None:
        """Why it cannot run the model; None when it can, as far as the config tells."""
        ...

    def missing_package(self, model_config: Mapping[str, Any]) -> str | None:
        """What "needs ..." to be installed to load this model; None where nothing is missing."""
        ...

    def moved_keys_refusal(self, model_config: Mapping[str, Any], backend: str) -> str | None:
        """What `Runner.moved_keys_refusal` will be on this backend, as far as the config tells."""
        ...

    def choose_weights(
        self,
        config: EngineConfig,
        model: ModelTraits,
        plan_pool: Callable[[KVSpec, int], int],
        available: int,
    ) -> tuple[str, str]:
        """The weight format, and why; "" where it has none of its own. `plan_pool`: gives what a
        pool for (KV spec, longest sequence) will take of the `available` memory.
        """
        ...


class _RunnerModule(Protocol):
    def load(self, checkpoint: Checkpoint, options: LoadOptions) -> Runner: ...


@dataclasses.dataclass(frozen=True, slots=True)
class RunnerChoice:
    """`weights`: the format, empty where the runner has none of its own. `wanted`: somebody asked
    for this runner, or none that is preferred to it was passed over.
    """

    name: str
    weights: str
    reason: str
    wanted: bool = True


def choose_runner(config: EngineConfig, model: ModelTraits) -> RunnerChoice:
    """The runner, its `weights` still open: the one that an option asks for, else the first that
    can run the model.

    Raises ConfigError for options that contradict each other, ModelFormatError where only one
    runner could do what is asked for and does not know the model.
    """
    wishes = {name: wish for name in RUNNERS if (wish := _wish(name, config, model))}
    if model.is_gguf and "torch" in wishes:
        raise ConfigError(
            f"{wishes['torch']}: a GGUF file runs on the CPU only, in the native runner; leave the "
            "option out, or give the model as safetensors"
        )
    if len(wishes) > 1:
        (first, wish), (second, other) = list(wishes.items())[:2]
        raise ConfigError(
            f"{wish} needs the {first} runner, which works with {plan_of(first).WORKS_WITH}, and "
            f"{other} asks for the {second} runner; leave one of them out"
        )
    passed_over: list[str] = []
    for name in wishes or RUNNERS:
        problem = plan_of(name).unsupported_reason(model)
        if problem is None and name in wishes:
            return RunnerChoice(name, "", f"{wishes[name]} was asked for")
        if problem is None:
            return RunnerChoice(
                name, "", "; ".join(passed_over) or "the family is known to it", not passed_over
            )
        if name in wishes:
            raise ModelFormatError(f"{problem}; {wishes[name]} needs the {name} runner")
        passed_over.append(f"not the {name} runner: {problem}")
    raise ModelFormatError("; ".join(passed_over))


def _wish(name: str, config: EngineConfig, model: ModelTraits) -> str:
    return f"runner={name!r}" if config.runner == name else plan_of(name).wish(config, model)


def plan_of(name: str) -> RunnerPlan:
    """How a runner decides; KeyError for a name that is not in the table."""
    return cast(RunnerPlan, importlib.import_module(f"{RUNNERS[name]}.select_{name}"))


def load_runner(name: str, checkpoint: Checkpoint, options: LoadOptions) -> Runner:
    """Load a model into a runner. Raises ModelFormatError for what cannot be loaded completely."""
    module = cast(_RunnerModule, importlib.import_module(f"{RUNNERS[name]}.runner"))
    return module.load(checkpoint, options)
