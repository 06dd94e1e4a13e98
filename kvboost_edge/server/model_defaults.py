"""Default system message and sampling parameters that a server gives the requests of a model."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvboost_edge.errors import ConfigError, RequestError
from kvboost_edge.options import nearest

if TYPE_CHECKING:
    from kvboost_edge.engine.request.sampling_defaults import SamplingDefaults

__all__ = ["NO_DEFAULTS", "ModelDefaults", "created_defaults", "read_model_defaults"]

_MAX_BYTES = 1 << 20
_PARAMETERS = (
    *("temperature", "top_p", "top_k", "min_p", "typical_p", "top_n_sigma"),
    *("dynatemp_range", "dynatemp_exponent", "xtc_probability", "xtc_threshold"),
    *("mirostat", "mirostat_tau", "mirostat_eta", "min_keep", "samplers"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "repeat_last_n"),
    *("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n"),
    *("dry_sequence_breakers", "bad_words"),
)
# Parameters of request bodies that created models may have too, by their names in the engine.
_CREATED = {"max_tokens": "max_new_tokens", "seed": "seed", "stop": "stop"}


class ModelDefaults(NamedTuple):
    """Defaults of one model.

    Attributes:
        system: system message of chats that have none, or "".
        sampling: sampling parameters by name.
    """

    system: str = ""
    sampling: Mapping[str, Any] = {}

    def over(self, model: SamplingDefaults) -> SamplingDefaults:
        """Return the model's sampling defaults with the values that are given here."""
        known = model.as_dict()
        return dataclasses.replace(
            model, **{name: value for name, value in self.sampling.items() if name in known}
        )

    def missing_in(self, body: object) -> dict[str, Any]:
        """Return the parameters that a request body has as fields, but does not set."""
        return {
            name: value
            for name, value in self.sampling.items()
            if getattr(body, name, value) is None
        }


NO_DEFAULTS = ModelDefaults()


def read_model_defaults(path: Path) -> dict[str, ModelDefaults]:
    """Read a TOML file with a table for each model, by its name.

    Raises:
        ConfigError: the file cannot be read, or a table is invalid.
    """
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigError(
                f"--model-defaults {str(path)!r} has more than {_MAX_BYTES} bytes; shorten it"
            )
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"--model-defaults {str(path)!r} cannot be read: {error.strerror}"
        ) from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--model-defaults {str(path)!r} is not valid TOML: {error}") from None
    return {name: _defaults_of(path, name, table) for name, table in tables.items()}


def _defaults_of(path: Path, name: str, table: Any) -> ModelDefaults:
    where = f"--model-defaults {str(path)!r}, {name!r}"
    if not isinstance(table, dict):
        raise ConfigError(
            f"{where} must be a table of parameters; write [{name}] above them, with the model's "
            "name in quotes if it has other characters than letters, digits, - and _"
        )
    given = dict(table)
    system = given.pop("system", "")
    if not isinstance(system, str):
        raise ConfigError(f"{where}: system={system!r} must be a string")
    if unknown := [parameter for parameter in given if parameter not in _PARAMETERS]:
        likely = nearest(unknown[0], _PARAMETERS)
        hint = f"did you mean {likely!r}? Known" if likely else "known"
        raise ConfigError(
            f"{where}: {unknown[0]!r} is not a default; {hint} are system, {', '.join(_PARAMETERS)}"
        )
    return ModelDefaults(system, _checked(where, given, {name: name for name in given}))


def created_defaults(name: str, system: str, sampling: Mapping[str, Any]) -> ModelDefaults:
    """Return the defaults of a created model.

    Args:
        name: name of the model, for messages.
        system: system message, or "".
        sampling: parameters by the names of request fields.

    Raises:
        ConfigError: a parameter is unknown, or its value is invalid.
    """
    fields = {**{one: one for one in _PARAMETERS}, **_CREATED}
    if unknown := [one for one in sampling if one not in fields]:
        raise ConfigError(
            f"the model {name!r} has a parameter {unknown[0]!r}, which is not one of "
            f"{', '.join(fields)}"
        )
    return ModelDefaults(system, _checked(f"the model {name!r}", sampling, fields))


def _checked(where: str, given: Mapping[str, Any], fields: Mapping[str, str]) -> dict[str, Any]:
    """Return parameters as the engine reads them.

    Args:
        where: beginning of error messages.
        given: values by name.
        fields: the engine's names by name.
    """
    # Slow import, not needed for --help.
    from kvboost_edge.engine.request.request import SamplingParams

    try:
        params = SamplingParams.from_options(**{fields[one]: given[one] for one in given})
    except RequestError as error:
        raise ConfigError(f"{where}: {error}") from None
    return {one: getattr(params, fields[one]) for one in given}
