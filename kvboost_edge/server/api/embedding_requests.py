"""Computation of embeddings and scores within the limits of the server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from starlette.requests import Request

from kvboost_edge.engine.handle import Handles
from kvboost_edge.engine.request.results import GenerationResult
from kvboost_edge.errors import KVBoostError, RequestError
from kvboost_edge.server.api.checks import check_priority
from kvboost_edge.server.api.prompt_encoding import estimate_tokens
from kvboost_edge.server.api.schemas.strict import bad_field
from kvboost_edge.server.state import ModelState
from kvboost_edge.server.work.bridge import to_its_end, wait_all
from kvboost_edge.text.tokenizer import Tokenizer

__all__ = ["computed", "embed_inputs"]

T = TypeVar("T")
Vectors = npt.NDArray[np.float32]


async def embed_inputs(
    state: ModelState,
    request: Request,
    inputs: Sequence[str | list[int]],
    dimensions: int | None = None,
    *,
    field: str = "input",
    limit: int | None = None,
    priority: int | None = None,
    cache_salt: str | None = None,
) -> tuple[Vectors, list[GenerationResult]]:
    """Compute the embeddings of inputs; return them and the results of their requests.

    Args:
        state: the model.
        request: the HTTP request.
        inputs: texts or token ids.
        dimensions: number of leading values of each embedding; None for all.
        field: field that errors name.
        limit: maximum number of tokens of a text; the rest is cut off. None for no limit besides
            the context, which longer inputs may not exceed.
        priority: priority of the request; None for the default.
        cache_salt: salt that separates the cached inputs from those of other requests.

    Raises:
        ApiError: an input or `dimensions` is out of bounds (400).
    """
    width = state.engine.embedding_size
    if dimensions is not None and dimensions > width > 0:
        raise bad_field(
            "dimensions",
            f"dimensions={dimensions} must be in 1..{width}, the size of the model's embeddings",
        )
    if not inputs:
        return np.empty((0, dimensions or width), np.float32), []

    def compute(**options: object) -> Vectors:
        tokenizer = state.engine.tokenizer
        given = inputs if limit is None else [_cut(tokenizer, one, limit) for one in inputs]
        return state.engine.embed(given, dimensions, **options)

    estimates = [estimate_tokens(one) if isinstance(one, str) else len(one) for one in inputs]
    if limit is not None:
        estimates = [min(one, limit) for one in estimates]
    return await computed(
        state,
        request,
        compute,
        field,
        estimates,
        sum(map(len, inputs)),
        priority=priority,
        cache_salt=cache_salt,
    )


def _cut(tokenizer: Tokenizer, given: str | list[int], limit: int) -> list[int]:
    """Return the first `limit` token ids of an input, with the special tokens at the end."""
    if not isinstance(given, str):
        return given[:limit]
    ids = tokenizer.encode(given)
    if len(ids) <= limit:
        return ids
    plain = tokenizer.encode(given, False)
    num_special = len(ids) - len(plain)
    starts = range(num_special + 1)
    start = next((at for at in starts if ids[at : at + len(plain)] == plain), num_special)
    # An embedding model reads the end of the text from its last token.
    end = ids[start + len(plain) :]
    return ids[: max(0, limit - len(end))] + end


async def computed(
    state: ModelState,
    request: Request,
    compute: Callable[..., T],
    field: str,
    estimates: Sequence[int],
    size: int,
    *,
    priority: int | None = None,
    cache_salt: str | None = None,
) -> tuple[T, list[GenerationResult]]:
    """Run `compute` in a worker thread; return its outcome and the results of its requests.

    The work stops if the client disconnects.

    Args:
        state: the model.
        request: the HTTP request.
        compute: function that submits the inputs to the engine and waits for them.
        field: field that errors name.
        estimates: approximate number of tokens of each input.
        size: number of characters or tokens to read.
        priority: priority of the request; None for the default.
        cache_salt: salt that separates the cached inputs from those of other requests.
    """
    # The engine queues only part of the inputs at a time, so one batch of places is enough.
    places = min(len(estimates), state.admission.batch)
    checked = check_priority(state, priority)
    async with state.admit(request, sum(estimates), places) as admission:
        handles = Handles()

        def run() -> T:
            try:
                return compute(
                    handles=handles,
                    tenant=admission.tenant,
                    weight=admission.weight,
                    background=admission.background,
                    cache_salt=cache_salt,
                    priority=checked,
                    deadline=admission.deadline,
                )
            except RequestError as error:
                raise bad_field(field, str(error)) from error

        try:
            found = await to_its_end(run, size, handles)
        except KVBoostError:
            await wait_all(admission, handles)  # raises the reason of a cancelled request
            raise
        return found, await wait_all(admission, handles)
