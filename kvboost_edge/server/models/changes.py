"""Pulled and created models in a server: they are added, copied and removed while it runs."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable

from kvboost_edge.errors import KVBoostError, ModelFormatError
from kvboost_edge.models.locate.managed import ManagedModel, ModelStore
from kvboost_edge.models.pull.download import PullEvent, PullLimits, PullStopped, pull_model
from kvboost_edge.models.pull.names import checked_name
from kvboost_edge.server.api_errors import ApiError, ShuttingDown
from kvboost_edge.server.cache_report.recent_requests import History
from kvboost_edge.server.logs import log_facts
from kvboost_edge.server.models.created import ModelOverrides, created_from
from kvboost_edge.server.models.loader import without_folders
from kvboost_edge.server.models.registry import Models
from kvboost_edge.server.models.served import ModelSource, ServedModel
from kvboost_edge.server.settings import ServerSettings, is_loopback
from kvboost_edge.server.work.threads import in_thread

__all__ = ["ManagedModels", "ModelChanges"]


@dataclasses.dataclass(frozen=True, slots=True)
class ManagedModels:
    """The store of pulled and created models, and how a server loads them.

    Attributes:
        store: the store.
        source_of: returns the source for loading a model.
    """

    store: ModelStore
    source_of: Callable[[ManagedModel], ModelSource]


class ModelChanges:
    """Changes of the models of a server, one at a time. Used only by the event loop's thread."""

    def __init__(self, models: Models, settings: ServerSettings, managed: ManagedModels) -> None:
        self._models = models
        self._settings = settings
        self._managed = managed
        self._busy = False
        self._stopped = threading.Event()
        for model in managed.store.models() if settings.model_changes else ():
            if model.name in models.names:
                log_facts(
                    logging.WARNING,
                    "a stored model is not served, because its name is given on the command line; "
                    "use another name there, or delete the model with kvboost-edge rm",
                    model=model.name,
                )
            elif not model.served or model.served in models.names:
                self._add(model)

    def check_allowed(self) -> None:
        """Raise ApiError (403) if clients may not change models."""
        settings = self._settings
        if not settings.model_changes:
            raise ApiError(
                403,
                "this server does not change its models (--no-model-changes)",
                code="model_changes_off",
            )
        if not settings.all_keys and not is_loopback(settings.host):
            raise ApiError(
                403,
                "other machines can reach this server without an API key, so they may not change "
                "its models; set a key (--api-key-file, KVBOOST_API_KEY)",
                code="model_changes_off",
            )

    def stop(self) -> None:
        """End a pull, because the server is shutting down."""
        self._stopped.set()

    async def pull(
        self, name: str, tell: Callable[[PullEvent], None], stopped: threading.Event
    ) -> None:
        """Download a model and serve it. A model that is already there is checked for changes.

        Raises:
            ApiError: the name or the size is refused, or the model cannot be downloaded.
        """
        async with self._turn():
            self._check_replaceable(_checked(name))
            limits = PullLimits(self._settings.max_pull_bytes)
            registries = self._settings.model_registries
            store = self._managed.store

            def work() -> ManagedModel:
                return pull_model(
                    name, store, registries=registries, limits=limits, tell=tell, stopped=either
                )

            either = _Either(stopped, self._stopped)
            log_facts(logging.INFO, "pulling a model", model=_checked(name))
            model = await in_thread(work, unwanted=lambda model: None)
            await self._serve(model)
            log_facts(logging.INFO, "model pulled", model=model.name, bytes=model.num_bytes)

    async def copy(self, source: str, destination: str) -> None:
        """Serve a model under a second name. Both share the files.

        Raises:
            ApiError: the source is unknown, or the destination is taken.
        """
        async with self._turn():
            name = _checked(destination)
            self._check_replaceable(name)
            model = self._found(source)
            copy = dataclasses.replace(model, name=name, created=time.time())
            if name != model.name:
                await in_thread(lambda: self._managed.store.put(copy))
                await self._serve(copy)

    async def create(
        self, name: str, source: str, overrides: ModelOverrides, tell: Callable[[PullEvent], None]
    ) -> None:
        """Serve a model with defaults of its own. It shares the files of the model `source`.

        Raises:
            ApiError: the source is unknown (404), the name is taken, or a default is refused.
        """
        async with self._turn():
            short = _checked(name)
            self._check_replaceable(short)
            tell(PullEvent("reading model metadata"))
            base = await in_thread(lambda: self._found(source, "from"))
            model = await in_thread(lambda: created_from(base, short, overrides))
            for layer in ("template", "system", "license"):
                if getattr(model, layer):
                    tell(PullEvent(f"creating {layer} layer"))
            if model.sampling or model.context:
                tell(PullEvent("creating parameters layer"))
            tell(PullEvent("writing manifest"))
            await in_thread(lambda: self._managed.store.put(model))
            await self._serve(model)
            log_facts(logging.INFO, "model created", model=short, source=base.name)

    async def delete(self, name: str) -> None:
        """Unload and delete a model.

        Raises:
            ApiError: the model is unknown (404), in use (409), or on the command line (400).
        """
        async with self._turn():
            short = _checked(name)
            self._check_replaceable(short)
            store = self._managed.store
            if await in_thread(lambda: store.find(short)) is None:
                raise _unknown(name)
            await self._leave(short)
            await in_thread(lambda: store.remove(short))
            log_facts(logging.INFO, "model removed", model=short)

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncGenerator[None]:
        self.check_allowed()
        if self._stopped.is_set():
            raise ShuttingDown
        if self._busy:
            raise ApiError(
                503,
                "another change of the models is running; try again later",
                code="model_change_running",
                headers={"Retry-After": "10"},
            )
        self._busy = True
        try:
            yield
        except PullStopped as error:
            raise ApiError(503, str(error), code="pull_stopped") from error
        except ModelFormatError as error:
            raise ApiError(502, without_folders(str(error)), code="pull_failed") from error
        except KVBoostError as error:
            raise ApiError(400, without_folders(str(error)), code="invalid_value") from error
        finally:
            self._busy = False

    def _found(self, name: str, field: str = "model") -> ManagedModel:
        """Return a stored model, or a record for a model of the command line.

        Args:
            field: field of the request that has the name.
        """
        short = _checked(name, field)
        model = self._managed.store.find(short)
        if model is not None:
            return model
        for known in (short, name):
            served = self._models.find(known)
            if served is not None:
                return ManagedModel(name=served.name, origin=served.name, served=served.name)
        raise _unknown(name, field)

    def _check_replaceable(self, name: str) -> None:
        """Raise ApiError if the model of this name is in use or belongs to the command line."""
        served = self._models.find(name)
        if served is None:
            return
        if served.record is None:
            raise ApiError(
                400,
                f"the model {name!r} is given on the command line, where it can be changed",
                code="model_is_fixed",
                param="model",
            )
        if served.in_use or served.loading is not None:
            raise ApiError(
                409,
                f"the model {name!r} is in use; try again later",
                code="model_in_use",
                headers={"Retry-After": "10"},
            )

    async def _serve(self, model: ManagedModel) -> None:
        await self._leave(model.name)
        self._add(model)

    def _add(self, model: ManagedModel) -> None:
        self._models.add(
            ServedModel(
                (model.name,),
                self._managed.source_of(model),
                self._settings.keep_alive_of(1),
                History(self._settings.request_history),
                record=model,
            )
        )

    async def _leave(self, name: str) -> None:
        """Unload a model if it is loaded, and serve it no more."""
        served = self._models.find(name)
        if served is None:
            return
        self._check_replaceable(name)
        await self._models.remove(served)


class _Either(threading.Event):
    """An event that counts as set once another one is set."""

    def __init__(self, own: threading.Event, other: threading.Event) -> None:
        super().__init__()
        self._events = (own, other)

    def is_set(self) -> bool:
        return any(event.is_set() for event in self._events)


def _checked(name: str, field: str = "model") -> str:
    try:
        return checked_name(name)
    except KVBoostError as error:
        raise ApiError(400, str(error), code="invalid_value", param=field) from error


def _unknown(name: str, field: str = "model") -> ApiError:
    hint = "" if field == "model" else "; name a model of this server, or pull it first"
    return ApiError(
        404, f"model {name[:200]!r} not found{hint}", code="model_not_found", param=field
    )
