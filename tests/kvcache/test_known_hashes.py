"""Hash chains that the caller supplies: correct ones save hashing, wrong ones cost a miss and never
serve a wrong block.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.kvcache.manager_cases import OTHER, ROOT, B, prefill
from kvboost_edge.kvcache.hashing import HASH_BYTES, chain_hash, known_hash, prefix_hashes
from kvboost_edge.kvcache.manager import KVCacheManager

TOKENS = list(range(30))
tokens_of = st.lists(st.integers(0, 1), min_size=1, max_size=24)


def right(tokens, root=ROOT):
    return b"".join(prefix_hashes(tokens, root, B))


def read(manager, block_ids):
    """Return the tokens that blocks were published with."""
    found = []
    for block_id in block_ids:
        key = manager.content.address(block_id)
        found += [
            int.from_bytes(key.tokens[at : at + 4], "little") for at in range(0, len(key.tokens), 4)
        ]
    return found


class Counting:
    """Hash function that counts its calls."""

    def __init__(self):
        self.count = 0

    def __call__(self, parent, tokens):
        self.count += 1
        return chain_hash(parent, tokens)


@pytest.mark.parametrize("whole_blocks", [False, True])
@pytest.mark.parametrize("held", [0, 3, 7])
def test_known_hashes_are_not_computed_again(held, whole_blocks):
    hashes = Counting()
    manager = KVCacheManager(32, B, hash_fn=hashes, whole_blocks=whole_blocks)
    if held:
        manager.free(prefill(manager, TOKENS[: held * B]))
    plain = manager.open_table(TOKENS, ROOT)
    assert hashes.count >= len(TOKENS) // B
    expected = plain.num_cached_tokens, plain.miss_reason
    manager.free(plain)
    hashes.count = 0
    assert manager.awaited_hash(TOKENS, ROOT, right(TOKENS)) is None
    table = manager.open_table(TOKENS, ROOT, known=right(TOKENS))
    assert hashes.count == 0
    assert (table.num_cached_tokens, table.miss_reason) == expected
    # The rest of a partly known chain is hashed as usual.
    hashes.count = 0
    other = manager.open_table(TOKENS, ROOT, known=right(TOKENS[: 2 * B]))
    assert hashes.count == len(TOKENS) // B - 2
    assert other.num_cached_tokens == table.num_cached_tokens
    for one in (table, other):
        manager.free(one)
    manager.check_invariants([])


@given(st.lists(tokens_of, min_size=1, max_size=5), tokens_of, st.data())
def test_forged_hashes_find_only_the_prompts_own_blocks(before, tokens, data):
    """The pool holds all prompts whose chains are forged: other prompts and roots, shifted, cut and
    mixed. Lookups return only the prompt's own blocks, and new blocks are published under their own
    hashes.
    """
    manager = KVCacheManager(64, B)
    for prompt in before:
        for root in (ROOT, OTHER):
            manager.free(prefill(manager, prompt, root))
    pieces = [right(prompt, root) for prompt in (*before, tokens) for root in (ROOT, OTHER)]
    hashes = [
        known_hash(piece, i) for piece in pieces for i in range(len(piece) // HASH_BYTES)
    ] or [bytes(HASH_BYTES)]
    lie = data.draw(
        st.one_of(
            st.sampled_from(pieces), st.lists(st.sampled_from(hashes), max_size=8).map(b"".join)
        )
    )
    honest = manager.peek(tokens, ROOT)

    table = manager.open_table(tokens, ROOT, known=lie)
    assert table.num_cached_tokens <= honest
    assert read(manager, table.block_ids) == tokens[: len(table.block_ids) * B]
    assert table.num_cached_tokens == honest or not right(tokens).startswith(lie)
    manager.check_invariants([table])
    manager.extend(table, len(tokens))
    manager.commit(table, tokens, len(tokens))
    manager.check_invariants([table])  # no block is published under a hash that is not its own
    manager.free(table)
    assert manager.peek([*tokens, 9], ROOT) == len(tokens) // B * B
    manager.check_invariants([])


@given(tokens_of, tokens_of, st.integers(0, 3))
def test_forged_hashes_are_never_looked_up_in_tiers(tokens, other, num_held):
    """A tier trusts the address that it is given. Equal tokens after another prefix therefore need
    another address.
    """
    manager = KVCacheManager(64, B)
    manager.free(prefill(manager, tokens[: num_held * B] or tokens[:1]))
    plain_first, _, plain_keys = manager.content.addresses_after(tokens, ROOT)
    expected = list(plain_keys)
    for known in (
        right(other),
        right(tokens, OTHER),
        right(tokens),
        right(tokens)[:HASH_BYTES] + right(other),
    ):
        first, _, keys = manager.content.addresses_after(tokens, ROOT, known)
        found = list(keys)
        assert first <= plain_first
        assert found[plain_first - first :] == expected
        hashes = prefix_hashes(tokens, ROOT, B)
        assert [key.prefix_hash for key in found] == list(hashes[first : first + len(found)])


def test_a_forged_promise_does_not_block_others():
    manager = KVCacheManager(32, B)
    liar = manager.open_table([7] * 12, ROOT, known=right(TOKENS))
    assert manager.is_in_flight(manager.awaited_hash(TOKENS, ROOT))
    manager.extend(liar, 12)
    manager.commit(liar, [7] * 12, 12)
    assert not manager.is_in_flight(prefix_hashes(TOKENS, ROOT, B)[0])
    manager.free(liar)
    assert manager.awaited_hash(TOKENS, ROOT) is None
    manager.check_invariants([])
