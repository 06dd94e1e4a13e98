"""What a runner is: a flat batch of tokens in, logits out. It knows no queue and no request."""

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

KEEPS_STATES = (
    "layers of this family keep a state instead of keys and values, or beside them, which the "
    "native runner alone computes"
)
"""Why the other runners refuse a model."""


class PassAbandoned(Exception):
    """The end of a pass whose result is not wanted any more. What it stored is not whole."""


@dataclasses.dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step's work.

    Attributes:
        token_ids (int64 [num_tokens]): the new tokens of all sequences, one sequence after another.
        positions (int64 [num_tokens]): their absolute positions.
        layout: BatchLayout where their KV goes and what they attend to.
        logit_rows (int64 [num_logits]): rows of the flat batch whose logits are wanted, ascending.
        state_rows (int64 [num_states]): rows whose hidden state behind the last norm is wanted
            instead, without the head.
        states (float32 [num_states, hidden_size]): where the pass puts those.
        is_abandoned: asked from time to time during a long pass, if the runner can: where it
            returns True the runner raises PassAbandoned.
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
    """Constants of a loaded model that the engine needs."""

    name: str  # "torch" | "native" | ...
    architecture: str  # model_type of the Hugging Face config
    dtype: str  # compute dtype
    vocab_size: int  # rows of the logits
    max_context: int  # longest sequence in tokens
    weight_bytes: int
    kv_spec: KVSpec
    # Where they lie in this process's memory; empty: not known.
    weight_region: Region = Region(0, 0)  # noqa: RUF009
    kernel_path: str = (
        "none"  # form of the project's own linear kernels that runs; "none" where others do
    )
    copies_kv: bool = (
        False  # holds running sequences' keys and values beside the pool too, as many bytes at most
    )
    hidden_size: int = 0  # floats of a hidden state; 0: the runner hands out none
    stores_kv: bool = True  # False: a text is one pass, all of it; what is wanted of it are states
    numerics: str = (
        ""  # what else the bits of keys and values depend on: versions of what computes them
    )


class StoredKeys(NamedTuple):
    """Tokens whose keys are stored, int64 [num_tokens] each.

    Attributes:
        slots: where.
        positions: at which they stand now.
        deltas: how far that is from where they were computed, new - old.
    """

    slots: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    deltas: npt.NDArray[np.int64]


class ModelTraits(NamedTuple):
    """What is known of a model before it is loaded: its config, and whether its weights are stored
    in a quantized format (which is then kept). `native_refusal`: why the files are none that the
    native runner reads, "" if they are;
    `onnx_refusal`: likewise of the ONNX runner, None where there is no ONNX file; `onnx_layers`:
      how many layers the graph has keys and values of; `describe`: gives its spec, where that is
      known already; `packed_bytes`: gives the bytes of its packed weights in a format, for
      `choose_weights` of the native runner.
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
        """What the native runner has to know. ModelFormatError where it does not know the model."""
        return describe_model(self.config) if self.describe is None else self.describe()


class LoadOptions(NamedTuple):
    """How a runner loads a model; each takes what concerns it. `progress`: called with (bytes done,
    bytes in all).
    """

    weights: str
    dtype: str
    device: str
    num_threads: int
    block_size: int
    kv_bits: tuple[int, int]
    progress: Callable[[int, int], None] | None = None


class Runner(Protocol):
    """A loaded model. `bind` gives it the backend that holds its KV; then `forward` may be
    called.
    """

    info: RunnerInfo

    @property
    def moved_keys_refusal(self) -> str | None:
        """Why keys are not attended at other positions than those they were computed at, as far as
        is known once a backend is bound; None: they are.
        """
        ...

    @property
    def copied_bytes(self) -> int:
        """Of copies of keys and values beside the pool, as of now; 0 unless `info.copies_kv`."""
        ...

    def bind(self, backend: Backend) -> None: ...

    def forward(self, batch: ForwardBatch) -> npt.NDArray[np.float32]:
        """Run the tokens, store their KV; return float32 logits [num_logits, vocab_size] that stay
        valid until the next call, and fill `batch.states`. Logits and states of a sequence are NaN
        if any key or value it stored is not finite. State rows only where `info.hidden_size` says
        so.
        """
        ...

    def accept_drafts(
        self, layout: BatchLayout, accepted: npt.NDArray[np.int32], states: PassStates
    ) -> None:
        """Let states take in drafts of the last pass, whose layout this is, to the bit as if they
        had been certain rows of it. accepted, [num_seqs]: how many of each sequence's drafts, at
        least one of all. states: where it goes on, which is what the pass left of it, and where to;
        of sequences without accepted drafts nothing is looked at. Saves lie behind accepted drafts.
        Only where `info.kv_spec` has states.
        """
        ...

    def deviations(
        self, batch: ForwardBatch, rows: npt.NDArray[np.int64], slots: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float32]:
        """Run the first layer and what makes the second one's values: squared distances, float32
        [len(rows)], of the values of these tokens of the flat batch from what is stored at these
        slots. Stores KV of both layers. Where there is no second layer nothing depends on context:
        0. Only where `moved_keys_refusal` is None.
        """
        ...

    def masses(
        self, batch: ForwardBatch, rows: npt.NDArray[np.int64], stored: StoredKeys
    ) -> npt.NDArray[np.float32]:
        """Run the layers up to `asked_layer`, and of that one attention: how much of theirs these
        tokens of the flat batch give to each of the stored ones, summed over tokens and heads,
        float32 [len(stored.slots)]. Stores KV of those layers. Only where `moved_keys_refusal` is
        None.
        """
        ...

    def close(self) -> None: ...
