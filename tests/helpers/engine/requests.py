"""Requests made without a request builder."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvboost_edge.engine.request.request import Request
from kvboost_edge.engine.request.terms import Terms

_RESOLVED = {field.name for field in dataclasses.fields(Request)}


def make_request(**fields: Any) -> Request:
    """Make a request from fields of `Request` and `Terms`. Fields that both have set the request's
    own.
    """
    terms = {name: fields.pop(name) for name in [*fields] if name not in _RESOLVED}
    plain = {"index": 0, "prompt": "", "seed": 0, "stop_ids": frozenset()}
    times = {"entered_at": 0.0, "tokenized_at": 0.0}
    return Request(terms=Terms(**terms), **{**plain, **times, **fields})
