"""Routes for uploaded files, in OpenAI's format."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import FileResponse, JSONResponse, Response

from kvboost_edge.server.api.bounds import BOUNDS
from kvboost_edge.server.api.listing import page_of
from kvboost_edge.server.api.schemas.strict import bad_field
from kvboost_edge.server.api_errors import ApiError
from kvboost_edge.server.batches.multipart import FormReader
from kvboost_edge.server.batches.tenant_space import Upload
from kvboost_edge.server.models.server import batches_of, space_of
from kvboost_edge.server.response_types import ERRORS, DeleteFileResponse, FileList, FileObject
from kvboost_edge.server.work.bridge import off_loop
from kvboost_edge.server.work.streams import json_response

__all__ = ["router"]

router = APIRouter(responses=ERRORS)

_FORM: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": ["batch"]},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {"type": "string", "pattern": "^[0-9]{4,10}$"},
                    },
                    "required": ["file", "purpose"],
                    "additionalProperties": False,
                }
            }
        },
    }
}
_FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
_WRITE_BYTES = 1 << 20  # bytes that are written at once
FileId = Annotated[str, Path(min_length=1, max_length=256)]


@router.post(
    "/v1/files",
    response_class=JSONResponse,
    responses={200: {"model": FileObject}},
    openapi_extra=_FORM,
)
async def upload(request: Request) -> Response:
    """Upload a file with the requests of a batch, one JSON object in each line.

    The body is a form (`multipart/form-data`) with the file and `purpose=batch`.
    """
    space = space_of(request)
    waiting = bytearray()
    form = FormReader(request.headers.get("content-type", ""), waiting.extend)
    stored = await off_loop(space.upload)
    try:
        async for data in request.stream():
            form.feed(data)
            if len(waiting) >= _WRITE_BYTES:
                await _written(stored, waiting)
        form.end()
        await _written(stored, waiting)
        seconds = _lifetime(request, form.fields)
        name = form.filename or ""
        file = await off_loop(lambda: stored.finish(name, seconds))
    except OSError as error:
        raise _disk_error(error) from error
    finally:
        await off_loop(stored.close)
    return json_response(file.as_answer())


@router.get("/v1/files", response_class=JSONResponse, responses={200: {"model": FileList}})
async def files(
    request: Request,
    purpose: Annotated[str | None, Query(max_length=64)] = None,
    limit: Annotated[
        int, Query(ge=int(BOUNDS["listed_files"].low), le=int(BOUNDS["listed_files"].high))
    ] = 10_000,
    order: Annotated[Literal["asc", "desc"], Query()] = "desc",
    after: Annotated[str | None, Query(max_length=256)] = None,
) -> Response:
    """List the stored files."""
    found = space_of(request).files()
    shown = [one.as_answer() for one in found if purpose in (None, one.purpose)]
    return json_response(page_of(shown if order == "asc" else shown[::-1], limit, after))


@router.get(
    "/v1/files/{file_id}", response_class=JSONResponse, responses={200: {"model": FileObject}}
)
async def file(request: Request, file_id: FileId) -> Response:
    """Return the description of a file."""
    return json_response(space_of(request).file(file_id).as_answer())


@router.delete(
    "/v1/files/{file_id}",
    response_class=JSONResponse,
    responses={200: {"model": DeleteFileResponse}},
)
async def delete(request: Request, file_id: FileId) -> Response:
    """Delete a file. A file that an unfinished batch reads cannot be deleted."""
    space = space_of(request)
    await off_loop(lambda: space.delete_file(file_id))
    answer: DeleteFileResponse = {"id": file_id, "object": "file", "deleted": True}
    return json_response(answer)


@router.get(
    "/v1/files/{file_id}/content",
    response_class=Response,
    responses={
        200: {"content": {"application/jsonl": {"schema": {"type": "string"}}}},
    },
)
async def content(request: Request, file_id: FileId) -> Response:
    """Return the contents of a file."""
    space = space_of(request)
    found = space.file(file_id)
    return FileResponse(space.path_of(found), media_type="application/jsonl")


async def _written(stored: Upload, waiting: bytearray) -> None:
    """Write the waiting bytes to disk."""
    data = bytes(waiting)
    waiting.clear()
    await off_loop(lambda: stored.write(data))


def _lifetime(request: Request, fields: dict[str, str]) -> int:
    """Return the lifetime of a file in seconds.

    Raises:
        ApiError: a field of the form is unknown or invalid (400).
    """
    if unknown := sorted(set(fields) - set(_FIELDS)):
        raise bad_field(unknown[0][:80], f"the field {unknown[0][:80]!r} is unknown")
    if fields.get("purpose") != "batch":
        given = fields.get("purpose", "")[:80]
        raise bad_field("purpose", f"purpose={given!r} must be 'batch'")
    anchor, seconds = (fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
    if anchor is None and seconds is None:
        return batches_of(request).retention
    if anchor != "created_at" or seconds is None or not seconds.isdecimal() or len(seconds) > 12:
        message = "expires_after needs anchor='created_at' and seconds"
        raise bad_field("expires_after", message)
    return lifetime(request, int(seconds), "expires_after")


def lifetime(request: Request, seconds: int, param: str) -> int:
    """Check the lifetime of a file and return it.

    Raises:
        ApiError: the lifetime is out of range (400).
    """
    most = batches_of(request).retention
    least = int(BOUNDS["expires_seconds"].low)
    if not least <= seconds <= most:
        raise bad_field(
            param, f"{param}.seconds={seconds} must be in {least}..{most} (--batch-retention)"
        )
    return seconds


def _disk_error(error: OSError) -> ApiError:
    return ApiError(
        507, f"the file cannot be stored: {error.strerror}; free disk space", code="storage_error"
    )
