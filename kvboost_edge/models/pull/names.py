"""Names of pulled and created models, and the registries that names refer to."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import urlsplit

from kvboost_edge.errors import ConfigError
from kvboost_edge.models.locate.suggestions import SUGGESTIONS

__all__ = ["RegistryModel", "checked_name", "checked_registry", "source_of"]

_LATEST = ":latest"
_MAX_NAME = 200
_PIECE = r"[A-Za-z0-9][\w.-]*"
# [HOST[:PORT]/][OWNER/]NAME[:TAG or file]
_NAME = re.compile(
    rf"((?P<host>{_PIECE}(:\d{{1,5}})?)/)?((?P<owner>{_PIECE})/)?(?P<name>{_PIECE})"
    r"(:(?P<wanted>[A-Za-z0-9][\w.+ /-]*))?",
    re.ASCII,
)
_HUB_HOSTS = ("hf.co", "huggingface.co")


class RegistryModel(NamedTuple):
    """Place of a model in a registry.

    Attributes:
        endpoint: URL of the registry; "" for the hub.
        repo: repository as owner/name.
        wanted: quantization or file name of a GGUF file, or None.
    """

    endpoint: str
    repo: str
    wanted: str | None


def checked_name(name: str) -> str:
    """Return the name of a model without Ollama's tag ":latest".

    Raises:
        ConfigError: the name has another form than NAME, OWNER/NAME or HOST/OWNER/NAME, with an
            optional tag.
    """
    short = name.removesuffix(_LATEST)
    if len(short) > _MAX_NAME or ".." in short or _NAME.fullmatch(short) is None:
        raise ConfigError(
            f"the model name {name[:_MAX_NAME]!r} is invalid; use letters, digits, '.', '_' and "
            f"'-', as in my-model, owner/name or owner/name:Q4_K_M, at most {_MAX_NAME} characters"
        )
    return short


def checked_registry(url: str) -> str:
    """Return the URL of a registry without a trailing slash.

    Raises:
        ConfigError: the URL is invalid.
    """
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid or parts.username or parts.query or parts.fragment:
        raise ConfigError(
            f"model_registries holds {url!r}; give the URL of a server with the hub's API, such as "
            "https://models.example.org"
        )
    return url.rstrip("/")


def source_of(name: str, registries: Iterable[str] = ()) -> RegistryModel:
    """Return the place of a model that is to be pulled.

    Args:
        name: OWNER/NAME on the hub, HOST/OWNER/NAME for a registry, or one of Ollama's names of the
            recommended models, each with an optional tag.
        registries: URLs of the configured registries.

    Raises:
        ConfigError: the name is invalid, or refers to no configured registry.
    """
    short = checked_name(name)
    known = next((one.name for one in SUGGESTIONS if one.ollama == short), None)
    found = _NAME.fullmatch(known or short)
    assert found is not None
    # With two pieces before the name the first one is the host, with one it is the owner.
    host, owner = found["host"], found["owner"]
    if owner is None:
        host, owner = None, host
    if owner is None:
        likely = " or ".join(one.ollama for one in SUGGESTIONS)
        raise ConfigError(
            f"{name!r} is not in a registry that this machine may use; give owner/name of a hub "
            f"model, or one of {likely}"
        )
    repo = f"{owner}/{found['name']}"
    if host is None or host in _HUB_HOSTS:
        return RegistryModel("", repo, found["wanted"])
    hosts = {urlsplit(url).netloc: url for url in map(checked_registry, registries)}
    if host not in hosts:
        allowed = ", ".join((*_HUB_HOSTS, *hosts))
        raise ConfigError(
            f"{name!r} names the registry {host}, which is not configured; use one of {allowed}, "
            "or add it with --model-registry"
        )
    return RegistryModel(hosts[host], repo, found["wanted"])
