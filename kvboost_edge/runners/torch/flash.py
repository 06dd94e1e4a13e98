"""Flash attention for transformers models that run outside the engine.

As in attention_hook.py, no module is replaced. The model's configs name the attention and mask
functions of this module. The mask function compares transformers' mask with the causal one
(including its window, aligned bottom right). Calls with a causal mask use the flash kernel. All
others (padding, packed sequences, chunks, no mask) use torch with their own mask.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from kvboost_edge.backends import cuda
from kvboost_edge.backends.cuda import find_tier
from kvboost_edge.backends.cuda_check import kernel_dtypes
from kvboost_edge.errors import ModelFormatError
from kvboost_edge.runners.torch.attention_hook import AttentionHook

__all__ = ["install", "is_model", "uninstall"]

_NAME = "kvboost_edge_flash"


@dataclasses.dataclass(frozen=True, slots=True)
class _Causal:
    """Object that is passed through a model instead of a causal mask, aligned bottom right.

    Attributes:
        window: sliding window in keys, or 0.
    """

    window: int


@dataclasses.dataclass(slots=True)
class _Installed:
    """State of a model with flash attention installed.

    Attributes:
        hook: switch for the model's attention function.
        before: names in the model's configs before the installation.
        tier: attention tier, as returned by `find_tier`.
        modules: ids of the modules that call the function of this module.
    """

    hook: AttentionHook
    before: list[str | None]
    tier: str
    modules: set[int] = dataclasses.field(default_factory=set)


_installed: weakref.WeakKeyDictionary[PreTrainedModel, _Installed] = weakref.WeakKeyDictionary()
_tiers: weakref.WeakKeyDictionary[torch.nn.Module, _Installed] = weakref.WeakKeyDictionary()


def is_model(model: object) -> bool:
    """Return whether an object is a transformers model."""
    return isinstance(model, PreTrainedModel)


def install(model: PreTrainedModel) -> int:
    """Make the model's attention modules call the flash kernel of its device.

    Returns:
        The number of attention modules that newly use it. If the tier is "vanilla" or the kernel is
            already installed, nothing changes and the result is 0.

    Raises:
        ModelFormatError: the model does not run with the kernel. The model is left unchanged.
    """
    tier = find_tier(model.device)
    if tier == "vanilla" or model in _installed:
        return 0
    AttentionInterface.register(_NAME, _flash_attention)
    AttentionMaskInterface.register(_NAME, _flash_mask)
    hook = AttentionHook(model)
    found = _Installed(hook, hook.rename(_NAME), tier)
    for module in model.modules():
        _tiers[module] = found
    try:
        # A pass of one token finds the modules that call the function, whatever their class names.
        with torch.inference_mode():
            model(
                input_ids=torch.zeros((1, 1), dtype=torch.int64, device=model.device),
                use_cache=False,
            )
    except Exception as error:
        _take_out(model, found)
        raise ModelFormatError(
            f"{type(model).__name__} does not run with flash attention: {error}"
        ) from error
    if not found.modules:
        _take_out(model, found)
        return 0
    _installed[model] = found
    return len(found.modules)


def uninstall(model: PreTrainedModel) -> int:
    """Restore a model's previous attention functions and return the number of modules."""
    found = _installed.pop(model, None)
    if found is None:
        return 0
    _take_out(model, found)
    return len(found.modules)


def _take_out(model: PreTrainedModel, found: _Installed) -> None:
    found.hook.restore(found.before)
    for module in model.modules():
        _tiers.pop(module, None)


def _flash_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *args: Any,
    local_size: int | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> _Causal | torch.Tensor:
    """Return `_Causal` if the mask is causal, otherwise the mask as bool [batch, 1, q, kv].

    Transformers calls this function.
    """
    kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask = sdpa_mask(
        batch_size, q_length, kv_length, *args, local_size=local_size, device=device, **kwargs
    )
    assert mask is not None
    for window in dict.fromkeys((int(local_size or 0), 0)):
        if bool((mask == _visible(q_length, kv_length, window, mask.device)).all()):
            return _Causal(window)
    return mask


def _visible(q_length: int, kv_length: int, window: int, device: torch.device) -> torch.Tensor:
    """Return the causal mask, bool [q, kv], aligned bottom right."""
    behind = torch.arange(kv_length, device=device) - torch.arange(q_length, device=device)[:, None]
    behind = behind - (kv_length - q_length)
    return (behind <= 0) & (behind > -window) if window else behind <= 0


def _flash_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | _Causal | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute the attention of a layer. Transformers calls this function.

    Args:
        module: the attention module.
        query: [batch, heads, seqlen_q, head_dim].
        key: [batch, kv_heads, seqlen_kv, head_dim].
        value: [batch, kv_heads, seqlen_kv, head_dim].
        attention_mask: `_Causal`, a tensor, or None.
        dropout: dropout probability.
        scaling: factor of the scores. Defaults to head_dim ** -0.5.
        is_causal: whether to use a causal mask if there is no mask. Defaults to the module's
            attribute.
        kwargs: softcap and sinks (`s_aux`).

    Returns:
        The output, [batch, seqlen_q, heads, head_dim], and None.
    """
    found = _tiers[module]
    found.modules.add(id(module))
    call = _Call(
        scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        softcap=float(kwargs.get("softcap") or 0.0),
        sinks=kwargs.get("s_aux"),
        dropout=dropout,
    )
    foreign = kwargs.get("position_bias")
    if foreign is not None:
        raise ModelFormatError(
            f"{type(module).__name__} adds a position bias to its scores, which is not supported"
        )
    tensors = (query, key, value)
    if isinstance(attention_mask, _Causal):
        attend = _KERNELS[found.tier]
        return (attend if _is_served(query, dropout) else _attend_plainly)(
            tensors, attention_mask, call
        ), None
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        attention_mask = _Causal(0) if causal and query.shape[2] > 1 else None
    return _attend_plainly(tensors, attention_mask, call), None


@dataclasses.dataclass(frozen=True, slots=True)
class _Call:
    """Constants of an attention call."""

    scaling: float
    softcap: float
    sinks: torch.Tensor | None
    dropout: float


_Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _is_served(query: torch.Tensor, dropout: float) -> bool:
    """Return whether the kernels support a call: half precision and forward only."""
    half = str(query.dtype).removeprefix("torch.") in kernel_dtypes(query.device)
    wants_gradient = torch.is_grad_enabled() and query.requires_grad
    return (
        half
        and not dropout
        and not wants_gradient
        and query.shape[-1] % 8 == 0
        and query.shape[-1] <= 256
    )


def _attend_by_kvboost(tensors: _Tensors, mask: _Causal, call: _Call) -> torch.Tensor:
    """Call the causal attention of the CUDA extension on [batch, heads, seqlen, head_dim]."""
    query, key, value = (tensor.transpose(1, 2) for tensor in tensors)
    out: torch.Tensor = cuda.extension().flash_attn_func(
        query,
        key,
        value,
        softmax_scale=call.scaling,
        causal=True,
        window_size=(mask.window - 1 if mask.window else -1, -1),
        softcap=call.softcap,
        sinks=call.sinks,
    )
    return out


def _attend_by_torch(tensors: _Tensors, mask: _Causal, call: _Call) -> torch.Tensor:
    """Call torch's flash kernel if it supports the mask. A single query needs no mask."""
    query, key, _ = tensors
    if mask.window or call.softcap or call.sinks is not None:
        return _attend_plainly(tensors, mask, call)
    q_length = query.shape[2]
    kv_length = key.shape[2]
    bias = None if q_length == 1 else causal_lower_right(q_length, kv_length)
    out = scaled_dot_product_attention(*_repeated(tensors), attn_mask=bias, scale=call.scaling)
    return out.transpose(1, 2)


def _attend_plainly(
    tensors: _Tensors, mask: torch.Tensor | _Causal | None, call: _Call
) -> torch.Tensor:
    """Compute attention in torch with any mask, softcap and sinks.

    A bool mask marks visible keys, and a float mask is added to the scores.
    """
    query, key, value = _repeated(tensors)
    seen = mask
    if isinstance(seen, _Causal):
        seen = _visible(query.shape[2], key.shape[2], seen.window, query.device)
    if not call.softcap and call.sinks is None:
        out = scaled_dot_product_attention(
            query, key, value, attn_mask=seen, dropout_p=call.dropout, scale=call.scaling
        )
        return out.transpose(1, 2)
    scores = query.float() @ key.float().transpose(-1, -2) * call.scaling
    if call.softcap:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if seen is not None:
        scores = (
            scores.masked_fill(~seen, float("-inf")) if seen.dtype == torch.bool else scores + seen
        )
    if call.sinks is not None:
        sinks = call.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.nn.functional.dropout(scores.softmax(dim=-1)[..., : key.shape[2]], call.dropout)
    return (weights.nan_to_num() @ value.float()).to(query.dtype).transpose(1, 2)


def _repeated(tensors: _Tensors) -> _Tensors:
    """Repeat keys and values for each query head."""
    query, key, value = tensors
    times = query.shape[1] // key.shape[1]
    return (
        (query, key, value)
        if times == 1
        else (query, *(x.repeat_interleave(times, dim=1) for x in (key, value)))
    )


_KERNELS: dict[str, Callable[[_Tensors, _Causal, _Call], torch.Tensor]] = {
    "kvboost_cuda": _attend_by_kvboost,
    "torch_flash": _attend_by_torch,
}
