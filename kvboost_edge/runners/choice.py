"""Choice of the runner for a model, with a reason. Loads no model and imports no torch.

A runner is a folder and an entry in RUNNERS. Its module `select_<name>` implements `RunnerPlan` and
is cheap to import. Its module `runner` defines `load` and is imported only if the runner is chosen.
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

# Runners in order of preference.
RUNNERS = {
    "native": "kvboost_edge.runners.native",
    "torch": "kvboost_edge.runners.torch",
    "onnx": "kvboost_edge.runners.onnx",
}


class RunnerPlan(Protocol):
    """Interface of a runner's module `select_<name>`.

    Attributes:
        WORKS_WITH: supported backends, for error messages.
        AUTO_BACKEND: backend that backend="auto" selects.
        AUTO_BACKEND_REASON: reason for that backend, or "" if the backend selection states one.
    """

    WORKS_WITH: str
    AUTO_BACKEND: str
    AUTO_BACKEND_REASON: str

    def wish(self, config: EngineConfig, model: ModelTraits) -> str:
        """Return the option or model format that only this runner supports, or ""."""
        ...

    def unsupported_reason(self, model: ModelTraits) -> str | None:
        """Return why the runner cannot run the model, or None if the config shows no reason."""
        ...

    def missing_package(self, model_config: Mapping[str, Any]) -> str | None:
        """Return "needs ..." if a package must be installed to load this model, or None."""
        ...

    def moved_keys_refusal(
        self, config: EngineConfig, model_config: Mapping[str, Any], backend: str
    ) -> str | None:
        """Return `Runner.moved_keys_refusal` for a backend, as far as the config shows."""
        ...

    def choose_weights(
        self,
        config: EngineConfig,
        model: ModelTraits,
        plan_pool: Callable[[KVSpec, int], int],
        available: int,
    ) -> tuple[str, str]:
        """Return the weight format and the reason for it.

        Both are "" for runners that keep the weights of the file.

        Args:
            config: options of the engine.
            model: the model.
            plan_pool: returns the size of the pool in bytes for a KV spec and a maximum sequence
                length.
            available: available memory in bytes.
        """
        ...


class _RunnerModule(Protocol):
    def load(self, checkpoint: Checkpoint, options: LoadOptions) -> Runner: ...


@dataclasses.dataclass(frozen=True, slots=True)
class RunnerChoice:
    """The chosen runner.

    Attributes:
        name: key in RUNNERS.
        weights: weight format, or "" if the runner keeps the weights of the file.
        reason: why the runner was chosen.
        wanted: whether it was requested or is the first in order of preference.
    """

    name: str
    weights: str
    reason: str
    wanted: bool = True


def choose_runner(config: EngineConfig, model: ModelTraits) -> RunnerChoice:
    """Return the runner that an option requires, or the first that supports the model.

    The field `weights` of the result is still empty.

    Raises:
        ConfigError: options contradict each other.
        ModelFormatError: the required runner, or every runner, rejects the model.
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
            f"{other} needs the {second} runner; leave one of them out"
        )
    passed_over: list[str] = []
    for name in wishes or RUNNERS:
        problem = plan_of(name).unsupported_reason(model)
        if problem is None and name in wishes:
            return RunnerChoice(name, "", f"{wishes[name]} requires it")
        if problem is None:
            return RunnerChoice(
                name, "", "; ".join(passed_over) or "it supports this model family", not passed_over
            )
        if name in wishes:
            raise ModelFormatError(f"{problem}; {wishes[name]} needs the {name} runner")
        passed_over.append(f"not the {name} runner: {problem}")
    raise ModelFormatError("; ".join(passed_over))


def _wish(name: str, config: EngineConfig, model: ModelTraits) -> str:
    return f"runner={name!r}" if config.runner == name else plan_of(name).wish(config, model)


def plan_of(name: str) -> RunnerPlan:
    """Return the `RunnerPlan` of a runner; raise KeyError for an unknown name."""
    return cast(RunnerPlan, importlib.import_module(f"{RUNNERS[name]}.select_{name}"))


def load_runner(name: str, checkpoint: Checkpoint, options: LoadOptions) -> Runner:
    """Load a model with a runner; raise ModelFormatError if it cannot be loaded completely."""
    module = cast(_RunnerModule, importlib.import_module(f"{RUNNERS[name]}.runner"))
    return module.load(checkpoint, options)
