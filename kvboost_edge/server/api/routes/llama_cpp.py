"""Routes of llama.cpp's API.

/tokenize, /detokenize, /health and /metrics also follow its format.
"""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Send

from kvboost_edge import __version__
from kvboost_edge.server.api.bodies import JsonRoute
from kvboost_edge.server.api.bounds import BOUNDS
from kvboost_edge.server.api.checks import (
    ModelParam,
    loaded_model,
    looked_up,
    respond_when_loaded,
)
from kvboost_edge.server.api.compat.llama_cpp.schemas import (
    ApplyTemplate,
    Infill,
    LlamaCompletion,
)
from kvboost_edge.server.api.compat.llama_cpp.translate import (
    FIELDS,
    RenderedPieces,
    completion_of,
    infill_of,
)
from kvboost_edge.server.api.compat.llama_cpp.writer import LlamaWriter, default_settings
from kvboost_edge.server.api.compat.translated import renamed
from kvboost_edge.server.api.generation import respond
from kvboost_edge.server.api.prompt_encoding import (
    estimate_messages,
    prompt_only,
    render_prompt,
    size_of,
)
from kvboost_edge.server.api.schemas.sessions import SlotAction
from kvboost_edge.server.api.schemas.strict import bad_field
from kvboost_edge.server.api.session_saving import (
    keep_session,
    missing_session,
    saved_prefill,
)
from kvboost_edge.server.api_errors import ApiError
from kvboost_edge.server.cache_report.recent_requests import RequestRecord
from kvboost_edge.server.response_types import UNDECLARED_ERRORS
from kvboost_edge.server.state import ModelState, tenant_of
from kvboost_edge.server.work.bridge import off_loop
from kvboost_edge.server.work.streams import dumps, dumps_long, json_response, send_json

__all__ = ["router"]

router = APIRouter(route_class=JsonRoute, responses=UNDECLARED_ERRORS)

# (name, JSON data) of an event
_EVENT = {"type": "object", "properties": {"event": {"type": "string"}, "data": {"type": "string"}}}
_STREAM = {"content": {"text/event-stream": {"schema": _EVENT}}}


@router.post("/completion", response_class=JSONResponse, responses={200: _STREAM})
async def completion(request: Request, body: LlamaCompletion) -> Response:
    """Continue one or more prompts, each a text, token ids, or a list of both.

    With `stream`, the answer is a stream of server-sent events.
    """

    async def work(state: ModelState, send: Send) -> None:
        with renamed(FIELDS):
            await _respond(request, send, body, completion_of(state, body))

    return respond_when_loaded(request, body.model, work)


@router.post("/infill", response_class=JSONResponse, responses={200: _STREAM})
async def infill(request: Request, body: Infill) -> Response:
    """Generate the text between a prefix and a suffix, if the model has infill tokens.

    Texts of other files come first, as in llama.cpp.
    """

    async def work(state: ModelState, send: Send) -> None:
        with renamed(FIELDS):
            await _respond(request, send, body, infill_of(state, body))

    return respond_when_loaded(request, body.model, work)


@router.post("/apply-template", response_class=JSONResponse)
async def apply_template(request: Request, body: ApplyTemplate) -> Response:
    """Return the text of the prompt of a chat with these messages."""

    async def work(state: ModelState, send: Send) -> None:
        chat = prompt_only(body.messages, body)
        async with state.admit(request, estimate_messages(body.messages, body.tools)) as admission:
            answers = state.engine.kept_answers(tenant=admission.tenant, cache_salt=None)
            answer = await off_loop(
                lambda: dumps_long({"prompt": render_prompt(state, chat, answers)}),
                size_of(body.messages, body.tools),
            )
        await send_json(send, answer)

    return respond_when_loaded(request, body.model, work)


@router.get("/props", response_class=JSONResponse)
async def props(request: Request, model: ModelParam = None) -> Response:
    """Return properties and default settings of the server. Paths on its disk are left out."""
    state = loaded_model(request, model)
    tokenizer = state.engine.tokenizer
    settings = {
        "n_ctx": state.usable_context,
        "params": {
            "n_predict": -1,
            "seed": -1,
            **default_settings(state.sampling_defaults),
        },
    }
    return json_response(
        {
            "default_generation_settings": {
                "id": 0,
                "speculative": state.engine.speculates,
                "is_processing": False,
                **settings,
            },
            "total_slots": state.admission.batch,
            "model_alias": state.model_name,
            "model_path": state.model_name,
            "chat_template": tokenizer.chat_template or "",
            "bos_token": tokenizer.special_tokens.get("bos_token", ""),
            "eos_token": tokenizer.special_tokens.get("eos_token", ""),
            "modalities": {"vision": False, "audio": False},
            "build_info": f"kvboost-edge {__version__}",
            "is_sleeping": False,
        }
    )


@router.get("/slots", response_class=JSONResponse)
async def slots(request: Request, model: ModelParam = None) -> Response:
    """List one slot for each sequence that can run at the same time.

    Slots have no blocks of their own, because all requests share the blocks of the pool.
    """
    state = loaded_model(request, model)
    running = await looked_up(state, state.engine.num_running)
    context = state.usable_context
    speculates = state.engine.speculates
    rows = [
        dumps(
            {
                "id": number,
                "n_ctx": context,
                "speculative": speculates,
                "is_processing": number < running,
            }
        )
        for number in range(state.admission.batch)
    ]
    return Response(
        b"[" + b",".join(rows) + b"]",
        media_type="application/json",
        headers={"Cache-Control": "no-store"},
    )


@router.post("/slots/{id_slot}", response_class=JSONResponse)
async def slot_action(
    request: Request,
    id_slot: Annotated[int, Path(ge=0, le=int(BOUNDS["slot"].high))],
    action: Annotated[Literal["save", "restore", "erase"], Query()],
    body: SlotAction | None = None,
) -> Response:
    """Save the conversation of a slot as a named session, restore it into a slot, or erase a slot.

    A slot is the latest conversation of this API key with this `id_slot`. Requests without one, and
    those of other APIs, have slot 0.
    """
    given = SlotAction.model_validate({}) if body is None else body
    run = {"save": _save_slot, "restore": _restore_slot, "erase": _erase_slot}[action]

    async def work(state: ModelState, send: Send) -> None:
        if id_slot >= state.admission.batch:
            raise bad_field(
                "id_slot",
                f"id_slot={id_slot} does not exist; this server has slots 0 to "
                f"{state.admission.batch - 1}",
            )
        await send_json(send, dumps(await run(request, state, id_slot, given)))

    return respond_when_loaded(request, given.model, work)


async def _save_slot(
    request: Request, state: ModelState, slot: int, given: SlotAction
) -> dict[str, Any]:
    started = time.perf_counter()
    name = _filename(given)
    records = _slot_records(request, state, slot, given)
    if not records:
        raise ApiError(
            400,
            f"slot {slot} holds no conversation of this API key; generate with id_slot {slot} "
            "before saving it",
            code="invalid_value",
            param="id_slot",
        )
    record = records[0]
    kept = await keep_session(
        request,
        state,
        name,
        record.ids.tolist(),
        cache_salt=given.cache_salt,
        prefill=record.prefill,
        slot=slot,
    )
    return {
        "id_slot": slot,
        "filename": name,
        "n_saved": kept.info.num_tokens,
        "n_written": kept.info.num_bytes,
        "timings": {"save_ms": round((time.perf_counter() - started) * 1e3, 3)},
    }


async def _restore_slot(
    request: Request, state: ModelState, slot: int, given: SlotAction
) -> dict[str, Any]:
    started = time.perf_counter()
    name = _filename(given)
    tenant = tenant_of(request)
    found = await off_loop(lambda: state.sessions.find(tenant, given.cache_salt, name))
    if found is None:
        raise missing_session(name)
    if found.info.model != state.model_name:
        raise bad_field(
            "filename",
            f"the session {name!r} is of the model {found.info.model!r}, not of "
            f"{state.model_name!r}; give its model",
        )
    kept = await keep_session(
        request,
        state,
        name,
        found,
        cache_salt=given.cache_salt,
        prefill=saved_prefill(state, found.info, "filename"),
        slot=slot,
    )
    return {
        "id_slot": slot,
        "filename": name,
        "n_restored": kept.info.num_tokens,
        "n_read": kept.info.num_bytes,
        "timings": {"restore_ms": round((time.perf_counter() - started) * 1e3, 3)},
    }


async def _erase_slot(
    request: Request, state: ModelState, slot: int, given: SlotAction
) -> dict[str, Any]:
    """Empty a slot. Its tokens stay cached for all requests of this API key."""
    records = _slot_records(request, state, slot, given)
    for record in records:
        record.slot = -1
    return {"id_slot": slot, "n_erased": len(records[0].ids) if records else 0}


def _filename(given: SlotAction) -> str:
    if given.filename is None:
        raise bad_field("filename", "filename is missing; give the name of the session")
    return given.filename


def _slot_records(
    request: Request, state: ModelState, slot: int, given: SlotAction
) -> list[RequestRecord]:
    history = state.doctor.history
    if not history.seconds:
        raise bad_field(
            "id_slot",
            "slots are empty because the server runs with --request-history 0; save messages or "
            "token ids with POST /v1/sessions",
        )
    state.doctor.settle()
    return history.in_slot(tenant_of(request), given.cache_salt, slot)


async def _respond(
    request: Request, send: Send, body: LlamaCompletion | Infill, rendered: RenderedPieces
) -> None:
    with_ids = bool(body.return_tokens)
    writer = LlamaWriter(
        rendered.state, rendered.body, with_ids=with_ids, fields=body.response_fields or ()
    )
    await respond(request, send, rendered, writer)
