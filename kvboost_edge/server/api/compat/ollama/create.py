"""Body of /api/create, and its conversion to and from a stored model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi.exceptions import RequestValidationError
from pydantic import Field, ValidationError

from kvboost_edge.models.locate.managed import ManagedModel
from kvboost_edge.server.api.compat.ollama.modelfile import fields_of
from kvboost_edge.server.api.compat.ollama.schemas import ModelNameFields, Options
from kvboost_edge.server.api.schemas.shared import BoundedText, ModelName
from kvboost_edge.server.api.schemas.strict import bad_field
from kvboost_edge.server.api.schemas.unsupported_fields import UnsupportedField
from kvboost_edge.server.api_errors import as_api_error
from kvboost_edge.server.models.created import ModelOverrides

__all__ = ["OllamaCreate", "modelfile_fields", "overrides_of", "parameters_of"]

_WEIGHTS = UnsupportedField(
    "a created model shares the weights of its source; pull a file in another format", ("",)
)
_TEMPLATE = UnsupportedField("the chat template says how prompts and answers are written", ("",))
_NO_DRAFT = UnsupportedField("a draft model is given to the server, with --draft-model", ({}, ""))
_UNSUPPORTED = {
    "files": UnsupportedField("files cannot be uploaded; pull a model, and name it in from", ({},)),
    "adapters": UnsupportedField("LoRA adapters are not supported", ({},)),
    "quantize": _WEIGHTS,
    "quantization": _WEIGHTS,
    "messages": UnsupportedField("send these messages in each request", ([],)),
    "path": UnsupportedField("paths of the server are not read; send the text as modelfile", ("",)),
    "renderer": _TEMPLATE,
    "parser": _TEMPLATE,
    "capabilities": UnsupportedField("they follow from the chat template", ([],)),
    "info": UnsupportedField("they follow from the model's files", ({},)),
    "requires": UnsupportedField(
        "this server does not compare versions of Ollama; leave it out", ("",)
    ),
    "remote_host": UnsupportedField("all models run on this server", ("",)),
    "draft_files": _NO_DRAFT,
    "draft_quantize": _NO_DRAFT,
}
_NAMES = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
"""Names of request fields by Ollama's names, where they differ."""


class OllamaCreate(ModelNameFields):
    """Body of /api/create: the fields of the new model, or a `modelfile` with them."""

    unsupported = _UNSUPPORTED

    source: ModelName | None = Field(
        None,
        alias="from",
        description="Model of this server whose files the new model shares.",
    )
    parameters: Options | None = Field(
        None, description="Sampling parameters for requests that set none."
    )
    system: BoundedText | None = Field(None, description="System message for chats that have none.")
    template: BoundedText | None = Field(None, description="Chat template in Jinja.")
    license: BoundedText | Annotated[list[BoundedText], Field(max_length=100)] | None = Field(
        None, description="Text of the licence, or a list of texts."
    )
    modelfile: BoundedText | None = Field(
        None,
        description="Text with FROM, PARAMETER, SYSTEM, TEMPLATE and LICENSE lines, as older "
        "clients send it.",
    )
    stream: bool | None = Field(
        None, description="Send the progress as a stream of JSON lines; true by default."
    )

    def whole(self) -> OllamaCreate:
        """Return the body with the fields of its Modelfile.

        Raises:
            ApiError: the Modelfile is invalid, or a field is given twice or is missing (400).
        """
        if self.modelfile is None:
            if self.source is None:
                raise bad_field("from", "from is missing; name the model to start from")
            return self
        twice = [
            name
            for name, value in (
                ("from", self.source),
                ("parameters", self.parameters),
                ("system", self.system),
                ("template", self.template),
                ("license", self.license),
            )
            if value is not None
        ]
        if twice:
            raise bad_field(
                "modelfile", f"modelfile and {twice[0]} are both given; give only one of them"
            )
        try:
            return OllamaCreate.model_validate({"model": self.given, **fields_of(self.modelfile)})
        except ValidationError as error:
            problems = [
                {**problem, "loc": ("body", "modelfile", *problem["loc"])}
                for problem in error.errors(include_url=False)
            ]
            raise as_api_error(RequestValidationError(problems)) from error


def overrides_of(body: OllamaCreate) -> ModelOverrides:
    """Convert a body without a Modelfile to the values that the new model overrides."""
    given = body.parameters or Options()
    sampling = {
        _NAMES.get(name, name): value
        for name, value in given
        if value is not None and name != "num_ctx"
    }
    if sampling.get("max_tokens", 0) < 0:
        sampling["max_tokens"] = None  # the answer may fill the context
    if (seed := sampling.get("seed")) is not None:
        sampling["seed"] = None if seed == -1 else seed % 2**64
    license = body.license
    return ModelOverrides(
        system=body.system,
        sampling=sampling,
        context=given.num_ctx,
        template=body.template,
        license="\n".join(license) if isinstance(license, list) else license,
    )


def parameters_of(model: ManagedModel) -> dict[str, Any]:
    """Return the parameters of a created model under Ollama's names."""
    ours = {value: name for name, value in _NAMES.items()}
    found = {ours.get(name, name): value for name, value in model.sampling.items()}
    return found if model.context is None else {**found, "num_ctx": model.context}


def modelfile_fields(model: ManagedModel) -> Mapping[str, Any]:
    """Return the fields that `modelfile_text` reads."""
    return {
        "parameters": parameters_of(model),
        "system": model.system,
        "template": model.template,
        "license": model.license,
    }
