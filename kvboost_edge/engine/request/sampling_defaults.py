"""Default sampling values, resolved by the same rule for all interfaces.

A value in the request comes first, then the engine's option, then the model's generation config
(generation_config.json, or `general.sampling.*` of a GGUF file), then the values in this module.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvboost_edge.config import EngineConfig
from kvboost_edge.engine.request.request import SamplingParams

__all__ = ["DEFAULT_SAMPLING", "SamplingDefaults", "sampling_defaults"]


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Default values of the sampling parameters. Temperature 0 is greedy."""

    temperature: float = 0.7
    top_p: float = 0.95
    top_k: int = 0
    min_p: float = 0.05
    repetition_penalty: float = 1.0

    def as_dict(self) -> dict[str, Any]:
        """Return the values by name."""
        return dataclasses.asdict(self)

    def values_for(self, request: object) -> dict[str, Any]:
        """Return the values that apply to a request.

        Each is the request's attribute of the same name, or the default if that attribute is None.
        """
        named = {name: getattr(request, name, None) for name in self.as_dict()}
        return {
            name: default if named[name] is None else named[name]
            for name, default in self.as_dict().items()
        }

    def fill(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with unset ones replaced by the defaults.

        If the model is greedy by default, do_sample=True samples at the temperature of
        `DEFAULT_SAMPLING`.
        """
        values = self.values_for(params)
        if params.do_sample and params.temperature is None and not values["temperature"]:
            values["temperature"] = DEFAULT_SAMPLING.temperature
        return dataclasses.replace(params, **values)

    def fill_sampled(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters, with defaults filled in if they ask for sampling.

        Greedy parameters are returned unchanged. Python calls follow this rule.
        """
        if not params.samples:
            return params
        return self.fill(dataclasses.replace(params, do_sample=True))


DEFAULT_SAMPLING = SamplingDefaults()
"""Defaults for a model whose files set no sampling values."""


def sampling_defaults(model: Mapping[str, float], config: EngineConfig) -> SamplingDefaults:
    """Return the default sampling values of an engine.

    Args:
        model: sampling values of the model's generation config, by name.
    """
    chosen = dict(model) if config.generation_config == "model" else {}
    if config.default_temperature is not None:
        chosen["temperature"] = config.default_temperature
    return SamplingDefaults(**chosen)  # type: ignore[arg-type]  # top_k is an int, checked on reading
