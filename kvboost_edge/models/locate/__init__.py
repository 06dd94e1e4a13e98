"""Lookup of models by path, hub name, or name in the store of another program."""

from kvboost_edge.models.locate.display_names import model_name
from kvboost_edge.models.locate.model import BUNDLED_MODEL, locate_model

__all__ = ["BUNDLED_MODEL", "locate_model", "model_name"]
