"""Base of all bodies: strict JSON types, known fields only, errors that name the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from kvboost_edge.server.api.schemas.foreign import Foreign, known_fields
from kvboost_edge.server.errors import ApiError

__all__ = ["Strict", "bad_field", "field_error"]


class Strict(BaseModel):
    """A body with strict JSON types.

    A string is never a number, true is not an integer, and an unknown field is an error.
    """

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)
    foreign: ClassVar[Mapping[str, Foreign]] = {}

    @model_validator(mode="before")
    @classmethod
    def _only_known_fields(cls, value: Any) -> Any:
        """Check the names of the fields."""
        # Before pydantic, which would collect an error for each unknown field.
        return known_fields(value, cls.model_fields, cls.foreign)


def field_error(kind: str, message: str) -> PydanticCustomError:
    """Return an error of the field that is being validated; braces in the message are kept."""
    return PydanticCustomError(kind, "{message}", {"message": message})


def bad_field(name: str, message: str) -> ApiError:
    """Return the error of a field that contradicts another one."""
    return ApiError(400, message, param=name, code="invalid_value")
