"""A replica's batches: whoever asks, however seldom, knows in the end what the replica holds."""

from hypothesis import given
from hypothesis import strategies as st

from kvboost_edge.kvcache.events import CacheEvents
from kvboost_edge.serve_ray.routing.cache_records import KEY_BYTES, NOTHING_KNOWN, Cursor, Place
from kvboost_edge.serve_ray.routing.event_journal import Journal


def hash_of(number):
    """The keys of its places: the number, a thousand and four times the number, two thousand and
    the number.
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
    """The keys of what is held, written out: all of a pool's, of the other places one in four."""
    pool, disk, shared = (held[place] for place in Place)
    return pool | {1000 + 4 * one for one in disk} | {2000 + one for one in shared if one % 4 == 0}


@given(st.lists(st.tuples(changes, st.sets(st.integers(0, 2))), max_size=30), st.integers(1, 12))
def test_every_reader_reconstructs_the_held_blocks(steps, max_changes):
    """Three askers, each asks after some of the steps; few changes are kept, so some are told
    everything. Pool and tiers have their own events, whole ones too, and one journal.
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
    ]  # knows more than there is


def test_of_two_hashes_with_one_key_the_published_one_counts():
    """A belief in a block too many costs time; a block that is not believed in is not used."""
    journal = Journal(epoch=5)
    one = hash_of(1)
    other = hash_of(1)[:-1] + b"x"
    journal.add(CacheEvents(True, (one,), ()))
    assert journal.add(CacheEvents(False, (other,), (one,))) is None
    assert keys(journal.since(NOTHING_KNOWN)[0].published) == {1}


def test_epochs_differ_between_instances():
    assert len({Journal().add(CacheEvents(True, (), ())).epoch for _ in range(4)} - {0}) == 4
