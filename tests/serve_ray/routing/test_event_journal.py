"""The event batches of a replica: any client that asks, however rarely, ends with the replica's
contents.
"""

from hypothesis import given
from hypothesis import strategies as st

from kvboost_edge.kvcache.events import CacheEvents
from kvboost_edge.serve_ray.routing.cache_records import KEY_BYTES, NOTHING_KNOWN, Cursor, Place
from kvboost_edge.serve_ray.routing.event_journal import Journal


def hash_of(number):
    """Build a hash whose keys are the number in the pool, 1000 + 4 x the number on disk, and 2000 +
    the number on the server.
    """
    return b"".join(
        key.to_bytes(KEY_BYTES, "little") for key in (number, 1000 + 4 * number, 2000 + number, 0)
    )


def keys(data):
    return {
        int.from_bytes(data[at : at + KEY_BYTES], "little") for at in range(0, len(data), KEY_BYTES)
    }


changes = st.tuples(
    st.booleans(), st.sets(st.integers(0, 9)), st.sets(st.integers(0, 9)), st.sampled_from(Place)
)


def told_of(held):
    """Return the keys of the held blocks: all of the pool's, and one in four of the other places."""
    pool, disk, shared = (held[place] for place in Place)
    return pool | {1000 + 4 * one for one in disk} | {2000 + one for one in shared if one % 4 == 0}


@given(st.lists(st.tuples(changes, st.sets(st.integers(0, 2))), max_size=30), st.integers(1, 12))
def test_every_reader_reconstructs_the_held_blocks(steps, max_changes):
    """Three clients ask after some of the steps. Few changes are kept, so some clients get
    everything.

    Pool and tiers have events of their own, complete ones included, but share one journal.
    """
    journal = Journal(max_changes)
    held = {place: set() for place in Place}
    known = [(NOTHING_KNOWN, set()) for _ in range(3)]
    for (is_whole, came, left, place), askers in steps:
        left = set() if is_whole else left - came
        held[place] = came if is_whole else (held[place] | came) - left
        journal.add(
            CacheEvents(is_whole, tuple(map(hash_of, came)), tuple(map(hash_of, left))), place
        )
        for asker in askers:
            cursor, told = known[asker]
            batches = journal.since(cursor)
            assert all(batch.is_whole for batch in batches[:-1]) or not batches[0].is_whole
            for batch in batches:
                assert not keys(batch.published) & keys(batch.evicted)
                assert batch.is_whole or batch.serial == cursor.serial + 1
                told = keys(batch.published) | (
                    set() if batch.is_whole else told - keys(batch.evicted)
                )
                cursor = Cursor(batch.epoch, batch.serial)
            known[asker] = cursor, told
            assert told == told_of(held)
            assert journal.since(cursor) == []


def test_without_changes_only_the_first_batch_is_sent():
    journal = Journal(epoch=5)
    assert journal.since(NOTHING_KNOWN) == []
    assert journal.add(CacheEvents(True, (), ())) == (5, 0, False, b"", b"")
    assert journal.add(CacheEvents(False, (), (hash_of(1),))) is None
    assert journal.add(CacheEvents(False, (hash_of(1),), ())).serial == 1
    assert journal.add(CacheEvents(True, (hash_of(1),), ())) is None
    assert [batch.is_whole for batch in journal.since(Cursor(6, 1))] == [True]
    assert [batch.serial for batch in journal.since(Cursor(5, 0))] == [1]
    assert [batch.is_whole for batch in journal.since(Cursor(5, 9))] == [
        True
    ]  # the client knows more than exists


def test_the_published_one_of_two_hashes_with_one_key_counts():
    """A false belief in a block costs time, while a block that is not believed in is never used."""
    journal = Journal(epoch=5)
    one = hash_of(1)
    other = hash_of(1)[:-1] + b"x"
    journal.add(CacheEvents(True, (one,), ()))
    assert journal.add(CacheEvents(False, (other,), (one,))) is None
    assert keys(journal.since(NOTHING_KNOWN)[0].published) == {1}


def test_epochs_differ_between_instances():
    assert len({Journal().add(CacheEvents(True, (), ())).epoch for _ in range(4)} - {0}) == 4
