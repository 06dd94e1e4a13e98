"""Base class of request bodies: strict JSON types, and errors that name the field."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from kvboost_edge.server.api.schemas.unsupported_fields import UnsupportedField, known_fields
from kvboost_edge.server.api_errors import ApiError

__all__ = ["Strict", "bad_field", "field_error"]


class Strict(BaseModel):
    """Base class of request bodies with strict JSON types.

    Strings are not converted to numbers, true is not an integer, and unknown fields are errors.
    """

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)
    unsupported: ClassVar[Mapping[str, UnsupportedField]] = {}

    @model_validator(mode="before")
    @classmethod
    def _only_known_fields(cls, value: Any) -> Any:
        """Check the field names before pydantic validates the values."""
        # pydantic would collect an error for each unknown field.
        return known_fields(value, cls.wire_names(), cls.unsupported)

    @classmethod
    def wire_names(cls) -> Collection[str]:
        """Names of the fields in JSON."""
        return _wire_names(cls)


@functools.cache
def _wire_names(cls: type[Strict]) -> Collection[str]:
    return dict.fromkeys(field.alias or name for name, field in cls.model_fields.items())


def field_error(kind: str, message: str) -> PydanticCustomError:
    """Return an error of the field that is being validated. Braces in the message are kept."""
    return PydanticCustomError(kind, "{message}", {"message": message})


def bad_field(name: str, message: str) -> ApiError:
    """Return an ApiError (400) about field `name`, for checks that involve several fields."""
    return ApiError(400, message, param=name, code="invalid_value")
