"""Replicas on Ray Serve: one server in front of several engines, on one or more machines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray import serve

__all__ = ["app"]


def app(args: dict[str, Any]) -> serve.Application:
    """Build the application for `serve run`, or for the `import_path` of a serve.yaml.

    Args:
        args: Flags of `kvboost-edge serve` by name, see `start.flags_of`.
    """
    from kvboost_edge.serve_ray.ingress import application

    return application(args)
