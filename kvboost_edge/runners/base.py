"""The runner interface: a flat batch of tokens to logits, without queues or requests."""

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
    """Raised when a pass ends early because its result is not wanted; its KV is incomplete."""


@dataclasses.dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Input of one step.

    Attributes:
        token_ids: int64 [num_tokens], new tokens of all sequences, one sequence after another.
        positions: int64 [num_tokens], their absolute positions.
        layout: slots of their KV, and the tables of the blocks that they attend to.
        logit_rows: int64 [num_logits], rows of the flat batch whose logits are wanted, ascending.
        state_rows: int64 [num_states], rows whose hidden state after the last norm is wanted
            instead, without the LM head.
        states: float32 [num_states, hidden_size], written: those hidden states.
        is_abandoned: called from time to time during a long pass, if the runner supports it; if it
            returns True, the runner raises PassAbandoned.
    """

    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    layout: BatchLayout
    logit_rows: npt.NDArray[np.int64]
    state_rows: npt.NDArray[np.int64] = dataclasses.field(
        default_factory=lambda: np.empty(0, np.int64)
    )
    states: npt.NDArray[np.float32] = dataclasses.field(
        default_factory=lambda: np.empty((0, 0), np.float32)
    )
    is_abandoned: Callable[[], bool] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class RunnerInfo:
    """Constants of a loaded model.

    Attributes:
        name: "torch", "native" or "onnx".
        architecture: model_type of the Hugging Face config.
        dtype: compute dtype, or weight format.
        vocab_size: width of the logits.
        max_context: longest sequence in tokens.
        weight_bytes: bytes of the weights.
        kv_spec: storage of KV and recurrent states.
        weight_region: memory of the weights in this process; empty if unknown.
        kernel_path: variant of this project's linear kernels; "none" if other kernels run.
        copies_kv: True if KV of running sequences is also held outside the pool, at most as many
            bytes.
        hidden_size: floats of a hidden state; 0: the runner returns none.
        stores_kv: False if a text is one whole pass that stores nothing; results are hidden
            states.
        numerics: versions of everything else that the bits of KV depend on.
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
    numerics: str = ""


class StoredKeys(NamedTuple):
    """Tokens whose keys are stored.

    Attributes:
        slots: int64 [num_tokens], slots of the pool.
        positions: int64 [num_tokens], their positions now.
        deltas: int64 [num_tokens], new position - position at which the key was computed.
    """

    slots: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    deltas: npt.NDArray[np.int64]


class ModelTraits(NamedTuple):
    """Facts about a model before it is loaded.

    Attributes:
        config: the Hugging Face config.
        is_gguf: True for a GGUF file.
        is_quantized: True if the weights are stored in a quantized format, which is then kept.
        native_refusal: why the native runner cannot read the files; "" if it can.
        onnx_refusal: why the ONNX runner cannot run the file; None without an ONNX file.
        onnx_layers: layers of the ONNX graph that have KV.
        describe: returns the model's spec, if it is known already.
        packed_bytes: (weight format) -> bytes of packed weights, for `choose_weights`.
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
        """The native runner's model description; raises ModelFormatError if unknown."""
        return describe_model(self.config) if self.describe is None else self.describe()


class LoadOptions(NamedTuple):
    """Options for loading a model; each runner uses the ones that apply to it.

    Attributes:
        weights: weight format.
        dtype: compute dtype.
        device: torch device.
        num_threads: threads of the kernels.
        block_size: tokens of a KV block.
        kv_bits: (bits of keys, bits of values) in the pool.
        progress: called with (bytes done, bytes in total).
    """

    weights: str
    dtype: str
    device: str
    num_threads: int
    block_size: int
    kv_bits: tuple[int, int]
    progress: Callable[[int, int], None] | None = None


class Runner(Protocol):
    """A loaded model; `bind` sets the backend that holds its KV, before `forward`."""

    info: RunnerInfo

    @property
    def moved_keys_refusal(self) -> str | None:
        """Reason why keys cannot be used at other positions, or None.

        It is final once a backend is bound.
        """
        ...

    @property
    def copied_bytes(self) -> int:
        """Bytes of KV copies outside the pool, at present; 0 unless `info.copies_kv`."""
        ...

    def bind(self, backend: Backend) -> None: ...

    def forward(self, batch: ForwardBatch) -> npt.NDArray[np.float32]:
        """Run the tokens, store their KV, and fill `batch.states`.

        Logits and states of a sequence are NaN if any key or value that it stored is not finite.
        `batch.state_rows` requires `info.hidden_size` > 0.

        Returns:
            Logits, float32 [num_logits, vocab_size], valid until the next call.
        """
        ...

    def accept_drafts(
        self, layout: BatchLayout, accepted: npt.NDArray[np.int32], states: PassStates
    ) -> None:
        """Advance recurrent states by accepted draft tokens of the last pass.

        The result is bit-identical to a pass in which they were ordinary tokens. Only for models
        with recurrent state.

        Args:
            layout: layout of the last pass.
            accepted: int32 [num_seqs], accepted draft tokens of each sequence; at least one in
                total.
            states: slots to read (left by the pass) and to write; ignored for sequences without
                accepted draft tokens. Snapshots are after accepted draft tokens.
        """
        ...

    def deviations(
        self, batch: ForwardBatch, rows: npt.NDArray[np.int64], slots: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float32]:
        """Return how far the values of tokens are from stored ones in the second layer.

        KV of the first two layers is stored. A model with one layer returns 0. Only if
        `moved_keys_refusal` is None.

        Args:
            batch: the pass.
            rows: int64 [n], rows of the flat batch.
            slots: int64 [n], slots of the stored values to compare with.

        Returns:
            Squared distances, float32 [n].
        """
        ...

    def masses(
        self, batch: ForwardBatch, rows: npt.NDArray[np.int64], stored: StoredKeys
    ) -> npt.NDArray[np.float32]:
        """Return the attention probability that tokens give to each stored key.

        It is measured in `asked_layer`, summed over tokens and heads. KV of the layers up to it is
        stored. Only if `moved_keys_refusal` is None.

        Args:
            batch: the pass.
            rows: int64 [n], rows of the flat batch.
            stored: the keys.

        Returns:
            float32 [len(stored.slots)].
        """
        ...

    def close(self) -> None: ...
