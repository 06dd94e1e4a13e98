"""The interface of llmds' KV cache as callers use it: every method, keyword and positional form."""

import inspect

import pytest

import kvboost_edge

STATS = {
    "total_sequences",
    "total_pages",
    "allocated_pages",
    "free_pages",
    "prefix_shares",
    "prefix_map_size",
    "shared_pages_count",
    "total_page_refs",
}
SYSTEM = list(range(100, 108))


@pytest.fixture
def cache():
    return kvboost_edge.KVCache(page_size=4, max_pages=20)


@pytest.mark.parametrize(
    ("args", "options"),
    [
        ((), {}),
        ((512,), {}),
        ((512, 10000), {}),
        ((512, 10000, True), {}),
        ((), {"page_size": 512}),
        ((), {"page_size": 512, "max_pages": 10000, "enable_prefix_sharing": True}),
        ((512,), {"enable_prefix_sharing": True, "max_pages": 10000}),
    ],
)
def test_constructors_accept_llmds_arguments(args, options):
    cache = kvboost_edge.KVCache(*args, **options)
    assert cache.page_size == 512
    assert cache.stats()["total_pages"] == 10000
    for seq_id in (1, 2):
        cache.attach(seq_id, SYSTEM, SYSTEM)
    assert cache.stats()["prefix_shares"] == 1


def test_parameter_names_and_defaults_equal_llmds():
    def given(call):
        parameters = inspect.signature(call).parameters.values()
        return {p.name: p.default for p in parameters if p.name != "self"}

    empty = inspect.Parameter.empty
    cls = kvboost_edge.KVCache
    assert given(cls) == {"page_size": 512, "max_pages": 10000, "enable_prefix_sharing": True}
    assert given(cls.attach) == {"seq_id": empty, "kv_tokens": empty, "prefix_tokens": None}
    assert given(cls.detach) == given(cls.get) == {"seq_id": empty}
    assert given(cls.hook_speculative_decode) == {"seq_id": empty, "draft_tokens": empty}


def test_attach_get_and_detach_by_position_and_keyword(cache):
    payloads = [{"k": i, "v": -i} for i in SYSTEM]
    cache.attach(1, payloads)
    cache.attach(2, payloads, SYSTEM)
    cache.attach(seq_id=3, kv_tokens=payloads, prefix_tokens=SYSTEM)
    cache.attach(4, payloads, prefix_tokens=None)
    for seq_id in (1, 2, 3, 4):
        assert cache.get(seq_id) == cache.get(seq_id=seq_id) == payloads
    cache.get(1).append("more")
    cache.get(1)[0]["k"] = "changed"
    assert cache.get(1) == payloads, "get must return a copy"
    assert cache.detach(1) is None
    assert cache.detach(seq_id=2) is None
    assert cache.get(1) is cache.get(2) is None
    assert cache.get(3) == payloads


def test_unknown_ids_are_ignored(cache):
    assert cache.get(99) is None
    assert cache.detach(99) is None
    assert cache.hook_speculative_decode(99, [1, 2]) is None
    assert cache.hook_speculative_decode(seq_id=99, draft_tokens=[1]) is None
    assert cache.stats()["allocated_pages"] == 0


def test_stats_have_llmds_keys(cache):
    assert set(cache.stats()) == STATS
    for seq_id in range(3):
        cache.attach(seq_id, [*SYSTEM, seq_id], SYSTEM)
    assert cache.stats() == {
        "total_sequences": 3,
        "total_pages": 20,
        "allocated_pages": 5,
        "free_pages": 15,
        "prefix_shares": 2,
        "prefix_map_size": 1,
        "shared_pages_count": 2,
        "total_page_refs": 9,
    }
    cache.attach(3, SYSTEM[::-1], SYSTEM[::-1])
    assert cache.stats()["prefix_map_size"] == 2


def test_page_size_and_allocator_are_read_only_views(cache):
    cache.attach(1, SYSTEM, SYSTEM)
    allocator = cache.allocator
    assert (cache.page_size, allocator.page_size, allocator.max_pages) == (4, 4, 20)
    stats = allocator.stats()
    assert (stats.total_pages, stats.allocated_pages, stats.free_pages) == (20, 2, 18)
    assert stats.fragmentation_ratio == 0.1
    for name in ("page_size", "allocator"):
        with pytest.raises(AttributeError, match=name):
            setattr(cache, name, None)
    for name in ("page_size", "max_pages"):
        with pytest.raises(AttributeError, match=name):
            setattr(allocator, name, 1)


@pytest.mark.parametrize(
    ("name", "way_out"),
    [("alloc", "KVCache.attach"), ("free", "KVCache.detach"), ("defragment", "nothing to compact")],
)
def test_unsupported_allocator_calls_name_an_alternative(cache, name, way_out):
    with pytest.raises(AttributeError, match=f"PageAllocator.{name} is not supported: .*{way_out}"):
        getattr(cache.allocator, name)


def test_unsupported_counts_are_refused_by_name(cache):
    for name in ("allocation_count", "free_count"):
        with pytest.raises(AttributeError, match=f"PageStats.{name} is not supported: .*_pages"):
            getattr(cache.allocator.stats(), name)
    with pytest.raises(AttributeError, match=r"PageStats\.other does not"):
        _ = cache.allocator.stats().other
