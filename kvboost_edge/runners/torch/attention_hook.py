"""Paged attention for transformers models through `AttentionInterface`, without patches.

While an `AttentionHook` is active, the model's configs name the attention and mask functions of
this module. Transformers then calls `_paged_mask` instead of building a mask tensor, and in each
layer `_paged_attention` with q, k and v after RoPE. The thread's active pass determines what a call
does:

- `ProbePass` (once, at load) records each layer's shapes, constants and keys. It evaluates the
  mask function around every edge to verify that the mask is causal, with at most a sliding window.
- `PagedPass` (each forward) writes k and v to the backend and returns its attention. It checks
  that every layer attends exactly once, and records sequences that wrote NaN or infinite values.
- `LookPass` is a `PagedPass` that ends at a layer in the middle of the model.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from kvboost_edge.backends.base import AttentionParams, Backend, BatchLayout
from kvboost_edge.backends.torch_backend import TorchBackend
from kvboost_edge.errors import ConfigError, ModelFormatError

__all__ = [
    "ATTENTION_NAME",
    "AttentionHook",
    "LayerPlan",
    "LookPass",
    "PagedPass",
    "ProbePass",
    "StopPass",
]

ATTENTION_NAME = "kvboost_edge_paged"
# Any other tensor, such as a position bias, would change the scores.
_KNOWN_TENSORS = {"s_aux", "position_ids", "cache_position"}


@dataclasses.dataclass(frozen=True, slots=True)
class LayerPlan:
    """Attention constants of one layer, found by the probe."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    params: AttentionParams


@dataclasses.dataclass(frozen=True, slots=True)
class _MaskSpec:
    """Object that is passed through the model instead of a mask tensor.

    Attributes:
        window: sliding window in keys, or 0.
        problem: reason why layers with this mask are not supported, or None. Models also build
            masks that no layer uses.
    """

    window: int
    problem: str | None


class AttentionPass(Protocol):
    """Handler for the tensors of attention layers.

    q is [num_q_heads, num_tokens, head_dim]. k and v are [num_kv_heads, num_tokens, head_dim]. The
    result is [num_tokens, num_q_heads, head_dim].
    """

    def find_mask_problem(
        self, mask_function: Callable[..., torch.Tensor], window: int
    ) -> str | None: ...

    def attend(
        self,
        layer: int,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        params: AttentionParams | None,
    ) -> torch.Tensor: ...

    def wants_params(self) -> bool: ...


# Engines that share a model run one at a time, because the model's config names the attention
# function.
_locks: weakref.WeakKeyDictionary[PreTrainedModel, threading.Lock] = weakref.WeakKeyDictionary()
_active: contextvars.ContextVar[AttentionPass | None] = contextvars.ContextVar(
    "kvboost_edge_pass", default=None
)


class ProbePass:
    """Pass that records each layer's `LayerPlan`, keys and values.

    Each token attends only to itself, so its attention output is its own value.
    """

    def __init__(self) -> None:
        self.layers: dict[int, LayerPlan] = {}
        self.kv: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def wants_params(self) -> bool:
        return True

    def find_mask_problem(
        self, mask_function: Callable[..., torch.Tensor], window: int
    ) -> str | None:
        """Return why the mask is not causal with this window, or None if it is."""
        points = {0, 1, 2, 3, 7, 64}
        if window:
            points |= {max(0, at + step) for at in (window, 2 * window) for step in range(-2, 4)}
        axis = torch.tensor(sorted(points))
        query = axis[:, None]
        key = axis[None, :]
        zero = torch.zeros((), dtype=torch.int64)
        expected = key <= query
        if window:
            expected = expected & (key > query - window)
        try:
            actual = torch.broadcast_to(
                torch.as_tensor(mask_function(zero, zero, query, key)), expected.shape
            )
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            return f"its attention mask cannot be checked: {error}"
        if torch.equal(actual.bool(), expected):
            return None
        kind = f"causal with a window of {window}" if window else "causal"
        return f"its attention mask is not {kind}; such masks are not supported"

    def attend(
        self,
        layer: int,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        params: AttentionParams | None,
    ) -> torch.Tensor:
        query, key, value = tensors
        if layer in self.layers:
            raise ModelFormatError(f"two attention modules have layer_idx={layer}")
        if (
            key.shape != value.shape
            or query.shape[-1] != key.shape[-1]
            or query.shape[0] % key.shape[0]
        ):
            raise ModelFormatError(
                f"layer {layer} has queries {tuple(query.shape)}, keys {tuple(key.shape)}, values "
                f"{tuple(value.shape)}: all must have the same head_dim, and the query heads must "
                "be a multiple of the KV heads"
            )
        assert params is not None
        self.layers[layer] = LayerPlan(query.shape[0], key.shape[0], key.shape[2], params)
        self.kv[layer] = key, value
        return value.repeat_interleave(query.shape[0] // key.shape[0], dim=0).transpose(0, 1)


class PagedPass:
    """Forward pass on a backend."""

    def __init__(
        self,
        backend: Backend,
        layout: BatchLayout,
        layers: Sequence[LayerPlan],
        turning: Sequence[npt.NDArray[np.float64]] = (),
    ) -> None:
        self._backend = backend
        self._batch = backend.prepare(layout)
        self._layers = layers
        self._turning = turning
        self._calls = [0] * len(layers)
        self._starts = layout.cu_seqlens_q
        # Sums over all KV of a token. They are not needed if every sequence has one token, whose
        # logits then show NaN, because it attends to its own KV.
        self._checks_rows = len(layout.slot_mapping) > len(layout.seq_lens)
        self._row_sums: torch.Tensor | None = None

    def wants_params(self) -> bool:
        return False

    def find_mask_problem(
        self, mask_function: Callable[..., torch.Tensor], window: int
    ) -> str | None:
        """Return None, because the probe has already checked the mask."""
        # In this pass the mask also separates sequences, which is the backend's task.
        return None

    def attend(
        self,
        layer: int,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        params: AttentionParams | None,
    ) -> torch.Tensor:
        self._calls[layer] += 1
        backend = self._backend
        query, key, value = (tensor.transpose(0, 1) for tensor in tensors)
        if self._checks_rows:
            # In float32, sums of finite half-precision numbers remain finite, and NaN and infinity
            # persist.
            sums = key.sum((1, 2), dtype=torch.float32) + value.sum((1, 2), dtype=torch.float32)
            self._row_sums = sums if self._row_sums is None else self._row_sums + sums
        if isinstance(backend, TorchBackend):
            backend.write_kv(layer, key, value, self._batch)
            return self._attend(backend, layer, query)[0]
        backend.write_kv(layer, _to_numpy(key), _to_numpy(value), self._batch)
        array, _ = backend.attention(
            layer, _to_numpy(query), self._batch, self._layers[layer].params
        )
        return torch.from_numpy(array).to(device=query.device, dtype=query.dtype)

    def _attend(
        self, backend: TorchBackend, layer: int, query: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        frequencies = self._turning[layer] if self._turning else None
        return backend.attention(layer, query, self._batch, self._layers[layer].params, frequencies)

    def blank_broken(self, logits: np.ndarray, logit_rows: np.ndarray) -> None:
        """Set the logits of sequences that wrote NaN or infinite KV to NaN."""
        # With a sliding window, the last row does not see all earlier rows, so it might not show
        # the NaN.
        if self._row_sums is None:
            return
        broken = np.flatnonzero(~torch.isfinite(self._row_sums).cpu().numpy())
        sequences = np.searchsorted(self._starts, broken, side="right")
        logits[np.isin(np.searchsorted(self._starts, logit_rows, side="right"), sequences)] = np.nan

    def check_complete(self, architecture: str) -> None:
        """Raise ModelFormatError unless every layer attended exactly once."""
        wrong = [layer for layer, count in enumerate(self._calls) if count != 1]
        if wrong:
            raise ModelFormatError(
                f"{architecture}: layer {wrong[0]} called the attention function "
                f"{self._calls[wrong[0]]} times in one pass instead of once, so its results cannot "
                "be trusted; use another runner or report this model"
            )


class StopPass(Exception):
    """Raised to end a pass at a layer after which nothing is needed."""


class LookPass(PagedPass):
    """Pass that raises `StopPass` at a layer once the layer's KV is stored.

    Attributes:
        values: values of that layer, [num_tokens, num_kv_heads, head_dim].
        query: queries of that layer, [num_tokens, num_q_heads, head_dim].
        lse: log-sum-exp of its attention scores, [num_tokens, num_q_heads].
    """

    values: torch.Tensor
    query: torch.Tensor
    lse: torch.Tensor

    def __init__(self, last: int, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._last = last

    def attend(
        self,
        layer: int,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        params: AttentionParams | None,
    ) -> torch.Tensor:
        if layer < self._last:
            return super().attend(layer, tensors, params)
        self.query, key, self.values = (tensor.transpose(0, 1) for tensor in tensors)
        assert isinstance(self._backend, TorchBackend)
        self._backend.write_kv(layer, key, self.values, self._batch)
        self.lse = self._attend(self._backend, layer, self.query)[1]
        raise StopPass


def _to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Return a contiguous float32 array, without a copy if possible."""
    array: np.ndarray = tensor.to(device="cpu", dtype=torch.float32).contiguous().numpy()
    return array


class AttentionHook:
    """Switch that makes a model use paged attention, but only inside `active`."""

    def __init__(self, model: PreTrainedModel) -> None:
        AttentionInterface.register(ATTENTION_NAME, _paged_attention)
        AttentionMaskInterface.register(ATTENTION_NAME, _paged_mask)
        configs = {id(model.config): model.config}
        for module in model.modules():
            config = getattr(module, "config", None)
            if hasattr(config, "_attn_implementation"):
                configs[id(config)] = config
        self._configs = list(configs.values())
        self._lock = _locks.setdefault(model, threading.Lock())

    @contextlib.contextmanager
    def active(self, attention_pass: AttentionPass) -> Iterator[None]:
        """Route this thread's attention to `attention_pass`."""
        token = _active.set(attention_pass)
        try:
            with self._named(ATTENTION_NAME):
                yield
        finally:
            _active.reset(token)

    def eager(self) -> contextlib.AbstractContextManager[None]:
        """Use transformers' eager attention, as a reference."""
        return self._named("eager")

    def rename(self, name: str) -> list[str | None]:
        """Make the model call an attention function; return the previous names for `restore`."""
        with self._lock:
            before = [config._attn_implementation for config in self._configs]
            self._set_names([name] * len(before))
        return before

    def restore(self, names: Sequence[str | None]) -> None:
        """Restore the names that `rename` returned."""
        with self._lock:
            self._set_names(names)

    def _set_names(self, names: Sequence[str | None]) -> None:
        for config, name in zip(self._configs, names, strict=True):
            config._attn_implementation = {"": name}  # the dict form does not change sub-configs

    @contextlib.contextmanager
    def _named(self, name: str) -> Iterator[None]:
        with self._lock:
            before = [config._attn_implementation for config in self._configs]
            try:
                self._set_names([name] * len(before))
                yield
            finally:
                self._set_names(before)


def _current() -> AttentionPass:
    attention_pass = _active.get()
    if attention_pass is None:
        raise ConfigError(
            "an engine is running this transformers model; call it through the engine, or close "
            "the engine first"
        )
    return attention_pass


def _paged_mask(
    *args: Any,
    mask_function: Callable[..., torch.Tensor],
    local_size: int | None = None,
    **kwargs: Any,
) -> _MaskSpec:
    """Return the mask spec of a layer. Transformers calls this function.

    `local_size` is the window of a sliding-window layer.
    """
    window = int(local_size or 0)
    return _MaskSpec(window, _current().find_mask_problem(mask_function, window))


def _paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute the attention of a layer. Transformers calls this function.

    Args:
        module: the attention module.
        query: [1, num_q_heads, num_tokens, head_dim], after RoPE.
        key: [1, num_kv_heads, num_tokens, head_dim], after RoPE.
        value: [1, num_kv_heads, num_tokens, head_dim].
        attention_mask: a `_MaskSpec`.
        scaling: factor of the scores. Defaults to head_dim ** -0.5.
        kwargs: further constants and tensors.

    Returns:
        The output, [1, num_tokens, num_q_heads, head_dim], and None.
    """
    attention_pass = _current()
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise ModelFormatError(
            f"{type(module).__name__} has no layer_idx, so its KV cannot be stored"
        )
    params = None
    if attention_pass.wants_params():
        params = _read_params(module, query.shape[-1], attention_mask, scaling, kwargs)
    out = attention_pass.attend(layer, (query[0], key[0], value[0]), params)
    return out[None], None


def _read_params(
    module: torch.nn.Module,
    head_dim: int,
    attention_mask: object,
    scaling: float | None,
    kwargs: dict[str, Any],
) -> AttentionParams:
    """Return a layer's attention constants; raise ModelFormatError if they are unsupported."""
    kind = type(module).__name__
    if not isinstance(attention_mask, _MaskSpec):
        raise ModelFormatError(
            f"{kind} does not use transformers' mask functions, which is not supported"
        )
    if attention_mask.problem is not None:
        raise ModelFormatError(f"{kind} layer {module.layer_idx}: {attention_mask.problem}")
    foreign = [
        name
        for name, value in kwargs.items()
        if isinstance(value, torch.Tensor) and name not in _KNOWN_TENSORS
    ]
    if foreign:
        raise ModelFormatError(
            f"{kind} passes {foreign[0]!r} to its attention function, which is not supported"
        )
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise ModelFormatError(f"{kind} is not causal; only decoder-only models are supported")
    window = kwargs.get("sliding_window") or 0
    if window and window != attention_mask.window:
        raise ModelFormatError(
            f"{kind} layer {module.layer_idx} has a window of {window}, but its mask has a window "
            f"of {attention_mask.window}"
        )
    sinks = kwargs.get("s_aux")
    return AttentionParams(
        softmax_scale=float(head_dim**-0.5 if scaling is None else scaling),
        window=attention_mask.window,
        softcap=float(kwargs.get("softcap") or 0.0),
        sinks=None if sinks is None else _to_numpy(sinks.detach()),
    )
