"""Tests of the extension's public functions: results against an oracle, and rejected arguments."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from helpers.cuda.standin import DEVICE, standing_in

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture(scope="module")
def loaded():
    with standing_in() as both:
        yield both


@pytest.fixture
def kernels(loaded):
    return loaded[0]


def draw(*shape, seed=0, dtype=torch.float16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def ints(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def oracle(
    q,
    k,
    v,
    *,
    scale=None,
    window=(-1, -1),
    softcap=0.0,
    sinks=None,
):
    """Compute attention of one sequence in float64.

    Shapes:
        q: [len_q, heads, dim]
        k, v: [len_k, kv_heads, dim]

    Returns:
        The output, and the log-sum-exp as [heads, len_q].
    """
    times = q.shape[1] // k.shape[1]
    wide = [x.double().repeat_interleave(times, dim=1).transpose(0, 1) for x in (k, v)]
    scores = (
        q.double().transpose(0, 1)
        @ wide[0].transpose(1, 2)
        * (q.shape[-1] ** -0.5 if scale is None else scale)
    )
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    ahead = (
        torch.arange(len(k), device=q.device)
        - torch.arange(len(q), device=q.device)[:, None]
        - len(k)
        + len(q)
    )
    left, right = (len(q) + len(k) if side < 0 else side for side in window)
    scores = scores.masked_fill((ahead < -left) | (ahead > right), -torch.inf)
    if sinks is not None:
        extra = sinks.double()[:, None, None].expand(-1, len(q), 1)
        scores = torch.cat([scores, extra], dim=-1)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse[..., None]).nan_to_num(0.0)[..., : len(k)]
    return (weights @ wide[1]).transpose(0, 1), lse


def assert_near(got, wanted):
    off = 2e-3 if got[0].dtype == torch.float16 else 2e-2
    torch.testing.assert_close(got[0].double(), wanted[0], rtol=0, atol=off)
    torch.testing.assert_close(got[1].double(), wanted[1], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("len_q", "len_k", "options"),
    [
        (5, 40, {"causal": True}),
        (40, 5, {"causal": True}),
        (20, 20, {}),
        (3, 0, {"causal": True}),
        (9, 70, {"causal": True, "window_size": (16, -1), "softcap": 5.0, "softmax_scale": 0.3}),
        (9, 30, {"window_size": (4, 6)}),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
def test_fixed_length_sequences_equal_the_oracle(kernels, len_q, len_k, options, dtype):
    q, k, v = (
        draw(2, rows, heads, 64, dtype=dtype)
        for rows, heads in ((len_q, 6), (len_k, 2), (len_k, 2))
    )
    sinks = draw(6, seed=1, dtype=torch.float32) if "softcap" in options else None
    out, lse = kernels.flash_attn_func(q, k, v, **options, sinks=sinks, return_softmax_lse=True)
    assert lse.shape == (2, 6, len_q)
    window = options.get("window_size", (-1, -1))
    plain = {
        "scale": options.get("softmax_scale"),
        "window": (window[0], 0) if options.get("causal") else window,
        "softcap": options.get("softcap", 0.0),
    }
    for row in range(2):
        assert_near((out[row], lse[row]), oracle(q[row], k[row], v[row], **plain, sinks=sinks))
    assert torch.equal(kernels.flash_attn_func(q, k, v, **options, sinks=sinks), out)


@pytest.mark.parametrize("head_dim", [24, 96, 136])
@pytest.mark.parametrize("paged", [False, True])
def test_variable_length_sequences_equal_the_oracle(kernels, head_dim, paged):
    lens_q = [1, 0, 30, 4]
    lens_k = [37, 5, 12, 64]
    starts = [ints([0, *torch.tensor(lens).cumsum(0).tolist()]) for lens in (lens_q, lens_k)]
    q, k, v = (
        draw(sum(n), heads, head_dim, seed=heads)
        for n, heads in ((lens_q, 4), (lens_k, 2), (lens_k, 2))
    )
    caches = [k, v]
    table = None
    if paged:
        table = ints(torch.randperm(11, generator=torch.Generator().manual_seed(0)).tolist()).view(
            11
        )
        table = torch.stack(
            [torch.cat([row, row.new_full((2,), -1)]) for row in table[:8].view(4, 2)]
        )
        table[3, 2:] = ints([9, 10])
        caches = [
            torch.full((11, 32, 2, head_dim), torch.nan, dtype=k.dtype, device=DEVICE)
            for _ in range(2)
        ]
        for row, (start, length) in enumerate(zip(starts[1].tolist(), lens_k, strict=False)):
            for at in range(length):
                for cache, source in zip(caches, (k, v), strict=True):
                    cache[table[row, at // 32], at % 32] = source[start + at]
    out, lse = kernels.flash_attn_varlen_func(
        q,
        *caches,
        *starts,
        max(lens_q),
        max(lens_k),
        causal=True,
        block_table=table,
        return_softmax_lse=True,
    )
    assert lse.shape == (4, sum(lens_q))
    for row, (len_q, len_k) in enumerate(zip(lens_q, lens_k, strict=True)):
        at_q, at_k = (
            slice(s[row], s[row] + n)
            for s, n in zip((x.tolist() for x in starts), (len_q, len_k), strict=True)
        )
        assert_near((out[at_q], lse[:, at_q]), oracle(q[at_q], k[at_k], v[at_k], window=(-1, 0)))


@pytest.mark.parametrize("where", ["rows", "indexed rows", "blocks"])
@pytest.mark.parametrize("num_splits", [0, 3])
def test_new_keys_are_written_into_the_cache(kernels, where, num_splits):
    seqlens = [30, 0, 77]
    new = 4
    room = 96
    q = draw(3, new, 6, 64)
    k = draw(3, new, 2, 64, seed=1)
    v = draw(3, new, 2, 64, seed=2)
    held = [draw(3, room, 2, 64, seed=seed) for seed in (3, 4)]
    index = None
    table = None
    if where == "rows":
        caches = [x.clone() for x in held]
    elif where == "indexed rows":
        index = ints([4, 0, 2])
        caches = [
            torch.full((5, room, 2, 64), torch.nan, dtype=q.dtype, device=DEVICE) for _ in held
        ]
        for cache, source in zip(caches, held, strict=True):
            cache[index.long()] = source
    else:
        table = ints(torch.randperm(20, generator=torch.Generator().manual_seed(1)).tolist())[
            :18
        ].view(3, 6)
        caches = [
            torch.full((20, 16, 2, 64), torch.nan, dtype=q.dtype, device=DEVICE) for _ in held
        ]
        for cache, source in zip(caches, held, strict=True):
            cache[table.long()] = source.view(3, 6, 16, 2, 64)
    before = [cache.clone() for cache in caches]
    out, lse = kernels.flash_attn_with_kvcache(
        *(q, *caches, k, v),
        cache_seqlens=ints(seqlens),
        cache_batch_idx=index,
        block_table=table,
        causal=True,
        num_splits=num_splits,
        return_softmax_lse=True,
    )
    for row, length in enumerate(seqlens):
        full = [
            torch.cat([source[row, :length], fresh[row]])
            for source, fresh in zip(held, (k, v), strict=True)
        ]
        assert_near((out[row], lse[row]), oracle(q[row], *full, window=(-1, 0)))
    changed = sum(
        int((a != b).logical_and(~(a.isnan() & b.isnan())).any(-1).sum())
        for a, b in zip(before, caches, strict=True)
    )
    assert changed == 2 * 3 * new * 2, (
        "exactly the rows of the new keys and values must change in the cache"
    )


def test_cache_lengths_default_to_full_and_accept_an_integer(kernels):
    q = draw(2, 1, 4, 64)
    k = draw(2, 50, 4, 64, seed=1)
    v = draw(2, 50, 4, 64, seed=2)
    whole = kernels.flash_attn_with_kvcache(q, k, v)
    part = kernels.flash_attn_with_kvcache(q, k, v, cache_seqlens=20)
    for row in range(2):
        torch.testing.assert_close(
            whole[row].double(), oracle(q[row], k[row], v[row])[0], rtol=0, atol=2e-3
        )
        torch.testing.assert_close(
            part[row].double(), oracle(q[row], k[row, :20], v[row, :20])[0], rtol=0, atol=2e-3
        )


def test_queries_may_have_any_strides(kernels):
    q = draw(1, 6, 33, 64).transpose(1, 2)
    k = draw(1, 2, 33, 64, seed=1).transpose(1, 2)
    v = draw(1, 33, 2, 64, seed=2)
    odd = torch.empty(1, 33, 6, 65, dtype=q.dtype, device=DEVICE)[..., 1:]
    odd.copy_(q)
    expected = kernels.flash_attn_func(q.contiguous(), k.contiguous(), v, causal=True)
    assert torch.equal(kernels.flash_attn_func(q, k, v, causal=True), expected)
    assert torch.equal(kernels.flash_attn_func(odd, k, v, causal=True), expected)


def test_parameters_equal_those_of_flash_attn(kernels):
    tail = "softcap alibi_slopes deterministic return_attn_probs".split()
    varlen = (
        "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale causal "
        "window_size"
    ).split()
    cache = (
        "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad "
        "block_table"
    ).split()
    cache += (
        "softmax_scale causal window_size softcap rotary_interleaved alibi_slopes num_splits "
        "return_softmax_lse"
    ).split()
    wanted = {
        "flash_attn_func": [
            "q",
            "k",
            "v",
            "dropout_p",
            "softmax_scale",
            "causal",
            "window_size",
            *tail,
        ],
        "flash_attn_varlen_func": [*varlen, *tail, "block_table"],
        "flash_attn_with_kvcache": cache,
    }
    for name, names in wanted.items():
        found = inspect.signature(getattr(kernels, name)).parameters.values()
        assert [each.name for each in found if each.kind is each.POSITIONAL_OR_KEYWORD] == names


Q = (1, 4, 4, 64)
KV = (1, 8, 2, 64)


@pytest.mark.parametrize(
    ("function", "given"),
    [
        ("flash_attn_func", {"dropout_p": 0.1}),
        ("flash_attn_func", {"return_attn_probs": True}),
        ("flash_attn_func", {"alibi_slopes": torch.zeros(4)}),
        ("flash_attn_with_kvcache", {"rotary_cos": torch.zeros(8, 32)}),
        ("flash_attn_with_kvcache", {"rotary_sin": torch.zeros(8, 32)}),
        ("flash_attn_with_kvcache", {"cache_leftpad": torch.zeros(1)}),
        ("flash_attn_with_kvcache", {"alibi_slopes": torch.zeros(4)}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_unsupported_options_are_refused_by_name(kernels, function, given):
    with pytest.raises(NotImplementedError, match=next(iter(given))):
        getattr(kernels, function)(draw(*Q), draw(*KV), draw(*KV), **given)


def test_gradients_head_dims_and_dtypes_are_refused_by_name(kernels):
    k = draw(*KV)
    with pytest.raises(NotImplementedError, match="backward"):
        kernels.flash_attn_func(draw(*Q).requires_grad_(), k, k)
    with pytest.raises(NotImplementedError, match="head_dim=60"):
        kernels.flash_attn_func(draw(1, 4, 4, 60), draw(1, 8, 2, 60), draw(1, 8, 2, 60))
    with pytest.raises(NotImplementedError, match="head_dim=264"):
        kernels.flash_attn_func(draw(1, 4, 4, 264), draw(1, 8, 2, 264), draw(1, 8, 2, 264))
    with pytest.raises(NotImplementedError, match=r"q in torch\.float32"):
        kernels.flash_attn_func(draw(*Q).float(), k.float(), k.float())


Call = Callable[[Any], object]
VARLEN = {"max_seqlen_q": 4, "max_seqlen_k": 8}


def varlen(kernels, starts_q, starts_k, **more):
    k = more.pop("k", draw(8, 2, 64))
    return kernels.flash_attn_varlen_func(
        draw(4, 4, 64), k, k, ints(starts_q), ints(starts_k), **(VARLEN | more)
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda kernels: varlen(kernels, [0, 5], [0, 8]), "longer than 4"),
        (lambda kernels: varlen(kernels, [0, 3], [0, 8]), "end at 4"),
        (lambda kernels: varlen(kernels, [1, 4], [0, 8]), "start at 0"),
        (lambda kernels: varlen(kernels, [0, 4, 3, 4], [0, 8, 8, 8]), "cu_seqlens_q falls"),
        (lambda kernels: varlen(kernels, [0, 4], [0, 9]), "cu_seqlens_k"),
        (lambda kernels: varlen(kernels, [0, 4], [0, 8], max_seqlen_q=3), "longer than 3"),
        (lambda kernels: varlen(kernels, [0, 4], [0, 8, 8]), r"cu_seqlens_k is .* \[2\]"),
        (lambda kernels: blocks(kernels, [[0, 3]]), r"0\.\.2"),
        (lambda kernels: blocks(kernels, [[-1, 0]]), r"0\.\.2"),
        (lambda kernels: blocks(kernels, [[0]]), "too short for a sequence"),
        (lambda kernels: blocks(kernels, [0, 1]), "block_table is"),
        (lambda kernels: cached(kernels, cache_seqlens=ints([9])), "cache_seqlens"),
        (lambda kernels: cached(kernels, cache_seqlens=ints([-1])), "cache_seqlens"),
        (lambda kernels: cached(kernels, cache_batch_idx=ints([1])), "cache_batch_idx"),
        (
            lambda kernels: cached(kernels, k=draw(1, 1, 2, 64), v=draw(1, 1, 2, 64)),
            "after cache_seqlens",
        ),
        (
            lambda kernels: cached(
                kernels, k=draw(1, 2, 2, 64), v=draw(1, 2, 2, 64), cache_seqlens=7
            ),
            "cache_seqlens",
        ),
        (lambda kernels: cached(kernels, k=draw(1, 2, 2, 64)), "together"),
        (lambda kernels: cached(kernels, num_splits=-1), "num_splits=-1"),
        (lambda kernels: slots(kernels, [0, 32]), "slot_mapping"),
        (lambda kernels: slots(kernels, [0]), "slot_mapping is"),
        (lambda kernels: kernels.copy_blocks([draw(2, 16)], [(0, 2)]), "0 -> 2"),
        (lambda kernels: kernels.copy_blocks([draw(2, 4)], [(0, 1)]), "a multiple of 16 bytes"),
    ],
)
def test_out_of_bounds_indices_are_refused_before_the_launch(loaded, call, message):
    kernels, standin = loaded
    before = standin.launches if standin else 0
    with pytest.raises(ValueError, match=message):
        call(kernels)
    assert (standin.launches if standin else 0) == before


def blocks(kernels, table):
    """Run one sequence of 20 keys in blocks of 16, from a pool of three blocks."""
    return varlen(
        kernels, [0, 4], [0, 20], k=draw(3, 16, 2, 64), max_seqlen_k=20, block_table=ints(table)
    )


def cached(kernels, **more):
    return kernels.flash_attn_with_kvcache(
        draw(1, 1, 4, 64), draw(1, 8, 2, 64), draw(1, 8, 2, 64), **more
    )


def slots(kernels, values):
    cache = draw(2, 16, 2, 64)
    return kernels.write_kv(draw(2, 2, 64), draw(2, 2, 64), cache, cache, ints(values, torch.int64))


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((1, 4, 3, 64), KV, KV), "3 query heads must be a multiple of 2"),
        ((Q, KV, (1, 9, 2, 64)), "must be equal"),
        ((Q, (1, 8, 2, 72), (1, 8, 2, 72)), "head_dim"),
        ((Q, (2, 8, 2, 64), (2, 8, 2, 64)), "2 sequences, but q has 1"),
    ],
)
def test_mismatched_tensors_are_refused_by_the_operator(kernels, shapes, message):
    with pytest.raises(RuntimeError, match=message):
        kernels.flash_attn_func(*(draw(*shape) for shape in shapes))


def test_unsupported_block_sizes_and_mixed_dtypes_are_refused(kernels):
    with pytest.raises(RuntimeError, match="multiple of 16"):
        varlen(kernels, [0, 4], [0, 8], k=draw(3, 24, 2, 64), block_table=ints([[0]]))
    with pytest.raises(RuntimeError, match="BFloat16"):
        kernels.flash_attn_func(
            draw(*Q), draw(*KV, dtype=torch.bfloat16), draw(*KV, dtype=torch.bfloat16)
        )


def test_a_token_without_a_slot_is_skipped(kernels):
    keys = draw(3, 2, 64)
    cache = torch.zeros(2, 16, 2, 64, dtype=torch.float16, device=DEVICE)
    other = cache.clone()
    kernels.write_kv(keys, 2 * keys, cache, other, ints([5, -1, 30], torch.int64))
    expected = torch.zeros_like(cache)
    expected[0, 5] = keys[0]
    expected[1, 14] = keys[2]
    assert torch.equal(cache, expected)
    assert torch.equal(other, 2 * expected)


def test_a_copied_block_can_be_copied_again(kernels):
    pools = [draw(4, 16, 2, 24), draw(4, 32, 1, 64, seed=1)]
    expected = [pool[[1, 1, 2, 1]].clone() for pool in pools]
    kernels.copy_blocks(pools, [(1, 3), (3, 0)])
    assert all(torch.equal(pool, wanted) for pool, wanted in zip(pools, expected, strict=True))
