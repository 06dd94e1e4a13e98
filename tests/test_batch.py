"""Tests of KVBoost's batch module: lists are padded on the right and decoded with their masks."""

import inspect

import pytest
import torch
from transformers import DynamicCache

from helpers.models.tiny_models import build_tiny_model
from kvboost_edge.batch import (
    batched_decode,
    broadcast_kv,
    find_common_chunk_prefix,
    group_by_prefix,
    pad_and_mask,
)
from kvboost_edge.errors import RequestError

pytestmark = pytest.mark.usefixtures("one_torch_thread")

PREFIX = [(7 * i) % 250 for i in range(20)]
SUFFIXES = [[7, 8, 9, 10, 11], [20], [30, 31, 32]]


def test_padding_is_on_the_right_and_in_lists():
    assert pad_and_mask([[1, 2, 3], [4], []], 9) == (
        [[1, 2, 3], [4, 9, 9], [9, 9, 9]],
        [[1, 1, 1], [1, 0, 0], [0, 0, 0]],
    )
    assert pad_and_mask(suffix_ids_list=[(1, 2)], pad_token_id=0) == ([[1, 2]], [[1, 1]])
    with pytest.raises(RequestError, match="at least one row"):
        pad_and_mask([], 0)


def test_parameters_have_their_names_order_and_defaults():
    def named(call):
        found = inspect.signature(call).parameters.values()
        return [
            p.name if p.default is p.empty else (p.name, p.default)
            for p in found
            if p.kind is p.POSITIONAL_OR_KEYWORD
        ]

    assert named(find_common_chunk_prefix) == ["all_token_ids", "chunk_size"]
    assert named(broadcast_kv) == ["kv", "batch_size"]
    assert named(pad_and_mask) == ["suffix_ids_list", "pad_token_id"]
    assert named(group_by_prefix) == [
        "prompts",
        "token_ids_list",
        "chunk_size",
        ("n_prefix_chunks", 3),
    ]
    assert named(batched_decode) == [
        *("model", "past_kv", "first_tokens", "start_pos", "max_new_tokens", "eos_token_id"),
        *(("temperature", 1.0), ("do_sample", False), ("device", "cpu")),
    ]


def test_functions_over_lists_by_position_and_keyword():
    ids = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [9]]
    groups = group_by_prefix(["a", "b", "c"], ids, 2, 2)
    assert list(groups.values()) == [[0, 1], [2]]
    assert groups == group_by_prefix(
        prompts=["a", "b", "c"], token_ids_list=ids, chunk_size=2, n_prefix_chunks=2
    )
    assert list(group_by_prefix("abc", ids, 2).values()) == [[0], [1], [2]]
    assert find_common_chunk_prefix(ids[:2], 2) == 4
    assert find_common_chunk_prefix(all_token_ids=ids, chunk_size=2) == 0
    assert find_common_chunk_prefix([ids[0]], 2) == 5


def test_broadcast_shares_memory():
    kv = ((torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4)),)
    for wide in (broadcast_kv(kv, 3), broadcast_kv(kv=kv, batch_size=3)):
        assert [part.shape for part in wide[0]] == [(3, 2, 5, 4)] * 2
        assert [part.data_ptr() for part in wide[0]] == [part.data_ptr() for part in kv[0]]
        assert torch.equal(wide[0][1][2], kv[0][1][0])


@torch.inference_mode()
def alone(model, prompt, count):
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_either_padding_decodes_by_its_mask(family, side):
    model = build_tiny_model(family)
    rows, masks = pad_and_mask(SUFFIXES, 0)
    if side == "left":
        order = [sorted(range(len(mask)), key=mask.__getitem__) for mask in masks]
        rows = [[row[i] for i in places] for row, places in zip(rows, order, strict=True)]
        masks = [sorted(mask) for mask in masks]
    full = [[1] * len(PREFIX) + mask for mask in masks]
    with torch.inference_mode():
        shared = model(torch.tensor([PREFIX]), use_cache=True).past_key_values
        kv = tuple((layer.keys, layer.values) for layer in shared.layers)
        mask = torch.tensor(full)
        out = model(
            torch.tensor(rows),
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1)[:, len(PREFIX) :],
            past_key_values=DynamicCache(list(broadcast_kv(kv, len(rows)))),
            use_cache=True,
        )
    last = [max(i for i, bit in enumerate(mask) if bit) for mask in masks]
    first = [int(out.logits[row, place].argmax()) for row, place in enumerate(last)]
    past = tuple((layer.keys, layer.values) for layer in out.past_key_values.layers)
    outputs, _ = batched_decode(
        model=model,
        past_kv=past,
        first_tokens=torch.tensor(first),
        start_pos=[sum(mask) for mask in full],
        max_new_tokens=10,
        eos_token_id=None,
        attention_mask=full,
    )
    assert outputs == [alone(model, PREFIX + suffix, 10) for suffix in SUFFIXES]
