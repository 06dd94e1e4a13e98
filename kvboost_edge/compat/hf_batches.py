"""Batched decoding with a plain transformers model, outside of the engine.

The functions have KVBoost's names and signatures, and support shared prefixes and left padding.
Attention masks and positions are correct for every row. torch and transformers are loaded on first
use.
"""

from __future__ import annotations

import functools
import logging
import math
import numbers
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvboost_edge.compat.torch_extra import require_torch
from kvboost_edge.errors import RequestError
from kvboost_edge.kvcache.prompt_groups import find_common_chunk_prefix, group_by_prefix

_LOG = logging.getLogger(__name__)

if TYPE_CHECKING:
    import torch

    LegacyKV = tuple[tuple[torch.Tensor, torch.Tensor], ...]

__all__ = [
    "batched_decode",
    "broadcast_kv",
    "find_common_chunk_prefix",
    "group_by_prefix",
    "pad_and_mask",
]


def broadcast_kv(kv: LegacyKV, batch_size: int) -> LegacyKV:
    """Expand the KV of each layer from [1, heads, tokens, dim] to [batch_size, …].

    The returned tensors are views, so nothing is copied.
    """
    return tuple(
        (k.expand(batch_size, -1, -1, -1), v.expand(batch_size, -1, -1, -1)) for k, v in kv
    )


def pad_and_mask(
    suffix_ids_list: Sequence[Sequence[int]], pad_token_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad rows of token ids on the left, and return the padded ids and masks.

    With left padding, the last column holds the last token of each row. For suffixes after a shared
    prefix of P tokens, the attention mask is P ones followed by the row's mask. The positions are P
    + cumsum(mask) - 1.

    transformers counts padding slots in a sliding window. For a model with such a window, pad whole
    prompts instead of suffixes.

    Returns:
        Ids and masks, both int64 [batch, longest suffix]. A mask is 1 for tokens and 0 for padding.
    """
    require_torch("pad_and_mask (kvboost_edge.batch has one without)")
    import torch

    if not suffix_ids_list or not all(len(ids) for ids in suffix_ids_list):
        raise RequestError("pad_and_mask needs at least one row and at least one token in each")
    longest = max(map(len, suffix_ids_list))
    rows = [[pad_token_id] * (longest - len(ids)) + list(ids) for ids in suffix_ids_list]
    masks = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in suffix_ids_list]
    return torch.tensor(rows, dtype=torch.int64), torch.tensor(masks, dtype=torch.int64)


def batched_decode(
    model: Any,
    past_kv: LegacyKV,
    first_tokens: torch.Tensor | Sequence[int],
    start_pos: int | Sequence[int],
    max_new_tokens: int,
    eos_token_id: int | Sequence[int] | None,
    temperature: float = 1.0,
    do_sample: bool = False,
    device: str = "cpu",
    *,
    attention_mask: torch.Tensor | Sequence[Sequence[int]] | None = None,
) -> tuple[list[list[int]], LegacyKV]:
    """Decode a batch whose prompts are already in `past_kv`.

    The output of a row includes its EOS token. Sampling uses torch's global random generator.

    Args:
        model: a transformers model.
        past_kv: (keys, values) of each layer, [batch, kv_heads, slots, dim]. With a sliding window,
            the cache may be cut to the window.
        first_tokens: [batch], the first new token of each row. It counts towards max_new_tokens and
            is part of the output.
        start_pos: position of the first new token; a list if the rows differ in length.
        max_new_tokens: maximum number of new tokens per row.
        eos_token_id: one or more tokens that end a row.
        temperature: sampling temperature.
        do_sample: whether to sample; False selects the most likely token.
        device: device of the new tensors.
        attention_mask: [batch, slots], a tensor or lists; 0 marks padding, which may be anywhere.
            None assumes left padding: the last start_pos slots of each row hold tokens. Rows with a
            shared prefix and different lengths need a mask, because padding may follow the prefix.
            start_pos=slots means that there is no padding.

    Returns:
        Token ids of each row, and the KV including the new tokens.

    Raises:
        RequestError: the arguments do not determine which slots hold tokens.
    """
    require_torch("batched_decode", "transformers")
    import torch
    from transformers import DynamicCache

    _check_temperature(temperature)
    eos = {eos_token_id} if isinstance(eos_token_id, int) else set(eos_token_id or ())
    tokens = torch.as_tensor(first_tokens, dtype=torch.int64, device=device).reshape(-1, 1)
    batch = len(tokens)
    slots = past_kv[0][0].shape[2]
    positions = (
        torch.as_tensor(start_pos, dtype=torch.int64, device=device).expand(batch).reshape(-1, 1)
    )
    window = getattr(model.config, "sliding_window", None)
    is_cut = window is not None and slots == window - 1 and int(positions.max()) > slots
    visible = positions.clamp(max=slots) if is_cut else positions
    if attention_mask is None:
        _check_shared_prefix(past_kv, start_pos, is_full=bool((positions == slots).all()))
        attention_mask = torch.arange(slots, device=device) >= slots - visible
    mask = torch.as_tensor(attention_mask, dtype=torch.int64, device=device)
    if is_cut and mask.dim() == 2:
        mask = mask[:, -slots:]
    if mask.shape != (batch, slots) or not torch.equal(mask.sum(1, keepdim=True), visible):
        raise RequestError(
            f"start_pos={start_pos} contradicts the attention mask of shape {tuple(mask.shape)} "
            f"over {slots} slots and {batch} rows; each row must see exactly start_pos slots, or "
            "all slots of a sliding window"
        )
    cache = DynamicCache(_left_padded(past_kv, mask))
    mask = mask.sort(dim=1).values
    outputs: list[list[int]] = [[int(token)] for token in tokens[:, 0]]
    done = [row[0] in eos for row in outputs]
    for _ in range(max_new_tokens - 1):
        if all(done):
            break
        mask = torch.cat([mask, mask.new_ones(batch, 1)], dim=1)
        with torch.inference_mode():
            logits = model(
                tokens,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
            ).logits
        tokens = _next_tokens(logits[:, -1].float(), temperature, do_sample)
        positions = positions + 1
        for row, token in enumerate(tokens[:, 0].tolist()):
            if not done[row]:
                outputs[row].append(token)
                done[row] = token in eos
    return outputs, tuple((layer.keys, layer.values) for layer in cache.layers)


def _check_shared_prefix(kv: LegacyKV, start_pos: int | Sequence[int], *, is_full: bool) -> None:
    """Raise RequestError if rows share a prefix and padding may follow it.

    Rows share a prefix if their first slots are equal. Without a mask, the position of padding is
    unknown unless `is_full` (start_pos counts every slot). A single start_pos for all rows may be
    the padded length by mistake, so a warning is logged once.
    """
    first = kv[0][0][:, :, 0]
    if len(first) < 2 or not bool((first == first[:1]).all()):
        return
    if not is_full:
        raise RequestError(
            "the rows share a prefix, as after broadcast_kv; pass attention_mask (ones for the "
            "prefix, then the masks of pad_and_mask), and its row sums as start_pos"
        )
    if isinstance(start_pos, int):
        _log_unpadded()


@functools.cache
def _log_unpadded() -> None:
    _LOG.warning(
        "batched_decode: the rows share a prefix and start_pos counts every slot, so no slot "
        "counts as padding; pass attention_mask if rows are padded, otherwise start_pos as a list"
    )


def _check_temperature(temperature: object) -> None:
    known = isinstance(temperature, numbers.Real) and not isinstance(temperature, bool)
    if not known or not 0 <= float(temperature) < math.inf:  # type: ignore[arg-type]
        raise RequestError(f"temperature={temperature!r} must be a finite number of at least 0")


def _left_padded(kv: LegacyKV, mask: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Move the padding slots of each row to the front of its KV.

    Distances in slots then equal distances in positions, as sliding windows require. Tensors are
    copied only if a slot moves.
    """
    order = mask.argsort(dim=1, stable=True)
    if bool((order[:, 1:] > order[:, :-1]).all()):
        return list(kv)

    def move(part: torch.Tensor) -> torch.Tensor:
        return part.gather(2, order[:, None, :, None].expand(part.shape))

    return [(move(keys), move(values)) for keys, values in kv]


def _next_tokens(logits: torch.Tensor, temperature: float, do_sample: bool) -> torch.Tensor:
    import torch

    if not do_sample or temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    return torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1)
