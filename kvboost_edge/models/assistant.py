"""Assistants and MTP heads in files that hold only the drafter of another model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.config.mtp_spec import MtpSpec, describe_assistant, fitted_head
from kvboost_edge.models.packed.pack_plan import PackEntry, mtp_plan
from kvboost_edge.models.weights.weight_source import WeightSource

__all__ = ["AssistantFiles", "HeadFile", "packed_fingerprint"]


def packed_fingerprint(whole: str) -> str:
    """Return the fingerprint of an MTP head's packed weights, given that of its checkpoint."""
    return hashlib.sha256(f"mtp {whole}".encode()).hexdigest()


class AssistantFiles:
    """The checkpoint of an assistant, with the methods of a `Checkpoint` that has an MTP head.

    Attributes:
        mtp: description of the assistant as an MTP head of the model.

    Args:
        checkpoint: the assistant's checkpoint.
        target: the model that it drafts for.
        target_weights: weight format of that model.

    Raises:
        ModelFormatError: the assistant is damaged.
        DraftModelMismatch: the assistant does not fit the model.
    """

    def __init__(self, checkpoint: Checkpoint, target: Checkpoint, target_weights: str) -> None:
        self.path: Path = checkpoint.path
        self.cache_dir = checkpoint.cache_dir
        self.mtp: MtpSpec = self._described(checkpoint, target)
        self._checkpoint = checkpoint
        self._target = target
        self._target_weights = target_weights

    def _described(self, checkpoint: Checkpoint, target: Checkpoint) -> MtpSpec:
        return describe_assistant(checkpoint.config, target.spec)

    @property
    def config(self) -> Mapping[str, Any]:
        return self._checkpoint.config

    def plan(self, weights: str) -> list[PackEntry]:
        """Return the pack plan of the model, whose embedding the assistant uses."""
        return self._target.plan(self._target_weights)

    def open_mtp_source(self) -> WeightSource:
        """Open the tensors of the assistant, as a context manager."""
        return self._checkpoint.open_assistant_source()

    def mtp_plan(self, weights: str) -> list[PackEntry]:
        """Return the pack plan of the assistant.

        Raises:
            ModelFormatError: the tensors do not match the plan.
        """
        with self.open_mtp_source() as source:
            return mtp_plan(self.mtp, weights, source)

    def fingerprint(self, *, cache_dir: Path | None = None) -> str:
        return self._checkpoint.fingerprint(cache_dir=cache_dir)

    def changed_files(self) -> list[str]:
        return self._checkpoint.changed_files()


class HeadFile(AssistantFiles):
    """A GGUF file that contains an MTP head without its model.

    The head uses the embedding and the LM head of the model, unless its block contains them.
    """

    def _described(self, checkpoint: Checkpoint, target: Checkpoint) -> MtpSpec:
        if checkpoint.mtp is None:
            raise ModelFormatError(
                "multi-token prediction heads of model_type="
                f"{checkpoint.config['model_type']!r} are not supported"
            )
        return fitted_head(checkpoint.mtp, checkpoint.spec, target.spec)

    def open_mtp_source(self) -> WeightSource:
        """Open the tensors of the head, as a context manager."""
        return self._checkpoint.open_mtp_source()
