"""Model specs read from a model's files."""

from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.config.spec import describe_model


def spec_of(path, **options):
    return describe_model(Checkpoint.open(path, **options).config)
