"""Pages of lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvboost_edge.server.api.schemas.strict import bad_field

__all__ = ["page_of"]


def page_of(found: Sequence[Mapping[str, Any]], limit: int, after: str | None) -> dict[str, Any]:
    """Return a page of a list in the format of OpenAI's API.

    Args:
        found: the whole list, as responses show its objects.
        limit: maximum number of objects in the page.
        after: id of the object before the page; None for the first page.

    Raises:
        ApiError: `after` is not the id of a listed object (400).
    """
    if after is not None:
        ids = [one["id"] for one in found]
        if after not in ids:
            raise bad_field("after", "after must be the id of an object in the list")
        found = found[ids.index(after) + 1 :]
    page = found[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(found) > limit,
    }
