"""Runner interface: computes logits for a flat batch of tokens, without queues or requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvboost_edge.backends.base import Backend, BatchLayout, KVSpec, PassStates
from kvboost_edge.host.memory import Region
from kvboost_edge.models.config.spec import ModelSpec, describe_model

__all__ = [
    "KEEPS_STATES",
    "ForwardBatch",
    "LoadOptions",
    "ModelTraits",
    "PassAbandoned",
    "Runner",
    "RunnerInfo",
    "StoredKeys",
]

KEEPS_STATES = "layers of this family keep a recurrent state, which only the native runner supports"
"""Reason for which the other runners refuse a model."""


class PassAbandoned(Exception):
    """Raised when a pass ends early because its result is no longer needed.

    The KV of the pass is incomplete.
    """


@dataclasses.dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Input of one pass.

    Attributes:
        token_ids: int64 [num_tokens], new tokens of all sequences, concatenated.
        positions: int64 [num_tokens], absolute positions of the tokens.
        layout: slots for the new KV, and block tables for attention.
        logit_rows: int64 [num_logits], rows of the flat batch that need logits, ascending.
        hidden_state_rows: int64 [num_hidden_states], rows that need the hidden state after the last
            norm, ascending. A row may need both.
        hidden_states: float32 [num_hidden_states, hidden_size], receives those hidden states.
        joined: float32 [num_tokens, hidden_size], hidden states that an MTP head joins with the
            embeddings of the tokens, or None for other models. An assistant returns logits and
            states of all rows.
        is_short: whether only logits of the short vocabulary are wanted, see
            `RunnerInfo.short_vocabulary`.
        is_abandoned: called repeatedly during a long pass, if the runner supports it. If it returns
            True, the runner raises PassAbandoned.
        num_shareable: int64 [num_seqs], number of leading tokens of each sequence whose KV other
            sequences may reuse, or None unless `RunnerInfo.splits_passes`.
    """

    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    layout: BatchLayout
    logit_rows: npt.NDArray[np.int64]
    hidden_state_rows: npt.NDArray[np.int64] = dataclasses.field(
        default_factory=lambda: np.empty(0, np.int64)
    )
    hidden_states: npt.NDArray[np.float32] = dataclasses.field(
        default_factory=lambda: np.empty((0, 0), np.float32)
    )
    joined: npt.NDArray[np.float32] | None = None
    is_short: bool = False
    is_abandoned: Callable[[], bool] | None = None
    num_shareable: npt.NDArray[np.int64] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class RunnerInfo:
    """Constants of a loaded model.

    Attributes:
        name: "torch", "native" or "onnx".
        architecture: model_type of the Hugging Face config.
        dtype: compute dtype or weight format.
        vocab_size: number of logits per token.
        max_context: maximum sequence length in tokens.
        weight_bytes: size of the weights in bytes.
        kv_spec: storage format of KV and recurrent states.
        weight_region: memory region of the weights in this process, or empty if unknown.
        kernel_path: variant of this project's linear kernels, or "none" if other kernels are used.
        copies_kv: whether the runner also stores KV of running sequences outside the pool. The
            copies take at most the size of the pool.
        hidden_size: size of a hidden state, or 0 if the runner does not return hidden states.
        stores_kv: False if each text is one pass that stores no KV. Results are then hidden states.
        joins_hidden_states: True for an MTP head, whose passes need `ForwardBatch.joined`.
        borrows_kv: True for an assistant, which attends to the KV of the model that it drafts for
            and stores none.
        short_vocabulary: number of ids in the short vocabulary, which has the lowest ids, or 0 if
            passes always compute all logits.
        num_params: number of parameters, or 0 if unknown.
        numerics: versions of everything else that the exact bits of KV depend on.
        splits_passes: True if the runner computes KV that other sequences may reuse differently
            from all other KV. It then needs `ForwardBatch.num_shareable`.
    """

    name: str
    architecture: str
    dtype: str
    vocab_size: int
    max_context: int
    weight_bytes: int
    kv_spec: KVSpec
    weight_region: Region = Region(0, 0)  # noqa: RUF009
    kernel_path: str = "none"
    copies_kv: bool = False
    hidden_size: int = 0
    stores_kv: bool = True
    joins_hidden_states: bool = False
    borrows_kv: bool = False
    short_vocabulary: int = 0
    num_params: int = 0
    numerics: str = ""
    splits_passes: bool = False

    @property
    def exact_path(self) -> str:
        """The part of `kernel_path` that the exact bits of KV depend on."""
        # Each start decides whether to use AMX, which computes the bits of the variant after it.
        return self.kernel_path.removeprefix("amx+")


class StoredKeys(NamedTuple):
    """Tokens whose keys are stored in the pool.

    Attributes:
        slots: int64 [num_tokens], slots in the pool.
        positions: int64 [num_tokens], current positions.
        deltas: int64 [num_tokens], current position minus the position where the key was computed.
    """

    slots: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    deltas: npt.NDArray[np.int64]


class ModelTraits(NamedTuple):
    """Facts about a model that are known before it is loaded.

    Attributes:
        config: the Hugging Face config.
        is_gguf: whether the model is a GGUF file.
        is_quantized: whether the weights are stored in a quantized format, which is then kept.
        native_refusal: reason why the native runner cannot read the files, or "".
        onnx_refusal: reason why the ONNX runner cannot run the file, or "". None without an ONNX
            file.
        onnx_layers: number of layers with KV in the ONNX graph.
        describe: returns the model's spec, if it is already known.
        packed_bytes: returns the size of the packed weights in bytes for a weight format, used by
            `choose_weights`.
    """

    config: Mapping[str, Any]
    is_gguf: bool = False
    is_quantized: bool = False
    native_refusal: str = ""
    onnx_refusal: str | None = None
    onnx_layers: int = 0
    describe: Callable[[], ModelSpec] | None = None
    packed_bytes: Callable[[str], int] | None = None

    @property
    def spec(self) -> ModelSpec:
        """Model description of the native runner. Unknown models raise ModelFormatError."""
        return describe_model(self.config) if self.describe is None else self.describe()


class LoadOptions(NamedTuple):
    """Options for loading a model. Each runner uses those that apply to it.

    Attributes:
        weights: weight format.
        dtype: compute dtype.
        device: torch device.
        num_threads: number of kernel threads.
        block_size: number of tokens in a KV block.
        kv_bits: bits of keys and bits of values in the pool.
        progress: called with the bytes done and the bytes in total.
        short_vocabulary: see `RunnerInfo`.
        arithmetic: "exact" or "wide", see `EngineConfig.arithmetic`.
        sparse: whether passes may have sparse ranges, see `BatchLayout`.
    """

    weights: str
    dtype: str
    device: str
    num_threads: int
    block_size: int
    kv_bits: tuple[int, int]
    progress: Callable[[int, int], None] | None = None
    short_vocabulary: int = 0
    arithmetic: str = "exact"
    sparse: bool = False


class Runner(Protocol):
    """A loaded model. `bind` sets the backend that stores its KV, and must precede `forward`."""

    info: RunnerInfo

    @property
    def moved_keys_refusal(self) -> str | None:
        """Reason why keys cannot be reused at other positions, or None.

        The answer is final once a backend is bound.
        """
        ...

    @property
    def copied_bytes(self) -> int:
        """Current size of KV copies outside the pool in bytes. It is 0 unless `info.copies_kv`."""
        ...

    def bind(self, backend: Backend) -> None: ...

    def forward(self, batch: ForwardBatch) -> npt.NDArray[np.float32]:
        """Compute a pass: store its KV, fill `batch.hidden_states` and return logits.

        If a key or value that a sequence stores is not finite, all its logits and states are NaN.
        `batch.hidden_state_rows` requires `info.hidden_size` > 0.

        Returns:
            Logits, float32 [num_logits, vocab_size], valid until the next call.
        """
        ...

    def accept_drafts(
        self, layout: BatchLayout, accepted: npt.NDArray[np.int32], states: PassStates
    ) -> None:
        """Advance the recurrent state by accepted draft tokens of the last pass.

        The result is bit-identical to a pass with the same tokens as ordinary tokens. Models
        without recurrent state do not support this.

        Args:
            layout: layout of the last pass.
            accepted: int32 [num_seqs], number of accepted draft tokens per sequence. At least one
                must be positive.
            states: slots to read (as the pass left them) and to write. Sequences without accepted
                draft tokens are ignored. Snapshot positions count accepted draft tokens.
        """
        ...

    def deviations(
        self, batch: ForwardBatch, rows: npt.NDArray[np.int64], slots: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float32]:
        """Return how far tokens' values in the second layer deviate from stored values.

        The pass also stores the KV of the first two layers. A model with one layer returns 0.
        Requires `moved_keys_refusal` to be None.

        Args:
            batch: input of the pass.
            rows: int64 [n], rows of the flat batch.
            slots: int64 [n], slots of the stored values to compare with.

        Returns:
            Squared distances, float32 [n].
        """
        ...

    def masses(
        self, batch: ForwardBatch, rows: npt.NDArray[np.int64], stored: StoredKeys
    ) -> npt.NDArray[np.float32]:
        """Return the attention probability of stored keys in the layer `asked_layer`.

        The probability is summed over tokens and heads. The pass also stores the KV of all layers
        up to that layer. Requires `moved_keys_refusal` to be None.

        Args:
            batch: input of the pass.
            rows: int64 [n], rows of the flat batch whose attention counts.
            stored: the keys.

        Returns:
            float32 [len(stored.slots)].
        """
        ...

    def close(self) -> None: ...
