"""Faults in the KV offload tiers, disk and Redis, and in the events that report their blocks."""

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
        "serves a damaged payload from disk",
        "tiers/disk/store.py",
        "                and is_intact(found, payload)\n",
        "",
        f"{_DAMAGE}::test_random_bit_flips_cost_at_most_one_block",
    ),
    fault(
        "serves a block of another address from disk",
        "tiers/disk/store.py",
        "and (found.space, found.address) == (self._space, address)",
        "and found.space == self._space",
        f"{_TIER}::test_a_block_with_another_address_is_refused_and_dropped",
    ),
    fault(
        "trusts a header without its checksum",
        "tiers/record.py",
        "if xxhash.xxh3_128_digest(body) != bytes(data[length - _SUM_BYTES : length]):",
        "if not body:",
        "tests/tiers/test_record.py::test_any_flipped_header_bit_is_detected",
    ),
    fault(
        "lets a second process write",
        "tiers/disk/directory.py",
        'return self.why_not == ""',
        "return True",
        f"{_FOLLOWING}::test_a_reader_becomes_owner_when_the_owner_ends",
    ),
    fault(
        "a reader trusts a record whose payload is not written yet",
        "tiers/disk/sidecar.py",
        "if self.records and not self.payload_holds(self.records[-1]):",
        "if self.records and searches and not self.payload_holds(self.records[-1]):",
        f"{_FOLLOWING}::test_a_reader_sees_only_complete_records",
    ),
    fault(
        "a reader misses blocks that the owner has just moved",
        "tiers/disk/store.py",
        "                if not self.directory.owned:\n                    self._follow()\n",
        "",
        f"{_FOLLOWING}::test_moved_blocks_are_found_at_once",
    ),
    fault(
        "a reader takes a new owner's segment for the old owner's",
        "tiers/disk/store.py",
        "if self.directory.take() or self.directory.generation != self._generation:",
        "if self.directory.take():",
        f"{_FOLLOWING}::test_a_reused_segment_number_is_read_again",
    ),
    fault(
        "no reader takes over when the owner ends",
        "tiers/disk/store.py",
        "if self.directory.take() or self.directory.generation != self._generation:",
        "if self.directory.generation != self._generation:",
        f"{_FOLLOWING}::test_a_reader_becomes_owner_when_the_owner_ends",
    ),
    fault(
        "lets other users read what is stored on disk",
        "tiers/disk/directory.py",
        "                self._files.make_private(self.path)\n",
        "",
        f"{_DIRECTORY}::test_a_readable_directory_is_made_private",
    ),
    fault(
        "follows a symlink in place of a space's directory",
        "tiers/disk/directory.py",
        "if path.is_symlink():",
        "if path.is_symlink() and not path.exists():",
        f"{_DIRECTORY}::test_a_link_in_place_of_a_space_is_refused",
    ),
    fault(
        "fills the disk to its last byte",
        "tiers/disk/capacity.py",
        "of_disk = own_bytes + free - free_floor(total)",
        "of_disk = own_bytes + free",
        f"{_ROOM}::test_free_space_bounds_the_tier_dynamically",
    ),
    fault(
        "does not count other models' bytes against the cap",
        "tiers/disk/capacity.py",
        "return min(self.max_bytes - theirs, of_disk)",
        "return min(self.max_bytes, of_disk)",
        f"{_ROOM}::test_closed_spaces_are_evicted_first_in_lru_order",
    ),
    fault(
        "deletes segments of a space that another process has open",
        "tiers/disk/capacity.py",
        "                if handle is None:\n                    continue\n",
        "",
        f"{_ROOM}::test_an_open_space_is_not_evicted_by_others",
    ),
    fault(
        "prompts seen once evict blocks that are used",
        "tiers/disk/index.py",
        "if self._probation_bytes > _ON_PROBATION * room or probation.last_use",
        "if probation.last_use",
        f"{_ROOM}::test_reused_blocks_survive_a_scan",
    ),
    fault(
        "evicts a block from disk before its successors",
        "tiers/disk/index.py",
        "order.update(dict.fromkeys(reversed(path)))",
        "order.update(dict.fromkeys(path))",
        f"{_ROOM}::test_a_chain_is_evicted_from_its_tail",
    ),
    fault(
        "finds dropped blocks again after a restart",
        "tiers/disk/index.py",
        (
            "            last = (\n"
            "                frontier[1] if number == frontier[0] else -1 if number > frontier[0] "
            "else math.inf\n"
            "            )\n"
        ),
        "            last = -1 if number == frontier[0] else -1 if number > frontier[0] else "
        "math.inf\n",
        f"{_TIER}::test_dropped_blocks_stay_dropped_after_a_restart",
    ),
    fault(
        "deletes live blocks with their segment",
        "tiers/disk/cleaning.py",
        "            self._copy(victim)\n",
        "",
        f"{_ROOM}::test_write_amplification_is_at_most_two",
    ),
    fault(
        "never writes again after a failed write",
        "tiers/disk/store.py",
        "return bool(self._problem) and self._clock() < self._retry_at",
        "return bool(self._problem)",
        f"{_FAULTY}::test_writes_resume_after_a_full_or_broken_disk",
    ),
)

_SERVER = (
    fault(
        "Redis: trusts a sealed value without its MAC",
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
        "Redis: opens a value of another block",
        "tiers/redis/values.py",
        " or header.address != address",
        "",
        _VALUES,
    ),
    fault(
        "Redis: opens a value of another space",
        "tiers/redis/values.py",
        "header.space != self._space or header.address",
        "header.address",
        f"{_REDIS}::test_spaces_are_isolated",
    ),
    fault(
        "Redis: trusts any length in a value's header",
        "tiers/redis/values.py",
        "return length if length <= _LONGEST_VALUE else 0",
        "return length",
        f"{_VALUES}::test_an_absurd_length_is_rejected",
    ),
    fault(
        "Redis: opens the circuit breaker one failure late",
        "tiers/redis/breaker.py",
        "if self._in_a_row < self._failures:",
        "if self._in_a_row <= self._failures:",
        f"{_BREAKER}::test_three_consecutive_failures_open_the_breaker",
    ),
    fault(
        "Redis: does not reset its failure count after an answer",
        "tiers/redis/breaker.py",
        "        self._in_a_row = 0\n        self._closed_again_at = None\n        return",
        "        self._closed_again_at = None\n        return",
        f"{_BREAKER}::test_three_consecutive_failures_open_the_breaker",
    ),
    fault(
        "Redis: accepts any TLS certificate",
        "tiers/redis/address.py",
        '"ssl_cert_reqs": "required"',
        '"ssl_cert_reqs": "none"',
        "tests/tiers/redis/test_address.py::test_redis_urls_are_parsed",
    ),
    fault(
        "Redis: accepts a short secret",
        "tiers/redis/tier.py",
        "if secret is not None and len(secret) < _SHORTEST_SECRET:",
        "if secret is not None and not secret:",
        f"{_REDIS}::test_without_a_secret_the_tier_is_refused_unless_trusted",
    ),
    fault(
        "Redis: stores blocks without a time to live",
        "tiers/redis/tier.py",
        '("SET", key, piece, "EX", self._ttl_s, *condition)',
        '("SET", key, piece, *condition)',
        f"{_REDIS}::test_blocks_are_shared_between_clients",
    ),
    fault(
        "Redis: does not renew blocks that the pool serves",
        "tiers/redis/tier.py",
        "        self._refresh(_MOST_TOUCHED)\n\n    def stat",
        "\n    def stat",
        f"{_LIVING}::test_reads_renew_some_blocks_and_tend_the_rest",
    ),
    fault(
        "Redis: assumes forever that a block is on the server",
        "tiers/redis/tier.py",
        "return True if seen is not None and self._clock() - seen < self._seen_s else None",
        "return True if seen is not None else None",
        f"{_REDIS}::test_holds_remembers_recent_writes_and_reads",
    ),
    fault(
        "Redis: does not rewrite the blocks after a lost block",
        "tiers/redis/tier.py",
        "self._lost(*(block.prefix_hash for block in blocks[index:]))",
        "self._lost(blocks[index].prefix_hash)",
        f"{_REDIS}::test_lost_or_damaged_values_are_rewritten_at_once",
    ),
    fault(
        "Redis: accepts a value with trailing bytes",
        "tiers/redis/tier.py",
        '("GETRANGE", key, 0, length)',
        '("GETRANGE", key, 0, length - 1)',
        f"{_REDIS}::test_an_invalid_value_is_a_miss_and_rewritten",
    ),
    fault(
        "Redis: sends every block to a full server again",
        "tiers/redis/tier.py",
        "        if self._clock() < self._writes_again_at:\n            return 0\n",
        "",
        f"{_SERVERS}::test_a_full_server_is_read_and_written_again_later",
    ),
)

_TOLD = (
    fault(
        "reports blocks as held whose presence is unknown",
        "tiers/tier_events.py",
        "if one not in reported and holds(one) is True)",
        "if one not in reported and holds(one) is not False)",
        "tests/tiers/test_tier_events.py::test_unknown_blocks_are_not_reported",
    ),
    fault(
        "reports a block as held after it left a tier",
        "tiers/tier_events.py",
        "            for one in checked:\n                del reported[one]\n",
        "",
        "tests/tiers/test_tier_events.py::test_reported_events_add_up_to_the_contents",
    ),
)

FAULTS = (*_DISK, *_SERVER, *_TOLD)
