"""Routes of Ollama's API: chat, generate, embeddings, and the models and their changes."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Send

from kvboost_edge import __version__
from kvboost_edge.errors import RequestError
from kvboost_edge.server.api.bodies import JsonRoute
from kvboost_edge.server.api.chat_requests import RenderedChat
from kvboost_edge.server.api.checks import respond_when_loaded, served_model
from kvboost_edge.server.api.compat.ollama.changes import (
    OllamaCopy,
    OllamaDelete,
    OllamaPull,
    changes_of,
    send_progress,
)
from kvboost_edge.server.api.compat.ollama.create import OllamaCreate, overrides_of
from kvboost_edge.server.api.compat.ollama.embeddings import (
    OllamaEmbed,
    OllamaEmbeddings,
    embed_answer,
)
from kvboost_edge.server.api.compat.ollama.models import (
    API_VERSION,
    list_models,
    list_running,
    resolve_name,
    show_model,
)
from kvboost_edge.server.api.compat.ollama.schemas import OllamaChat, OllamaGenerate, OllamaShow
from kvboost_edge.server.api.compat.ollama.translate import (
    CHAT_FIELDS,
    GENERATE_FIELDS,
    chat_of,
    generation_of,
    log_reduced_context,
    prompt_of,
)
from kvboost_edge.server.api.compat.ollama.writer import LINES, OllamaWriter, loaded
from kvboost_edge.server.api.compat.translated import renamed
from kvboost_edge.server.api.completion_requests import RenderedCompletion
from kvboost_edge.server.api.embedding_requests import embed_inputs
from kvboost_edge.server.api.generation import respond
from kvboost_edge.server.api.schemas.chat import ChatRequest
from kvboost_edge.server.api.schemas.strict import bad_field
from kvboost_edge.server.api.turns import named_by_field
from kvboost_edge.server.models.server import server_of
from kvboost_edge.server.response_types import UNDECLARED_ERRORS
from kvboost_edge.server.state import ModelState, load_seconds_of, tenant_of
from kvboost_edge.server.work.bridge import Answer, off_loop
from kvboost_edge.server.work.streams import dumps, json_response, send_json

__all__ = ["router"]

router = APIRouter(route_class=JsonRoute, responses=UNDECLARED_ERRORS)

_STREAM = {"content": {LINES: {"schema": {"type": "string"}}}}


@router.post("/api/chat", response_class=JSONResponse, responses={200: _STREAM})
async def chat(request: Request, body: OllamaChat) -> Response:
    """Generate the next message of a conversation, in Ollama's format.

    A request without messages only loads or unloads the model.
    """

    async def work(state: ModelState, send: Send) -> None:
        log_reduced_context(body.chosen, state.engine)
        if not body.messages:
            await send_json(send, dumps(loaded(body.model, stays=_stays(request, body), chat=True)))
            return
        with renamed(CHAT_FIELDS):
            # Translating thousands of messages takes long.
            chat = await off_loop(lambda: chat_of(body))
            await _chat(request, send, state, chat, body.model, chat=True)

    return _answered(request, body, work, asks=bool(body.messages))


@router.post("/api/generate", response_class=JSONResponse, responses={200: _STREAM})
async def generate(request: Request, body: OllamaGenerate) -> Response:
    """Answer a prompt, in Ollama's format. With `raw`, the prompt bypasses the chat template.

    A request without a prompt only loads or unloads the model.
    """

    async def work(state: ModelState, send: Send) -> None:
        log_reduced_context(body.chosen, state.engine)
        if not body.prompt:
            await send_json(
                send, dumps(loaded(body.model, stays=_stays(request, body), chat=False))
            )
            return
        with renamed(GENERATE_FIELDS):
            if not body.raw:
                await _chat(request, send, state, generation_of(body), body.model, chat=False)
                return
            completion = prompt_of(body)
            rendered = RenderedCompletion(state, completion, fills=True)
            await respond(request, send, rendered, _writer(request, rendered, body.model))

    return _answered(request, body, work, asks=bool(body.prompt))


@router.post("/api/embed", response_class=JSONResponse)
async def embed(request: Request, body: OllamaEmbed) -> Response:
    """Compute the embedding of each input, in Ollama's format."""

    async def work(state: ModelState, send: Send) -> None:
        log_reduced_context(body.chosen, state.engine)
        started = time.perf_counter()
        most = state.usable_context
        vectors, results = await embed_inputs(
            state,
            request,
            body.input,
            body.dimensions or None,
            limit=min(most, body.chosen.num_ctx or most) if body.truncate else None,
        )
        waited = load_seconds_of(request)
        total = waited + time.perf_counter() - started
        answer = await off_loop(lambda: embed_answer(body.model, vectors, results, waited, total))
        await send_json(send, answer)

    name = resolve_name(server_of(request).models, body.model)
    return respond_when_loaded(request, name, work, body.keep_alive)


@router.post("/api/embeddings", response_class=JSONResponse)
async def embeddings(request: Request, body: OllamaEmbeddings) -> Response:
    """Compute the embedding of a prompt, in the format of Ollama's older clients."""

    async def work(state: ModelState, send: Send) -> None:
        log_reduced_context(body.chosen, state.engine)
        prompts = [body.prompt] if body.prompt else []
        vectors, _ = await embed_inputs(state, request, prompts, field="prompt")
        await send_json(send, dumps({"embedding": vectors[0].tolist() if prompts else []}))

    name = resolve_name(server_of(request).models, body.model)
    return respond_when_loaded(request, name, work, body.keep_alive)


@router.get("/api/tags", response_class=JSONResponse)
async def tags(request: Request) -> Response:
    """List all served models under each of their names."""
    return json_response({"models": list_models(server_of(request))})


@router.get("/api/ps", response_class=JSONResponse)
async def ps(request: Request) -> Response:
    """List the loaded models with the time at which each will be unloaded."""
    return json_response({"models": list_running(server_of(request))})


@router.post("/api/show", response_class=JSONResponse)
async def show(request: Request, body: OllamaShow) -> Response:
    """Return information about a model, without loading it."""
    server = server_of(request)
    served = served_model(request, resolve_name(server.models, body.given))
    return json_response(await off_loop(lambda: show_model(server, served)))


@router.post("/api/pull", response_class=JSONResponse, responses={200: _STREAM})
async def pull(request: Request, body: OllamaPull) -> Response:
    """Download a model and serve it, with a stream of progress."""
    changes = changes_of(request)
    name = body.given

    async def work(send: Send) -> None:
        await send_progress(
            request,
            send,
            lambda tell, stopped: changes.pull(name, tell, stopped),
            streams=body.stream is not False,
        )

    return Answer(work)


@router.post("/api/create", response_class=JSONResponse, responses={200: _STREAM})
async def create(request: Request, body: OllamaCreate) -> Response:
    """Serve a new model with the files of another one, and defaults of its own."""
    changes = changes_of(request)
    name = body.given
    whole = body.whole()
    source = str(whole.source)

    async def work(send: Send) -> None:
        await send_progress(
            request,
            send,
            lambda tell, stopped: changes.create(name, source, overrides_of(whole), tell),
            streams=body.stream is not False,
        )

    return Answer(work)


@router.post("/api/copy", response_class=JSONResponse)
async def copy(request: Request, body: OllamaCopy) -> Response:
    """Serve a model under a second name."""
    await changes_of(request).copy(body.source, body.destination)
    return json_response({})


@router.delete("/api/delete", response_class=JSONResponse)
async def delete(request: Request, body: OllamaDelete) -> Response:
    """Unload and delete a pulled or created model. Files that another model uses stay."""
    await changes_of(request).delete(body.given)
    return json_response({})


@router.get("/api/version", response_class=JSONResponse)
async def version() -> Response:
    """Return the supported version of Ollama's API, and the version of this server."""
    return json_response({"version": API_VERSION, "server": f"kvboost-edge {__version__}"})


def _answered(
    request: Request,
    body: OllamaChat | OllamaGenerate,
    work: Callable[[ModelState, Send], Awaitable[None]],
    *,
    asks: bool,
) -> Response:
    """Return the response that `work` sends.

    A request that only unloads a model does not load it first.
    """
    name = resolve_name(server_of(request).models, body.model)
    if not asks and not _stays(request, body) and served_model(request, name).state is None:
        return json_response(loaded(body.model, stays=False, chat=isinstance(body, OllamaChat)))
    return respond_when_loaded(request, name, work, body.keep_alive)


def _stays(request: Request, body: OllamaChat | OllamaGenerate) -> bool:
    """Return whether the model stays loaded after the answer."""
    models = server_of(request).models
    served = served_model(request, resolve_name(models, body.model))
    return body.keep_alive != 0 or not models.may_set_keep_alive(served, tenant_of(request))


async def _chat(
    request: Request, send: Send, state: ModelState, body: ChatRequest, name: str, *, chat: bool
) -> None:
    try:
        rendered = RenderedChat(state, body, fills=True)
        await respond(request, send, rendered, _writer(request, rendered, name, chat=chat))
    except RequestError as error:
        named_error = named_by_field(error, body)
        if (
            named_error is error
            and body.json_schema is not None
            and str(error).startswith(("grammar", "json_schema"))
        ):
            raise bad_field("format", f"format: {error}") from error
        raise named_error from error


def _writer(
    request: Request, rendered: RenderedChat | RenderedCompletion, name: str, *, chat: bool = False
) -> OllamaWriter:
    return OllamaWriter(
        rendered.state,
        name,
        rendered.body.stop or (),
        chat=chat,
        load_seconds=load_seconds_of(request),
    )
