"""Faults that `make mutants` plants, grouped by package or subject."""

from __future__ import annotations

from faults import (
    backends,
    batches,
    cli,
    compat,
    cuda,
    drafts,
    engine,
    kernels,
    kvcache,
    models,
    recurrent,
    reuse,
    runners,
    serve_ray,
    server,
    server_apis,
    text,
    tiers,
    weight_tables,
)
from faults.fault import Fault as Fault

_MODULES = (
    kernels,
    backends,
    kvcache,
    tiers,
    models,
    text,
    runners,
    compat,
    reuse,
    engine,
    server,
    server_apis,
    batches,
    serve_ray,
    cli,
    recurrent,
    drafts,
    weight_tables,
    cuda,
)

FAULTS = tuple(one for module in _MODULES for one in module.FAULTS)
