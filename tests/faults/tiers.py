"""Faults in the tiers below the pool: the disk, a Redis server, what is said of them."""

from __future__ import annotations

from faults.fault import fault

_FAULTY = "tests/tiers/disk/test_faults.py"
_ROOM = "tests/tiers/disk/test_capacity.py"
_TIER = "tests/tiers/disk/test_tier.py"
_DIRECTORY = "tests/tiers/disk/test_directory.py"
_DAMAGE = "tests/tiers/disk/test_damage.py"
_FOLLOWING = "tests/tiers/disk/test_following.py"
_REDIS = "tests/tiers/redis/test_tier.py"
_LIVING = "tests/tiers/redis/test_time_to_live.py"
_SERVERS = "tests/tiers/redis/test_connection.py"
_VALUES = "tests/tiers/redis/test_values.py"
_BREAKER = "tests/tiers/redis/test_breaker.py"

_DISK = (
    fault(
        "a damaged payload is served from disk",
        "tiers/disk/store.py",
        "                and is_intact(found, payload)\n",
        "",
        f"{_DAMAGE}::test_random_bit_flips",
    ),
    fault(
        "a block of another address is served from disk",
        "tiers/disk/store.py",
        "and (found.space, found.address) == (self._space, address)",
        "and found.space == self._space",
        f"{_TIER}::test_a_block_of_the_same_hash_and_another_address_is_refused_and_dropped",
    ),
    fault(
        "a header is believed without its checksum",
        "tiers/record.py",
        "if xxhash.xxh3_128_digest(body) != bytes(data[length - _SUM_BYTES : length]):",
        "if not body:",
        "tests/tiers/test_record.py::test_any_bit_that_flips_in_a_header_is_found",
    ),
    fault(
        "a second process writes too",
        "tiers/disk/directory.py",
        'return self.why_not == ""',
        "return True",
        f"{_TIER}::test_a_second_process_reads_only_and_says_so",
    ),
    fault(
        "a reader believes a record whose payload is not there yet",
        "tiers/disk/sidecar.py",
        "if self.records and not self.payload_holds(self.records[-1]):",
        "if self.records and searches and not self.payload_holds(self.records[-1]):",
        f"{_FOLLOWING}::test_a_record_is_seen_when_it_is_whole",
    ),
    fault(
        "a reader misses blocks that the owner has just moved",
        "tiers/disk/store.py",
        "                if not self.directory.owned:\n                    self._follow()\n",
        "",
        f"{_FOLLOWING}::test_blocks_that_the_owner_moves_are_found_at_once",
    ),
    fault(
        "a reader takes the segment of a new owner for the old one's",
        "tiers/disk/store.py",
        "if self.directory.take() or self.directory.generation != self._generation:",
        "if self.directory.take():",
        f"{_FOLLOWING}::test_a_segment_number_that_comes_again_is_read_anew",
    ),
    fault(
        "nobody takes over",
        "tiers/disk/store.py",
        "if self.directory.take() or self.directory.generation != self._generation:",
        "if self.directory.generation != self._generation:",
        f"{_FOLLOWING}::test_when_the_owner_ends_one_of_the_others_stores",
    ),
    fault(
        "others can read what is stored on disk",
        "tiers/disk/directory.py",
        "                self._files.make_private(self.path)\n",
        "",
        f"{_DIRECTORY}::test_a_directory_that_others_could_read_is_closed_to_them",
    ),
    fault(
        "a link in the place of a space is followed",
        "tiers/disk/directory.py",
        "if path.is_symlink():",
        "if path.is_symlink() and not path.exists():",
        f"{_DIRECTORY}::test_a_link_in_the_place_of_a_spaces_directory_is_refused",
    ),
    fault(
        "the disk is filled to its last byte",
        "tiers/disk/capacity.py",
        "of_disk = own_bytes + free - free_floor(total)",
        "of_disk = own_bytes + free",
        f"{_ROOM}::test_a_file_system_that_fills_up_takes_room_back_and_gives_it_again",
    ),
    fault(
        "what other models store counts for no cap",
        "tiers/disk/capacity.py",
        "return min(self.max_bytes - theirs, of_disk)",
        "return min(self.max_bytes, of_disk)",
        f"{_ROOM}::test_spaces_that_nobody_has_open_go_first_those_used_longest_ago_before_others",
    ),
    fault(
        "segments of a space that is open are deleted by others",
        "tiers/disk/capacity.py",
        "                if handle is None:\n                    continue\n",
        "",
        f"{_ROOM}::test_a_space_that_is_open_is_left_alone_by_others",
    ),
    fault(
        "prompts that come once push out what is used",
        "tiers/disk/index.py",
        "if self._probation_bytes > _ON_PROBATION * room or probation.last_use",
        "if probation.last_use",
        f"{_ROOM}::test_what_was_asked_for_outlives_a_scan_of_prompts_that_come_once",
    ),
    fault(
        "a block leaves the disk before those behind it",
        "tiers/disk/index.py",
        "order.update(dict.fromkeys(reversed(path)))",
        "order.update(dict.fromkeys(path))",
        f"{_ROOM}::test_of_a_chain_the_tail_goes_before_the_head",
    ),
    fault(
        "blocks that were dropped are there after a restart",
        "tiers/disk/index.py",
        (
            "            last = (\n"
            "                frontier[1] if number == frontier[0] else -1 if number > frontier[0] "
            "else math.inf\n"
            "            )\n"
        ),
        "            last = -1 if number == frontier[0] else -1 if number > frontier[0] else "
        "math.inf\n",
        f"{_TIER}::test_dropped_blocks_stay_away_over_a_restart",
    ),
    fault(
        "blocks that count go with the segment they lie in",
        "tiers/disk/cleaning.py",
        "            self._copy(victim)\n",
        "",
        f"{_ROOM}::test_at_most_twice_as_much_is_written_as_was_stored",
    ),
    fault(
        "a failed write stops writing for ever",
        "tiers/disk/store.py",
        "return bool(self._problem) and self._clock() < self._retry_at",
        "return bool(self._problem)",
        f"{_FAULTY}::test_a_full_or_broken_disk_is_read_and_written_again_later",
    ),
)

_SERVER = (
    fault(
        "a sealed value is believed without its MAC",
        "tiers/redis/values.py",
        (
            "        if len(value) != end + self.mac_bytes or not hmac.compare_digest(\n"
            "            self._mac(view[:end]), view[end:]\n"
            "        ):\n"
        ),
        "        if len(value) != end + self.mac_bytes:\n",
        _VALUES,
    ),
    fault(
        "a value of another block is opened",
        "tiers/redis/values.py",
        " or header.address != address",
        "",
        _VALUES,
    ),
    fault(
        "a value of another space is opened",
        "tiers/redis/values.py",
        "header.space != self._space or header.address",
        "header.address",
        f"{_REDIS}::test_spaces_do_not_see_each_other",
    ),
    fault(
        "a length that a stranger wrote is believed",
        "tiers/redis/values.py",
        "return length if length <= _LONGEST_VALUE else 0",
        "return length",
        f"{_VALUES}::test_a_value_says_its_length_and_an_absurd_one_is_not_believed",
    ),
    fault(
        "the fourth failure leaves the server alone",
        "tiers/redis/breaker.py",
        "if self._in_a_row < self._failures:",
        "if self._in_a_row <= self._failures:",
        f"{_BREAKER}::test_the_third_failure_in_a_row_opens_it_for_a_while",
    ),
    fault(
        "failures count though the server answered in between",
        "tiers/redis/breaker.py",
        "        self._in_a_row = 0\n        self._closed_again_at = None\n        return",
        "        self._closed_again_at = None\n        return",
        f"{_BREAKER}::test_the_third_failure_in_a_row_opens_it_for_a_while",
    ),
    fault(
        "TLS takes any certificate",
        "tiers/redis/address.py",
        '"ssl_cert_reqs": "required"',
        '"ssl_cert_reqs": "none"',
        "tests/tiers/redis/test_address.py::test_what_a_url_says",
    ),
    fault(
        "a short secret is taken",
        "tiers/redis/tier.py",
        "if secret is not None and len(secret) < _SHORTEST_SECRET:",
        "if secret is not None and not secret:",
        f"{_REDIS}::test_without_a_secret_the_tier_is_refused_unless_trusted",
    ),
    fault(
        "blocks on the server live for ever",
        "tiers/redis/tier.py",
        '("SET", key, piece, "EX", self._ttl_s, *condition)',
        '("SET", key, piece, *condition)',
        f"{_REDIS}::test_what_one_wrote_another_reads",
    ),
    fault(
        "what is served from the pool dies on the server",
        "tiers/redis/tier.py",
        "        self._refresh(_MOST_TOUCHED)\n\n    def stat",
        "\n    def stat",
        f"{_LIVING}::test_a_read_or_write_renews_some_and_a_look_after_the_tier_the_rest",
    ),
    fault(
        "a block is believed to be on the server for ever",
        "tiers/redis/tier.py",
        "return True if seen is not None and self._clock() - seen < self._seen_s else None",
        "return True if seen is not None else None",
        f"{_REDIS}::test_it_holds_what_it_wrote_or_read_lately_until_a_read_tells_otherwise",
    ),
    fault(
        "behind a lost block the others are not written again",
        "tiers/redis/tier.py",
        "self._lost(*(block.prefix_hash for block in blocks[index:]))",
        "self._lost(blocks[index].prefix_hash)",
        f"{_REDIS}::test_a_server_that_lost_or_got_wrong_values_is_given_all_of_them_again_at_once",
    ),
    fault(
        "a value with bytes behind it is believed",
        "tiers/redis/tier.py",
        '("GETRANGE", key, 0, length)',
        '("GETRANGE", key, 0, length - 1)',
        f"{_REDIS}::test_a_value_not_to_be_believed_is_a_miss_dropped_and_written_anew",
    ),
    fault(
        "a full server is sent every block again",
        "tiers/redis/tier.py",
        "        if self._clock() < self._writes_again_at:\n            return 0\n",
        "",
        f"{_SERVERS}::test_a_full_server_is_read_and_written_to_again_when_there_is_room",
    ),
)

_TOLD = (
    fault(
        "what nobody knows is told as held",
        "tiers/tier_events.py",
        "if one not in reported and holds(one) is True)",
        "if one not in reported and holds(one) is not False)",
        "tests/tiers/test_tier_events.py::test_what_a_tier_would_have_to_ask_for_is_not_told",
    ),
    fault(
        "a block that left a tier is told as there",
        "tiers/tier_events.py",
        "            for one in checked:\n                del reported[one]\n",
        "",
        "tests/tiers/test_tier_events.py::test_what_was_told_adds_up_to_what_is_there",
    ),
)

FAULTS = (*_DISK, *_SERVER, *_TOLD)
