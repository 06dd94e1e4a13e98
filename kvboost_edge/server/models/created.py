"""Models that clients create from others, with a system message, parameters and a template."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvboost_edge.errors import ConfigError, ModelFormatError, RequestError
from kvboost_edge.models.locate.managed import ManagedModel
from kvboost_edge.server.model_defaults import created_defaults
from kvboost_edge.text.chat_template import ChatTemplate

__all__ = ["ModelOverrides", "created_from"]

# Parts of Go templates that Jinja rejects: fields, variables, and statements in double braces.
_GO = re.compile(r"\{\{-?\s*(?:[.$]|(?:if|range|with|else|end|template|define|block)\b)")
_SAID = "a message of a user"


class ModelOverrides(NamedTuple):
    """Values that a created model overrides. None keeps the value of its source.

    Attributes:
        system: system message.
        sampling: sampling parameters by the names of request fields. A value of None removes the
            parameter.
        context: maximum number of tokens of a request.
        template: chat template in Jinja.
        license: text of the licence.
    """

    system: str | None = None
    sampling: Mapping[str, Any] = {}
    context: int | None = None
    template: str | None = None
    license: str | None = None


def created_from(base: ManagedModel, name: str, overrides: ModelOverrides) -> ManagedModel:
    """Return the record of a model with the files of `base`.

    Rendering its template takes a while, so run this in a worker thread.

    Raises:
        ConfigError: a parameter or the template is refused.
    """
    sampling = {**base.sampling, **overrides.sampling}
    model = dataclasses.replace(
        base,
        name=name,
        created=time.time(),
        system=base.system if overrides.system is None else overrides.system,
        sampling={one: value for one, value in sampling.items() if value is not None},
        context=overrides.context or base.context,
        template=base.template if overrides.template is None else overrides.template,
        license=base.license if overrides.license is None else overrides.license,
    )
    created_defaults(name, model.system, model.sampling)
    if overrides.template:
        _check_template(name, overrides.template)
    return model


def _check_template(name: str, source: str) -> None:
    """Raise ConfigError unless the template writes a user's message within its limits."""
    try:
        template = ChatTemplate(source, model_name=name, variables={})
        text = template.render([{"role": "user", "content": _SAID}])
    except (ModelFormatError, RequestError) as error:
        if _GO.search(source):
            raise ConfigError(
                "the template is a Go template, as Ollama's models have, and only Jinja is "
                "supported; leave the template out to use that of the model's files, or give the "
                "chat_template of the model's tokenizer_config.json"
            ) from error
        raise ConfigError(f"the template cannot be used: {error}") from error
    if _SAID not in text:
        raise ConfigError(
            "the template does not write a user's message; write the content of each of the "
            "`messages`"
        )
