"""Torch runner: causal language models of transformers with paged KV and unmodified modules."""

from __future__ import annotations

import contextlib
import inspect
import logging
import threading
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from kvboost_edge.backends.base import Backend, BatchLayout, LayerKVSpec, PassStates
from kvboost_edge.backends.batch_layout import refuse_deltas
from kvboost_edge.backends.torch_backend import TorchBackend, turn_keys
from kvboost_edge.errors import BackendUnavailable, CapacityError, ConfigError, ModelFormatError
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.config.architectures import (
    SUPPORTED_ARCHITECTURES,
    is_bidirectional,
    pinned_context,
)
from kvboost_edge.models.config.json_readers import context_length
from kvboost_edge.models.config.spec import may_keep_states
from kvboost_edge.runners.attended_keys import asked_layer, attended_masses
from kvboost_edge.runners.base import (
    KEEPS_STATES,
    ForwardBatch,
    LoadOptions,
    RunnerInfo,
    StoredKeys,
)
from kvboost_edge.runners.torch.attention_hook import (
    AttentionHook,
    LayerPlan,
    LookPass,
    PagedPass,
    ProbePass,
    StopPass,
)
from kvboost_edge.runners.torch.eager_check import check_against_eager
from kvboost_edge.runners.torch.rope_detection import NUM_PROBED, RopeFrequencies, find_turning
from kvboost_edge.runners.torch.select_torch import BIDIRECTIONAL, compute_dtype, torch_kv_spec

__all__ = ["TorchRunner", "load"]

_LOG = logging.getLogger(__name__)
_PROBED_TOKEN = 1  # not 0, which is padding in some vocabularies and has a zero embedding
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_LOADING_ERRORS = (
    ImportError,
    OSError,
    KeyError,
    TypeError,
    ValueError,
    RuntimeError,
    SafetensorError,
    StrictDataclassError,
)
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class TorchRunner:
    """Runner over a loaded transformers model.

    The constructor runs a pass to find each layer's KV shape, window, scale, softcap, sinks and
    RoPE as transformers uses them. A family that no test covers is also compared with eager
    attention. Between forward passes the model is unchanged, so its owner can use it.

    Args:
        model: the transformers model.
        model_type: overrides the model_type of the config.
        max_context: maximum sequence length in tokens. Defaults to that of the config.
        block_size: number of tokens in a KV block.
        kv_bits: bits of keys and bits of values in the pool. (16, 16) uses the model's dtype.

    Raises:
        ModelFormatError: paged attention does not support the model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        model_type: str | None = None,
        max_context: int | None = None,
        block_size: int = 16,
        kv_bits: tuple[int, int] = (16, 16),
    ) -> None:
        config = model.config.get_text_config()
        if is_bidirectional(config.to_dict()):
            raise ModelFormatError(BIDIRECTIONAL)
        self.model = model.eval()
        self._kind = type(model).__name__
        self._hook = AttentionHook(model)
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._backend: Backend | None = None
        self.device = str(model.device)
        if model.dtype not in _NAMES:
            raise ModelFormatError(
                f"{self._kind} computes in {model.dtype}, which is not supported; use "
                f"{', '.join(_DTYPES)}"
            )
        longest = _context_length(config, max_context)
        with self._watched() as states:
            self._layers, self._turning, vocab_size = self._probe(
                int(config.num_hidden_layers), longest
            )
        self.info = RunnerInfo(
            name="torch",
            architecture=model_type or model.config.model_type,
            dtype=_NAMES[model.dtype],
            vocab_size=vocab_size,
            max_context=longest,
            weight_bytes=_weight_bytes(model),
            kv_spec=torch_kv_spec(
                tuple(LayerKVSpec(layer.num_kv_heads, layer.head_dim) for layer in self._layers),
                block_size,
                _NAMES[model.dtype],
                kv_bits,
            ),
            hidden_size=_state_size(model, states),
            num_params=model.num_parameters(),
            numerics=(
                f"torch {torch.__version__} transformers {version('transformers')} "
                f"{torch.get_num_threads()} {_processor(model.device)}"
            ),
        )
        known = SUPPORTED_ARCHITECTURES.get(self.info.architecture)
        if known is None or not known.tested:
            check_against_eager(self)

    @property
    def turning_refusal(self) -> str | None:
        """Reason why no backend can reuse the model's keys at other positions, or None."""
        if self._turning.refusal is not None:
            return f"{self._kind}: {self._turning.refusal}; use runner='native'"
        return None

    @property
    def moved_keys_refusal(self) -> str | None:
        if self._turning.refusal is not None:
            return self.turning_refusal
        if isinstance(self._backend, TorchBackend):
            return None
        name = "no backend" if self._backend is None else f"backend {self._backend.name!r}"
        return f"the torch runner on {name} cannot use keys at other positions; use backend='torch'"

    @property
    def copied_bytes(self) -> int:
        return 0

    def accept_drafts(
        self, layout: BatchLayout, accepted: npt.NDArray[np.int32], states: PassStates
    ) -> None:
        raise BackendUnavailable(
            "the torch runner does not support models with recurrent state; use runner='native'"
        )

    def deviations(
        self, batch: ForwardBatch, rows: npt.NDArray[np.int64], slots: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float32]:
        """Return distances of computed values from stored ones. See `Runner.deviations`."""
        if len(self._layers) < 2:
            return np.zeros(len(rows), dtype=np.float32)
        backend, seen = self._look(batch, 1)
        computed = seen.values[torch.from_numpy(rows).to(seen.values.device)].float()
        return _numpy((computed - backend.stored(1, slots)[1]).square().sum((1, 2)))

    def masses(
        self, batch: ForwardBatch, rows: npt.NDArray[np.int64], stored: StoredKeys
    ) -> npt.NDArray[np.float32]:
        """Return the attention that tokens give to stored keys. See `Runner.masses`."""
        layer = asked_layer([one.params.window for one in self._layers])
        backend, seen = self._look(batch, layer)
        if not len(rows):
            return np.zeros(len(stored.slots), dtype=np.float32)
        deltas, which = np.unique(stored.deltas, return_inverse=True)
        keys = backend.stored(layer, stored.slots)[0]
        turns = torch.from_numpy(which).to(keys.device)[:, None]
        turned = _numpy(turn_keys(keys, deltas, turns, self._turning.layers[layer]))
        query, lse = (_numpy(tensor)[rows] for tensor in (seen.query, seen.lse))
        params = self._layers[layer].params
        return attended_masses(query, lse, batch.positions[rows], turned, stored.positions, params)

    def _look(self, batch: ForwardBatch, layer: int) -> tuple[TorchBackend, LookPass]:
        """Run the layers up to and including `layer`, and store their KV."""
        backend = self._backend
        if self.moved_keys_refusal is not None or not isinstance(backend, TorchBackend):
            raise BackendUnavailable(str(self.moved_keys_refusal))
        look = LookPass(layer, backend, batch.layout, self._layers, self._turning.layers)
        with torch.inference_mode(), self._hook.active(look), contextlib.suppress(StopPass):
            self._run(batch.token_ids, batch.positions, np.empty(0, np.int64))
        return backend, look

    @classmethod
    def from_dir(
        cls,
        model_dir: Path | str,
        *,
        dtype: str = "auto",
        device: str = "cpu",
        num_threads: int | None = None,
        max_context: int | None = None,
        block_size: int = 16,
        kv_bits: tuple[int, int] = (16, 16),
    ) -> TorchRunner:
        """Load a model directory. Only safetensors are read, without remote code or network.

        Args:
            model_dir: the directory.
            dtype: compute dtype. For "auto", see `compute_dtype`.
            device: torch device.
            num_threads: number of torch threads in this process. None keeps the current number.
            max_context: maximum sequence length in tokens. Defaults to that of the config.
            block_size: number of tokens in a KV block.
            kv_bits: bits of keys and bits of values in the pool.

        Raises:
            ModelFormatError: the model cannot be loaded completely.
        """
        if dtype != "auto" and dtype not in _DTYPES:
            raise ConfigError(f"dtype={dtype!r} is not one of {('auto', *_DTYPES)}")
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        try:
            config = AutoConfig.from_pretrained(
                model_dir, local_files_only=True, trust_remote_code=False
            )
            with _no_progress_bars():
                model, report = AutoModelForCausalLM.from_pretrained(
                    model_dir,
                    config=config,
                    dtype=_resolve_dtype(dtype, config, device),
                    local_files_only=True,
                    use_safetensors=True,
                    trust_remote_code=False,
                    output_loading_info=True,
                )
        except _LOADING_ERRORS as error:
            raise ModelFormatError(
                f"{model_dir}: transformers cannot load this model: {error}"
            ) from error
        missing = sorted(report["missing_keys"])
        if missing:
            raise ModelFormatError(
                f"{model_dir}: {len(missing)} weights are missing, starting with {missing[0]!r}"
            )
        try:
            model = model.to(device)
        except RuntimeError as error:
            if "memory" in str(error):
                raise CapacityError(
                    f"{model_dir}: the weights ({_weight_bytes(model)} bytes) do not fit on "
                    f"device={device!r}: {error}; use device='cpu' or a smaller model"
                ) from error
            raise ModelFormatError(
                f"{model_dir}: torch cannot move the model to device={device!r}: {error}"
            ) from error
        return cls(model, max_context=max_context, block_size=block_size, kv_bits=kv_bits)

    def _probe(self, num_layers: int, longest: int) -> tuple[list[LayerPlan], RopeFrequencies, int]:
        """Run one token at several positions.

        Returns:
            The plan of each layer, the RoPE frequencies, and the number of logits.
        """
        probe = ProbePass()
        positions = np.arange(min(NUM_PROBED, longest))
        try:
            with torch.inference_mode(), self._hook.active(probe):
                logits = self._run(
                    np.full_like(positions, _PROBED_TOKEN), positions, np.zeros(1, np.int64)
                )
        except ModelFormatError as error:
            raise ModelFormatError(f"{self._kind}: {error}") from error
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"{self._kind}: device={self.device!r} has too little free memory for a pass of "
                f"{len(positions)} tokens: {error}; use device='cpu' or a smaller model"
            ) from error
        except (AttributeError, KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
            raise ModelFormatError(
                f"{self._kind} does not run on paged attention: its layers handle their mask or "
                f"cache outside transformers' attention interface ({error})"
            ) from error
        if sorted(probe.layers) != list(range(num_layers)):
            raise ModelFormatError(
                f"{self._kind}: {len(probe.layers)} of {num_layers} layers use transformers' "
                "attention interface; the others keep state that the block pool cannot hold"
            )
        # A state in parallel to attention is not visible in the layers that were probed.
        if may_keep_states(self.model.config.to_dict()):
            raise ModelFormatError(f"{self._kind}: {KEEPS_STATES}")
        kv = [probe.kv[layer] for layer in range(num_layers)]
        with torch.inference_mode():
            turning = find_turning(self.model, kv, _NAMES[self.model.dtype])
        return [probe.layers[layer] for layer in range(num_layers)], turning, logits.shape[-1]

    def bind(self, backend: Backend) -> None:
        """Set the backend; raise ConfigError if its layers or device do not match the model."""
        if backend.spec.layers != self.info.kv_spec.layers:
            raise ConfigError(
                f"the backend was created for layers {backend.spec.layers}, but the model has "
                f"{self.info.kv_spec.layers}; create a new backend"
            )
        if backend.array_kind == "torch" and _numbered(backend.device) != _numbered(self.device):
            raise ConfigError(
                f"the backend is on device={backend.device!r}, but the model is on "
                f"{self.device!r}; use device={self.device!r}"
            )
        self._backend = backend

    def forward(self, batch: ForwardBatch) -> npt.NDArray[np.float32]:
        """Compute a pass: store its KV, fill `batch.hidden_states` and return logits.

        Returns:
            Logits, float32 [num_logits, vocab_size].
        """
        backend = self._backend
        if backend is None:
            raise ConfigError("call bind before forward: the runner has no backend for its KV")
        refusal = self.moved_keys_refusal
        if refusal is not None:
            refuse_deltas(batch.layout, "the torch runner")
        paged = PagedPass(
            backend, batch.layout, self._layers, [] if refusal else self._turning.layers
        )
        wanted = self._watched() if len(batch.hidden_state_rows) else contextlib.nullcontext()
        with torch.inference_mode(), self._hook.active(paged), wanted as states:
            logits = self._run(batch.token_ids, batch.positions, batch.logit_rows)
            paged.check_complete(self._kind)
            if states is not None:
                batch.hidden_states[:] = _numpy(
                    states[-1][0][torch.from_numpy(batch.hidden_state_rows).to(self.device)]
                )
                paged.blank_broken(batch.hidden_states, batch.hidden_state_rows)
            result: npt.NDArray[np.float32] = logits.to(device="cpu", dtype=torch.float32).numpy()
            paged.blank_broken(result, batch.logit_rows)
        return result

    @contextlib.contextmanager
    def _watched(self) -> Iterator[list[torch.Tensor]]:
        """Collect each pass's hidden states after the last norm, [1, num_tokens, hidden_size]."""
        found: list[torch.Tensor] = []
        thread = threading.get_ident()  # the owner may run the model in another thread

        def take(module: torch.nn.Module, args: Any, output: Any) -> None:
            if threading.get_ident() == thread:
                found.append(output[0])

        handle = self.model.base_model.register_forward_hook(take)
        try:
            yield found
        finally:
            handle.remove()

    def _run(
        self,
        token_ids: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        logit_rows: npt.NDArray[np.int64],
    ) -> torch.Tensor:
        """Run the model's own forward on a flat batch and return logits [num_logits, vocab_size].

        The forward applies the family's logit scales and softcaps. With `logits_to_keep`, the LM
        head skips all other rows.
        """
        ids, at, rows = (
            torch.from_numpy(array).to(self.device) for array in (token_ids, positions, logit_rows)
        )
        keep = {"logits_to_keep": rows} if self._keeps_rows else {}
        output = self.model(
            input_ids=ids[None], position_ids=at[None], use_cache=False, return_dict=True, **keep
        )
        logits: torch.Tensor = output.logits[0]
        return logits if self._keeps_rows else logits[rows]

    def eager_logits(self, token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Return logits of one sequence with dense eager attention, as a reference.

        Returns:
            float32 [num_tokens, vocab_size].
        """
        rows = np.arange(len(token_ids), dtype=np.int64)
        with torch.inference_mode(), self._hook.eager():
            result: npt.NDArray[np.float32] = (
                self._run(token_ids, rows, rows).to("cpu", torch.float32).numpy()
            )
        return result

    def unbind(self) -> None:
        """Release the backend."""
        self._backend = None

    def close(self) -> None:
        """Release the backend and the model. Afterwards only `info` may be read.

        Weights that nothing else references are freed.
        """
        self.unbind()
        vars(self).pop("model", None)


def _state_size(model: PreTrainedModel, states: list[torch.Tensor]) -> int:
    """Return the size of the hidden state that the LM head reads, or 0 if it is unavailable."""
    head = model.get_output_embeddings()
    if model.base_model is model or head is None or not states:
        return 0
    size = int(states[0].shape[-1])
    return size if head.weight.shape[-1] == size else 0


def _numpy(tensor: torch.Tensor) -> npt.NDArray[np.float32]:
    array: npt.NDArray[np.float32] = tensor.to(device="cpu", dtype=torch.float32).numpy()
    return array


def load(checkpoint: Checkpoint, options: LoadOptions) -> TorchRunner:
    """Load a checkpoint with this runner. Its weights keep their format."""
    return TorchRunner.from_dir(
        checkpoint.path,
        dtype=options.dtype,
        device=options.device,
        num_threads=options.num_threads,
        block_size=options.block_size,
        kv_bits=options.kv_bits,
    )


def _context_length(config: PreTrainedConfig, asked: int | None) -> int:
    """Return the maximum sequence length in tokens.

    The frequencies of some RoPE types (dynamic, longrope) depend on the longest position in a call.
    Their context is limited to the first range, where frequencies are constant. A batch therefore
    cannot change a result.
    """
    fields = config.to_dict()
    length = context_length(fields)
    if asked is not None:
        length = min(length, asked)
    pinned = pinned_context(fields)
    if pinned is not None and pinned.length < length:
        _LOG.warning(
            "rope_type=%r: the context is limited to %d of %d tokens, because its frequencies "
            "depend on the batch beyond that",
            pinned.rope_type,
            pinned.length,
            length,
        )
        length = pinned.length
    return length


def _resolve_dtype(name: str, config: PreTrainedConfig, device: str) -> torch.dtype | str:
    """Return the dtype to load in, or "auto" if neither the option nor the config names one."""
    stored = config.get_text_config().dtype or config.dtype
    stored_name = _NAMES.get(stored, "")
    chosen = compute_dtype(name, stored_name, device)
    if name == "auto" and chosen != stored_name:
        _LOG.info(
            "the %s checkpoint is computed in %s, because half precision is slow on the CPU",
            stored_name,
            chosen,
        )
    return _DTYPES[chosen] if chosen else stored or "auto"


def _numbered(name: str) -> torch.device:
    """Return a device with its number, which for a GPU is by default the current one."""
    device = torch.device(name)
    if device.type == "cuda" and device.index is None:
        return torch.device(device.type, torch.cuda.current_device())
    return device if device.type == "cuda" else torch.device(device.type)


def _processor(device: torch.device) -> str:
    """Return the processor that computes, on which the last bits of KV depend."""
    if device.type == "cuda":
        return f"cuda {torch.cuda.get_device_name(device)}"
    if device.type == "cpu":
        return f"cpu {torch.backends.cpu.get_cpu_capability()}"
    return str(device.type)


def _weight_bytes(model: PreTrainedModel) -> int:
    """Return the size of parameters and buffers in bytes, with tied ones counted once."""
    tensors = {tensor.data_ptr(): tensor for tensor in [*model.parameters(), *model.buffers()]}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
