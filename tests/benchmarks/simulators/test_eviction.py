"""Tests of the trace replay: generated traces never change, recorded traces are parsed, and rival
policies behave as named.
"""

import hashlib
import json

import pytest

from benchmarks.data.eviction_traces import TRACES, Access, read_mooncake
from benchmarks.simulators.eviction import POLICIES, FirstInFirstOut, LeastFrequentlyUsed, replay

# Eviction orders are compared on these traces, so a changed generator changes the comparison.
DIGESTS = {
    "chats": "8fb0d87fb6ef50e1",
    "agents": "e77d1dfc062b80a7",
    "scans": "3b59eb9d10365aa4",
    "questions": "ff467b09e9063a2d",
    "tenants": "a09fb93402f4b839",
    "drift": "f9b05f3fa52e644f",
    "floods": "752b22ad470eed97",
}


@pytest.mark.parametrize("name", TRACES)
def test_generated_traces_do_not_change(name):
    text = "\n".join(
        f"{access.at:.6f} {access.tenant} {access.prompt_ids} {access.output_ids}"
        for access in TRACES[name]()
    )
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == DIGESTS[name]


@pytest.mark.parametrize("name", TRACES)
def test_an_id_stands_for_its_block_and_all_blocks_before_it(name):
    """Otherwise a prefix in the trace would not be a prefix in the pool. Two tenants never share an
    id.
    """
    parents = {}
    for access in TRACES[name]():
        ids = (*access.prompt_ids, *access.output_ids)
        for before, one in zip((0, *ids), ids, strict=False):
            assert parents.setdefault(one, (access.tenant, before)) == (access.tenant, before)


def test_mooncake_traces_are_read(tmp_path):
    path = tmp_path / "trace.jsonl"
    records = [
        {"timestamp": 0, "input_length": 1030, "output_length": 600, "hash_ids": [0, 1, 2]},
        {"timestamp": 3000, "input_length": 1700, "output_length": 5, "hash_ids": [0, 1, 2, 3]},
    ]
    path.write_text("\n".join(map(json.dumps, records)))
    first, second = read_mooncake(path)
    assert first == Access(0.0, "", (0, 1, 2), (1 << 31,), 1030)
    assert second == Access(3.0, "", (0, 1, 2, 3), (), 1700)
    assert replay([first, second, second], 20, POLICIES["lru"]).hit_tokens == 3 * 512 + 1700
    for bad in ("{", "[]", '{"timestamp": 1}', json.dumps(records[0] | {"hash_ids": []})):
        path.write_text(json.dumps(records[0]) + "\n" + bad)
        with pytest.raises(ValueError, match="line 2"):
            read_mooncake(path)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_bookkeeping_holds_under_every_order(policy):
    trace = TRACES["tenants"]()[:300]
    replay(trace, 500, POLICIES[policy], check_every=50)


@pytest.mark.parametrize(
    ("policy", "order"), [(LeastFrequentlyUsed, [1, 2, 0]), (FirstInFirstOut, [0, 1, 2])]
)
def test_rivals_in_one_picture(policy, order):
    rival = policy(range(3))
    assert sorted(rival.take(3)) == [0, 1, 2]
    for block_id in (0, 1, 2):
        rival.put(block_id, matchable=True)
    for block_id in (0, 2, 0):
        rival.remove(block_id)
        rival.put(block_id, matchable=True)
    assert rival.order() == order
    assert rival.take(2) == order[:2]
