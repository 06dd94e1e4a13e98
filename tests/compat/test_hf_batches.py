"""The batch functions over a transformers model, against the same model one prompt at a time."""

import pytest
import torch
from transformers import DynamicCache

from helpers.models.tiny_models import EOS_ID, PAD_ID, build_tiny_model
from kvboost_edge.compat import hf_batches
from kvboost_edge.compat.hf_batches import (
    batched_decode,
    broadcast_kv,
    pad_and_mask,
)
from kvboost_edge.errors import RequestError

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def test_pad_and_mask_pads_and_masks():
    ids, masks = pad_and_mask([[1, 2, 3], [4], [5, 6]], 9)
    assert ids.tolist() == [[1, 2, 3], [9, 9, 4], [9, 5, 6]]
    assert masks.tolist() == [[1, 1, 1], [0, 0, 1], [0, 1, 1]]
    for bad in ([], [[1], []]):
        with pytest.raises(RequestError, match="at least one"):
            pad_and_mask(bad, 0)


@pytest.fixture(scope="module", params=["llama", "mistral"])
def model(request):
    return build_tiny_model(request.param)


@torch.inference_mode()
def greedy(model, prompt, count, eos):
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == eos:
            break
    return ids[len(prompt) :]


@pytest.fixture(scope="module")
def llama():
    return build_tiny_model("llama")


PREFIX = torch.randint(0, 256, (1, 20), generator=torch.Generator().manual_seed(1))
SUFFIXES = [[7, 8, 9, 10, 11], [20], [30, 31, 32]]


def past_of(out):
    return tuple((layer.keys, layer.values) for layer in out.past_key_values.layers)


@torch.inference_mode()
def after_the_prefix(model):
    """Run all suffixes after the shared prefix; return their past KV, their first tokens and the
    mask.
    """
    ids, masks = pad_and_mask(SUFFIXES, PAD_ID)
    full = torch.cat([torch.ones(3, 20, dtype=torch.int64), masks], dim=1)
    shared = DynamicCache(list(broadcast_kv(past_of(model(PREFIX, use_cache=True)), 3)))
    positions = (full.cumsum(1) - 1)[:, 20:]
    out = model(
        ids, attention_mask=full, position_ids=positions, past_key_values=shared, use_cache=True
    )
    return past_of(out), out.logits[:, -1].argmax(-1), full


@pytest.mark.parametrize("eos", [EOS_ID, None])
def test_a_shared_prefix_and_ragged_suffixes_decode_like_single_prompts(llama, eos):
    """The shared prefix is computed once, which is the use that the functions are made for."""
    model = llama
    singles = [
        greedy(model, PREFIX[0].tolist() + s, 12, -1 if eos is None else eos) for s in SUFFIXES
    ]
    if eos is not None:
        eos = singles[0][3]  # so that rows end at different times
        singles = [row[: row.index(eos) + 1] if eos in row else row for row in singles]
    past, first, full = after_the_prefix(model)
    starts = [20 + len(s) for s in SUFFIXES]
    outputs, grown = batched_decode(model, past, first, starts, 12, eos, attention_mask=full)
    assert outputs == singles
    assert grown[0][0].shape[0] == 3
    with pytest.raises(RequestError, match="contradicts the attention mask"):
        batched_decode(model, past, first, 20, 4, None, attention_mask=full)


@pytest.mark.parametrize("hole", ["front", "middle", "end"])
def test_masked_slots_anywhere_do_not_matter(model, hole):
    """The KV of rows with different lengths was computed alone. Windows also count positions, not
    slots.
    """
    prompts = [list(range(40, 40 + n)) for n in (30, 17, 24)]
    longest = 30
    rows = []
    masks = []
    first = []
    for prompt in prompts:
        with torch.inference_mode():
            out = model(torch.tensor([prompt]), past_key_values=DynamicCache(), use_cache=True)
        first.append(int(out.logits[0, -1].argmax()))
        missing = longest - len(prompt)
        at = {"front": 0, "middle": 9, "end": len(prompt)}[hole]
        junk = torch.full((1, 2, missing, 16), 50.0)
        rows.append(
            [
                tuple(
                    torch.cat([part[:, :, :at], junk, part[:, :, at:]], dim=2)
                    for part in (layer.keys, layer.values)
                )
                for layer in out.past_key_values.layers
            ]
        )
        masks.append([1] * at + [0] * missing + [1] * (len(prompt) - at))
    kv = tuple(
        tuple(torch.cat(parts) for parts in zip(*layer, strict=True))
        for layer in zip(*rows, strict=True)
    )
    mask = None if hole == "front" else torch.tensor(masks)
    outputs, _ = batched_decode(
        model, kv, first, [len(p) for p in prompts], 10, None, attention_mask=mask
    )
    assert outputs == [greedy(model, prompt, 10, -1) for prompt in prompts]


def test_equal_lengths_need_no_mask_and_sampling_is_seeded(model):
    prompts = torch.randint(0, 256, (4, 9), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        out = model(prompts, use_cache=True)
    first = out.logits[:, -1].argmax(-1)

    outputs, _ = batched_decode(model, past_of(out), first, 9, 6, [])
    assert outputs == [greedy(model, row.tolist(), 6, -1) for row in prompts]
    cold, _ = batched_decode(
        model, past_of(out), first, 9, 6, None, temperature=0.0, do_sample=True
    )
    assert cold == outputs, "temperature 0 must be greedy"
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        drawn.append(
            batched_decode(model, past_of(out), first, 9, 6, None, temperature=2.0, do_sample=True)[
                0
            ]
        )
    assert drawn[0] == drawn[1] != outputs
    assert batched_decode(model, past_of(out), first.tolist(), 9, 1, None)[0] == [
        [int(token)] for token in first
    ]


def test_ambiguous_padding_without_a_mask_is_refused(llama):
    """After broadcast_kv and pad_and_mask, the padding is between prefix and suffix, so
    batched_decode needs a mask.
    """
    past, first, full = after_the_prefix(llama)
    for start in (24, [25, 21, 23]):
        with pytest.raises(RequestError, match=r"attention_mask .* pad_and_mask"):
            batched_decode(llama, past, first, start, 4, None, 1.0, False, "cpu")
    outputs, _ = batched_decode(
        llama, past, first, full.sum(1).tolist(), 4, None, attention_mask=full
    )
    assert outputs == [greedy(llama, PREFIX[0].tolist() + s, 4, -1) for s in SUFFIXES]


@pytest.fixture
def unlogged():
    hf_batches._log_unpadded.cache_clear()


@pytest.mark.usefixtures("unlogged")
def test_rows_of_equal_length_after_broadcast_kv_need_no_mask(llama, caplog):
    with torch.inference_mode():
        past = broadcast_kv(past_of(llama(PREFIX, use_cache=True)), 3)
    first = torch.tensor([7, 20, 30])
    singles = [[int(t), *greedy(llama, [*PREFIX[0].tolist(), int(t)], 5, -1)] for t in first]
    outputs, _ = batched_decode(llama, past, first, [20, 20, 20], 6, None)
    assert outputs == singles
    assert caplog.messages == []
    for _ in range(2):
        outputs, _ = batched_decode(llama, past, first, 20, 6, None, 1.0, False, "cpu")
        assert outputs == singles
    [line] = caplog.messages
    assert "pass attention_mask if rows are padded" in line
    with pytest.raises(RequestError, match="attention_mask"):
        batched_decode(llama, past, first, 19, 6, None)


@pytest.mark.parametrize("ragged", [False, True])
def test_a_cache_trimmed_to_its_sliding_window_continues(ragged):
    mistral = build_tiny_model("mistral")
    window = mistral.config.sliding_window
    longest = window + 9
    prompts = [
        torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(n)).tolist()
        for n in ((longest, longest - 6, window - 5) if ragged else (longest, longest))
    ]
    if not ragged:
        prompts[1] = prompts[1][::-1]
    ids, masks = pad_and_mask(prompts, PAD_ID)
    with torch.inference_mode():
        positions = (masks.cumsum(1) - 1).clamp(min=0)
        out = mistral(ids, attention_mask=masks, position_ids=positions, use_cache=True)
    past = past_of(out)
    assert past[0][0].shape[2] == window - 1, "transformers did not trim its cache to the window"
    first = out.logits[:, -1].argmax(-1)
    singles = [greedy(mistral, prompt, 6, -1) for prompt in prompts]
    for mask in (None, masks, masks[:, -(window - 1) :]):
        outputs, _ = batched_decode(
            mistral, past, first, [len(p) for p in prompts], 6, None, attention_mask=mask
        )
        assert outputs == singles
    cut = tuple((keys[:, :, 1:], values[:, :, 1:]) for keys, values in past)
    with pytest.raises(RequestError, match="contradicts the attention mask"):
        batched_decode(mistral, cut, first, [len(p) for p in prompts], 6, None)


@pytest.mark.parametrize("temperature", [-1, -0.5, float("nan"), float("inf"), True, "1", None])
def test_invalid_temperatures_are_refused(llama, temperature):
    with pytest.raises(RequestError, match="temperature="):
        batched_decode(llama, (), [1], 1, 1, None, temperature=temperature)
