"""How many states there is room for, and how many sequences run together because of that."""

from __future__ import annotations

from kvboost_edge.config import EngineConfig
from kvboost_edge.engine.ledger import most_sequences, num_open_blocks, planned_blocks
from kvboost_edge.errors import CapacityError, ConfigError
from kvboost_edge.kvcache.table_states import StateSizes
from kvboost_edge.runners.base import RunnerInfo

__all__ = [
    "check_options",
    "plan_states",
    "planned_state_bytes",
    "speculation_refusal",
    "state_bytes",
    "states_refusal",
]

_POOL_SHARE = 4  # without a given size states take a quarter of what keys and values do
_SPARE, _PER_SEQUENCE = 4, 2  # and at least so many slots: a running sequence writes one, and may read another
_WANTED_SEQUENCES = 4  # where their number is not given: not fewer, as long as there is memory
_ANY = 1 << 60  # bytes: more than any machine has
_SMALL = 2  # a state of at most so many blocks' bytes is kept behind every block


def plan_states(
    config: EngineConfig, info: RunnerInfo, num_blocks: int, available: int
) -> tuple[StateSizes | None, int]:
    """(slots of states beside a pool of `num_blocks` blocks, None where the model keeps none; sequences that run
    together). `available` is the memory that pool and states share.

    Given by max_state_bytes, in which what drafts bring to states has its room too; else a quarter of the pool's bytes,
    and 4 + 2 x max_num_seqs slots at least, with that room beside them. Raises
    ConfigError for max_state_bytes where there are no states, CapacityError where the slots do not suffice for the
    sequences, or do not fit.
    """
    spec, most = info.kv_spec, most_sequences(config, num_blocks, info.kv_spec.block_size)
    given = config.max_state_bytes
    check_options(config, info)
    if not spec.states:
        return None, most
    size, num_draft_rows = spec.bytes_per_state, 0 if config.speculation == "off" else config.max_draft_tokens
    draft_bytes = num_draft_rows * spec.bytes_per_draft
    num_open = num_open_blocks(config, num_blocks, spec.block_size)
    pool_bytes = num_blocks * spec.bytes_per_block + num_open * spec.bytes_per_open_block
    if given is not None:
        num_slots = max(0, given - draft_bytes) // size
        num_seqs = config.max_num_seqs or max(1, min(most, num_slots // _PER_SEQUENCE))
        if num_slots < num_seqs + 1:
            raise CapacityError(
                f"max_state_bytes={given} holds {num_slots} states of {_mib(size)}: {num_seqs} sequences need "
                f"{num_seqs} x {_mib(size)} and one more to begin from, and {num_draft_rows} drafts "
                f"{_mib(draft_bytes)}: {(num_seqs + 1) * size + draft_bytes} bytes; enlarge max_state_bytes or lower "
                "max_num_seqs or max_draft_tokens"
            )
    else:
        share, fitting = pool_bytes // _POOL_SHARE // size, (available - pool_bytes - draft_bytes) // size
        wanted = max(_WANTED_SEQUENCES, (share - _SPARE) // _PER_SEQUENCE)
        num_seqs = config.max_num_seqs or max(1, min(most, wanted, (fitting - _SPARE) // _PER_SEQUENCE))
        num_slots = max(min(share, num_blocks, max(0, fitting)), _SPARE + _PER_SEQUENCE * num_seqs)
    if pool_bytes + num_slots * size + draft_bytes > available:
        raise CapacityError(
            f"{num_slots} states of {_mib(size)} ({num_seqs} sequences need {num_seqs} x {_mib(size)}), drafts of "
            f"{_mib(draft_bytes)} and a pool of {_mib(pool_bytes)} exceed memory: {_mib(available)} are available "
            "beside the weights; lower max_num_seqs, max_state_bytes, max_draft_tokens, max_cache_bytes or num_blocks"
        )
    every_block = size <= _SMALL * spec.bytes_per_block
    return StateSizes(num_slots, every_block=every_block, num_draft_rows=num_draft_rows), num_seqs


def planned_state_bytes(config: EngineConfig, info: RunnerInfo, available: int) -> int:
    """Bytes that states would take beside the pool, of so much memory; 0 where the model keeps none. What does not fit
    is not refused, as others may leave; else it raises as `plan_states`."""
    num_blocks = planned_blocks(config, info.kv_spec, info.max_context, available)
    try:
        sizes, _ = plan_states(config, info, num_blocks, available)
    except CapacityError:
        sizes, _ = plan_states(config, info, num_blocks, _ANY)
    return 0 if sizes is None else state_bytes(info, sizes)


def state_bytes(info: RunnerInfo, sizes: StateSizes) -> int:
    """Bytes of slots, and of what drafts bring to them."""
    return sizes.num_slots * info.kv_spec.bytes_per_state + sizes.num_draft_rows * info.kv_spec.bytes_per_draft


def states_refusal(info: RunnerInfo) -> str | None:
    """Why what a model computed cannot be used at other positions because of its states; None: it keeps none."""
    if not info.kv_spec.states:
        return None
    return (
        f"the model is recurrent: {len(info.kv_spec.states)} of its layers keep a state, which is a function of all "
        "tokens before, so nothing that was computed can stand at another position; use mode='prefix_cache'"
    )


def speculation_refusal(config: EngineConfig, info: RunnerInfo) -> str | None:
    """Why nothing can be guessed ahead by a request; None: it can."""
    if not info.kv_spec.states or config.speculation != "off":
        return None
    return (
        "the model keeps states, and the engine was started with speculation='off', so without room for what drafts "
        "bring to them; start it with 'auto'"
    )


def check_options(config: EngineConfig, info: RunnerInfo) -> None:
    """ConfigError for options that are about states where there are none."""
    if config.max_state_bytes is not None and not info.kv_spec.states:
        raise ConfigError(
            f"max_state_bytes={config.max_state_bytes} has no effect: the model has no layer with a state beside its "
            "keys and values; leave it out"
        )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.2f} MiB"
